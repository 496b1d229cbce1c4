"""When signal handlers run, which may raise exceptions anywhere in the main thread, and how processes are ended."""

import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

FORCED_SECONDS = 1.5  # for what ends in an orderly way after a second signal
WAIT_SECONDS = 1.0  # at a time: Windows does not interrupt a wait, and Ctrl-C is handled after it


def wait_until(is_true: Callable[[], Any], changed: threading.Condition) -> None:
    """`changed.wait_for(is_true)`, during which signal handlers run."""
    while not changed.wait_for(is_true, WAIT_SECONDS):
        pass


@contextmanager
def signals_deferred() -> Iterator[None]:
    """Handle SIGINT and SIGTERM after the block, for what must not be left half done."""
    if threading.current_thread() is not threading.main_thread():  # no handler runs in other threads
        yield
        return
    received: list[int] = []
    try:
        with _deferred(signal.SIGINT, received), _deferred(signal.SIGTERM, received):
            yield
    finally:
        for number in received:
            signal.raise_signal(number)


@contextmanager
def _deferred(number: int, received: list[int]) -> Iterator[None]:
    """One signal: a handler of the other one that raises while this one's is set leaves none behind."""
    handler = signal.getsignal(number)
    if handler is None:  # not of Python: it raises no exception, and could not be set again
        yield
        return
    try:
        signal.signal(number, lambda number, _: received.append(number))
        yield
    finally:
        signal.signal(number, handler)


@contextmanager
def ended_by_second_signal() -> Iterator[None]:
    """From the second SIGINT or SIGTERM on, the program and its processes end within `FORCED_SECONDS`.

    Threads and other processes may wait for what never comes, and Python, as it exits, for them. Signals are counted by
    a thread, so that it does not matter whether the main thread is in a call of C, or defers them. The exit code is
    that of a program that the signal has ended, as a shell shows it. What runs here has handlers for these signals.
    """
    received, waker = socket.socketpair()
    waker.setblocking(False)
    threading.Thread(target=_end_at_second, args=(received,), name="mmvllm-signals", daemon=True).start()
    before = signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        waker.close()


def _end_at_second(received: socket.socket) -> None:
    num_signals = 0
    with received:
        while data := received.recv(64):
            for number in data:
                num_signals += number in (signal.SIGINT, signal.SIGTERM)
                if num_signals == 2:
                    time.sleep(FORCED_SECONDS)
                    _end(128 + number)


def _end(code: int) -> None:
    with suppress(Exception):
        for process in multiprocessing.active_children():
            kill_process(process)  # one that is stopped would not notice that its parent has ended
    os._exit(code)


def kill_process(process: BaseProcess) -> None:
    """End a process at once.

    What it has started ends with it, unless it is stopped (SIGSTOP): it is killed too, where the system tells (Linux).
    """
    children: list[int] = []
    if process.is_alive():  # else its number may be another one's
        with suppress(OSError):  # there is no /proc
            tasks = [*Path(f"/proc/{process.pid}/task").iterdir()]
            children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    process.kill()
    for child in children:
        with suppress(OSError):
            os.kill(child, signal.SIGKILL)


def run_below_first_process() -> None:
    """Where this is the first process of a container, go on in a child of it, whose exit code it then ends with.

    Linux ignores the signals that the first process has no handler for: nothing would end a command while it loads a
    model. As an init it also hands signals on and reaps orphans.
    """
    handed_on = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, handed_on)  # one that comes now is handed on below
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)  # a terminal's Ctrl-C reaches it once
        if os.isatty(0):  # only the foreground group may read from a terminal
            signal.signal(signal.SIGTTOU, signal.SIG_IGN)
            os.tcsetpgrp(0, os.getpgrp())
            signal.signal(signal.SIGTTOU, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    for number in handed_on:
        signal.signal(number, lambda number, _: _hand_on(child, number))
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def _hand_on(child: int, number: int) -> None:
    with suppress(ProcessLookupError):  # it has just ended
        os.kill(child, number)
