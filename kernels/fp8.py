"""Activations quantized to 8-bit floats (e4m3) with a scale per row, and products of such rows (arXiv 2209.05433).

A row's scale is its largest magnitude / 448, so it depends only on that row. The GPU's conversion rounds to the nearest
value, ties to even, like torch's.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mmvllm.kernels.common.dispatch import Case, KernelShapes, runs_triton, supports_fp8, tl, triton

E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """Quantized rows: values (N, C) in e4m3, a scale (N,) float32 per row, and the dtype before quantization."""

    values: Tensor
    scale: Tensor
    dtype: torch.dtype

    @classmethod
    def empty_like(cls, x: Tensor) -> "Fp8Rows":
        scale = torch.empty(len(x), dtype=torch.float32, device=x.device)
        return cls(torch.empty(x.shape, dtype=E4M3, device=x.device), scale, x.dtype)


def quantize_rows(x: Tensor) -> Fp8Rows:
    """Round the contiguous rows x (N, C) to 8 bits."""
    assert x.is_contiguous()
    return (quantize_rows_triton if runs_triton(x) else quantize_rows_torch)(x)


def quantize_rows_torch(x: Tensor) -> Fp8Rows:
    wide = x.float()
    largest = wide.abs().amax(dim=1).clamp_(min=1e-12)
    return Fp8Rows((wide * (448 / largest)[:, None]).to(E4M3), largest / 448, x.dtype)


def scaled_linear(x: Fp8Rows, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Return x Wᵀ + b (N, out) in x's dtype, for an e4m3 weight (out, in) with a scale (out,) per row.

    On CUDA, both sizes of the weight must be multiples of 16, and x's dtype must be bfloat16.
    """
    if not x.values.is_cuda:
        return scaled_linear_torch(x, weight, scale, bias)
    # No fast accumulation: in it, Hopper's tensor cores add 8-bit products in fewer bits than float32 has.
    scales = x.scale[:, None], scale[None]
    return torch._scaled_mm(x.values, weight.t(), *scales, bias=bias, out_dtype=x.dtype, use_fast_accum=False)


def scaled_linear_torch(x: Fp8Rows, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    product = F.linear(x.values.float(), weight.float()).mul_(x.scale[:, None]).mul_(scale)
    return (product if bias is None else product.add_(bias)).to(x.dtype)


def quantize_rows_triton(x: Tensor) -> Fp8Rows:
    out, (N, C) = Fp8Rows.empty_like(x), x.shape
    block = triton.next_power_of_2(C)
    num_warps = min(16, max(1, block // 256))  # 8 values per thread: one 16-byte load of a 16-bit dtype; not tuned
    sizes = {"C": C, "BLOCK": block, "num_warps": num_warps, "enable_fp_fusion": False}
    _quantize_rows_kernel[(N,)](x, out.values, out.scale, **sizes)
    return out


@triton.jit
def _quantize_rows_kernel(x_ptr, out_ptr, scale_ptr, C: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < C
    x = tl.load(x_ptr + row * C + at, mask=mask, other=0.0)
    store_row(x, out_ptr + row * C + at, scale_ptr + row, mask)


@triton.jit
def store_row(x, out_ptr, scale_ptr, mask):
    """Store a whole row in 8 bits where `mask` is true, and its scale."""
    largest = largest_magnitude(x, mask)
    tl.store(scale_ptr, tl.div_rn(largest, 448.0))
    store_scaled(x, largest, out_ptr, mask)


@triton.jit
def largest_magnitude(x, mask):
    """Return the largest magnitude where `mask` is true, but at least 1e-12, because a row is divided by it."""
    return tl.maximum(tl.max(tl.where(mask, tl.abs(x.to(tl.float32)), 0.0), 0), 1e-12)


@triton.jit
def store_scaled(x, largest, out_ptr, mask):
    """Store x, or a part of a row, scaled such that `largest` becomes 448, the largest value of e4m3."""
    tl.store(out_ptr, (x.to(tl.float32) * tl.div_rn(448.0, largest)).to(tl.float8e4nv), mask=mask)


def cases(shapes: KernelShapes, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Yield outputs of the decoder's attention; nothing on a GPU without 8-bit floats."""
    if not supports_fp8(device):
        return
    C = shapes.num_heads * shapes.head_dim
    for N in (1, 64, 1024, 4096):
        x = torch.randn(N, C, device=device, dtype=dtype)
        yield Case("quantize_rows", f"N={N} C={C}", (x,), x.nbytes + x.numel() + 4 * N)
