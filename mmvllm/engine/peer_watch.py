"""Signs of life: each rank counts on while its process runs, and rank 0 ends one that has stopped counting.

A rank that ends is noticed at once. One that does not answer, because it was stopped or waits for something that never
comes, would keep the others waiting in an operation until that fails, after `mmvllm.ranks.TIMEOUT`.
"""

import multiprocessing
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_uint64
from multiprocessing import connection
from typing import Protocol

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


class Watched(Protocol):
    """What is told that a rank is lost."""

    def fail(self, reason: str) -> None: ...


def watch(
    watched: "weakref.ref[Watched]",
    processes: list[multiprocessing.Process],
    pulses: list[c_uint64],
    timeout: float,
    is_exiting: threading.Event,
) -> None:
    """Until the first process ends, or gives no sign of life for `timeout` seconds and is killed."""
    silences = [_Silence(pulse) for pulse in pulses]
    reason = None
    while reason is None:
        ended = connection.wait([process.sentinel for process in processes], BEAT_SECONDS)
        for rank, (process, silence) in enumerate(zip(processes, silences, strict=True), 1):
            if process.sentinel in ended:
                reason = f"the process of rank {rank} {how_it_ended(process)}"
            elif silence.seconds() > timeout:
                for each in processes:  # others may be silent too, and could not end with their parent
                    each.kill()
                reason = f"the process of rank {rank} did not answer for {timeout:g} s and was killed"
    alive = watched()
    if alive is not None and not is_exiting.is_set():
        alive.fail(reason)


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
