"""`mmvllm caption` as a process on small folders of images."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
from PIL import Image

from mmvllm.captioning.jobs import endpoint
from mmvllm.captioning.sources import loading
from mmvllm.captioning.sources import walk as walk_module
from mmvllm.processors.budget import VIDEO_DECODING
from tests.helpers.captioning.command import SERVER, TINY, Done, Run, many
from tests.helpers.needs import allowed, needs


class _PoolOfThisProcess:
    def __init__(self, num_workers: int, initializer: Callable, reserve: Callable):
        initializer()

    def run(self, task: Callable, *args, timeout: float) -> object:
        return task(*args)

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def videos_in_this_process(request, monkeypatch):
    """Decode videos here, where the start of a process would take longer than the test; not in one that may start any.

    The limits of time and memory then do not hold.
    """
    if "spawns" not in allowed(request.node):
        monkeypatch.setattr(loading, "WorkerPool", _PoolOfThisProcess)
        monkeypatch.setattr(loading, "memory_of_video", nullcontext)
        monkeypatch.setattr(loading, "reserve_in_parent", VIDEO_DECODING.reserve)


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """The working directory, with images/a.png and images/deep/b.png, and a link to the folder."""
    here = tmp_path / "here"
    (here / "images/deep").mkdir(parents=True)
    for name in ("a.png", "deep/b.png"):
        (here / "images" / name).touch()
    (here / "link").symlink_to("images")
    monkeypatch.chdir(here)
    return here


@pytest.fixture(scope="session")
@needs("spawns")
def server(checkpoint, tmp_path_factory):
    """A function ask(**job) that returns the server's reply."""
    (commands, ask_end), (reply_end, replies) = os.pipe(), os.pipe()
    warm = many(tmp_path_factory.mktemp("warm") / "images", 1)
    command = [sys.executable, "-c", SERVER, str(commands), str(replies), "caption", str(warm), "--model", checkpoint]
    process = subprocess.Popen([*command, *TINY], pass_fds=(commands, replies), stdin=subprocess.DEVNULL)
    os.close(commands)
    os.close(replies)
    with open(ask_end, "w") as writer, open(reply_end) as reader:

        def ask(**job) -> int:
            print(json.dumps(job), file=writer, flush=True)
            return int(reader.readline())

        yield ask
    assert process.wait(60) == 0


@pytest.fixture
def start(server, checkpoint, tmp_path_factory):
    """Start `mmvllm caption` on the tiny model in an empty folder; returns a `Run`."""

    runs: list[Run] = []

    def start(*arguments, stdin: str | Path = os.devnull, max_bytes: int | None = None, has_end: bool = False) -> Run:
        streams = tmp_path_factory.mktemp("run")
        arguments = ["caption", "--model", str(checkpoint), *TINY, *map(str, arguments)]
        job = {"folder": str(streams), "stdin": str(stdin), "max_bytes": max_bytes, "has_end": has_end}
        runs.append(Run(server, streams, arguments=arguments, **job))
        return runs[-1]

    yield start
    for run in runs:
        with suppress(ProcessLookupError):
            run.send_all(signal.SIGKILL)
        run.end()


@pytest.fixture
def caption(start) -> Callable[..., Done]:
    """Run `mmvllm caption` on the tiny model to its end; returns a `Done`."""
    return lambda *arguments, **options: start(*arguments, **options).end()


@pytest.fixture
def folder(tmp_path) -> Path:
    """Four images."""
    return many(tmp_path / "images", 4)


@pytest.fixture(scope="session")
def images(tmp_path_factory) -> Path:
    """More images than the engine processes at once."""
    return many(tmp_path_factory.mktemp("many") / "images", 300)


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "out.jsonl"


@pytest.fixture
def names(tmp_path) -> Path:
    """A pipe with a list, which is read while it is written."""
    path = tmp_path / "names.txt"
    os.mkfifo(path)
    return path


@pytest.fixture
def open_folders(monkeypatch):
    """The folders that are being read, and the number of entries read from each in the order of opening."""
    scandir, is_open, taken = os.scandir, set(), []

    class Counted:
        def __init__(self, path):
            self.path, self.entries, self.number = path, scandir(path), len(taken)
            taken.append(0)
            is_open.add(path)

        def __iter__(self):
            return self

        def __next__(self):
            entry = next(self.entries)
            taken[self.number] += 1
            return entry

        def close(self):
            self.entries.close()
            is_open.discard(self.path)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.close()

    monkeypatch.setattr(walk_module.os, "scandir", Counted)
    return is_open, taken


@pytest.fixture
def colors(tmp_path) -> list[Path]:
    """Twelve images of one color each, as (20 * i, 0, 255 - 20 * i)."""
    paths = [tmp_path / f"{i}.png" for i in range(12)]
    for i, path in enumerate(paths):
        Image.new("RGB", (60, 40), (20 * i, 0, 255 - 20 * i)).save(path)
    return paths


@pytest.fixture
def quick_retries(monkeypatch):
    """An endpoint is asked again at once, and without a key."""
    monkeypatch.setattr(endpoint, "INITIAL_BACKOFF", 0.01)
    monkeypatch.delenv(endpoint.KEY_VARIABLE, raising=False)
