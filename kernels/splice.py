"""Replaces rows of a tensor or adds to them: embeddings at placeholder tokens, results of experts."""

from collections.abc import Iterator

import torch
from torch import Tensor

from mmvllm.kernels.common.dispatch import Case, KernelShapes, runs_triton, tl, triton


def splice(x: Tensor, rows: Tensor, at: Tensor) -> None:
    """Do x[at] = rows in place, for contiguous x (N, C), rows (M, C) and unique indices at (M,) int64; M may be 0.

    rows may be a slice of the columns of wider rows: only their last dimension must be contiguous.
    """
    if len(at):
        _check(x, rows)
        (splice_triton if runs_triton(x) else splice_torch)(x, rows, at)


def splice_add(x: Tensor, rows: Tensor, at: Tensor) -> None:
    """Do x[at] += rows in place, with the arguments of `splice` (DeepStack, arXiv 2406.04334)."""
    if len(at):
        _check(x, rows)
        (splice_add_triton if runs_triton(x) else splice_add_torch)(x, rows, at)


def _check(x: Tensor, rows: Tensor) -> None:
    assert x.is_contiguous() and rows.stride(1) == 1 and x.dtype == rows.dtype


def splice_torch(x: Tensor, rows: Tensor, at: Tensor) -> None:
    x.index_copy_(0, at, rows)


def splice_add_torch(x: Tensor, rows: Tensor, at: Tensor) -> None:
    x.index_copy_(0, at, x[at] + rows)  # a third of index_add_'s time on a CPU


def splice_triton(x: Tensor, rows: Tensor, at: Tensor) -> None:
    _splice_kernel[(len(rows),)](x, rows, at, rows.stride(0), **_sizes(rows), ADD=False)


def splice_add_triton(x: Tensor, rows: Tensor, at: Tensor) -> None:
    _splice_kernel[(len(rows),)](x, rows, at, rows.stride(0), **_sizes(rows), ADD=True)


def _sizes(rows: Tensor) -> dict[str, int]:
    C = rows.shape[1]
    block = triton.next_power_of_2(C)
    # 8 values per thread, 16 bytes of a 16-bit dtype; not tuned.
    return {"C": C, "BLOCK": block, "num_warps": min(8, max(1, block // 256)), "enable_fp_fusion": False}


@triton.jit(do_not_specialize_on_alignment=["at_ptr"])  # may be a view at any row
def _splice_kernel(x_ptr, rows_ptr, at_ptr, row_stride, C: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr):
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < C
    target = x_ptr + tl.load(at_ptr + row) * C + columns
    values = tl.load(rows_ptr + row * row_stride + columns, mask=mask)
    if ADD:
        values = tl.load(target, mask=mask).to(tl.float32) + values.to(tl.float32)
    tl.store(target, values, mask=mask)


def cases(shapes: KernelShapes, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Yield prompts of image tokens and 32 text tokens."""
    C = shapes.hidden_size
    for N in (64, 1024, 4096):
        x = torch.randn(N, C, device=device, dtype=dtype)
        at = torch.arange(16, N - 16, device=device)
        rows = torch.randn(len(at), C, device=device, dtype=dtype)
        shape = f"N={N} M={len(at)} C={C}"
        yield Case("splice", shape, (x, rows, at), 2 * rows.nbytes + at.nbytes)
        yield Case("splice_add", shape, (x, rows, at), 3 * rows.nbytes + at.nbytes)
