"""Tracks which items' embeddings are on the device, within a byte budget; the model runner owns the tensors.

The scheduler acquires an item before the first chunk that touches it and releases it after the last; in between its
embeddings cannot be dropped. Embeddings without users stay while the budget allows and serve the next request with the
same item; the least recently used are dropped first. What was dropped is reported once (`take_freed`), and the
runner frees it.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

User = tuple[int, int]  # (seq_id, index of the item in that sequence)


@dataclass(slots=True)
class _Entry:
    num_bytes: int
    is_encoded: bool = False  # whether its embeddings are on the device for every step scheduled from now on
    users: set[User] = field(default_factory=set)


class EncoderCache:
    """Never counts more than `capacity_bytes`; an item that could never fit must be refused with its request."""

    def __init__(self, capacity_bytes: int, bytes_per_embed: int):
        self.capacity_bytes = capacity_bytes
        self.bytes_per_embed = bytes_per_embed
        self.used_bytes = 0
        # Lookups of items by sequences that need them; a hit is an item that is encoded, or scheduled to be.
        self.num_lookups = self.num_hits = 0
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # least recently used first
        self._freed: list[bytes] = []

    def fits(self, num_embeds: int) -> bool:
        """Whether an item of `num_embeds` embeddings could ever be held."""
        return num_embeds * self.bytes_per_embed <= self.capacity_bytes

    def is_encoded(self, digest: bytes) -> bool:
        entry = self._entries.get(digest)
        return entry is not None and entry.is_encoded

    def acquire(self, digest: bytes, num_embeds: int, user: User) -> bool:
        """Hold the item's embeddings, or space for them, for `user`; False if there is no space."""
        entry = self._entries.get(digest)
        is_hit = entry is not None
        if entry is None:
            entry = _Entry(num_embeds * self.bytes_per_embed)
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
        """End a user's hold; harmless if there is none."""
        entry = self._entries.get(digest)
        if entry is None:
            return
        entry.users.discard(user)
        if not entry.users and not entry.is_encoded:  # given up before it was encoded
            self._drop(digest)

    def mark_encoded(self, digests: Iterable[bytes]) -> None:
        """A scheduled step encodes these items, each acquired before."""
        for digest in digests:
            self._entries[digest].is_encoded = True

    def keep_encoded(self, is_on_device: Callable[[bytes], bool]) -> None:
        """After failed steps: items whose embeddings are not on the device will be encoded again."""
        for digest, entry in list(self._entries.items()):
            entry.is_encoded = entry.is_encoded and is_on_device(digest)
            if not entry.users and not entry.is_encoded:
                self._drop(digest)

    @property
    def encoded_digests(self) -> set[bytes]:
        return {digest for digest, entry in self._entries.items() if entry.is_encoded}

    def take_freed(self) -> tuple[bytes, ...]:
        """Items dropped since the last call. One of them may have been acquired again, and will be encoded again."""
        freed, self._freed = tuple(self._freed), []
        return freed

    def check(self, users: set[User]) -> None:
        """Assert that exactly `users` hold items and that the byte count is right."""
        held = {user for entry in self._entries.values() for user in entry.users}
        assert held == users, f"items held by {sorted(held)}, should be {sorted(users)}"
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
        self._freed.append(digest)
