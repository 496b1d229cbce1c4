"""Tasks for worker processes, which import this module."""

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from mmvllm.config import MiB
from mmvllm.processes.pool import WorkerPool
from mmvllm.processes.worker import reserve_in_parent
from mmvllm.utils.memory_limit import memory_limit

state = {}


def remember(value) -> None:
    """An initializer."""
    state["value"] = value


def recall():
    return state["value"]


def end_at_once() -> None:
    """An initializer that no process survives."""
    os._exit(3)


def echo(value):
    return value


def pid() -> int:
    return os.getpid()


def fail(error: Exception):
    held = np.zeros(1000)  # in the frame
    assert len(held)
    raise error


def crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def sleep(seconds: float, marker: Path | None = None) -> None:
    if marker is not None:
        marker.touch()
    time.sleep(seconds)


def start_process_that_sleeps() -> int:
    return subprocess.Popen(["sleep", "60"]).pid


def allocate(num_bytes: int) -> int:
    return len(bytearray(num_bytes))


def reserve_and_sleep(num_bytes: int, seconds: float) -> None:
    with reserve_in_parent(num_bytes):
        time.sleep(seconds)


def make_array(num_bytes: int) -> np.ndarray:
    return np.arange(num_bytes, dtype=np.uint8)


def make_unpicklable():
    return lambda: None


def run_in_a_process(task):
    pool = WorkerPool(1)
    try:
        return pool.run(task)
    finally:
        pool.close()


def niceness_and_threads() -> tuple[int, str | None]:
    return os.nice(0), os.environ.get("OMP_NUM_THREADS")


def loaded_modules() -> set[str]:
    return {*sys.modules}


def ignored_signals() -> list[bool]:
    return [signal.getsignal(number) == signal.SIG_IGN for number in (signal.SIGINT, signal.SIGTERM)]


def need_memory(*_) -> int:
    with memory_limit(MiB):
        return allocate(64 * MiB)


def allocate_with_reservation(num_bytes: int, limit: int, reserved: int) -> int:
    with memory_limit(limit), reserve_in_parent(reserved):
        return allocate(num_bytes)


def warn(text: str) -> None:
    logging.getLogger("mmvllm.tasks").warning("%s!", text)


def crash_on(*_) -> None:
    crash()


def sleep_on(*_) -> None:
    time.sleep(60)
