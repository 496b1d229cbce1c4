"""The memory of results that no browser has read."""

from collections import deque
from collections.abc import Mapping
from typing import Any, Protocol

from mmvllm.memory_limit import memory_of

MAX_UNREAD_BYTES = 2**27  # of all sessions; a result has a conversation, of which the longest take a few megabytes


class MessageQueue(Protocol):
    """Gradio's queue of the messages to one session."""

    def qsize(self) -> int:
        """How many messages wait to be read."""


class UnreadResults:
    """Counts the bytes of the results that wait in gradio's queues, which are given by session."""

    def __init__(self, queues: Mapping[str, MessageQueue]):
        self._queues = queues
        self._sizes: dict[str, deque[int]] = {}  # of the messages of each session
        self._num_bytes = 0  # of all of them at most: what was read is subtracted when there may be too many

    def count(self, session_id: str, output: Any) -> str | None:
        """Count a message that was put into the queue of a session, with its output.

        Returns the session that has most of all bytes if these are more than `MAX_UNREAD_BYTES`.
        """
        size = memory_of(output)
        self._sizes.setdefault(session_id, deque()).append(size)
        self._num_bytes += size
        self._drop_read(session_id)
        if self._num_bytes <= MAX_UNREAD_BYTES:
            return None
        for one in [*self._sizes]:
            self._drop_read(one)
        unread = {one: sum(sizes) for one, sizes in self._sizes.items()}
        self._num_bytes = sum(unread.values())
        return max(unread, key=unread.__getitem__) if self._num_bytes > MAX_UNREAD_BYTES else None

    def _drop_read(self, session_id: str) -> None:
        sizes, queue = self._sizes[session_id], self._queues.get(session_id)
        for _ in range(len(sizes) - (0 if queue is None else queue.qsize())):
            sizes.popleft()
        if not sizes:
            del self._sizes[session_id]
