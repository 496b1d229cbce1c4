"""Copies between host and device that do not wait for the device."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to a device; to CUDA from pinned memory, in stream order and without waiting."""
    return (pinned(x) if device.type == "cuda" else x).to(device, non_blocking=True)


def pinned(x: Tensor) -> Tensor:
    """Return the tensor in pinned host memory; a pinned tensor or a device tensor is returned unchanged."""
    return x if x.device.type != "cpu" or x.is_pinned() else x.pin_memory()


class CopyStream:
    """A CUDA stream for copies to the device that overlap with previously launched steps."""

    def __init__(self, device: torch.device):
        self._device, self._stream = device, torch.cuda.Stream(device)

    def inside(self) -> AbstractContextManager:
        """Return a context in which memory is allocated and copies are submitted on this stream."""
        return torch.cuda.stream(self._stream)

    def hand_over(self, x: Tensor) -> None:
        """Make the current stream wait for the copies so far and take over `x`, which was allocated on this stream."""
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        x.record_stream(current)  # else the next copy could reuse its memory while the current stream still reads it


class H2DCopier:
    """Copies the tensors of one step to a device as a single tensor.

    Args:
        stream: runs the copies, which then do not wait for earlier work on the current stream.
    """

    def __init__(self, device: torch.device, stream: CopyStream | None = None):
        self._device, self._stream = device, stream

    def concatenated(self, tensors: Sequence[Tensor]) -> Tensor:
        """Concatenate tensors (P, D) of one dtype, all on the host or all on the device; contiguous, on the device."""
        if self._stream is None or tensors[0].device.type != "cpu":
            return (torch.cat(tensors) if len(tensors) > 1 else tensors[0].contiguous()).to(self._device)
        with self._stream.inside():
            out = tensors[0].new_empty((sum(map(len, tensors)), *tensors[0].shape[1:]), device=self._device)
            # One copy per tensor: concatenating them on the host first would write all of them once more.
            for own, x in zip(out.split([len(x) for x in tensors]), tensors, strict=True):
                own.copy_(pinned(x), non_blocking=True)
        self._stream.hand_over(out)
        return out


def copy_packed(arrays: Sequence[np.ndarray], device: torch.device, into: Tensor | None = None) -> list[Tensor]:
    """Copy host arrays of int32 and int64 in one transfer, without waiting; on a CPU they share the arrays' memory.

    With `into`, a large enough uint8 tensor (bytes,) on the device, the copies are views of its first bytes.
    """
    if device.type != "cuda" and into is None:
        return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
    ends = np.cumsum([-(-array.nbytes // 8) * 8 for array in arrays]).tolist()  # aligned for int64
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
    """Asynchronous copies to the host; `lists` waits for these copies only, not for work submitted later."""

    def __init__(self, *tensors: Tensor):
        self._copies, self._arrived = tensors, None
        if tensors[0].is_cuda:
            self._copies = [torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in tensors]
            for copy, x in zip(self._copies, tensors, strict=True):
                copy.copy_(x, non_blocking=True)
            self._arrived = torch.cuda.current_stream(tensors[0].device).record_event()

    def lists(self) -> list[list]:
        """Return each tensor as a list."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return [copy.tolist() for copy in self._copies]


def current_device(device: torch.device) -> AbstractContextManager:
    """Make a GPU the current device, on which Triton launches kernels wherever their arguments are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
