"""Sets the logits of tokens that may not follow to -inf, by a bit mask per row."""

from collections.abc import Iterator

import torch
from torch import Tensor

from mmvllm.kernels.common.dispatch import Case, KernelShapes, runs_triton, tl, triton


def mask_tokens(logits: Tensor, allowed: Tensor, row_indices: Tensor) -> None:
    """Set logits (R, V) to -inf, in place, where a bit of `allowed` (M, ceil(V / 32)) int32 is 0.

    Row m of `allowed` applies to row `row_indices[m]` (int32) of the logits; indices are unique. Bit i % 32 (counted
    from the least significant) of word i // 32 is the bit of token i; bits beyond V are ignored.
    """
    assert logits.stride(1) == 1 and allowed.is_contiguous() and row_indices.is_contiguous()
    (mask_tokens_triton if runs_triton(logits) else mask_tokens_torch)(logits, allowed, row_indices)


def mask_tokens_torch(logits: Tensor, allowed: Tensor, row_indices: Tensor) -> None:
    bits = allowed[:, :, None] >> torch.arange(32, dtype=torch.int32, device=allowed.device)
    forbidden = (bits & 1 == 0).flatten(1)[:, : logits.shape[1]]  # (M, V)
    logits[row_indices.long()] = logits.index_select(0, row_indices).masked_fill_(forbidden, float("-inf"))


def mask_tokens_triton(logits: Tensor, allowed: Tensor, row_indices: Tensor, block: int = 4096) -> None:
    """Launch the kernel; a program takes `block` logits, a power of two."""
    V, (M, W) = logits.shape[1], allowed.shape
    # As many logits per thread as in `penalize`; not tuned.
    _mask_tokens_kernel[(triton.cdiv(V, block), M)](
        *(logits, allowed, row_indices, logits.stride(0)),
        **{"V": V, "W": W, "BLOCK": block},
        num_warps=16,
        enable_fp_fusion=False,  # nothing is computed
    )


@triton.jit
def _mask_tokens_kernel(
    logits_ptr, allowed_ptr, places_ptr, row_stride, V: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr
):
    """One program per block of a row."""
    m = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(allowed_ptr + m.to(tl.int64) * W + at // 32, mask=at < V, other=-1)
    is_forbidden = ((word >> (at % 32)) & 1) == 0
    row_ptr = logits_ptr + tl.load(places_ptr + m).to(tl.int64) * row_stride
    tl.store(row_ptr + at, float("-inf"), mask=is_forbidden & (at < V))


def cases(shapes: KernelShapes, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Yield cases with float32 logits for every dtype; half of the tokens are allowed."""
    V = shapes.vocab_size
    for R in (1, 8, 64):
        logits = torch.randn(R, V, device=device)
        allowed = torch.randint(-(2**31), 2**31, (R, -(-V // 32)), dtype=torch.int32, device=device)
        row_indices = torch.arange(R, dtype=torch.int32, device=device)
        yield Case("mask_tokens", f"R={R} V={V}", (logits, allowed, row_indices), allowed.nbytes + logits.nbytes // 2)
