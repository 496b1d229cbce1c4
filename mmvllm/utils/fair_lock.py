"""A lock for threads that take turns with an engine."""

import threading
import time

from mmvllm.utils.forks import OwnProcess

TURN_SECONDS = 1e-3  # enough for a waiting thread to acquire the lock


class FairLock:
    """A reentrant lock; a thread that takes it again and again gives way to threads that wait for it.

    Raises RuntimeError in a fork of the process, where a thread that does not exist may hold the lock.
    """

    def __init__(self, process: OwnProcess):
        self._process, self._lock = process, threading.RLock()
        self._waiting: set[object] = set()

    def __enter__(self) -> None:
        self._process.check()
        if self._waiting:
            time.sleep(TURN_SECONDS)
        waiting = object()
        self._waiting.add(waiting)
        try:
            self._lock.acquire()
        finally:
            self._waiting.discard(waiting)

    def __exit__(self, *_: object) -> None:
        self._lock.release()
