"""Heartbeats: a process increments a counter while it runs (`beating`), and its parent kills it when that stops.

The parent notices the end of a process at once. A process that hangs, because it was stopped or waits forever, would
block requests indefinitely, and other ranks in a collective until `mmvllm.processes.ranks.TIMEOUT`.
"""

import multiprocessing
import threading
import time
from collections.abc import Sequence
from ctypes import c_uint64
from multiprocessing import connection
from typing import NamedTuple

from mmvllm.processes.signals import kill_process
from mmvllm.processes.start import KILL_SECONDS, how_it_ended
from mmvllm.processes.worker import BEAT_SECONDS

START_SECONDS = 300.0  # until the first heartbeat: the process first starts Python and imports its modules


def new_pulse() -> c_uint64:
    """Return a counter in shared memory, to be passed to a process that is started."""
    return multiprocessing.get_context("spawn").RawValue(c_uint64, 0)


class Watched(NamedTuple):
    """A process with a heartbeat, and its name in messages."""

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
            if silence.is_over(timeout):
                for each in watched:  # others may be silent too, and could not end with their parent
                    kill_process(each.process)
                return f"{name} did not answer for {timeout:g} s and was killed"


class Watch:
    """Watches one process from a thread."""

    def __init__(self, watched: Watched, timeout: float):
        self._end = f"{watched.name} could not be ended"
        self._thread = threading.Thread(target=self._run, args=(watched, timeout), daemon=True)
        self._thread.start()

    def end(self) -> str:
        """Return what happened to a process that has ended or was just killed."""
        self._thread.join(2 * KILL_SECONDS)
        return self._end

    def _run(self, watched: Watched, timeout: float) -> None:
        self._end = first_lost([watched], timeout)


class _Silence:
    """Measures how long a process has had no heartbeat."""

    def __init__(self, pulse: c_uint64):
        self._pulse, self._count, self._seconds, self._asked_at = pulse, 0, 0.0, time.monotonic()

    def is_over(self, timeout: float) -> bool:
        """Return whether the silence exceeds `timeout`; must be called at every beat.

        A pause of this process, which may have paused the other one too, counts for at most two beats.
        """
        now, count = time.monotonic(), self._pulse.value
        self._seconds += min(now - self._asked_at, 2 * BEAT_SECONDS)
        self._asked_at = now
        if count != self._count:
            self._count, self._seconds = count, 0.0
        return self._seconds > (timeout if count else max(timeout, START_SECONDS))
