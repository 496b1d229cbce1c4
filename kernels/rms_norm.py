"""RMSNorm, alone and fused with the residual addition before it and rounding to 8 bits after it."""

from collections.abc import Iterator

import torch
from torch import Tensor

from mmvllm.kernels.common.dispatch import Case, KernelShapes, runs_triton, supports_fp8, tl, triton
from mmvllm.kernels.fp8 import Fp8Rows, quantize_rows_torch, store_row


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMSNorm of the contiguous rows x (N, C), computed in float32 (arXiv 1910.07467)."""
    assert x.is_contiguous()
    return (rms_norm_triton if runs_triton(x) else rms_norm_torch)(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the normalized sum of x and residual, both (N, C), and the sum itself, which is the next residual."""
    assert x.is_contiguous() and residual.is_contiguous()
    return (add_rms_norm_triton if runs_triton(x) else add_rms_norm_torch)(x, residual, weight, eps)


def add_rms_norm_fp8(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Fp8Rows, Tensor]:
    """Compute `add_rms_norm` and round the normalized sum to x's dtype and then to 8 bits."""
    assert x.is_contiguous() and residual.is_contiguous()
    return (add_rms_norm_fp8_triton if runs_triton(x) else add_rms_norm_fp8_torch)(x, residual, weight, eps)


def rms_norm_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def add_rms_norm_torch(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm_torch(total, weight, eps), total


def add_rms_norm_fp8_torch(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Fp8Rows, Tensor]:
    normalized, total = add_rms_norm_torch(x, residual, weight, eps)
    return quantize_rows_torch(normalized), total


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = torch.empty_like(x)
    _rms_norm_kernel[(len(x),)](x, weight, out, eps, **_sizes(x))
    return out


def add_rms_norm_triton(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    out, total = torch.empty_like(x), torch.empty_like(x)
    _add_rms_norm_kernel[(len(x),)](x, residual, weight, out, total, eps, **_sizes(x))
    return out, total


def add_rms_norm_fp8_triton(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Fp8Rows, Tensor]:
    out, total = Fp8Rows.empty_like(x), torch.empty_like(x)
    tensors = (x, residual, weight, out.values, out.scale, total)
    _add_rms_norm_fp8_kernel[(len(x),)](*tensors, eps, **_sizes(x))
    return out, total


def _sizes(x: Tensor) -> dict[str, int]:
    C = x.shape[1]
    block = triton.next_power_of_2(C)
    # 8 values per thread: one 16-byte load of a 16-bit dtype; not tuned. Without fusion, both kernels normalize a row
    # to the same bits; the compiler would choose which products it fuses with a sum.
    return {"C": C, "BLOCK": block, "num_warps": min(16, max(1, block // 256)), "enable_fp_fusion": False}


@triton.jit
def _rms_norm_kernel(x_ptr, weight_ptr, out_ptr, eps, C: tl.constexpr, BLOCK: tl.constexpr):
    """One program per row, which it keeps in registers."""
    row = tl.program_id(0).to(tl.int64) * C
    at = tl.arange(0, BLOCK)
    mask = at < C
    weight = tl.load(weight_ptr + at, mask=mask)
    x = tl.load(x_ptr + row + at, mask=mask, other=0.0)
    tl.store(out_ptr + row + at, _normalized(x, weight, eps, C), mask=mask)


@triton.jit
def _add_rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, total_ptr, eps, C: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * C
    at = tl.arange(0, BLOCK)
    mask = at < C
    weight = tl.load(weight_ptr + at, mask=mask)
    total = _add(x_ptr + row + at, residual_ptr + row + at, total_ptr + row + at, mask)
    tl.store(out_ptr + row + at, _normalized(total, weight, eps, C), mask=mask)


@triton.jit
def _add_rms_norm_fp8_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, scale_ptr, total_ptr, eps, C: tl.constexpr, BLOCK: tl.constexpr
):
    index = tl.program_id(0).to(tl.int64)
    row = index * C
    at = tl.arange(0, BLOCK)
    mask = at < C
    weight = tl.load(weight_ptr + at, mask=mask)
    total = _add(x_ptr + row + at, residual_ptr + row + at, total_ptr + row + at, mask)
    store_row(_normalized(total, weight, eps, C), out_ptr + row + at, scale_ptr + index, mask)


@triton.jit
def _add(x_ptr, residual_ptr, total_ptr, mask):
    """Store and return the sum of two rows, zero where `mask` is false."""
    x = tl.load(x_ptr, mask=mask, other=0.0)
    residual = tl.load(residual_ptr, mask=mask, other=0.0)
    # Round before normalizing: the norm and the residual stream must use the same value.
    total = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
    tl.store(total_ptr, total, mask=mask)
    return total


@triton.jit
def _normalized(x, weight, eps, C: tl.constexpr):
    """Normalize a row, zero beyond its C values; round to its dtype before and after the weight, like the reference."""
    wide = x.to(tl.float32)
    wide *= tl.rsqrt(tl.sum(wide * wide) / C + eps)
    return (weight.to(tl.float32) * wide.to(x.dtype).to(tl.float32)).to(x.dtype)


def cases(shapes: KernelShapes, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    C = shapes.hidden_size
    weight = torch.randn(C, device=device, dtype=dtype)
    for N in (1, 64, 1024, 4096):
        x = torch.randn(N, C, device=device, dtype=dtype)
        shape, residual = f"N={N} C={C}", torch.randn_like(x)
        yield Case("rms_norm", shape, (x, weight, 1e-6), 2 * x.nbytes + weight.nbytes)
        yield Case("add_rms_norm", shape, (x, residual, weight, 1e-6), 4 * x.nbytes + weight.nbytes)
        if supports_fp8(device):
            moved = 3 * x.nbytes + x.numel() + 4 * N + weight.nbytes
            yield Case("add_rms_norm_fp8", shape, (x, residual, weight, 1e-6), moved)
