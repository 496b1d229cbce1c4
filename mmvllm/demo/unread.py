"""Limits the memory of results that no browser has read."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from mmvllm.utils.memory_limit import memory_of

MAX_UNREAD_BYTES = 2**27  # of all sessions; each result contains a conversation of up to a few megabytes
SENT_FACTOR = 6  # gradio keeps a message, its bytes, and its text with up to 4 bytes per character


class MessageQueue(Protocol):
    """Gradio's queue of the messages to one session."""

    def qsize(self) -> int:
        """Return how many messages wait to be read."""


class UnreadResults:
    """Limits the memory of the results that wait in gradio's queues, or for a browser that reads slowly.

    Args:
        queues: gradio's queues, by session.
        drop: called with each session to remove, in descending order of unread bytes times their waiting time.
    """

    def __init__(self, queues: Mapping[str, MessageQueue], drop: Callable[[str], None]):
        self._queues, self._drop = queues, drop
        self._waiting: dict[str, deque[tuple[float, int]]] = {}  # arrival and bytes of a session's messages
        self._sending: dict[object, tuple[str, float, int]] = {}  # session, begin and bytes of a message
        self._num_bytes = 0  # an upper bound on all unread bytes; `_limit` makes it exact

    def count(self, session_id: str, content: Any) -> None:
        """Count the content of a message that was put into the queue of a session."""
        size = memory_of(content)
        self._waiting.setdefault(session_id, deque()).append((time.monotonic(), size))
        self._num_bytes += size
        self._forget_read(session_id)
        self._limit()

    @contextmanager
    def being_sent(self, session_id: str, num_bytes: int) -> Iterator[None]:
        """Count a message of `num_bytes` as unread while it is sent to the session's browser."""
        key, size = object(), SENT_FACTOR * num_bytes
        self._sending[key] = session_id, time.monotonic(), size
        self._num_bytes += size
        self._limit()
        try:
            yield
        finally:
            del self._sending[key]

    def _limit(self) -> None:
        if self._num_bytes <= MAX_UNREAD_BYTES:
            return
        now, num_bytes, weights = time.monotonic(), dict[str, int](), dict[str, float]()
        for session_id, begin, size in self._unread():
            num_bytes[session_id] = num_bytes.get(session_id, 0) + size
            weights[session_id] = weights.get(session_id, 0.0) + size * (now - begin)
        self._num_bytes = sum(num_bytes.values())
        for session_id in sorted(weights, key=weights.__getitem__, reverse=True):
            if self._num_bytes <= MAX_UNREAD_BYTES:
                return
            self._num_bytes -= num_bytes[session_id]
            self._drop(session_id)

    def _unread(self) -> Iterator[tuple[str, float, int]]:
        """Yield the session, begin and bytes of each unread message."""
        for session_id in [*self._waiting]:
            self._forget_read(session_id)
        for session_id, messages in self._waiting.items():
            yield from ((session_id, begin, size) for begin, size in messages)
        yield from self._sending.values()

    def _forget_read(self, session_id: str) -> None:
        messages, queue = self._waiting[session_id], self._queues.get(session_id)
        for _ in range(len(messages) - (0 if queue is None else queue.qsize())):
            messages.popleft()
        if not messages:
            del self._waiting[session_id]
