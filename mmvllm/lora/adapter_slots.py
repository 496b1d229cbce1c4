"""Assigns LoRA adapters to the device's slots; the model runner owns the matrices.

A sequence holds the slot of its adapter while it runs. A slot without users keeps its adapter until it is reused, the
least recently used first. `take_new` reports each new assignment once. The next step writes it in device order, so
steps in flight still use the adapters that they were launched with.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from mmvllm.lora.adapters import Adapter


@dataclass(slots=True)
class _Slot:
    index: int
    users: set[int] = field(default_factory=set)  # seq_ids


class AdapterSlots:
    """An LRU cache of adapters with a fixed number of slots; it does not touch device memory."""

    def __init__(self, num_slots: int):
        self.num_slots = num_slots
        self._free = list(reversed(range(num_slots)))
        self._slots: OrderedDict[bytes, _Slot] = OrderedDict()  # by digest, least recently used first
        self._new: dict[int, Adapter] = {}

    def acquire(self, adapter: Adapter, seq_id: int) -> int | None:
        """Hold the adapter's slot for a sequence and return it; None if other adapters use all slots."""
        slot = self._slots.get(adapter.digest)
        if slot is None:
            index = self._unused()
            if index is None:
                return None
            slot = self._slots[adapter.digest] = _Slot(index)
            self._new[index] = adapter
        slot.users.add(seq_id)
        self._slots.move_to_end(adapter.digest)
        return slot.index

    def release(self, adapter: Adapter, seq_id: int) -> None:
        """Release the adapter's slot for a sequence; do nothing if the sequence does not hold it."""
        if (slot := self._slots.get(adapter.digest)) is not None:
            slot.users.discard(seq_id)

    def take_new(self) -> tuple[tuple[int, Adapter], ...]:
        """Return (slot, adapter) pairs to write before the step that is scheduled now."""
        new, self._new = tuple(self._new.items()), {}
        return new

    def forget_unused(self) -> None:
        """Clear slots without users after a failed step, which may not have written them; its sequences hold none."""
        for digest, slot in list(self._slots.items()):
            if not slot.users:
                del self._slots[digest]
                self._free.append(slot.index)
                self._new.pop(slot.index, None)

    def check(self, users: dict[int, int]) -> None:
        """Assert that exactly the sequences in `users` hold slots; it maps seq_ids to slots."""
        held = {seq_id: slot.index for slot in self._slots.values() for seq_id in slot.users}
        assert held == users, f"slots held by {held}, should be {users}"
        indices = [slot.index for slot in self._slots.values()]
        assert sorted([*indices, *self._free]) == list(range(self.num_slots))

    def _unused(self) -> int | None:
        if self._free:
            return self._free.pop()
        digest = next((digest for digest, slot in self._slots.items() if not slot.users), None)
        return None if digest is None else self._slots.pop(digest).index
