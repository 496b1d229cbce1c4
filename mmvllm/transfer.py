"""Copies between host and device that do not wait for the device."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor; on CUDA from pinned memory: ordered in the stream, without waiting."""
    return (x.pin_memory() if device.type == "cuda" else x).to(device, non_blocking=True)


class HostCopy:
    """A copy to the host; `tolist` waits for this copy alone, not for work submitted to the device later."""

    def __init__(self, x: Tensor):
        self._copy, self._arrived = x, None
        if x.is_cuda:
            self._copy = torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
            self._arrived = torch.cuda.current_stream(x.device).record_event()

    def tolist(self) -> list:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copy.tolist()


def current_device(device: torch.device) -> AbstractContextManager:
    """Make a GPU the current one: Triton launches there whatever device its arguments are on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
