"""Which LoRA adapters are in the device's slots; the model runner owns the matrices themselves.

A sequence holds the slot of its adapter while it runs. Slots without users keep their adapters until they are needed,
those that were used last for the longest. What was put into a slot is reported once (`take_new`), and written in the
step that follows, in the order of the device: steps in flight still find what they were launched with.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from mmvllm.lora.adapters import Adapter


@dataclass(slots=True)
class _Slot:
    index: int
    users: set[int] = field(default_factory=set)  # seq_ids


class AdapterSlots:
    """LRU over a fixed number of slots; nothing here touches device memory."""

    def __init__(self, num_slots: int):
        self.num_slots = num_slots
        self._free = list(reversed(range(num_slots)))
        self._slots: OrderedDict[bytes, _Slot] = OrderedDict()  # by digest, least recently used first
        self._new: dict[int, Adapter] = {}

    def acquire(self, adapter: Adapter, seq_id: int) -> int | None:
        """Hold the adapter's slot for a sequence; None if others hold all slots."""
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
        """End a sequence's hold; harmless if there is none."""
        if (slot := self._slots.get(adapter.digest)) is not None:
            slot.users.discard(seq_id)

    def take_new(self) -> tuple[tuple[int, Adapter], ...]:
        """(slot, adapter) of what is to be written before the step that is scheduled now."""
        new, self._new = tuple(self._new.items()), {}
        return new

    def forget_unused(self) -> None:
        """After a step that failed, which may not have written its slots: its sequences hold none any more."""
        for digest, slot in list(self._slots.items()):
            if not slot.users:
                del self._slots[digest]
                self._free.append(slot.index)
                self._new.pop(slot.index, None)

    def check(self, users: dict[int, int]) -> None:
        """Assert that exactly these sequences hold slots: their seq_ids, and the slots."""
        held = {seq_id: slot.index for slot in self._slots.values() for seq_id in slot.users}
        assert held == users, f"slots held by {held}, should be {users}"
        indices = [slot.index for slot in self._slots.values()]
        assert sorted([*indices, *self._free]) == list(range(self.num_slots))

    def _unused(self) -> int | None:
        if self._free:
            return self._free.pop()
        digest = next((digest for digest, slot in self._slots.items() if not slot.users), None)
        return None if digest is None else self._slots.pop(digest).index
