"""Responses of OpenAI's Responses API that are kept, so that later requests can go on with them."""

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mmvllm.server.responses_request import ITEMS, Item

MISSING = "is unknown: it was not stored, or it has left the memory of this server meanwhile"


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response, and the items of each turn of its conversation, as JSON: objects take many times the memory."""

    response: bytes
    turns: tuple[bytes, ...]

    @property
    def size(self) -> int:
        return len(self.response) + sum(map(len, self.turns))

    def items(self) -> list[Item]:
        """The items of the whole conversation."""
        return [item for turn in self.turns for item in ITEMS.validate_json(turn)]

    def output(self) -> list[dict[str, Any]]:
        return json.loads(self.response)["output"]


class ResponseStore:
    """Responses in the memory of one server, by id.

    One is kept for some time after it was made or went on; the oldest ones leave first where they are too many.

    Args:
        max_bytes: of all that are kept, each with its whole conversation.
        seconds: for which one is kept.
    """

    def __init__(self, max_bytes: int, seconds: float):
        self._max_bytes, self._seconds = max_bytes, seconds
        self._kept: OrderedDict[str, tuple[float, StoredResponse]] = OrderedDict()  # with the time of the last use
        self._response_ids: dict[str, str] = {}  # by ids of items
        self._num_bytes = 0
        self._lock = threading.Lock()  # large responses are made in a thread

    @property
    def is_open(self) -> bool:
        """Whether anything is kept."""
        return self._max_bytes > 0

    def add(self, response: dict[str, Any], given: Sequence[Item], earlier: StoredResponse | None) -> None:
        """Keep a response to the items `given`, with which a conversation went on, if there is an `earlier` one."""
        turn = ITEMS.dump_json([*given, *ITEMS.validate_python(response["output"])])
        stored = StoredResponse(json.dumps(response).encode(), (*(earlier.turns if earlier else ()), turn))
        with self._lock:
            self._kept[response["id"]] = time.monotonic(), stored
            self._response_ids |= {item["id"]: response["id"] for item in response["output"]}
            self._num_bytes += stored.size
            self._clear()

    def get(self, response_id: str) -> StoredResponse | None:
        """A response, which is kept on from now; None if it is not there."""
        with self._lock:
            self._clear()
            if response_id not in self._kept:
                return None
            _, stored = self._kept.pop(response_id)
            self._kept[response_id] = time.monotonic(), stored
            return stored

    def output_item(self, item_id: str) -> Item | None:
        """An item of the output of a response that is kept."""
        stored = self.get(self._response_ids.get(item_id, ""))
        found = [item for item in stored.output() if item["id"] == item_id] if stored else []
        return ITEMS.validate_python(found)[0] if found else None

    def remove(self, response_id: str) -> bool:
        """Whether a response was there, which is kept no more."""
        with self._lock:
            return self._remove(response_id)

    def _remove(self, response_id: str) -> bool:
        if response_id not in self._kept:
            return False
        _, stored = self._kept.pop(response_id)
        self._num_bytes -= stored.size
        for item in stored.output():
            self._response_ids.pop(item["id"], None)
        return True

    def _clear(self) -> None:
        """Remove what is too old, and the oldest ones where they are too large together."""
        while self._kept:
            response_id, (used, _) = next(iter(self._kept.items()))
            if self._num_bytes <= self._max_bytes and time.monotonic() - used <= self._seconds:
                return
            self._remove(response_id)
