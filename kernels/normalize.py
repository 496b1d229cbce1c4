"""Normalizes uint8 patches to the model's dtype with a lookup table of 256 values per channel."""

from collections.abc import Iterator

import torch
from torch import Tensor

from mmvllm.kernels.common.dispatch import Case, KernelShapes, runs_triton, tl, triton


def normalize(patches: Tensor, table: Tensor) -> Tensor:
    """Look up contiguous patches (P, C * n) uint8 in a table (C, 256) on the same device; return the table's dtype.

    A table gives the same bits on every device, whatever arithmetic it was computed with.
    """
    assert patches.dtype == torch.uint8 and patches.is_contiguous() and table.is_contiguous()
    assert patches.shape[1] % len(table) == 0 and table.shape[1] == 256
    return (normalize_triton if runs_triton(patches) else normalize_torch)(patches, table)


def normalize_torch(patches: Tensor, table: Tensor) -> Tensor:
    channels = patches.view(len(patches), len(table), -1).int()
    first = 256 * torch.arange(len(table), dtype=torch.int32, device=patches.device)[:, None]
    # Not table[...]: a uint8 index would be a mask, which would wait for the device.
    return table.view(-1).index_select(0, channels.add_(first).view(-1)).view(patches.shape)


def normalize_triton(patches: Tensor, table: Tensor) -> Tensor:
    out = torch.empty(patches.shape, dtype=table.dtype, device=patches.device)
    width = patches.shape[1]
    block = 2048  # with 4 warps, 16 values per thread: a 16-byte load; not tuned
    grid = (triton.cdiv(patches.numel(), block),)
    _normalize_kernel[grid](
        *(patches, table, out, patches.numel()),
        **{"WIDTH": width, "PER_CHANNEL": width // len(table), "BLOCK": block},
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out


@triton.jit
def _normalize_kernel(
    patches_ptr, table_ptr, out_ptr, size, WIDTH: tl.constexpr, PER_CHANNEL: tl.constexpr, BLOCK: tl.constexpr
):
    """One program per BLOCK values of consecutive patches; the table stays in the L1 cache."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = tl.arange(0, BLOCK)
    mask = at < size - start
    level = tl.load(patches_ptr + start + at, mask=mask, other=0).to(tl.int32)
    # 32-bit divisions by constants; the block's offset in a patch takes one 64-bit remainder per program.
    channel = (at + (start % WIDTH).to(tl.int32)) % WIDTH // PER_CHANNEL
    tl.store(out_ptr + start + at, tl.load(table_ptr + 256 * channel + level, mask=mask), mask=mask)


def cases(shapes: KernelShapes, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Yield patches of 2 frames of 14x14 pixels: a small image, a large image, a full step; nothing without a ViT."""
    if shapes.vision is None:
        return
    width = 3 * 2 * 14 * 14
    table = torch.randn(3, 256, device=device).to(dtype)
    for P in (256, 4096, 16384):
        patches = torch.randint(0, 256, (P, width), dtype=torch.uint8, device=device)
        yield Case("normalize", f"P={P} D={width}", (patches, table), patches.numel() * (1 + dtype.itemsize))
