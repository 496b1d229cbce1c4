"""Which device work goes to, and how data gets there without waiting."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor; on CUDA through pinned memory, so that the copy is ordered in the stream and nobody waits."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x


def current_device(device: torch.device) -> AbstractContextManager:
    """Make a GPU the current one, to which Triton launches whatever device its arguments are on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
