"""A pool of worker processes, each of which runs one task at a time within a time limit.

    WorkerPool.run, in a thread of the parent  <── a channel for each process ──>  serve, in the process

A process is killed if its task exceeds the time limit or is cancelled, or if it gives no sign of life. The next task
replaces a process that was killed or died. Processes are spawned, not forked, since the parent's threads may hold
locks. They end with their parent.
"""

import atexit
import logging
import multiprocessing
import os
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from multiprocessing import connection
from typing import Any

from mmvllm.processes.channel import Channel, SharedBuffer
from mmvllm.processes.signals import kill_process
from mmvllm.processes.start import start_process
from mmvllm.processes.watchdog import Watch, Watched, new_pulse
from mmvllm.processes.worker import serve

NUM_WORKERS = min(8, os.cpu_count() or 1)
CANCEL_SECONDS = 1.0  # grace period of a cancelled task: most end within it, and a new process costs more
POLL_SECONDS = 0.1  # between checks for cancellation
SILENCE_SECONDS = 60.0

ReserveWhile = Callable[[int, Callable[[], float | None]], AbstractContextManager]  # see `DecodeBudget.reserve`


class WorkerTimeout(TimeoutError):
    """A task took longer than its time limit; its process was killed."""


class WorkerDied(RuntimeError):
    """A process ended during a task, for example by a crash; the message says how."""


class WorkersUnusable(RuntimeError):
    """The pool is closed, or its processes end before they are ready for a task; a retry would fail too."""


class TaskCancelled(RuntimeError):
    """A task was cancelled by its caller."""


class WorkerPool:
    """A pool of worker processes that several threads share; processes are started on demand.

    Args:
        num_workers: maximum number of processes.
        initializer: called with `initargs` in each new process; both are pickled.
        reserve: reserves the bytes that a task requests with `reserve_in_parent`.
        engine_env: environment variables for processes that run an engine, such as thread counts and devices.
            Such a process keeps the parent's priority and may start further processes.
        silence: seconds without a sign of life after which a process is killed, even an idle one. Code that holds the
            GIL gives no sign of life.

    Raises the errors of pickling. If `initializer` or `initargs` refer to the main module, the processes import it.
    """

    def __init__(
        self,
        num_workers: int = NUM_WORKERS,
        initializer: Callable = nullcontext,
        initargs: tuple = (),
        reserve: ReserveWhile = lambda *_: nullcontext(),
        engine_env: dict[str, str] | None = None,
        silence: float = SILENCE_SECONDS,
    ):
        self._num_workers, self._reserve = num_workers, reserve
        self._setup = pickle.dumps((initializer, initargs)), engine_env, silence
        self._changed = threading.Condition()
        self._idle: list[_Worker] = []
        self._workers: set[_Worker] = set()
        self._is_closed = self._has_worked = False
        # atexit runs this before multiprocessing's handler, which was registered earlier and would wait for processes.
        self._kill_all = weakref.finalize(self, _kill_all, self._workers)
        atexit.register(self._kill_all)

    def start(self) -> None:
        """Start one process now, so that the first task does not wait for it."""
        self._give_back(self._take(_never))

    def run(
        self,
        task: Callable,
        *args: Any,
        timeout: float | None = None,
        is_cancelled: Callable[[], bool] | None = None,
    ) -> Any:
        """Return the result of `task(*args)` from a process; many threads may call this and wait for a free process.

        Args:
            timeout: in seconds; starting a process and waiting for reserved bytes do not count.
            is_cancelled: polled regularly; once it returns True, the task ends within about `CANCEL_SECONDS`.

        Raises the task's exception without its traceback, WorkerTimeout, WorkerDied, WorkersUnusable or TaskCancelled.
        """
        worker = self._take(is_cancelled or _never)
        try:
            worker.wait_until_ready(_Limit(None, is_cancelled))
            self._has_worked = True
            is_error, result = worker.run(task, args, _Limit(timeout, is_cancelled), self._reserve)
        except BaseException as error:
            self._drop(worker)
            if isinstance(error, WorkerDied) and self._is_closed:
                raise WorkersUnusable("the worker pool is closed") from None
            if isinstance(error, WorkerDied) and not self._has_worked:
                raise WorkersUnusable(f"worker processes end as soon as they begin: {error}") from None
            raise
        self._give_back(worker)
        try:
            if is_error:
                raise result
            return result
        finally:
            del result  # avoid a reference cycle between an error and this frame, which holds the arguments

    def close(self) -> None:
        """Kill all processes; tasks in flight raise WorkersUnusable."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._kill_all()
        atexit.unregister(self._kill_all)
        with self._changed:
            while self._idle:
                self._idle.pop().close()

    def _take(self, is_cancelled: Callable[[], bool]) -> "_Worker":
        with self._changed:
            while not self._may_take() and not is_cancelled():
                self._changed.wait(POLL_SECONDS)
            if is_cancelled():
                self._changed.notify()  # pass the wake-up on to another thread
                raise TaskCancelled("the task was cancelled")
            if self._is_closed:
                raise WorkersUnusable("the worker pool is closed")
            while self._idle:
                if (worker := self._idle.pop()).is_alive:
                    return worker
                worker.close()
                self._workers.discard(worker)
            try:
                worker = _Worker(*self._setup)
            except BaseException:
                self._changed.notify()  # another thread may start a worker
                raise
            self._workers.add(worker)
            return worker

    def _may_take(self) -> bool:
        return bool(self._idle) or len(self._workers) < self._num_workers or self._is_closed

    def _give_back(self, worker: "_Worker") -> None:
        with self._changed:
            self._idle.append(worker)
            self._changed.notify()

    def _drop(self, worker: "_Worker") -> None:
        worker.kill()
        worker.close()
        with self._changed:
            self._workers.discard(worker)
            self._changed.notify()


def _never() -> bool:
    return False


def _kill_all(workers: "set[_Worker]") -> None:
    for worker in [*workers]:
        worker.kill()


class _Limit:
    """The time limit and the cancellation of one task."""

    def __init__(self, timeout: float | None, is_cancelled: Callable[[], bool] | None):
        self._timeout, self._is_cancelled = timeout, is_cancelled
        self._end = float("inf") if timeout is None else time.monotonic() + timeout
        self._cancelled_at: float | None = None

    def next_wait(self) -> float | None:
        """Return the seconds until the next call, None for no limit; raises WorkerTimeout or TaskCancelled."""
        now = time.monotonic()
        if self._cancelled_at is None and self._is_cancelled is not None and self._is_cancelled():
            self._cancelled_at = now
        if self._cancelled_at is not None and now >= self._cancelled_at + CANCEL_SECONDS:
            raise TaskCancelled("the task was cancelled")
        if now >= self._end:
            raise WorkerTimeout(f"the task took longer than {self._timeout:g} s")
        waits = [self._end - now] * (self._timeout is not None) + [POLL_SECONDS] * (self._is_cancelled is not None)
        return min(waits, default=None)

    def check_cancelled(self) -> float | None:
        """Return the next wait like `next_wait`, but without a time limit; cancellation takes effect at once."""
        if self._is_cancelled is None:
            return None
        if self._is_cancelled():
            raise TaskCancelled("the task was cancelled")
        return POLL_SECONDS

    @contextmanager
    def ending(self, end: Callable[[], None]) -> Iterator[None]:
        """Call `end` from another thread if the time limit expires inside the block."""
        if self._timeout is None:
            yield
            return
        timer = threading.Timer(self._end - time.monotonic(), end)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    @contextmanager
    def paused(self) -> Iterator[None]:
        start = time.monotonic()
        yield
        self._end += time.monotonic() - start


class _Worker:
    """A process, and the parent's end of its channel; used by one thread at a time."""

    def __init__(self, setup: bytes, engine_env: dict[str, str] | None, silence: float):
        pipe, theirs = multiprocessing.Pipe()
        shared, pulse = SharedBuffer.create(), new_pulse()
        self._channel = Channel(pipe, shared)
        arguments = (theirs, shared, setup, engine_env, pulse)
        self.process = start_process(serve, arguments, is_daemon=engine_env is None, needs_main=b"__main__" in setup)
        theirs.close()
        self._watch = Watch(Watched("it", self.process, pulse), silence)
        self._is_ready = False

    @property
    def is_alive(self) -> bool:
        return not connection.wait([self.process.sentinel], 0)

    def wait_until_ready(self, limit: _Limit) -> None:
        if not self._is_ready:
            self._receive(limit)
            self._is_ready = True

    def run(self, task: Callable, args: tuple, limit: _Limit, reserve: ReserveWhile) -> tuple[bool, Any]:
        """Run a task; return whether it raised an exception, and its result or that exception."""
        limit.next_wait()
        with limit.ending(partial(kill_process, self.process)):  # a stopped process (SIGSTOP) reads nothing
            self._send((task, args), limit)
        with ExitStack() as reserved:
            while True:
                kind, value = self._receive(limit)
                if kind != "reserve":
                    return kind == "error", value
                reserved.close()
                with limit.paused():
                    reserved.enter_context(reserve(value, limit.check_cancelled))
                self._send(None, limit)

    def kill(self) -> None:
        kill_process(self.process)
        self._watch.end()

    def close(self) -> None:
        """Release the channel of a process that has ended; the worker cannot be used afterwards."""
        self._channel.close()

    def _send(self, message: Any, limit: _Limit) -> None:
        try:
            self._channel.send(message)
        except OSError:
            limit.next_wait()
            raise self._death() from None

    def _receive(self, limit: _Limit) -> tuple[str, Any]:
        """Return the next message that is not a log record; log records are handled here."""
        while True:
            ready = connection.wait([self._channel.pipe, self.process.sentinel], limit.next_wait())
            limit.next_wait()  # this thread may have been delayed: a message after the time limit does not count
            if self._channel.pipe in ready:
                try:
                    kind, value = self._channel.receive()
                except (EOFError, OSError):
                    raise self._death() from None
                if kind != "log":
                    return kind, value
                logger = logging.getLogger(value.name)
                if logger.isEnabledFor(value.levelno):
                    logger.handle(value)
                continue
            if ready:
                raise self._death()

    def _death(self) -> WorkerDied:
        return WorkerDied(self._watch.end())
