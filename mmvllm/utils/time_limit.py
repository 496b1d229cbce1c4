"""Limits of time: for work that Python cannot interrupt (a decoder in C, a file on a server, a slow host), and for
programs of others in Python, which it can."""

import ctypes
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NoReturn, TypeVar

T = TypeVar("T")

POLL_SECONDS = 0.1  # between looks at work whose clock is stopped
WATCH_SECONDS = 1.0  # between looks of a watchdog


class TimeIsOver(Exception):
    """Work took longer than its limit. Not an OSError, which readers of damaged files skip."""


class TimeLimit:
    """The seconds that some work may take, from now on; work that waits for its turn may stop the clock.

    `run` returns when the time is over, whatever the work does. The work then goes on in its thread until it calls
    `check`, or ends: Python can end a process, but not a thread.
    """

    def __init__(self, seconds: float):
        self._end = time.monotonic() + seconds
        self._stopped_at: float | None = None
        self.is_over = False  # whether `run` has given up
        self._lock = threading.Lock()
        self._releases: list[Callable[[], None]] = []

    def run(self, work: Callable[[], T]) -> T:
        """What `work` returns or raises, in another thread; raises TimeIsOver if it takes longer."""
        done: Future[T] = Future()
        threading.Thread(target=_settle, args=(done, work), name="mmvllm-limited", daemon=True).start()
        while not wait([done], self._seconds_left() if self._stopped_at is None else POLL_SECONDS).done:
            if self._seconds_left() == 0:
                self._give_up()
        if done.exception() is not None:
            self.check()  # a decoder may have made another error of it
        return done.result()

    def check(self) -> None:
        """Raise TimeIsOver if the time is over."""
        if self._seconds_left() == 0:
            raise TimeIsOver

    @contextmanager
    def released_when_over(self, release: Callable[[], None]) -> Iterator[None]:
        """Call `release` once, at the end or when `run` gives up: what the work holds does not wait for its thread."""
        with self._lock:
            self._releases.append(release)
        if self.is_over:
            self._release([release])
        try:
            yield
        finally:
            self._release([release])

    @contextmanager
    def stopped_clock(self) -> Iterator[None]:
        """A wait that does not count."""
        self._stopped_at = time.monotonic()
        try:
            yield
        finally:
            self._end += time.monotonic() - self._stopped_at
            self._stopped_at = None

    def _give_up(self) -> NoReturn:
        self.is_over = True
        self._release(list(self._releases))
        raise TimeIsOver

    def _release(self, releases: list[Callable[[], None]]) -> None:
        with self._lock:  # two threads may release at the same time
            for release in releases:
                if release in self._releases:
                    self._releases.remove(release)
                    release()

    def _seconds_left(self) -> float:
        now = self._stopped_at  # read once: the thread of the work may start the clock
        return max(0.0, self._end - (time.monotonic() if now is None else now))


def shut_down(sockets: Iterable[socket.socket]) -> None:
    """End connections that other threads wait for, which then get an error or the end of the data."""
    for one in sockets:
        with suppress(OSError):  # closed meanwhile
            socket.socket.shutdown(one, socket.SHUT_RDWR)  # the method of SSL sockets is not for other threads


def _settle(done: "Future[T]", work: Callable[[], T]) -> None:
    try:
        done.set_result(work())
    except BaseException as error:
        done.set_exception(error)


class _Interruption(BaseException):
    """Raised in code that runs for too long; not an Exception, which programs of others catch."""


@dataclass(slots=True)
class _Run:
    end: float
    is_interrupted: bool = False


class Watchdog:
    """Interrupts Python code that runs for too long, in the thread that called `run`: no second thread has to run it.

    The code is interrupted between two instructions, repeatedly until it ends, and within a C call when that returns.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._runs: dict[int, _Run] = {}  # by thread
        self._watcher: threading.Thread | None = None

    def run(self, work: Callable[[], T], seconds: float) -> T:
        """What `work` returns or raises; it may not hold locks. Raises TimeIsOver if it was interrupted."""
        thread = threading.get_ident()
        try:
            return self._run(thread, work, seconds)
        except _Interruption:
            self._finish(thread)  # where this was interrupted, too
            raise TimeIsOver from None

    def _run(self, thread: int, work: Callable[[], T], seconds: float) -> T:
        try:
            self._begin(thread, seconds)
            made = work()
        except BaseException:
            if self._finish(thread):  # whatever it has made of the interruption
                raise TimeIsOver from None
            raise
        if self._finish(thread):
            raise TimeIsOver
        return made

    def _begin(self, thread: int, seconds: float) -> None:
        with self._lock:
            self._runs[thread] = _Run(time.monotonic() + seconds)
            if self._watcher is None:
                watcher = threading.Thread(target=self._watch, name="mmvllm-watchdog", daemon=True)
                watcher.start()
                self._watcher = watcher

    def _finish(self, thread: int) -> bool:
        """Whether it was interrupted; nothing is raised in the thread after this.

        An interruption that was not raised yet is raised here, after a call; it is not taken back, which CPython offers
        but 3.11 does by halves: functions that are profiled, or traced, would hang as they begin.
        """
        with self._lock:
            run = self._runs.pop(thread, None)
            return run is not None and run.is_interrupted

    def _watch(self) -> None:
        while True:
            time.sleep(WATCH_SECONDS)
            with self._lock:
                if not self._runs:
                    self._watcher = None
                    return
                now = time.monotonic()
                for thread, run in self._runs.items():
                    if run.end < now:
                        run.is_interrupted = True
                        _raise_in(thread)


def _raise_in(thread: int) -> None:
    """Interrupt a thread at its next instruction that checks for it: a call, a jump back, the start of a function."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_Interruption))
