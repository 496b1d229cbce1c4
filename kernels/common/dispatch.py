"""Decides whether kernels run, whether a device supports 8-bit floats, and in which dtype a CPU multiplies."""

import time
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # Triton does not support macOS: kernels are defined there, but never run
    triton = SimpleNamespace(jit=lambda function=None, **_: function or (lambda kernel: kernel), __version__=None)
    tl = SimpleNamespace(constexpr=None)

__all__ = [
    "FP8_CAPABILITY",
    "Case",
    "ExpertShapes",
    "KernelShapes",
    "VisionShapes",
    "multiplies_float32_faster",
    "runs_triton",
    "supports_fp8",
    "tl",
    "triton",
    "triton_unusable",
]


FP8_CAPABILITY = (8, 9)  # the first with products of 8-bit floats


def runs_triton(x: Tensor) -> bool:
    """Return whether the kernel processes this tensor, not its reference."""
    return x.is_cuda and triton.__version__ is not None


def triton_unusable(device: torch.device) -> str | None:
    """Return why kernels cannot run on this device, or None; Triton's interpreter runs them on a CPU, but slowly."""
    if triton.__version__ is None:
        return "needs Triton, which is not installed"
    if device.type != "cuda" and not triton.knobs.runtime.interpret:
        return f"needs a CUDA device, this is {device.type}"
    return None


def supports_fp8(device: torch.device) -> bool:
    """Return whether kernels that store 8-bit floats run on this device; their references run on any CPU."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= FP8_CAPABILITY


@cache
def multiplies_float32_faster() -> bool:
    """Return whether products of many rows are clearly faster in float32 than in bfloat16, measured once in 10 ms.

    They are faster on CPUs whose bfloat16 instructions are missing or slow, such as Emerald Rapids without AMX (109
    Gflop/s per core, 223 in float32), and float32 is more precise. Other CPUs take half the time in bfloat16, so noise
    does not change the result.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # waiting for other threads would be counted
    try:
        times = [(_product_time(torch.float32), _product_time(torch.bfloat16)) for _ in range(10)]
    finally:
        torch.set_num_threads(threads)
    in_float32, in_bfloat16 = map(min, zip(*times, strict=True))
    return in_float32 < 0.75 * in_bfloat16


def _product_time(dtype: torch.dtype) -> float:
    x, weight = torch.ones(64, 512, dtype=dtype), torch.ones(512, 512, dtype=dtype)
    start = time.thread_time()
    x @ weight
    return time.thread_time() - start


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
    """One line of `mmvllm bench kernels`: the arguments of the kernel and its reference, and the minimum work."""

    kernel: str  # its name, without _torch or _triton
    label: str  # the shape, as printed: "N=64 C=1536"
    args: tuple
    bytes: int  # bytes that must be read or written
    flops: int = 0
