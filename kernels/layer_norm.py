"""LayerNorm fused with the residual addition before it."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from mmvllm.kernels.common.dispatch import Case, KernelShapes, runs_triton, tl, triton


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the normalized sum of the contiguous x and residual, both (N, C), and the sum (arXiv 1607.06450).

    Mean and variance are computed in float32.
    """
    assert x.is_contiguous() and residual.is_contiguous()
    return (add_layer_norm_triton if runs_triton(x) else add_layer_norm_torch)(x, residual, weight, bias, eps)


def add_layer_norm_torch(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    total = residual + x
    return F.layer_norm(total, total.shape[1:], weight, bias, eps), total


def add_layer_norm_triton(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    out, total, C = torch.empty_like(x), torch.empty_like(x), x.shape[1]
    block = triton.next_power_of_2(C)
    # 8 values per thread: one 16-byte load of a 16-bit dtype; not tuned.
    sizes = {"C": C, "BLOCK": block, "num_warps": min(16, max(1, block // 256)), "enable_fp_fusion": True}
    _add_layer_norm_kernel[(len(x),)](x, residual, weight, bias, out, total, eps, **sizes)
    return out, total


@triton.jit
def _add_layer_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, out_ptr, total_ptr, eps, C: tl.constexpr, BLOCK: tl.constexpr
):
    """One program per row, which it keeps in registers."""
    row = tl.program_id(0).to(tl.int64) * C
    at = tl.arange(0, BLOCK)
    mask = at < C
    x = tl.load(x_ptr + row + at, mask=mask, other=0.0)
    residual = tl.load(residual_ptr + row + at, mask=mask, other=0.0)
    weight = tl.load(weight_ptr + at, mask=mask).to(tl.float32)
    bias = tl.load(bias_ptr + at, mask=mask).to(tl.float32)
    # Round before normalizing: the norm and the residual stream must use the same value.
    total = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
    tl.store(total_ptr + row + at, total, mask=mask)
    centred = total.to(tl.float32)
    centred = tl.where(mask, centred - tl.sum(centred) / C, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred) / C + eps)
    tl.store(out_ptr + row + at, centred * scale * weight + bias, mask=mask)


def cases(shapes: KernelShapes, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Yield the ViT's rows for the patches of a small image, a large image and a full step; nothing without a ViT."""
    if shapes.vision is None:
        return
    C = shapes.vision.num_heads * shapes.vision.head_dim
    weight, bias = torch.randn(2, C, device=device, dtype=dtype)
    for P in (256, 4096, 16384):
        x, residual = torch.randn(2, P, C, device=device, dtype=dtype)
        yield Case(
            "add_layer_norm", f"P={P} C={C}", (x, residual, weight, bias, 1e-6), 4 * x.nbytes + 2 * weight.nbytes
        )
