"""Defer signal handlers, which may raise exceptions anywhere in the main thread, and end processes by force."""

import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

FORCED_SECONDS = 1.5  # for an orderly shutdown after a second signal


@contextmanager
def signals_deferred() -> Iterator[None]:
    """Defer SIGINT and SIGTERM until after the block, for work that must not be left half done."""
    if threading.current_thread() is not threading.main_thread():  # handlers run in the main thread only
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
    """Defer one signal, and restore its handler even if a handler of the other signal raises."""
    handler = signal.getsignal(number)
    if handler is None:  # installed outside Python: it raises no exception, and cannot be restored
        yield
        return
    try:
        signal.signal(number, lambda number, _: received.append(number))
        yield
    finally:
        signal.signal(number, handler)


@contextmanager
def ended_by_second_signal() -> Iterator[None]:
    """Force the program and its child processes to end `FORCED_SECONDS` after the second SIGINT or SIGTERM.

    Otherwise Python could wait at exit for threads and processes that never finish. A thread counts the signals, even
    while the main thread is in a C call or defers them. The exit code is 128 plus the signal number, as in a shell.
    The code in the block must have handlers for both signals.
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
            kill_process(process)  # a stopped process would not notice that its parent has ended
    os._exit(code)


def kill_process(process: BaseProcess) -> None:
    """Kill a process at once, and its child processes where the system lists them (Linux).

    Child processes end with their parent by themselves, unless they are stopped (SIGSTOP).
    """
    children: list[int] = []
    if process.is_alive():  # otherwise another process may have its number
        with suppress(OSError):  # there is no /proc
            tasks = [*Path(f"/proc/{process.pid}/task").iterdir()]
            children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    process.kill()
    for child in children:
        with suppress(OSError):
            os.kill(child, signal.SIGKILL)


def run_below_first_process() -> None:
    """Continue in a child process; this process, the first one of a container, becomes its init.

    Linux ignores signals for which the first process has no handler, so nothing could end a command while it loads a
    model. The init forwards signals, reaps orphans, and exits with the child's exit code.
    """
    handed_on = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, handed_on)  # signals that arrive now are forwarded below
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)  # so that Ctrl-C in a terminal reaches the child only once
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
