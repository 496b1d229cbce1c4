"""Signs of life: a process of an engine counts on while it runs, and its parent ends one that has stopped counting.

A process that ends is noticed at once. One that does not answer, because it was stopped or waits for something that
never comes, would keep requests waiting for ever, or other ranks in an operation until `mmvllm.ranks.TIMEOUT`.
"""

import multiprocessing
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_uint64
from multiprocessing import connection
from typing import NamedTuple

from mmvllm.worker_start import how_it_ended

BEAT_SECONDS = 0.5


def new_pulse() -> c_uint64:
    """A count in memory that two processes see; an argument of a process that is started."""
    return multiprocessing.get_context("spawn").RawValue(c_uint64, 0)


@contextmanager
def beating(pulse: c_uint64) -> Iterator[None]:
    """Count on, in a thread."""
    is_over = threading.Event()

    def beat() -> None:
        while not is_over.wait(BEAT_SECONDS):
            pulse.value += 1

    threading.Thread(target=beat, name="mmvllm-pulse", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


class Watched(NamedTuple):
    """A process that beats, and how messages call it."""

    name: str
    process: multiprocessing.Process
    pulse: c_uint64


def first_lost(watched: Sequence[Watched], timeout: float) -> str:
    """Wait until a process ends, or gives no sign of life for `timeout` seconds and is killed; return what happened."""
    silences = [_Silence(each.pulse) for each in watched]
    while True:
        ended = connection.wait([each.process.sentinel for each in watched], BEAT_SECONDS)
        for (name, process, _), silence in zip(watched, silences, strict=True):
            if process.sentinel in ended:
                return f"{name} {how_it_ended(process)}"
            if silence.seconds() > timeout:
                for each in watched:  # others may be silent too, and could not end with their parent
                    each.process.kill()
                return f"{name} did not answer for {timeout:g} s and was killed"


class _Silence:
    """How long a pulse has not been felt; nothing counts before its first beat, while the process starts."""

    def __init__(self, pulse: c_uint64):
        self._pulse, self._count, self._seconds, self._asked_at = pulse, 0, 0.0, time.monotonic()

    def seconds(self) -> float:
        """To be called often. A pause of this process, which may have stopped the other one too, counts only once."""
        now, count = time.monotonic(), self._pulse.value
        self._seconds += min(now - self._asked_at, 2 * BEAT_SECONDS)
        self._asked_at = now
        if count == 0 or count != self._count:
            self._count, self._seconds = count, 0.0
        return self._seconds
