"""`mmvllm caption` as a process, and the files that it reads and writes."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.engine.requests import noise_image

TINY = ("--device", "cpu", "--max-tokens", "4")

# Imports torch once, runs once so that lazy imports are done, and forks a process for every run: a start takes 0.1 s,
# and each run is still a process with its own signals and limits. Root's right to ignore file permissions is
# dropped. The interpreter's shutdown takes half a second, and is skipped unless a test is about it.
SERVER = """
import ctypes, gc, json, os, resource, sys
import torch
from mmvllm.cli.main import main

torch.set_num_threads(1)
libc, header, rights = ctypes.CDLL(None), (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
libc.capget(header, rights)
rights[0] &= ~0b110  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH
libc.capset(header, rights)
commands, replies = os.fdopen(int(sys.argv[1])), os.fdopen(int(sys.argv[2]), "w")
assert main(sys.argv[3:]) == 0
gc.freeze()
for line in commands:
    job = json.loads(line)
    if "wait" in job:
        reply = os.waitstatus_to_exitcode(os.waitpid(job["wait"], 0)[1])
    elif (reply := os.fork()) == 0:
        os.setsid()
        os.chdir(job["folder"])
        for fd, (name, mode) in enumerate(((job["stdin"], 0), ("stdout", 0o1101), ("stderr", 0o1101))):
            os.dup2(os.open(name, mode, 0o600), fd)
        if job["max_bytes"] is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (job["max_bytes"], job["max_bytes"]))
        try:
            code = main(job["arguments"])
        except SystemExit as exit:
            code = exit.code
        sys.stdout.flush()
        if job["has_end"]:
            sys.exit(code)
        os._exit(code)
    print(reply, file=replies, flush=True)
"""


@dataclass(frozen=True, slots=True)
class Done:
    """`code` is negative for a process that a signal ended."""

    code: int
    out: str
    err: str


class Run:
    """A process that is running; its streams are files in a separate folder."""

    def __init__(self, ask: Callable[..., int], streams: Path, **job):
        self._ask, self._streams = ask, streams
        self._code: int | None = None
        for name in ("stdout", "stderr"):  # the process may be killed before it creates them
            (streams / name).touch()
        self.pid = ask(**job)

    @property
    def err(self) -> str:
        return (self._streams / "stderr").read_text(errors="replace")

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def send_all(self, number: int) -> None:
        """Send a signal to the process and its workers, as a terminal does."""
        os.killpg(self.pid, number)

    def end(self, seconds: float = 120) -> Done:
        """Wait for the end; a process that takes longer is killed, and has the code -9."""
        if self._code is None:
            timer = threading.Timer(seconds, self.send, [signal.SIGKILL])
            timer.start()
            self._code = self._ask(wait=self.pid)
            timer.cancel()
        return Done(self._code, (self._streams / "stdout").read_text(errors="replace"), self.err)


@contextmanager
def all_but_the_last(images: Path, names: Path) -> Iterator[None]:
    """Write image paths to the pipe `names`, the last one at the end of the `with`: the run cannot finish before."""
    *first, last = sorted(images.iterdir())
    with open(os.open(names, os.O_RDWR), "w") as lines:  # O_RDWR does not wait for a reader
        print(*first, sep="\n", file=lines, flush=True)
        yield
        print(last, file=lines, flush=True)


def many(folder: Path, number: int) -> Path:
    folder.mkdir()
    for i in range(number):
        noise_image(40 + i % 7, 40, seed=i).save(folder / f"{i:03}.png")
    return folder


def records(path: Path) -> list[dict]:
    """The records in a file of JSON lines, all of which must be complete."""
    with path.open(encoding="utf-8", newline="\n") as lines:
        return [json.loads(line) for line in lines]


def by_name(path: Path) -> dict[str, dict]:
    """The records by name of the image; there must be one for each."""
    found = records(path)
    named = {os.path.basename(record["path"]): record for record in found}
    assert len(named) == len(found)
    return named


def recorded(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def until(is_true: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.001)


def stats(group: int) -> list[str]:
    """The text of /proc/PID/stat for every process of a group."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            stat = path.read_text()
            if int(stat.rpartition(")")[2].split()[2]) == group:
                found.append(stat)
    return found
