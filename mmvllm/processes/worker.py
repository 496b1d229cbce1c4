"""The main loop of worker processes, which run one task after the other until the parent ends."""

import logging
import multiprocessing
import os
import pickle
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from ctypes import c_uint64
from logging.handlers import QueueHandler
from multiprocessing.connection import Connection

from mmvllm.errors import without_frames
from mmvllm.processes.channel import Channel, SharedBuffer
from mmvllm.utils.memory_limit import allow

BEAT_SECONDS = 0.5
NICENESS = 5  # the engine has priority
# Read when the libraries that numpy and torch use are loaded.
NUMBERS_OF_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
ONE_THREAD = dict.fromkeys(NUMBERS_OF_THREADS, "1")
# Ctrl-C in a terminal reaches all processes of a job; workers ignore it, so the parent can finish tasks in flight.
IGNORED_SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]

_parent: Channel | None = None


@contextmanager
def reserve_in_parent(num_bytes: int) -> Iterator[None]:
    """Have the parent reserve bytes for the rest of the task, replacing the task's previous reservation.

    Inside a `memory_limit`, these bytes are added to the limit.
    """
    _parent.send(("reserve", num_bytes))
    _parent.receive()
    allow(num_bytes)
    yield


def serve(
    pipe: Connection,
    shared: SharedBuffer | None,
    setup: bytes,
    engine_env: dict[str, str] | None,
    pulse: c_uint64,
) -> None:
    """Run the parent's tasks; `setup` is a pickled initializer with its arguments, which is called first."""
    global _parent
    _parent = channel = Channel(pipe, shared)
    _become_worker(engine_env)
    with beating(pulse), suppress(EOFError, ConnectionError):  # the parent has ended
        initializer, initargs = pickle.loads(setup)
        initializer(*initargs)
        channel.send(("ready", None))
        while True:
            _answer(channel, *channel.receive())


@contextmanager
def beating(pulse: c_uint64) -> Iterator[None]:
    """Increment `pulse` from a thread, to show the parent that this process is running."""
    is_over = threading.Event()

    def beat() -> None:
        pulse.value += 1
        while not is_over.wait(BEAT_SECONDS):
            pulse.value += 1

    threading.Thread(target=beat, name="mmvllm-pulse", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def _become_worker(engine_env: dict[str, str] | None) -> None:
    if engine_env is not None:
        begin_engine(engine_env)
        return
    follow_parent()
    logging.getLogger().addHandler(_LogOfParent(None))
    warnings.simplefilter("ignore")  # Pillow's warnings contain values of the image, so Python would show every one
    os.environ.update(ONE_THREAD)
    os.nice(NICENESS)


class _LogOfParent(QueueHandler):
    """Forwards the log records of a task to the parent."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.thread == threading.main_thread().ident  # only the thread that runs tasks may use the channel

    def enqueue(self, record: logging.LogRecord) -> None:
        _parent.send(("log", record))


def begin_engine(env: dict[str, str]) -> None:
    """Prepare this process to run an engine or one rank of an engine.

    Args:
        env: environment variables to set; settings of threads and devices take effect only before torch is imported.
    """
    from tqdm import tqdm

    follow_parent()
    os.environ.update(env)
    tqdm.set_lock(threading.RLock())  # tqdm's default lock has a system semaphore, which leaks if the process is killed


def follow_parent() -> None:
    """Ignore signals, which the parent handles, and end when the parent ends."""
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def _answer(channel: Channel, task: Callable, args: tuple) -> None:
    try:
        message = "result", task(*args)
    except Exception as error:
        message = "error", without_frames(error)
    try:
        channel.send(message)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        channel.send(("error", RuntimeError(f"{type(message[1]).__name__} cannot be pickled: {error}")))
