"""Images and videos that clients have named, kept in memory so that later requests need not send them again."""

import threading
from collections import OrderedDict
from collections.abc import Hashable

LARGEST_SHARE = 4  # of the store: one video never evicts all others
Data = bytes | list[bytes]  # encoded; a list of frames is a video


class MediaStore:
    """The least recently used data is removed where all of it together is larger than `max_bytes`.

    May be used by several threads. Data of more than a quarter of `max_bytes` is not kept.
    """

    def __init__(self, max_bytes: int):
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._kept: OrderedDict[Hashable, Data] = OrderedDict()
        self._lock = threading.Lock()

    def keep(self, key: Hashable, data: Data) -> None:
        """Keep data in place of what was kept under the key."""
        with self._lock:
            self._num_bytes -= size_of(self._kept.pop(key, b""))
            if LARGEST_SHARE * size_of(data) > self._max_bytes:
                return
            self._kept[key] = data
            self._num_bytes += size_of(data)
            while self._num_bytes > self._max_bytes:
                self._num_bytes -= size_of(self._kept.popitem(last=False)[1])

    def get(self, key: Hashable) -> Data | None:
        """What is kept under the key; None if there is nothing."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)


def size_of(data: Data) -> int:
    """Bytes of encoded data."""
    return len(data) if isinstance(data, bytes) else sum(map(len, data))
