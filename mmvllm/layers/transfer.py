"""Which device work goes to, and how data gets there without waiting."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor; on CUDA through pinned memory, so that the copy is ordered in the stream and nobody waits."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x


class HostCopy:
    """A tensor on its way to the host; reading it waits for it alone, not for what the device was given since."""

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
    """Make a GPU the current one, to which Triton launches whatever device its arguments are on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
