"""Slots of LoRA adapters: held while sequences run, then replaced, the least recently used first."""

import random

import torch

from mmvllm.lora.adapter_slots import AdapterSlots
from mmvllm.lora.adapters import Adapter
from mmvllm.lora.device_adapters import DeviceAdapters
from tests.helpers.models.weights import load

A, B, C = (Adapter(name, name.encode(), {}, False) for name in "ABC")


def test_the_least_recently_used_adapter_is_replaced():
    slots = AdapterSlots(2)
    first, second = slots.acquire(A, 1), slots.acquire(B, 2)
    assert slots.take_new() == ((first, A), (second, B)) and slots.take_new() == ()
    assert slots.acquire(C, 3) is None, "both are in use"
    slots.release(A, 1)
    assert slots.acquire(A, 4) == first and slots.take_new() == (), "it is still there"
    slots.release(A, 4)
    slots.release(B, 2)
    assert slots.acquire(C, 3) == second and slots.take_new() == ((second, C),), "A was used last"
    slots.check({3: second})


def test_sequences_share_the_slot_of_equal_adapters():
    slots = AdapterSlots(1)
    assert slots.acquire(A, 1) == slots.acquire(Adapter("other", A.digest, {}, False), 2) == 0
    slots.release(A, 1)
    assert slots.acquire(B, 3) is None
    slots.release(A, 2)
    slots.release(A, 2)
    assert slots.acquire(B, 3) == 0


def test_what_a_failed_step_may_not_have_written_is_written_again():
    slots = AdapterSlots(2)
    slots.acquire(A, 1)
    slots.take_new()
    slot = slots.acquire(B, 2)
    slots.take_new()
    slots.release(B, 2)  # preempted with its step
    slots.forget_unused()
    slots.check({1: 0})
    again = slots.acquire(B, 2)
    assert again == slot and slots.take_new() == ((slot, B),)


def test_random_sequences():
    rng, slots, held, written = random.Random(0), AdapterSlots(3), {}, {}
    adapters = [Adapter(str(i), bytes([i]), {}, False) for i in range(6)]
    for seq_id in range(2000):
        if held and rng.random() < 0.5:
            done = rng.choice([*held])
            slots.release(held.pop(done)[0], done)
        adapter = rng.choice(adapters)
        slot = slots.acquire(adapter, seq_id)
        written |= slots.take_new()
        if slot is None:
            assert len({one.digest for one, _ in held.values()}) == 3 and adapter not in [a for a, _ in held.values()]
        else:
            held[seq_id] = adapter, slot
        assert all(written[at] is one for one, at in held.values())
        slots.check({seq: at for seq, (_, at) in held.items()})


def test_the_warm_up_changes_nothing(checkpoint):
    adapters = DeviceAdapters(load(checkpoint), 2, 4, torch.float32, torch.device("cpu"))
    adapters.warm_up()
    assert not any(stack.a.any() or stack.b.any() for stack in adapters._stacks.values())
