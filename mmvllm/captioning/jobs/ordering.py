"""Records in the order of their tasks, although captions are finished in another."""

import time
from collections.abc import Callable, Iterable, Iterator
from threading import Semaphore
from typing import Generic, TypeVar

from mmvllm.utils.memory_limit import memory_of

T = TypeVar("T")

MAX_AHEAD = 1024  # tasks begun after the oldest one without a record
MAX_HELD_BYTES = 256 << 20  # of records; then no task begins until the oldest one has its record
POLL_SECONDS = 0.1


def in_order(
    run: Callable[[Iterable], Iterator[tuple[int, T]]], tasks: Iterable, is_stopped: Callable[[], bool]
) -> Iterator[T]:
    """The records of `run(tasks)`, which gives each with the number of its task, in the order of the tasks.

    If the run raises something, the records that are held are given first: what has been captioned is not lost.
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
    """Holds records back until the records of all earlier tasks have been given.

    A thread that begins tasks waits in `limited`, so that at most `MAX_AHEAD` records are held, and hardly more bytes
    than `MAX_HELD_BYTES`.
    """

    def __init__(self):
        self._room = Semaphore(MAX_AHEAD)
        self._held: dict[int, tuple[T, int]] = {}  # with their bytes
        self._held_bytes = 0
        self._next = 0

    def limited(self, tasks: Iterable, is_stopped: Callable[[], bool]) -> Iterator:
        """The tasks, each once there is room for its record, until `is_stopped`."""
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
        """Take the record of a task; gives those whose turn it is."""
        size = memory_of(record)
        self._held[number], self._held_bytes = (record, size), self._held_bytes + size
        while self._next in self._held:
            record, size = self._held.pop(self._next)
            self._next, self._held_bytes = self._next + 1, self._held_bytes - size
            self._room.release()
            yield record

    def rest(self) -> Iterator[T]:
        """The records that are held when a run is stopped or fails, and tasks between them have none."""
        return (self._held[number][0] for number in sorted(self._held))
