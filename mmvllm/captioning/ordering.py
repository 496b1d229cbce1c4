"""Records in the order of their tasks, although captions are finished in another."""

from collections.abc import Callable, Iterable, Iterator
from threading import Semaphore
from typing import Generic, TypeVar

T = TypeVar("T")

MAX_AHEAD = 1024  # tasks begun after the oldest one without a record
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
    """Holds records back until those of all earlier tasks have been given.

    A thread that begins tasks waits in `limited`, so that at most `MAX_AHEAD` records are held.
    """

    def __init__(self):
        self._room = Semaphore(MAX_AHEAD)
        self._held: dict[int, T] = {}
        self._next = 0

    def limited(self, tasks: Iterable, is_stopped: Callable[[], bool]) -> Iterator:
        """The tasks, each once there is room for its record, until `is_stopped`."""
        for task in tasks:
            while not self._room.acquire(timeout=POLL_SECONDS):
                if is_stopped():
                    return
            yield task

    def put(self, number: int, record: T) -> Iterator[T]:
        """Take the record of a task; gives those whose turn it is."""
        self._held[number] = record
        while (record := self._held.pop(self._next, None)) is not None:
            self._next += 1
            self._room.release()
            yield record

    def rest(self) -> Iterator[T]:
        """The records that are held when a run is stopped or fails, and tasks between them have none."""
        return (self._held[number] for number in sorted(self._held))
