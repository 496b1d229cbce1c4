"""ViT outputs by picture digest, within a byte budget.

The scheduler acquires a picture before the first chunk that touches it and releases it after the last; in between its
rows cannot go. Rows that nobody holds stay while the budget allows and serve the next request with the same picture;
the least recently used go first.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

import torch

User = tuple[int, int]  # (seq_id, index of the picture in that sequence)


@dataclass(slots=True)
class _Entry:
    num_bytes: int
    rows: torch.Tensor | None = None  # (M, C), None until the runner has encoded the picture
    users: set[User] = field(default_factory=set)


class EncoderCache:
    """Never holds more than `capacity_bytes`; a picture that could never fit must be refused at the door."""

    def __init__(self, capacity_bytes: int, bytes_per_row: int):
        self.capacity_bytes = capacity_bytes
        self.bytes_per_row = bytes_per_row
        self.used_bytes = 0
        # Of pictures, by sequences that need them; a hit is one that is encoded, or about to be.
        self.num_lookups = self.num_hits = 0
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # least recently used first

    def fits(self, num_rows: int) -> bool:
        """Whether a picture of so many rows could ever be held."""
        return num_rows * self.bytes_per_row <= self.capacity_bytes

    def is_encoded(self, digest: bytes) -> bool:
        entry = self._entries.get(digest)
        return entry is not None and entry.rows is not None

    def acquire(self, digest: bytes, num_rows: int, user: User) -> bool:
        """Hold the picture's rows, or the room for them, for `user`; False if there is no room."""
        entry = self._entries.get(digest)
        is_hit = entry is not None
        if entry is None:
            entry = _Entry(num_rows * self.bytes_per_row)
            if not self._make_room(entry.num_bytes):
                return False
            self._entries[digest] = entry
            self.used_bytes += entry.num_bytes
        if user not in entry.users:
            self.num_lookups += 1
            self.num_hits += is_hit
        entry.users.add(user)
        self._entries.move_to_end(digest)
        return True

    def release(self, digest: bytes, user: User) -> None:
        """Let go of a picture; harmless if `user` does not hold it."""
        entry = self._entries.get(digest)
        if entry is None:
            return
        entry.users.discard(user)
        if not entry.users and entry.rows is None:  # given up before it was encoded
            self._drop(digest)

    def store(self, digest: bytes, rows: torch.Tensor) -> None:
        """Keep the rows (M, C) of a picture that has been acquired."""
        self._entries[digest].rows = rows

    def rows(self, digest: bytes) -> torch.Tensor:
        rows = self._entries[digest].rows
        assert rows is not None, "rows were asked for before the picture was encoded"
        return rows

    def check(self, users: set[User]) -> None:
        """Assert that exactly `users` hold pictures and that the byte count is right."""
        held = {user for entry in self._entries.values() for user in entry.users}
        assert held == users, f"pictures held by {sorted(held)}, should be {sorted(users)}"
        assert self.used_bytes == sum(entry.num_bytes for entry in self._entries.values()) <= self.capacity_bytes

    def _make_room(self, num_bytes: int) -> bool:
        held = sum(entry.num_bytes for entry in self._entries.values() if entry.users)
        if held + num_bytes > self.capacity_bytes:
            return False
        for digest in [d for d, entry in self._entries.items() if not entry.users]:
            if self.used_bytes + num_bytes <= self.capacity_bytes:
                break
            self._drop(digest)
        return True

    def _drop(self, digest: bytes) -> None:
        self.used_bytes -= self._entries.pop(digest).num_bytes
