"""Budgets for the memory of images and videos while they are decoded."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class DecodeBudget:
    """Limits the bytes in use for decoding images or videos across all threads.

    Args:
        limit: bytes; a single image or video that needs more is decoded alone.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self._changed = threading.Condition()
        self._in_use = 0
        self._waiting: deque[object] = deque()  # in order of arrival, so large requests do not starve

    @property
    def in_use(self) -> int:
        return self._in_use

    @contextmanager
    def reserve(self, num_bytes: int, next_wait: Callable[[], float | None] = lambda: None) -> Iterator[None]:
        """Wait until `num_bytes` more may be in use, and count them until the end of the `with` statement.

        While waiting, `next_wait` returns the seconds until its next call, or raises an exception to end the wait.
        """
        self._acquire(num_bytes, next_wait)
        try:
            yield
        finally:
            with self._changed:
                self._in_use -= num_bytes
                self._changed.notify_all()

    def _acquire(self, num_bytes: int, next_wait: Callable[[], float | None]) -> None:
        place = object()
        with self._changed:
            self._waiting.append(place)
            try:
                while self._waiting[0] is not place or not self._has_room(num_bytes):
                    self._changed.wait(next_wait())
                self._in_use += num_bytes
            finally:  # also if waiting is interrupted
                self._waiting.remove(place)
                self._changed.notify_all()

    def _has_room(self, num_bytes: int) -> bool:
        return self._in_use == 0 or self._in_use + num_bytes <= self.limit


# For the whole process. A 12-megapixel photograph takes about 100 MB, so eight threads decode them without waiting. Of
# the largest images that a server accepts by default (64 megapixels), one or two are decoded at once.
DECODING = DecodeBudget(1024 * 1024 * 1024)

# Separate from `DECODING`: decoding a video takes seconds, and images must not wait for it.
VIDEO_DECODING = DecodeBudget(2 * 1024 * 1024 * 1024)
