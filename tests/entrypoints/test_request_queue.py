"""Requests are prepared ahead of the engine in worker threads: in order, and bounded in number and bytes."""

import threading
import time

import pytest
import torch

from mmvllm.entrypoints.request_queue import Prefetcher
from mmvllm.inputs import EngineInput, MultiModalItem, PlaceholderRange
from mmvllm.processes.pool import WorkersUnusable


def prompt_of(num_bytes: int) -> EngineInput:
    patches = torch.zeros(num_bytes, dtype=torch.uint8)
    return EngineInput([1], (MultiModalItem("image", patches, (1, 1, 1), b"", PlaceholderRange(0, 1)),))


def drain(prefetcher: Prefetcher) -> list:
    items = []
    while (item := prefetcher.get(wait=True)) is not None:
        items.append(item)
    assert prefetcher.is_exhausted
    prefetcher.close()
    return items


def settle(condition) -> None:
    """Wait until a condition holds, and 50 ms more for it to change again."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "the condition never held"
        time.sleep(0.005)
    time.sleep(0.05)


@pytest.mark.parametrize("num_workers", [1, 2, 7])
def test_results_are_in_order_however_long_each_takes(num_workers):
    def prepare(request):
        time.sleep(0.01 if request["i"] % 3 == 0 else 0)
        return prompt_of(request["i"])

    prefetcher = Prefetcher(({"i": i} for i in range(40)), prepare, max_requests=5, num_workers=num_workers)
    items = drain(prefetcher)
    assert [item.index for item in items] == list(range(40))
    assert [item.prompt.result().num_bytes for item in items] == list(range(40))


def test_requests_are_taken_a_bounded_number_ahead():
    taken = []

    def requests():
        for i in range(100):
            taken.append(i)
            yield {}

    prefetcher = Prefetcher(requests(), lambda request: prompt_of(0), max_requests=4, num_workers=2)
    settle(lambda: len(taken) == 5)  # four prepared, and one held by the feeder
    assert len(taken) == 5
    prefetcher.get(wait=True)
    settle(lambda: len(taken) == 6)
    assert len(taken) == 6
    prefetcher.close()


def test_bytes_are_bounded():
    done = []

    def prepare(request):
        done.append(1)
        return prompt_of(600)

    prefetcher = Prefetcher([{}] * 50, prepare, max_requests=50, max_bytes=1000, num_workers=2)
    settle(lambda: len(done) >= 2)
    assert len(done) <= 1 + 2, "one below the limit, and at most one more per worker"
    assert len(drain(prefetcher)) == 50


def test_a_prompt_larger_than_the_byte_limit_is_prepared_alone():
    prefetcher = Prefetcher([{}] * 3, lambda request: prompt_of(5000), max_requests=8, max_bytes=1000, num_workers=1)
    assert len(drain(prefetcher)) == 3


def test_an_error_affects_only_its_request():
    def prepare(request):
        if request["i"] == 1:
            raise ValueError("invalid image")
        return prompt_of(0)

    items = drain(Prefetcher([{"i": i} for i in range(3)], prepare, max_requests=2))
    assert items[0].prompt.result() and items[2].prompt.result()
    with pytest.raises(ValueError, match="invalid image"):
        items[1].prompt.result()


def test_get_waits_only_if_asked_to():
    may_finish = threading.Event()

    def prepare(request):
        may_finish.wait(10)
        return prompt_of(0)

    prefetcher = Prefetcher([{}], prepare, max_requests=2)
    assert prefetcher.get(wait=False) is None and not prefetcher.is_exhausted
    may_finish.set()
    assert prefetcher.get(wait=True).index == 0
    assert prefetcher.get(wait=True) is None and prefetcher.is_exhausted
    prefetcher.close()


def test_closing_stops_the_feeder():
    earlier, taken = set(threading.enumerate()), []

    def endless():
        while True:
            taken.append(1)
            yield {}

    prefetcher = Prefetcher(endless(), lambda request: prompt_of(0), max_requests=3)
    settle(lambda: len(taken) >= 3)
    prefetcher.close()
    settle(lambda: not any(thread.name == "mmvllm-feed" for thread in set(threading.enumerate()) - earlier))
    before = len(taken)
    time.sleep(0.05)
    assert len(taken) == before


def test_out_of_order_a_slow_request_does_not_delay_others():
    may_finish = threading.Event()

    def prepare(request):
        assert request["i"] or may_finish.wait(10)
        return prompt_of(0)

    prefetcher = Prefetcher(({"i": i} for i in range(6)), prepare, max_requests=9, num_workers=2, in_order=False)
    assert [prefetcher.get(wait=True).index for _ in range(5)] == [1, 2, 3, 4, 5]
    may_finish.set()
    assert prefetcher.get(wait=True).index == 0
    prefetcher.close()


def test_finish_takes_no_more_requests_and_returns_those_already_taken():
    prefetcher = Prefetcher(({} for _ in iter(int, 1)), lambda request: prompt_of(0), max_requests=4, num_workers=2)
    settle(lambda: len(prefetcher._items) == 4)
    prefetcher.finish()
    assert 4 <= len(drain(prefetcher)) <= 5  # one may be held by the feeder


def test_finish_does_not_wait_for_a_blocked_iterable():
    blocked = threading.Event()

    def requests():
        blocked.wait(10)
        yield {}

    prefetcher = Prefetcher(requests(), lambda request: prompt_of(0), max_requests=4)
    threading.Timer(0.05, prefetcher.finish).start()
    assert prefetcher.get(wait=True) is None and prefetcher.is_exhausted
    blocked.set()


def test_workers_that_cannot_prepare_anything_end_the_run():
    def prepare(request):
        raise WorkersUnusable("worker processes end as soon as they begin: it ended with exit code 3")

    prefetcher = Prefetcher([{}] * 3, prepare, max_requests=9)
    with pytest.raises(WorkersUnusable, match="end as soon as they begin"):
        prefetcher.get(wait=True).engine_input()
    prefetcher.close()
