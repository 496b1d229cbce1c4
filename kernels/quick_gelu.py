"""The activation of the ViT's MLP."""

from collections.abc import Iterator

import torch
from torch import Tensor

from mmvllm.kernels.common.dispatch import Case, KernelShapes, runs_triton, tl, triton


def quick_gelu(x: Tensor) -> Tensor:
    """Return x * sigmoid(1.702 x) of a contiguous tensor of any shape (arXiv 1606.08415)."""
    assert x.is_contiguous()
    return (quick_gelu_triton if runs_triton(x) else quick_gelu_torch)(x)


def quick_gelu_torch(x: Tensor) -> Tensor:
    return (x * 1.702).sigmoid_().mul_(x)


def quick_gelu_triton(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    block = 2048  # with 4 warps, 16 values per thread: two 16-byte loads of a 16-bit dtype; not tuned
    grid = (triton.cdiv(x.numel(), block),)
    _quick_gelu_kernel[grid](x, out, x.numel(), BLOCK=block, num_warps=4, enable_fp_fusion=False)
    return out


@triton.jit
def _quick_gelu_kernel(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    x = tl.load(x_ptr + at, mask=mask).to(tl.float32)
    tl.store(out_ptr + at, x * tl.sigmoid(1.702 * x), mask=mask)


def cases(shapes: KernelShapes, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Yield the ViT's MLP for the patches of a small image, a large image and a full step; nothing without a ViT."""
    if shapes.vision is None:
        return
    width = shapes.vision.intermediate_size
    for P in (256, 4096, 16384):
        x = torch.randn(P, width, device=device, dtype=dtype)
        yield Case("quick_gelu", f"P={P} I={width}", (x,), 2 * x.nbytes)
