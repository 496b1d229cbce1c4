"""Copies to a GPU: from pinned memory, on a stream of their own, handed over before they are used."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mmvllm.entrypoints.request_queue import pinning
from mmvllm.inputs import EngineInput, MultiModalItem, PlaceholderRange
from mmvllm.utils.transfer import H2DCopier, pinned

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def pins(monkeypatch) -> list[torch.Tensor]:
    """The tensors that were pinned, on a machine that cannot pin."""
    made: list[torch.Tensor] = []

    def pin(x: torch.Tensor) -> torch.Tensor:
        if x.device.type != "cpu":
            raise RuntimeError("only dense CPU tensors can be pinned")  # as torch does
        made.append(x.clone())
        return made[-1]

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda x: any(x is one for one in made))
    return made


def test_a_tensor_is_pinned_once(pins):
    x = torch.arange(5)
    first = pinned(x)
    assert first is not x and torch.equal(first, x)
    assert pinned(first) is first and len(pins) == 1


def test_a_tensor_on_a_device_is_used_where_it_is(pins):
    x = torch.empty(3, 6, device="meta")  # which no more than a CUDA tensor can be pinned
    assert pinned(x) is x and not pins


class FakeStream(TorchDispatchMode):
    """A copy stream that writes down what is submitted on it and beside it."""

    def __init__(self):
        super().__init__()
        self.events: list[tuple[str, str]] = []
        self.handed_over: list[torch.Tensor] = []
        self._where = "current stream"

    @contextmanager
    def inside(self) -> Iterator[None]:
        self._where = "copy stream"
        try:
            yield
        finally:
            self._where = "current stream"

    def hand_over(self, x: torch.Tensor) -> None:
        self.events.append((self._where, "hand over"))
        self.handed_over.append(x)

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = operation.overloadpacket.__name__
        if name in ("copy_", "empty", "new_empty", "cat", "add"):
            self.events.append((self._where, name))
        return operation(*args, **(kwargs or {}))


def test_allocation_and_copies_are_on_the_copy_stream_and_handed_over_before_use(pins):
    stream = FakeStream()
    sources = [torch.full((n, 4), n, dtype=torch.uint8) for n in (2, 1, 3)]
    with stream:
        rows = H2DCopier(CPU, stream).concatenated(sources)
        rows + 1
    assert [name for where, name in stream.events if where == "copy stream"] == ["new_empty", *["copy_"] * 3]
    assert stream.events[4:] == [("current stream", "hand over"), ("current stream", "add")]
    assert stream.handed_over[0] is rows and torch.equal(rows, torch.cat(sources)) and len(pins) == 3


def test_rows_that_were_pinned_before_are_not_pinned_in_the_step(pins):
    sources = [pinned(torch.ones(n, 4)) for n in (2, 1)]
    H2DCopier(CPU, FakeStream()).concatenated(sources)
    assert len(pins) == 2


def test_rows_on_the_device_stay_on_the_stream_that_they_were_made_on(pins):
    stream, made = FakeStream(), [torch.empty(n, 4, device="meta") for n in (2, 1)]
    with stream:
        rows = H2DCopier(torch.device("meta"), stream).concatenated(made)
    assert rows.shape == (3, 4) and stream.events == [("current stream", "cat")] and not pins


def test_without_a_stream_one_tensor_is_not_copied():
    x = torch.ones(2, 4)
    assert H2DCopier(CPU).concatenated([x]) is x
    assert H2DCopier(CPU).concatenated([x.t()]).is_contiguous()


def prompt() -> EngineInput:
    item = MultiModalItem("image", torch.ones(4, 6, dtype=torch.uint8), (1, 2, 2), b"digest", PlaceholderRange(0, 1))
    return EngineInput([1, 2], (item,), position_delta=3)


def test_preparation_for_a_gpu_pins_patches_in_the_worker(pins):
    made = pinning(lambda request: prompt(), CUDA)({})
    assert made.mm_items[0].patches is pins[0] and torch.equal(pins[0], prompt().mm_items[0].patches)
    assert (made.token_ids, made.position_delta, made.mm_items[0].placeholder) == ([1, 2], 3, (0, 1))


def test_preparation_for_a_cpu_pins_nothing(pins):
    def prepare(request: dict) -> EngineInput:
        return prompt()

    assert pinning(prepare, CPU) is prepare and not pins
