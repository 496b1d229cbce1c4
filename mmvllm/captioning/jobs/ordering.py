"""Yields records in the order of their tasks, although captions finish in another order."""

import time
from collections.abc import Callable, Iterable, Iterator
from threading import Semaphore
from typing import Generic, TypeVar

from mmvllm.utils.memory_limit import memory_of

T = TypeVar("T")

MAX_AHEAD = 1024  # tasks begun after the oldest one without a record
MAX_HELD_BYTES = 256 << 20  # of held records; above this, no task begins until the oldest one has its record
POLL_SECONDS = 0.1


def in_order(
    run: Callable[[Iterable], Iterator[tuple[int, T]]], tasks: Iterable, is_stopped: Callable[[], bool]
) -> Iterator[T]:
    """Yield the records of `run(tasks)`, which yields (task number, record), in the order of the tasks.

    If the run raises an exception, the held records are yielded first, so that no caption is lost.
    """
    order = InOrder()
    try:
        for number, record in run(order.limited(tasks, is_stopped)):
            yield from order.put(number, record)
    except Exception:
        yield from order.rest()
        raise
    yield from order.rest()


class InOrder(Generic[T]):
    """Holds records back until the records of all earlier tasks have been yielded.

    The thread that begins tasks waits in `limited`: this limits the held records to `MAX_AHEAD`, and to about
    `MAX_HELD_BYTES`.
    """

    def __init__(self):
        self._room = Semaphore(MAX_AHEAD)
        self._held: dict[int, tuple[T, int]] = {}  # with their sizes in bytes
        self._held_bytes = 0
        self._next = 0

    def limited(self, tasks: Iterable, is_stopped: Callable[[], bool]) -> Iterator:
        """Yield each task once there is room for its record, until `is_stopped`."""
        for task in tasks:
            while not self._room.acquire(timeout=POLL_SECONDS):
                if is_stopped():
                    return
            while self._held_bytes > MAX_HELD_BYTES:
                if is_stopped():
                    return
                time.sleep(POLL_SECONDS)
            yield task

    def put(self, number: int, record: T) -> Iterator[T]:
        """Add the record of a task, and yield the records whose turn it is."""
        size = memory_of(record)
        self._held[number], self._held_bytes = (record, size), self._held_bytes + size
        while self._next in self._held:
            record, size = self._held.pop(self._next)
            self._next, self._held_bytes = self._next + 1, self._held_bytes - size
            self._room.release()
            yield record

    def rest(self) -> Iterator[T]:
        """Return the held records of a run that was stopped or failed, although earlier tasks have no records."""
        return (self._held[number][0] for number in sorted(self._held))
