"""Replace the embeddings of placeholder tokens with image rows."""

from collections.abc import Iterator

import torch
from torch import Tensor

from mmvllm.kernels.dispatch import Case, KernelShapes, runs_triton, tl, triton


def splice(x: Tensor, rows: Tensor, at: Tensor) -> None:
    """x[at] = rows in place: x (N, C), rows (M, C), both contiguous, at (M,) int64, indices unique; M may be 0."""
    if len(at):
        assert x.is_contiguous() and rows.is_contiguous() and x.dtype == rows.dtype
        (splice_triton if runs_triton(x) else splice_torch)(x, rows, at)


def splice_torch(x: Tensor, rows: Tensor, at: Tensor) -> None:
    x.index_copy_(0, at, rows)


def splice_triton(x: Tensor, rows: Tensor, at: Tensor) -> None:
    M, C = rows.shape
    block = triton.next_power_of_2(C)
    # 8 values per thread, 16 bytes of a 16-bit dtype; not tuned.
    _splice_kernel[(M,)](x, rows, at, C=C, BLOCK=block, num_warps=min(8, max(1, block // 256)))


@triton.jit
def _splice_kernel(x_ptr, rows_ptr, at_ptr, C: tl.constexpr, BLOCK: tl.constexpr):
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(at_ptr + row)
    columns = tl.arange(0, BLOCK)
    mask = columns < C
    tl.store(x_ptr + target * C + columns, tl.load(rows_ptr + row * C + columns, mask=mask), mask=mask)


def cases(shapes: KernelShapes, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Prompts of image tokens and 32 text tokens."""
    C = shapes.hidden_size
    for N in (64, 1024, 4096):
        x = torch.randn(N, C, device=device, dtype=dtype)
        at = torch.arange(16, N - 16, device=device)
        rows = torch.randn(len(at), C, device=device, dtype=dtype)
        yield Case("splice", f"N={N} M={len(at)} C={C}", (x, rows, at), 2 * rows.nbytes + at.nbytes)
