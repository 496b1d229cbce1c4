"""LLM with iterators, threads, aborts and interrupts while requests are in flight."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor, wait

import pytest

from mmvllm import SamplingParams
from mmvllm.entrypoints.request_queue import Prefetcher
from mmvllm.errors import RequestsAborted
from tests.helpers.engine.requests import ask, noise_image, patches_of

SHORT = SamplingParams(max_tokens=4, ignore_eos=True)
GOOD = ask(noise_image(80, 60), "Describe this image.")


def test_stream_multimodal_takes_an_endless_iterator(llm):
    taken = itertools.count()

    def endless():
        for i in taken:
            yield ask(noise_image(40 + i % 5, 50), "What?", request_id=f"r{i}")

    stream = llm.stream_multimodal(endless(), SHORT)
    outputs = list(itertools.islice(stream, 10))
    assert len({output.request_id for output in outputs}) == 10
    stream.close()
    assert next(taken) < 10 + 4 * llm.engine.config.max_num_seqs + 16, "requests must be taken a bounded number ahead"


def test_a_slow_iterator_does_not_delay_requests_in_flight(llm):
    arrived = threading.Event()

    def slow():
        yield ask("First.", request_id="first")
        assert arrived.wait(20), "the first output must be yielded before the second request is given"
        yield ask("Second.", request_id="second")

    seen = []
    for output in llm.stream_multimodal(slow(), SHORT):
        seen.append(output.request_id)
        arrived.set()
    assert seen == ["first", "second"]


def test_an_exception_of_the_iterator_reaches_the_caller(llm):
    def broken():
        yield GOOD
        raise ZeroDivisionError("the caller's own")

    with pytest.raises(ZeroDivisionError, match="the caller's own"):
        list(llm.stream_multimodal(broken(), SHORT))


def test_threads_share_an_llm(llm):
    """An iterator of requests may itself call the LLM, from the thread that consumes it."""
    want = llm.generate_multimodal([GOOD], SHORT)[0].token_ids

    def calls_the_llm():
        for _ in range(4):
            assert llm.generate("Count.", SHORT)[0].error is None
            yield GOOD

    def work(_):
        return [output.token_ids for output in llm.generate_multimodal([GOOD] * 5, SHORT, use_tqdm=False)]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(6))) == [[want] * 5] * 6
    assert [output.token_ids for output in llm.stream_multimodal(calls_the_llm(), SHORT)] == [want] * 4


def test_streams_may_be_interleaved(llm):
    first = llm.stream_multimodal([ask(f"a {i}", request_id=f"a{i}") for i in range(5)], SHORT)
    second = llm.stream_multimodal([ask(f"b {i}", request_id=f"b{i}") for i in range(5)], SHORT)
    seen = [output.request_id for pair in zip(first, second, strict=True) for output in pair]
    assert sorted(seen) == sorted([f"a{i}" for i in range(5)] + [f"b{i}" for i in range(5)])


def test_closing_a_stream_aborts_its_requests(llm):
    stream = llm.stream_multimodal([GOOD] * 20, SamplingParams(max_tokens=30, ignore_eos=True))
    next(stream)
    stream.close()
    assert llm.engine.is_finished()


def test_a_request_aborted_by_another_caller_ends(llm, monkeypatch):
    step, groups = llm.engine.step, llm.engine.scheduler.groups

    def abort_and_step():
        if "aborted" in groups:
            llm.engine.abort_request("aborted")
        return step()

    monkeypatch.setattr(llm.engine, "step", abort_and_step)
    requests = [ask("x", request_id="aborted"), ask("y", request_id="other")]
    aborted, other = llm.generate_multimodal(requests, SHORT, on_error="return")
    assert aborted.error is None and aborted.finish_reason == "aborted"
    assert other.error is None and other.finish_reason == "length"
    with pytest.raises(RequestsAborted, match="request 0: aborted") as raised:
        llm.generate_multimodal(requests, SHORT)
    assert [output.finish_reason for output in raised.value.outputs] == ["aborted", "length"]
    assert raised.value.outputs[1].token_ids == other.token_ids


def test_a_stream_of_an_engine_that_has_exited_raises(checkpoint, make_llm):
    llm = make_llm(checkpoint)
    stream = llm.stream_multimodal([ask("x", sampling_params=SHORT), ask("y")], SamplingParams(max_tokens=50))
    next(stream)
    llm.exit()
    with pytest.raises(RuntimeError, match="the engine has exited"):
        list(stream)


def test_images_of_waiting_requests_are_bounded_in_bytes(llm, monkeypatch):
    """Two waiting requests fit beside the running ones; the others stay in the prefetcher, which is bounded too."""
    size = sum(pixels.nbytes for pixels in patches_of(llm.processor(GOOD)))
    monkeypatch.setattr("mmvllm.entrypoints.request_queue.MAX_BYTES", 2 * size)
    # Wait for preparation, so that as many requests as fit are added before each step.
    monkeypatch.setattr(Prefetcher, "get", lambda self, wait, get=Prefetcher.get: get(self, wait=True))
    held, step = [], llm.engine.step
    groups = llm.engine.scheduler.groups

    def watched():
        held.append([group.has_begun for group in groups.values()])
        return step()

    monkeypatch.setattr(llm.engine, "step", watched)
    assert len(llm.generate_multimodal([GOOD] * 7, SHORT)) == 7
    assert max(begun.count(False) for begun in held) <= 2 < max(map(len, held)) <= 2 + llm.engine.config.max_num_seqs


def test_a_keyboard_interrupt_aborts_all_requests(llm, monkeypatch):
    step = llm.engine.step
    monkeypatch.setattr(llm.engine, "step", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        llm.generate_multimodal([GOOD] * 3, SHORT)
    monkeypatch.setattr(llm.engine, "step", step)
    assert llm.engine.is_finished()


def test_exit_waits_for_the_step_of_another_thread(checkpoint, make_llm, monkeypatch):
    llm = make_llm(checkpoint)
    real, runs, may_run = llm.engine.model_runner.run, threading.Event(), threading.Event()

    def slow(*args):
        runs.set()
        assert may_run.wait(20)
        return real(*args)

    monkeypatch.setattr(llm.engine.model_runner, "run", slow)
    with ThreadPoolExecutor(2) as pool:
        generated = pool.submit(llm.generate_multimodal, [GOOD], SHORT)
        assert runs.wait(20)
        exited = pool.submit(llm.exit)
        assert not wait([exited], timeout=0.1).done
        may_run.set()
        with pytest.raises(RuntimeError, match="the engine has exited"):
            generated.result(20)
        exited.result(20)
