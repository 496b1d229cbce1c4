"""When a kernel runs instead of its plain torch twin, and what every kernel file imports from Triton."""

from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # there is no Triton for macOS and Windows: kernels are defined there, but never run
    triton = SimpleNamespace(jit=lambda function: function, __version__=None)
    tl = SimpleNamespace(constexpr=None)

__all__ = ["Case", "runs_triton", "tl", "triton", "triton_unusable"]


def runs_triton(x: Tensor) -> bool:
    """Whether the kernel, not the twin, serves this tensor."""
    return x.is_cuda and triton.__version__ is not None


def triton_unusable(device: torch.device) -> str | None:
    """Why kernels cannot run on this device, or None if they can; Triton's interpreter runs them on a CPU, slowly."""
    if triton.__version__ is None:
        return "needs Triton, which is not installed"
    if device.type != "cuda" and not triton.knobs.runtime.interpret:
        return f"needs a CUDA device, this is {device.type}"
    return None


@dataclass(frozen=True)
class Case:
    """One line of `mmvllm bench kernels`: arguments for kernel and twin alike, and the least work that they can do."""

    kernel: str  # its name, without _torch or _triton
    label: str  # the shape, for people: "N=64 C=1536"
    args: tuple
    bytes: int  # read and written at least once
    flops: int = 0
