"""Time limits: `TimeLimit` for work that Python cannot interrupt (a C decoder, a network file, a slow host), and
`Watchdog` for third-party Python code, which it can interrupt."""

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

POLL_SECONDS = 0.1  # between checks of work whose clock is stopped
WATCH_SECONDS = 1.0  # between checks by a watchdog


class TimeIsOver(Exception):
    """Work took longer than its limit; not an OSError, which readers of damaged files ignore."""


class TimeLimit:
    """The time that work may take, from now on; work that waits for its turn may stop the clock.

    `run` ends when the time is over, whatever the work does. The work then continues in its thread until it calls
    `check` or ends, because Python cannot kill a thread.
    """

    def __init__(self, seconds: float):
        self._end = time.monotonic() + seconds
        self._stopped_at: float | None = None
        self.is_over = False  # whether `run` has given up
        self._lock = threading.Lock()
        self._releases: list[Callable[[], None]] = []

    def run(self, work: Callable[[], T]) -> T:
        """Run `work` in another thread and return its result; raises its exception, or TimeIsOver."""
        done: Future[T] = Future()
        threading.Thread(target=_settle, args=(done, work), name="mmvllm-limited", daemon=True).start()
        while not wait([done], self._seconds_left() if self._stopped_at is None else POLL_SECONDS).done:
            if self._seconds_left() == 0:
                self._give_up()
        if done.exception() is not None:
            self.check()  # a decoder may have turned TimeIsOver into another error
        return done.result()

    def check(self) -> None:
        """Raise TimeIsOver if the time is over."""
        if self._seconds_left() == 0:
            raise TimeIsOver

    @contextmanager
    def released_when_over(self, release: Callable[[], None]) -> Iterator[None]:
        """Call `release` once, after the block or when `run` gives up: resources need not wait for the thread."""
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
        """Stop the clock inside the block."""
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
        now = self._stopped_at  # read once: the thread of the work may restart the clock
        return max(0.0, self._end - (time.monotonic() if now is None else now))


def shut_down(sockets: Iterable[socket.socket]) -> None:
    """Shut down connections that other threads wait for; they then get an error or the end of the data."""
    for one in sockets:
        with suppress(OSError):  # closed meanwhile
            socket.socket.shutdown(one, socket.SHUT_RDWR)  # `SSLSocket.shutdown` is not thread-safe


def _settle(done: "Future[T]", work: Callable[[], T]) -> None:
    try:
        done.set_result(work())
    except BaseException as error:
        done.set_exception(error)


class _Interruption(BaseException):
    """Raised in code that runs too long; not an Exception, which third-party code may catch."""


@dataclass(slots=True)
class _Run:
    end: float
    is_interrupted: bool = False


class Watchdog:
    """Interrupts Python code that runs too long, in the thread that called `run`.

    The code is interrupted between two bytecode instructions, repeatedly until it ends; a C call is not interrupted
    before it returns.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._runs: dict[int, _Run] = {}  # by thread
        self._watcher: threading.Thread | None = None

    def run(self, work: Callable[[], T], seconds: float) -> T:
        """Run `work`, which must not hold locks, and return its result; raises TimeIsOver if it was interrupted."""
        thread = threading.get_ident()
        try:
            return self._run(thread, work, seconds)
        except _Interruption:
            self._finish(thread)  # the interruption may have hit `_run` itself
            raise TimeIsOver from None

    def _run(self, thread: int, work: Callable[[], T], seconds: float) -> T:
        try:
            self._begin(thread, seconds)
            made = work()
        except BaseException:
            if self._finish(thread):  # even if `work` has turned the interruption into another error
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
        """End a run and return whether it was interrupted; afterwards nothing is raised in the thread.

        A pending interruption is raised here, after a call. CPython could withdraw it instead, but in 3.11 functions
        that are profiled or traced would then hang at their start.
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
    """Interrupt a thread at its next check for interruptions: a call, a backward jump or the start of a function."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_Interruption))
