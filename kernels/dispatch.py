"""When a kernel runs instead of its torch reference, and what every kernel file imports."""

from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # Triton does not support macOS and Windows: kernels are defined there, but never run
    triton = SimpleNamespace(jit=lambda function=None, **_: function or (lambda kernel: kernel), __version__=None)
    tl = SimpleNamespace(constexpr=None)

__all__ = ["Case", "ExpertShapes", "KernelShapes", "VisionShapes", "runs_triton", "tl", "triton", "triton_unusable"]


def runs_triton(x: Tensor) -> bool:
    """Whether the kernel, not its reference, processes this tensor."""
    return x.is_cuda and triton.__version__ is not None


def triton_unusable(device: torch.device) -> str | None:
    """Why kernels cannot run on this device, or None if they can; Triton's interpreter runs them on a CPU, slowly."""
    if triton.__version__ is None:
        return "needs Triton, which is not installed"
    if device.type != "cuda" and not triton.knobs.runtime.interpret:
        return f"needs a CUDA device, this is {device.type}"
    return None


@dataclass(frozen=True)
class VisionShapes:
    """The sizes of a ViT that its kernels depend on."""

    num_heads: int
    head_dim: int
    intermediate_size: int


@dataclass(frozen=True)
class ExpertShapes:
    """The sizes of a mixture of experts that its kernels depend on."""

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int


@dataclass(frozen=True)
class KernelShapes:
    """The sizes of a model that `cases` depend on; `vision` is None in a text-only model, `experts` in a dense one."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    vision: VisionShapes | None
    experts: ExpertShapes | None


@dataclass(frozen=True)
class Case:
    """One line of `mmvllm bench kernels`: arguments of both kernel and reference, and the minimum work."""

    kernel: str  # its name, without _torch or _triton
    label: str  # the shape, as printed: "N=64 C=1536"
    args: tuple
    bytes: int  # that must be read or written
    flops: int = 0
