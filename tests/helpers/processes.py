"""The processes that a program under test has started, and whether they have ended."""

import os
from contextlib import suppress

import psutil

from tests.helpers.engine.async_engines import wait_until


def spawned(pid: int | None = None, recursive: bool = False) -> list[psutil.Process]:
    """The processes that a program, by default this one, has started for engines, ranks and preparation, oldest first.

    With `recursive`, also those that these have started.
    """
    found = []
    children = psutil.Process(pid).children(recursive=recursive)
    for process in sorted(children, key=psutil.Process.create_time):  # process ids wrap around
        with suppress(psutil.Error):  # one that ends
            if any("spawn_main" in part for part in process.cmdline()):
                found.append(process)
    return found


def is_gone(pid: int) -> bool:
    """Whether a process has ended, with all its threads: until then its files are open. It may not be reaped yet."""
    try:
        has_ended = psutil.Process(pid).status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        return has_ended and len(os.listdir(f"/proc/{pid}/task")) == 1
    except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
        return True


def wait_until_gone(pids: list[int]) -> None:
    wait_until(lambda: all(map(is_gone, pids)), "gone")
