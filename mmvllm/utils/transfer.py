"""Copies between host and device that do not wait for the device."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor; to CUDA from pinned memory: ordered in the stream, without waiting."""
    return (pinned(x) if device.type == "cuda" else x).to(device, non_blocking=True)


def pinned(x: Tensor) -> Tensor:
    """The tensor in pinned host memory; one that is there already, or on a device, as it is."""
    return x if x.device.type != "cpu" or x.is_pinned() else x.pin_memory()


class CopyStream:
    """A CUDA stream for copies to the device, which then overlap with the steps that were launched before."""

    def __init__(self, device: torch.device):
        self._device, self._stream = device, torch.cuda.Stream(device)

    def inside(self) -> AbstractContextManager:
        """In it, memory is allocated and copies are submitted on this stream."""
        return torch.cuda.stream(self._stream)

    def hand_over(self, x: Tensor) -> None:
        """Let the current stream wait for the copies so far, and own `x`, which was allocated inside."""
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        x.record_stream(current)  # else its memory is given to the next copy while the current stream still reads it


class H2DCopier:
    """Brings tensors of one step to a device as one tensor.

    Args:
        stream: for the copies, where they need not wait for the work that the current stream was given before.
    """

    def __init__(self, device: torch.device, stream: CopyStream | None = None):
        self._device, self._stream = device, stream

    def concatenated(self, tensors: Sequence[Tensor]) -> Tensor:
        """Tensors (P, D) of one dtype, all on the host or all on the device -> all rows, contiguous, on the device."""
        if self._stream is None or tensors[0].device.type != "cpu":
            return (torch.cat(tensors) if len(tensors) > 1 else tensors[0].contiguous()).to(self._device)
        with self._stream.inside():
            out = tensors[0].new_empty((sum(map(len, tensors)), *tensors[0].shape[1:]), device=self._device)
            # A copy for each: to concatenate them first, the host would have to write all of them.
            for own, x in zip(out.split([len(x) for x in tensors]), tensors, strict=True):
                own.copy_(pinned(x), non_blocking=True)
        self._stream.hand_over(out)
        return out


def copy_packed(arrays: Sequence[np.ndarray], device: torch.device, into: Tensor | None = None) -> list[Tensor]:
    """Copy host arrays of int32 and int64 in one transfer, without waiting; on a CPU they share the arrays' memory.

    With `into` (bytes,) uint8 on the device, large enough, the copies are views of its first bytes.
    """
    if device.type != "cuda" and into is None:
        return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
    ends = np.cumsum([-(-array.nbytes // 8) * 8 for array in arrays]).tolist()  # each begins where int64 may
    staged = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    for tensor, array in zip(_views(staged, arrays, ends), arrays, strict=True):
        tensor.copy_(torch.from_numpy(np.ascontiguousarray(array)))
    placed = torch.empty_like(staged, device=device) if into is None else into[: ends[-1]]
    return _views(placed.copy_(staged, non_blocking=True), arrays, ends)


def _views(buffer: Tensor, arrays: Sequence[np.ndarray], ends: list[int]) -> list[Tensor]:
    begins = [0, *ends[:-1]]
    parts = [buffer[begin : begin + array.nbytes] for begin, array in zip(begins, arrays, strict=True)]
    return [
        part.view(torch.int64 if array.dtype == np.int64 else torch.int32).view(array.shape)
        for part, array in zip(parts, arrays, strict=True)
    ]


class AsyncD2H:
    """Copies to the host; `lists` waits for these copies alone, not for work submitted to the device later."""

    def __init__(self, *tensors: Tensor):
        self._copies, self._arrived = tensors, None
        if tensors[0].is_cuda:
            self._copies = [torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in tensors]
            for copy, x in zip(self._copies, tensors, strict=True):
                copy.copy_(x, non_blocking=True)
            self._arrived = torch.cuda.current_stream(tensors[0].device).record_event()

    def lists(self) -> list[list]:
        """Each tensor as a list."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return [copy.tolist() for copy in self._copies]


def current_device(device: torch.device) -> AbstractContextManager:
    """Make a GPU the current one: Triton launches there whatever device its arguments are on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
