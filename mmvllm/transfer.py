"""Copies between host and device that do not wait for the device."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor; on CUDA from pinned memory: ordered in the stream, without waiting."""
    return (x.pin_memory() if device.type == "cuda" else x).to(device, non_blocking=True)


class HostCopy:
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
