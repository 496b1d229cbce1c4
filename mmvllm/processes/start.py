"""Start processes, and control what they inherit from their parent."""

import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import spawn
from multiprocessing.context import SpawnProcess
from typing import Any

from mmvllm.processes.worker import IGNORED_SIGNALS

PROCESS_NAME = "mmvllm-worker"
KILL_SECONDS = 5.0  # for the system to end a killed process


def start_process(target: Callable, args: tuple, *, is_daemon: bool, needs_main: bool = False) -> SpawnProcess:
    """Spawn a process that calls `target(*args)`; the target must call `follow_parent` first.

    Args:
        is_daemon: whether the process is daemonic, and thus may not start further processes.
        needs_main: whether the process imports the main module, to unpickle instances of its classes.

    Raises RuntimeError as `check_may_start` does.
    """
    check_may_start()
    process = multiprocessing.get_context("spawn").Process(
        target=target, args=args, name=PROCESS_NAME, daemon=is_daemon
    )
    with _signals_blocked(), _main_module(needs_main):
        process.start()
    return process


def check_may_start() -> None:
    """Raise RuntimeError in a daemonic process, which Python does not allow to start other processes."""
    if multiprocessing.current_process().daemon:
        raise RuntimeError(
            "cannot start a process from a daemonic process of multiprocessing, such as a worker of a Pool; "
            "use a process that is not daemonic, or one device without worker processes"
        )


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block signals while a process is started: it inherits the mask, and no signal ends it before it ignores them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_spawning = threading.Lock()


@contextmanager
def _main_module(is_needed: bool) -> Iterator[None]:
    """Let started processes import the main module only if they need it.

    The main module may be a script that works on import; every process would repeat that work.
    """
    with _spawning:
        original = spawn.get_preparation_data

        def prepared(name: str) -> dict[str, Any]:
            data = original(name)
            is_ours = name == PROCESS_NAME and not is_needed
            return {key: data[key] for key in data if not (is_ours and key.startswith("init_main"))}

        spawn.get_preparation_data = prepared
        try:
            yield
        finally:
            spawn.get_preparation_data = original


def how_it_ended(process: SpawnProcess) -> str:
    """Describe how a process ended, or is about to: "was ended by SIGKILL" or "ended with exit code 1"."""
    end = time.monotonic() + KILL_SECONDS
    # Not `join`, which may return before the exit code is set if another thread queries it at the same time.
    while (code := process.exitcode) is None and time.monotonic() < end:
        time.sleep(0.01)
    if code is None:
        return "does not end"
    return f"was ended by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
