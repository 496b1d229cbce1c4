"""How much memory images and videos that are being decoded may take at once."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class DecodeBudget:
    """Bytes that may be in use at once for decoding images or videos, however many threads decode.

    Args:
        limit: bytes; a single image or video that needs more is decoded alone.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self._changed = threading.Condition()
        self._in_use = 0
        self._waiting: deque[object] = deque()  # in the order of arrival, so that large ones are not passed for ever

    @property
    def in_use(self) -> int:
        return self._in_use

    @contextmanager
    def reserve(self, num_bytes: int, next_wait: Callable[[], float | None] = lambda: None) -> Iterator[None]:
        """Wait until `num_bytes` more may be in use, and count them until the end of the `with` statement.

        While it waits, `next_wait` is called: for the seconds until its next call, or to raise what ends the wait.
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


# Of the process. Photographs of 12 million pixels take about 100 MB each, so that eight threads decode them without
# waiting; of the largest images that a server accepts by default (64 million pixels), one or two are decoded at once.
DECODING = DecodeBudget(1024 * 1024 * 1024)

# Frames of videos are decoded for seconds, in which images must not wait for them.
VIDEO_DECODING = DecodeBudget(2 * 1024 * 1024 * 1024)
