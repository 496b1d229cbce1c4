"""`--executor ray`: engines in Ray's actors make the records of a local engine, also when an actor is killed."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import psutil
import pytest
import torch

from mmvllm.captioning import CaptionSettings, caption_images
from mmvllm.captioning.jobs.captioner import Captioner, Task
from mmvllm.captioning.jobs.engine_worker import EngineSpec, finalized
from mmvllm.captioning.jobs.pending_tasks import Selection
from mmvllm.captioning.jobs.ray_options import RayOptions
from mmvllm.captioning.outputs.caption_files import CaptionFiles
from mmvllm.captioning.outputs.index import Index
from mmvllm.captioning.outputs.record import COLUMNS
from mmvllm.captioning.sources.items import Item
from mmvllm.captioning.sources.timeouts import DEFAULT_TIMEOUTS
from mmvllm.cli.common import option_name
from mmvllm.cli.main import main
from mmvllm.errors import ArgumentError
from tests.helpers.engine.requests import noise_image
from tests.helpers.media.videos import make_clip
from tests.helpers.serving.drips import Host

pytestmark = pytest.mark.ray

ray = pytest.importorskip("ray")
pytest.importorskip("ray.data")
ray_source = import_module("mmvllm.captioning.jobs.ray_source")
ray_worker = import_module("mmvllm.captioning.jobs.ray_worker")

CHUNK = ray_worker.CHUNK
ENGINE = {"device": "cpu", "num_kvcache_blocks": 256, "skip_warmup": True}
TWO = RayOptions(num_actors=2)
DIFFERS = dict.fromkeys(("time", "seconds", "duplicate_of"))  # these differ between runs


@pytest.fixture(scope="module", autouse=True)
def short_folder() -> Iterator[None]:
    """The folder of Ray's sockets, whose paths may have at most 107 bytes."""
    made = tempfile.TemporaryDirectory(dir="/tmp", prefix="ray", ignore_cleanup_errors=True)
    with made as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)
        yield


@pytest.fixture(scope="module")
def joined():
    """A Ray session, shared by all tests that do not start one themselves."""
    ray.init("local", num_cpus=2, include_dashboard=False, object_store_memory=128 * 1024 * 1024, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A relative path to six images: c equals a, x is damaged, and one name is not UTF-8."""
    monkeypatch.chdir(tmp_path)
    folder = Path("images")
    folder.mkdir()
    for i, name in enumerate(("a.png", "b.png", "d.png", os.fsdecode(b"\xff.png"))):
        noise_image(60 + i, 64, seed=i).save(folder / name)
    noise_image(60, 64, seed=0).save(folder / "c.bmp")
    (folder / "x.png").write_bytes(b"nothing")
    return folder


def run(paths, checkpoint, **options):
    return caption_images(paths, model=checkpoint, engine_args=ENGINE, max_tokens=4, **options)


def lines(path: Path) -> list[dict]:
    with path.open(encoding="utf-8", newline="\n") as file:
        return [json.loads(line) for line in file]


def many(folder: Path, number: int) -> Path:
    folder.mkdir()
    for i in range(number):
        noise_image(60 + i % 5, 64, seed=i).save(folder / f"{i:03}.png")
    return folder


def job(paths, files: CaptionFiles | None = None, **selection) -> ray_worker.RayJobSpec:
    return ray_worker.RayJobSpec(
        EngineSpec(CaptionSettings(), None, {}, None, worker_processes=False, timeouts=DEFAULT_TIMEOUTS),
        Selection(list(paths), **selection),
        files,
        folder=os.getcwd(),
    )


def chunks(job, recorded: bytes = b"") -> list:
    tables = ray_worker.walk(None, job, ray.put(recorded))
    return [chunk for table in tables for chunk in ray_worker.Chunk.unpack(table)]


def test_actors_and_a_local_engine_make_the_same_records(joined, folder, checkpoint):
    rows = [{"image": "a.png", "id": 7, "prompt": "Count!"}, {"image": "b.png", "context": "a cat"}, {"text": "none"}]
    (folder / "list.jsonl").write_text("\n".join(map(json.dumps, rows)))
    paths = [folder, folder / "list.jsonl"]
    local = {record["key"]: record for record in run(paths, checkpoint)}
    with run(paths, checkpoint, ray=TWO, output="out.jsonl") as remote:
        made = list(remote)
    assert len(made) == 9 and all(list(record) == list(COLUMNS) for record in made)
    assert {record["key"]: record | DIFFERS for record in made} == {
        key: record | DIFFERS for key, record in local.items()
    }
    assert lines(Path("out.jsonl")) == made
    equal = [record for record in made if record["path"] in ("images/a.png", "images/c.bmp") and not record["id"]]
    assert {record["duplicate_of"] for record in equal} in ({None, "images/a.png"}, {None, "images/c.bmp"})
    p = remote.progress
    assert (p.num_captioned, p.num_duplicates, p.num_failed, p.num_skipped) == (6, 1, 2, 0)
    assert 0 <= p.engine_wait_share <= 1


@pytest.mark.slow
def test_actors_caption_the_clips_of_videos(joined, tmp_path, checkpoint):
    folder = many(tmp_path / "media", 1)
    make_clip(folder / "long.mp4", 48)
    (folder / "broken.mp4").write_bytes(b"no video")
    options = {"clip_seconds": 2, "ordered": True}
    local = list(run(folder, checkpoint, **options))
    with run(folder, checkpoint, ray=TWO, output=tmp_path / "out.jsonl", **options) as remote:
        assert [record | DIFFERS for record in remote] == [record | DIFFERS for record in local]
    assert [record["start"] for record in local] == [None, 0.0, 0.0, 2.0, 4.0]
    p = remote.progress
    assert (p.num_captioned, p.num_failed, p.num_clips, p.num_further_clips) == (4, 1, 3, 2)
    with run(folder, checkpoint, ray=TWO, output=tmp_path / "out.jsonl", **options) as again:
        assert list(again) == [] and again.progress.num_skipped == 5


@pytest.mark.slow
def test_records_of_several_actors_have_the_order_of_the_input(joined, tmp_path, checkpoint):
    folder = many(tmp_path / "images", 3 * CHUNK + 5)
    with run(folder, checkpoint, ray=TWO, ordered=True) as made:
        assert [Path(record["path"]).name for record in made] == sorted(path.name for path in folder.iterdir())


@pytest.mark.slow
def test_the_time_of_an_image_holds_in_actors(joined, tmp_path, checkpoint):
    silent, folder = Host(""), many(tmp_path / "images", 3)
    with run([f"{silent.url}/a.png", folder], checkpoint, ray=TWO, image_timeout=2) as made:
        errors = {record["path"]: record["error"] for record in made}
    silent.close()
    assert errors.pop(f"{silent.url}/a.png").startswith("took longer than 2 s to load")
    assert [*errors.values()] == [None] * 3


@pytest.mark.slow
def test_another_run_adds_only_new_images(joined, folder, checkpoint):
    with run(folder, checkpoint, ray=TWO, output="out.jsonl") as first:
        before = list(first)
    noise_image(70, 64, seed=9).save(folder / "new.png")
    with run(folder, checkpoint, ray=TWO, output="out.jsonl") as second:
        assert [record["path"] for record in second] == ["images/new.png"]
    assert second.progress.num_skipped == 6 and len(lines(Path("out.jsonl"))) == len(before) + 1 == 7
    noise_image(70, 64, seed=10).save(folder / "x.png")
    with run(folder, checkpoint, ray=TWO, output="out.jsonl", retry_failed=True) as third:
        assert [(record["path"], record["error"]) for record in third] == [("images/x.png", None)]
    assert len({record["key"] for record in lines(Path("out.jsonl"))}) == len(lines(Path("out.jsonl"))) == 7


@pytest.mark.slow
@pytest.mark.parametrize(("number", "text"), [(1, "8 CPU requested for 1 actor, 8 each"), (2, "16 CPU .* 2 actors,")])
def test_more_than_ray_has_is_refused(number, text, monkeypatch):
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 4.0})
    source = object.__new__(ray_source.RaySource)
    source._options, source._gpus, source._is_ours = RayOptions("local", number, 8), 0, True
    with pytest.raises(ValueError, match=f"{text}.*; Ray has 4"):
        source._check_resources()


@pytest.mark.slow
def test_stop_and_fail_fast_end_the_actors(joined, tmp_path, checkpoint):
    folder = many(tmp_path / "images", 6 * CHUNK)
    (folder / "000.png").write_bytes(b"nothing")
    with run(folder, checkpoint, ray=TWO, fail_fast=True) as failing:
        made = list(failing)
    assert any(record["error"] for record in made) and len(made) < 6 * CHUNK
    with run(folder, checkpoint, ray=TWO) as stopped:
        next(stopped)
        stopped.stop()
        assert len(list(stopped)) < 5 * CHUNK
    deadline = time.monotonic() + 30
    while actors(psutil.Process()) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not actors(psutil.Process())


@pytest.mark.slow
def test_a_wrong_model_is_reported_once(joined, folder):
    with run(folder, "no/model/here", ray=TWO) as job, pytest.raises(ValueError, match="no/model/here"):
        next(job)


@pytest.mark.slow
def test_the_command_records_every_image_once_if_an_actor_is_killed(tmp_path, checkpoint):
    folder, out = many(tmp_path / "images", 8 * CHUNK), tmp_path / "out.jsonl"
    (folder / "000.png").write_bytes((folder / "001.png").read_bytes())
    command = [sys.executable, "-m", "mmvllm", "caption", folder, "--model", checkpoint, "--device", "cpu"]
    command += ["--output", out, "--max-tokens", "200", "--executor", "ray", "--address", "local", "--actors", "2"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(list(map(str, command)), text=True, **pipes) as process:
        both, at_work = [], []
        while process.poll() is None and not (len(both) == 2 and at_work and out.exists() and out.stat().st_size):
            time.sleep(0.05)
            both = actors(psutil.Process(process.pid))
            at_work = [actor for actor in both if "submit" in name_of(actor)]
        (victim, *_) = at_work
        num_before = out.read_bytes().count(b"\n")  # the last line may be incomplete
        victim.send_signal(signal.SIGKILL)
        printed, err = process.communicate()
    made = lines(out)
    assert process.returncode == 0, err
    assert len(both) == 2
    assert num_before < 8 * CHUNK == len(made)
    assert {record["path"] for record in made} == set(map(str, folder.iterdir()))
    assert sum(record["duplicate_of"] is not None for record in made) == 1
    assert printed == "" and "captioned" in err and "Traceback" not in err


def name_of(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.Error:  # the process has ended
        return ""


def actors(process: psutil.Process) -> list[psutil.Process]:
    def is_actor(child: psutil.Process) -> bool:
        try:
            return "CaptionActor" in " ".join(child.cmdline())
        except psutil.Error:
            return False

    return [child for child in process.children(recursive=True) if is_actor(child)]


def test_the_walk_yields_chunks_lazily(joined, tmp_path, monkeypatch):
    folder = many(tmp_path / "images", CHUNK + 3)
    found = []
    monkeypatch.setattr(Selection, "items", lambda *_: (found.append(i) or Item(i, i, i) for i in os.listdir(folder)))
    tables = ray_worker.walk(None, job([folder]), ray.put(b""))
    (first,) = ray_worker.Chunk.unpack(next(tables))
    assert len(first.items) == len(found) == CHUNK
    assert [len(chunk.items) for table in tables for chunk in ray_worker.Chunk.unpack(table)] == [3, 0]


def test_the_walk_skips_and_counts_recorded_images(joined, folder):
    here, index = job([folder]), Index()
    items = chunks(here)[0].items
    for number, item in enumerate(items[:4]):
        index.note(here.engine.settings.key(item), failed=number == 0, offset=number)
    (folder / "notes.pdf").touch()
    (left, end) = chunks(here, index.dump(retry=False))
    assert (left.items, end.num_skipped, end.num_failed_before) == (items[4:], 4, 1)
    assert end.ignored == {".pdf": 1}
    (again, end) = chunks(job([folder], retry_failed=True), index.dump(retry=True))
    assert (again.items, end.num_skipped) == (items[:1], 5)


def test_the_limit_of_the_walk_does_not_count_recorded_images(joined, folder):
    here, index = job([folder], limit=2), Index()
    items = chunks(job([folder]))[0].items
    index.note(here.engine.settings.key(items[0]), failed=False, offset=0)
    assert chunks(here, index.dump(retry=False))[0].items == items[1:3]


def test_the_walk_skips_or_refuses_images_with_a_caption_file(joined, folder):
    (folder / "b.txt").write_text("there")
    here = job([folder], CaptionFiles("txt", None, overwrite=False, skip_existing=True))
    assert "images/b.png" not in {item.path for item in chunks(here)[0].items}
    here = job([folder], CaptionFiles("txt", None, overwrite=False, skip_existing=False))
    errors = {item.path: item.error for item in chunks(here)[0].items if item.error}
    assert "images/a.png" not in errors and "exists already" in errors["images/b.png"]


def test_missing_caption_files_of_recorded_images_are_restored(joined, folder, checkpoint):
    keys = {"output": "out.jsonl", "format": "txt"}
    list(run([folder], checkpoint, **keys))
    texts = {path: path.read_text() for path in folder.glob("*.txt")}
    (lost, empty, *_) = texts
    lost.unlink()
    empty.write_text("")
    with run([folder], checkpoint, ray=TWO, **keys) as again:
        assert list(again) == []
    assert texts == {path: path.read_text() for path in folder.glob("*.txt")}


def test_a_walk_without_images_is_an_error(joined, tmp_path):
    (chunk,) = chunks(job([tmp_path]))
    assert "has no images" in chunk.error


def test_chunks_fail_when_the_engine_of_their_actor_ends(joined, folder, checkpoint, monkeypatch):
    def lose_device(self, tasks, index):
        next(iter(tasks))
        raise RuntimeError("the device is lost")
        yield

    monkeypatch.setattr(Captioner, "records", lose_device)
    here = job([folder])
    engine = replace(here.engine, model=checkpoint, engine_args=ENGINE)
    actor = ray_worker.CaptionActor(replace(here, engine=engine))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="device is lost"):
            list(actor(chunks(job([folder]))[0].pack()))


def record(path: str, **changes) -> dict:
    counts = dict.fromkeys(("prompt_tokens", "image_tokens", "completion_tokens", "width", "height"), 5)
    known = {"path": path, "digest": "d", "caption": f"of {path}", "finish_reason": "eos", "prompt": "p", "key": "3"}
    return dict.fromkeys(COLUMNS) | counts | known | {"settings": CaptionSettings().fingerprint} | changes


def task(path: str, error: str | None = None) -> Task:
    return Task(Item(path, path, path, error=error), f"key of {path}", f"{path}.txt")


def test_the_first_of_equal_images_from_several_actors_is_the_original():
    settings, index = CaptionSettings(), Index()
    copy = record("a", duplicate_of="b", seconds=0.0)
    taken = [finalized(task(r["path"]), r, settings, index) for r in (copy, record("b"), record("c"))]
    assert [r["duplicate_of"] for r in taken] == [None, "a", "a"]
    assert {r["caption"] for r in taken} == {"of a"}
    assert [(r["key"], r["file"]) for r in taken] == [(f"key of {path}", f"{path}.txt") for path in "abc"]


def test_captions_that_are_not_repeatable_are_not_copied():
    settings, index = CaptionSettings(temperature=1.0), Index()
    taken = [finalized(task(path), record(path), settings, index) for path in "ab"]
    assert [(r["caption"], r["duplicate_of"]) for r in taken] == [("of a", None), ("of b", None)]


def test_a_caption_file_that_cannot_be_written_is_a_failure():
    taken = finalized(task("a", "a.txt exists already"), record("a"), CaptionSettings(), Index())
    assert (taken["caption"], taken["error"], taken["finish_reason"]) == (None, "a.txt exists already", "error")
    assert (taken["path"], taken["completion_tokens"], list(taken)) == ("a", 0, list(COLUMNS))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--actors", "2"], "--actors needs --executor ray"),
        (["--gpus-per-actor", "0", "--address", "auto"], "--address, --gpus-per-actor needs --executor ray"),
        (["--executor", "ray", "--gpus-per-actor", "2"], "from 0 to 1"),
        (["--executor", "ray", "--gpus-per-actor", "0.5"], "--num-kvcache-blocks"),
        (["--executor", "ray", "--device", "cuda:1"], "Ray chooses each engine's GPUs"),
    ],
)
def test_conflicting_options_are_usage_errors(folder, capsys, options, words):
    assert main(["caption", str(folder), *options]) == 2
    assert words in capsys.readouterr().err


def test_standard_input_is_refused(capsys):
    assert main(["caption", "-", "--executor", "ray"]) == 2
    assert "standard input" in capsys.readouterr().err


def test_an_address_without_a_cluster_is_refused_at_once(folder, capsys, monkeypatch):
    monkeypatch.setattr(ray_source.ray, "is_initialized", lambda: False)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # and not listening
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        assert main(["caption", str(folder), "--executor", "ray", "--address", address]) == 2
    assert f"{address}: no Ray cluster answers there" in capsys.readouterr().err


def test_without_ray_the_command_says_how_to_install_it(folder, capsys, monkeypatch):
    monkeypatch.setattr("mmvllm.cli.caption.find_spec", lambda name: None)
    assert main(["caption", str(folder), "--executor", "ray"]) == 2
    assert "pip install 'mmvllm[ray]'" in capsys.readouterr().err


def test_a_local_engine_cannot_be_combined_with_ray(folder, make_llm, checkpoint):
    with pytest.raises(ValueError, match="engines of their own"):
        caption_images(folder, llm=make_llm(checkpoint), ray=TWO)


@pytest.mark.slow
def test_an_output_resumes_on_ray_only_with_its_quantization(folder, checkpoint, joined, tmp_path):
    ours, theirs = tmp_path / "bfloat16.jsonl", tmp_path / "int8.jsonl"
    assert len(list(run([folder], checkpoint, output=ours))) == 6
    with pytest.raises(ValueError, match="quantization was None, is 'int8'"):
        run([folder], checkpoint, output=ours, quantization="int8", ray=RayOptions())
    assert len(list(run([folder], checkpoint, output=theirs, quantization="int8", ray=RayOptions()))) == 6
    assert list(run([folder], checkpoint, output=theirs, quantization="int8")) == []
    with pytest.raises(ValueError, match="quantization was 'int8', is None"):
        run([folder], checkpoint, output=theirs)


@pytest.mark.parametrize(
    ("options", "engine_args", "message"),
    [
        ({}, {"device": "cuda:1"}, "--device is 'cuda:1', but Ray chooses each engine's GPUs; give 'cuda'"),
        ({"gpus_per_actor": 0.5}, {}, "0.5 GPU per actor: engines that share a GPU need --num-kvcache-blocks"),
        (
            {"gpus_per_actor": 1},
            {"tensor_parallel_size": 2},
            "--gpus-per-actor is 1, but an engine with --tensor-parallel-size 2 takes that many GPUs; leave it out",
        ),
    ],
)
def test_gpus_that_engines_cannot_share_are_refused(options, engine_args, message):
    with pytest.raises(ArgumentError) as raised:
        ray_source._gpus_per_actor(RayOptions(**options), engine_args)
    assert raised.value.format(option_name) == message


def test_an_engine_on_several_gpus_is_an_actor_with_all_of_them():
    engine_args = {"device": "cuda", "tensor_parallel_size": 4}
    assert ray_source._gpus_per_actor(RayOptions(), engine_args) == 4
    assert ray_source._gpus_per_actor(RayOptions(gpus_per_actor=0), engine_args) == 0
    assert ray_source._gpus_per_actor(RayOptions(), engine_args | {"device": "cpu"}) == 0


@pytest.mark.parametrize(("capability", "gpus"), [((9, 0), 1), ((7, 5), 0)])
def test_auto_asks_for_a_gpu_only_if_the_engine_can_use_it(capability, gpus, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (2**34, 2**34))
    assert ray_source._gpus_per_actor(RayOptions(), {}) == gpus
