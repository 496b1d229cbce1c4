"""The processes that a program under test has started, and whether they have ended."""

from contextlib import suppress

import psutil

from tests.helpers.async_engines import wait_until


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
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)  # until it is reaped
    except psutil.NoSuchProcess:
        return True


def wait_until_gone(pids: list[int]) -> None:
    wait_until(lambda: all(map(is_gone, pids)), "gone")
