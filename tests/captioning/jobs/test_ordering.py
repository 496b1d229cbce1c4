"""Records in the order in which images are found, whatever the order in which captions are finished."""

import itertools
import json
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from mmvllm import LLM
from mmvllm.captioning import CaptionSettings, JobError, caption_images
from mmvllm.captioning.jobs import ordering
from mmvllm.captioning.jobs.captioner import Captioner
from mmvllm.captioning.jobs.ordering import InOrder
from mmvllm.captioning.sources.loading import ItemLoader
from tests.helpers.captioning.command import records, until
from tests.helpers.engine.requests import noise_image


@pytest.fixture(scope="module")
def llm(checkpoint):
    made = LLM(checkpoint, device="cpu", dtype="float32", num_kvcache_blocks=256, skip_warmup=True, max_num_seqs=4)
    yield made
    made.exit()


@pytest.fixture
def names(tmp_path) -> list[str]:
    """A list of images in no alphabetic order: c has the pixels of k, and x and b are damaged."""
    order = ["k", "z", "a", "c", "x", "h", "b", "e"]
    for i, name in enumerate(order):
        noise_image(60 if name in "kc" else 61 + i, 64, seed=0 if name in "kc" else i).save(tmp_path / f"{name}.png")
    for name in "xb":
        (tmp_path / f"{name}.png").write_text("none")
    (tmp_path / "list.txt").write_text("\n".join(f"{name}.png" for name in order))
    return order


def run(paths, llm, **options):
    return caption_images(paths, llm=llm, max_tokens=4, **{"ordered": True} | options)


def stems(made) -> list[str]:
    return [Path(record["path"]).stem for record in made]


@pytest.fixture
def backwards(llm, monkeypatch):
    """The engine finishes the last request first."""
    stream = llm.stream_prepared

    def reverse(*arguments):
        events = list(stream(*arguments))
        yield from (event for event in events if event[1] is None)  # duplicates, which the engine does not get
        yield from (event for event in reversed(events) if event[1] is not None)

    monkeypatch.setattr(llm, "stream_prepared", reverse)


def test_records_have_the_order_of_the_input(names, llm, tmp_path, backwards):
    made = list(run(tmp_path / "list.txt", llm, output=tmp_path / "out.jsonl"))
    assert stems(made) == names and records(tmp_path / "out.jsonl") == made
    assert stems(run(tmp_path / "list.txt", llm, ordered=False)) != names
    by_stem = dict(zip(names, made, strict=True))
    assert by_stem["c"]["duplicate_of"] == by_stem["k"]["path"]  # and not the other way round
    assert [name for name in names if by_stem[name]["error"]] == ["x", "b"]


def test_a_resumed_run_has_the_order_of_the_rest(names, llm, tmp_path, backwards):
    out = tmp_path / "out.jsonl"
    assert stems(run(tmp_path / "list.txt", llm, output=out, limit=3)) == names[:3]
    (tmp_path / "list.txt").write_text("\n".join(f"{name}.png" for name in reversed(names)))
    rest = [name for name in reversed(names) if name not in names[:3]]
    assert stems(run(tmp_path / "list.txt", llm, output=out)) == rest
    assert stems(records(out)) == names[:3] + rest


@pytest.mark.spawns
def test_worker_processes_keep_the_order(names, llm, tmp_path):
    assert stems(run(tmp_path / "list.txt", llm, worker_processes=True, workers=2)) == names


def test_at_most_so_many_records_wait_for_an_earlier_one(monkeypatch):
    monkeypatch.setattr(ordering, "MAX_AHEAD", 3)
    order, taken = InOrder(), []
    begun = threading.Thread(target=lambda: taken.extend(order.limited(range(6), lambda: False)))
    begun.start()
    until(lambda: len(taken) == 3)
    assert list(order.put(2, {"n": 2})) == list(order.put(1, {"n": 1})) == []
    begun.join(0.3)
    assert taken == [0, 1, 2]
    assert list(order.put(0, {"n": 0})) == [{"n": 0}, {"n": 1}, {"n": 2}]
    begun.join(10)
    assert taken == [0, 1, 2, 3, 4, 5] and not begun.is_alive()


def test_no_task_begins_while_the_records_that_wait_have_too_many_bytes(monkeypatch):
    monkeypatch.setattr(ordering, "MAX_HELD_BYTES", 10_000)
    order, is_stopped = InOrder(), threading.Event()
    tasks = order.limited(itertools.count(), is_stopped.is_set)
    assert [next(tasks) for _ in range(3)] == [0, 1, 2]
    assert list(order.put(1, {"caption": "a" * 9_000})) == [] and next(tasks) == 3
    assert list(order.put(2, {"caption": "a" * 9_000})) == []
    with ThreadPoolExecutor() as threads:
        following = threads.submit(next, tasks)
        assert not wait([following], 0.3).done
        assert len(list(order.put(0, {}))) == 3 and following.result(10) == 4
        assert list(order.put(4, {"caption": "a" * 20_000})) == []
        following = threads.submit(next, tasks, None)
        is_stopped.set()
        assert following.result(10) is None


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stop", "close"])
def test_a_run_that_ends_early_leaves_no_thread_and_can_be_resumed(how, llm, tmp_path, monkeypatch):
    monkeypatch.setattr(ordering, "MAX_AHEAD", 2)
    folder, out = tmp_path / "images", tmp_path / "out.jsonl"
    folder.mkdir()
    for i in range(60):
        noise_image(56, 56, seed=i).save(folder / f"{i:02}.png")
    job = run(folder, llm, output=out)
    made = [next(job)]
    getattr(job, how)()
    made += list(job) if how == "stop" else []
    job.close()
    until(lambda: not any(thread.name == "mmvllm-feed" for thread in threading.enumerate()))
    assert len(made) < 30 and stems(made) == sorted(stems(made)) and not llm.engine.scheduler.groups
    made += run(folder, llm, output=out)
    assert stems(records(out)) == stems(made) and len(made) == 60


def test_records_that_wait_are_given_when_those_between_were_dropped():
    order = InOrder()
    assert [*order.put(3, {"n": 3}), *order.put(0, {"n": 0}), *order.put(2, {"n": 2})] == [{"n": 0}]
    assert list(order.rest()) == [{"n": 2}, {"n": 3}]


def test_records_that_wait_are_given_when_the_engine_fails(names, llm, tmp_path, monkeypatch):
    def numbered(self, tasks, index):
        yield from ((number, {"path": str(number)}) for number in (2, 1))
        raise JobError("the engine fails every time")

    monkeypatch.setattr(Captioner, "_numbered", numbered)
    made, given = Captioner(llm, CaptionSettings(), ItemLoader(), ordered=True).records([], None), []
    with pytest.raises(JobError):
        given.extend(made)
    assert [record["path"] for record in given] == ["1", "2"]


def test_the_command_writes_in_order(caption, names, tmp_path):
    assert caption(tmp_path / "list.txt", "--ordered", "--output", tmp_path / "out.jsonl").code == 3
    assert stems(map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())) == names
