"""Keeps responses of OpenAI's Responses API in memory, so that later requests can continue them."""

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmvllm.server.responses.as_chat import messages_of
from mmvllm.server.responses.protocol import ITEMS, Item
from mmvllm.utils.memory_limit import memory_of

LARGEST_SHARE = 4  # a conversation may take at most 1/4 of the store: one never evicts all others


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as JSON, the chat messages of its whole conversation, and the items of its output by id.

    `given` are the messages in the request's input, without the earlier conversation.
    """

    response: bytes
    messages: Sequence[dict]
    given: Sequence[dict]
    output: Mapping[str, Item]
    size: int  # in bytes; messages are shared with earlier responses, but each counts them


class ResponseStore:
    """Stores the responses of one server by id; thread-safe.

    A response expires some time after it was created or last continued. If all of them together are too large, the
    least recently used ones are evicted.

    Args:
        max_bytes: maximum memory of all responses; a conversation that takes more than a quarter of it is not stored.
        seconds: time until a response expires.
    """

    def __init__(self, max_bytes: int, seconds: float):
        self._max_bytes, self._seconds = max_bytes, seconds
        self._stored: OrderedDict[str, tuple[float, StoredResponse]] = OrderedDict()  # with the time of the last use
        self._response_ids: dict[str, str] = {}  # keyed by the ids of output items
        self._num_bytes = 0
        self._lock = threading.Lock()

    def accepts(self, messages: Sequence[dict], repeated: Any = None) -> bool:
        """Return whether the response to a conversation, with the fields `repeated` from the request, can be stored."""
        num_bytes = len(json.dumps(repeated)) if memory_of(repeated) < self._max_bytes else self._max_bytes
        return LARGEST_SHARE * (memory_of(messages) + num_bytes) < self._max_bytes

    def add(self, response: dict[str, Any], messages: Sequence[dict], given: Sequence[dict]) -> None:
        """Store a response, without log-probabilities; `given` are the last of its conversation's messages."""
        response = response | {"output": [_without_logprobs(item) for item in response["output"]]}
        items = ITEMS.validate_python(response["output"])
        data, messages = json.dumps(response).encode(), messages_of(items, messages)
        output = {item["id"]: made for item, made in zip(response["output"], items, strict=True)}
        with self._lock:
            stored = StoredResponse(data, messages, given, output, len(data) + memory_of(messages))
            self._stored[response["id"]] = time.monotonic(), stored
            self._response_ids |= dict.fromkeys(output, response["id"])
            self._num_bytes += stored.size
            self._evict()

    def get(self, response_id: str, renews: bool = False) -> StoredResponse | None:
        """Return a stored response, or None; `renews` postpones its expiry."""
        with self._lock:
            self._evict()
            if response_id not in self._stored:
                return None
            _, stored = self._stored[response_id]
            if renews:
                self._stored[response_id] = time.monotonic(), stored
                self._stored.move_to_end(response_id)
            return stored

    def output_item(self, item_id: str) -> Item | None:
        """Return an output item of a stored response, or None."""
        stored = self.get(self._response_ids.get(item_id, ""))
        return stored and stored.output[item_id]

    def remove(self, response_id: str) -> bool:
        """Delete a response; return False if it is not stored."""
        with self._lock:
            self._evict()
            return self._remove(response_id)

    def _remove(self, response_id: str) -> bool:
        _, stored = self._stored.pop(response_id, (0.0, None))
        if stored is None:
            return False
        self._num_bytes -= stored.size
        for item_id in stored.output:
            del self._response_ids[item_id]
        return True

    def _evict(self) -> None:
        """Remove expired responses, and the least recently used ones while all together are too large."""
        while self._stored:
            response_id, (used, _) = next(iter(self._stored.items()))
            if self._num_bytes <= self._max_bytes and time.monotonic() - used <= self._seconds:
                return
            self._remove(response_id)


def not_stored(noun: str, name: str) -> str:
    """Return the error message for a response or an output item that is not stored."""
    return f"the {noun} {name!r:.100} is unknown: it was not stored, or it has expired or was evicted"


def _without_logprobs(item: dict[str, Any]) -> dict[str, Any]:
    return item | {"content": [part | {"logprobs": []} for part in item["content"]]} if "content" in item else item
