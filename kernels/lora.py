"""LoRA adapters (arXiv 2106.09685) of different rows of one product: shrink to the rank, expand to the outputs.

The rows of each adapter are a group, as in S-LoRA (arXiv 2311.03285) and Punica (arXiv 2310.18547).
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from mmvllm.kernels.common.dispatch import Case, KernelShapes, runs_triton, tl, triton

_SPLIT = 1024  # inputs that one program sums; splits keep more programs busy if there are few rows


def lora_add(y: Tensor, x: Tensor, a: Tensor, b: Tensor, rows: Tensor, ends: Tensor, widths: Sequence[int]) -> None:
    """Add the adapters' outputs for rows of x (N, in) to the same rows of y (N, out), in place.

    y has up to three parts of `widths` outputs, each with separate matrices: a (slots, parts, rank, in), and b (slots,
    out, rank), which includes the scales. rows (L,) int64 are sorted by slot, and ends (slots,) int32 are the ends of
    the slots' rows. Other rows of y are not changed. x, a and b have one dtype, and all are contiguous. On CUDA,
    nothing is read on the host.
    """
    assert x.is_contiguous() and y.is_contiguous() and len(widths) <= 3 and sum(widths) == y.shape[1] == b.shape[1]
    (lora_add_triton if runs_triton(x) else lora_add_torch)(y, x, a, b, rows, ends, widths)


def lora_add_torch(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor, rows: Tensor, ends: Tensor, widths: Sequence[int]
) -> None:
    for slot, (start, end) in enumerate(pairwise([0, *ends.tolist()])):
        if start < end:
            at = rows[start:end]
            own = x[at]
            for part, (first, last) in enumerate(pairwise(accumulate(widths, initial=0))):
                y[:, first:last].index_add_(0, at, own @ a[slot, part].T @ b[slot, first:last].T)


def lora_add_triton(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor, rows: Tensor, ends: Tensor, widths: Sequence[int]
) -> None:
    (slots, parts, rank, in_size), L = a.shape, len(rows)
    if L == 0:
        return
    block_m = 64 if slots * 64 < L else 16
    groups = min(slots, L)
    tiles = groups + (L - groups) // block_m
    num_splits, block_r = triton.cdiv(in_size, _SPLIT), max(16, triton.next_power_of_2(rank))
    h = x.new_empty(num_splits, L, parts, rank, dtype=torch.float32)
    common = (slots, triton.next_power_of_2(slots))
    block_k, block_n = (32, 64) if x.dtype == torch.float32 else (64, 128)
    # Float32 products are summed on CUDA cores: each rounded once, as in cuBLAS.
    _lora_shrink_kernel[(tiles, parts, num_splits)](
        *(x, a, h, rows, ends, L),
        *(*common, in_size, rank, parts, block_m, block_r, block_k, _SPLIT),
        enable_fp_fusion=True,
    )
    w = (*widths, 0, 0)[:3]
    _lora_expand_kernel[(tiles, sum(triton.cdiv(width, block_n) for width in w))](
        *(h, b, y, rows, ends, L),
        *(*common, num_splits, rank, parts, *w, block_m, block_n, block_r),
        enable_fp_fusion=True,
    )


@triton.jit
def _tile_of_slot(ends_ptr, S: tl.constexpr, S_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the slot of this program's tile, its indices of sorted rows, and their end; 0 if there is no tile."""
    tile = tl.program_id(0)
    slot = tl.arange(0, S_BLOCK)
    ends = tl.load(ends_ptr + slot, mask=slot < S, other=0)
    starts = tl.load(ends_ptr + slot - 1, mask=(slot > 0) & (slot < S), other=0)
    tiles = tl.where(slot < S, tl.cdiv(ends - starts, BLOCK_M), 0)
    last_tiles = tl.cumsum(tiles, 0)
    mine = (last_tiles - tiles <= tile) & (tile < last_tiles)  # one slot
    at = tl.sum(tl.where(mine, starts + (tile - last_tiles + tiles) * BLOCK_M, 0), 0) + tl.arange(0, BLOCK_M)
    return tl.sum(tl.where(mine, slot, 0), 0).to(tl.int64), at, tl.sum(tl.where(mine, ends, 0), 0)


@triton.jit(do_not_specialize=["L"])
def _lora_shrink_kernel(
    x_ptr,
    a_ptr,
    h_ptr,
    rows_ptr,
    ends_ptr,
    L,
    S: tl.constexpr,
    S_BLOCK: tl.constexpr,
    IN: tl.constexpr,
    R: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """One program per tile of a slot's rows, part, and SPLIT inputs; the expansion adds up their sums."""
    slot, at, end = _tile_of_slot(ends_ptr, S, S_BLOCK, BLOCK_M)
    if end == 0:
        return
    part, split = tl.program_id(1), tl.program_id(2)
    row = tl.load(rows_ptr + at, mask=at < end, other=0)
    r = tl.arange(0, BLOCK_R)
    has_row, has_r = at[:, None] < end, r[:, None] < R
    x_rows = x_ptr + row[:, None] * IN
    a_rows = a_ptr + ((slot * PARTS + part) * R + r[:, None]) * IN
    acc = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    for k in range(0, SPLIT, BLOCK_K):
        inputs = split * SPLIT + k + tl.arange(0, BLOCK_K)[None, :]
        x = tl.load(x_rows + inputs, mask=has_row & (inputs < IN), other=0.0)
        a = tl.load(a_rows + inputs, mask=has_r & (inputs < IN), other=0.0)
        acc = tl.dot(x, tl.trans(a), acc, input_precision="ieee")
    h = h_ptr + ((split * L + at[:, None]) * PARTS + part) * R + r[None, :]
    tl.store(h, acc, mask=has_row & (r[None, :] < R))


@triton.jit(do_not_specialize=["L"])
def _lora_expand_kernel(
    h_ptr,
    b_ptr,
    y_ptr,
    rows_ptr,
    ends_ptr,
    L,
    S: tl.constexpr,
    S_BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    R: tl.constexpr,
    PARTS: tl.constexpr,
    W0: tl.constexpr,
    W1: tl.constexpr,
    W2: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """One program per tile of a slot's rows and of outputs of one part. Each element of y has one program."""
    slot, at, end = _tile_of_slot(ends_ptr, S, S_BLOCK, BLOCK_M)
    if end == 0:
        return
    OUT: tl.constexpr = W0 + W1 + W2
    N0: tl.constexpr = tl.cdiv(W0, BLOCK_N)
    N1: tl.constexpr = tl.cdiv(W1, BLOCK_N)
    block = tl.program_id(1)
    part = (block >= N0).to(tl.int32) + (block >= N0 + N1).to(tl.int32)
    column = tl.where(part == 0, 0, tl.where(part == 1, W0 - N0 * BLOCK_N, W0 + W1 - (N0 + N1) * BLOCK_N))
    column = column + block * BLOCK_N + tl.arange(0, BLOCK_N)
    last = tl.where(part == 0, W0, tl.where(part == 1, W0 + W1, OUT))
    row = tl.load(rows_ptr + at, mask=at < end, other=0)
    r = tl.arange(0, BLOCK_R)
    has_row, has_r = at[:, None] < end, r[None, :] < R
    h = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    for split in range(SPLITS):
        own = h_ptr + ((split * L + at[:, None]) * PARTS + part) * R + r[None, :]
        h += tl.load(own, mask=has_row & has_r, other=0.0)
    b = tl.load(
        b_ptr + (slot * OUT + column[:, None]) * R + r[None, :], mask=(column[:, None] < last) & has_r, other=0.0
    )
    added = tl.dot(h.to(b.dtype), tl.trans(b), input_precision="ieee")
    y = y_ptr + row[:, None] * OUT + column[None, :]
    mask = has_row & (column[None, :] < last)
    tl.store(y, tl.load(y, mask=mask, other=0.0).to(tl.float32) + added, mask=mask)


def cases(shapes: KernelShapes, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Yield the query-key-value and the down projection, with 4 adapters of rank 16, for 1 to 4096 rows."""
    C, D, slots, rank = shapes.hidden_size, shapes.head_dim, 4, 16
    qkv = (shapes.num_heads * D, shapes.num_kv_heads * D, shapes.num_kv_heads * D)
    for in_size, widths in ((C, qkv), (shapes.intermediate_size, (C,))):
        a = torch.randn(slots, len(widths), rank, in_size, device=device, dtype=dtype)
        b = torch.randn(slots, sum(widths), rank, device=device, dtype=dtype)
        for N in (1, 64, 4096):
            x = torch.randn(N, in_size, device=device, dtype=dtype)
            y = torch.randn(N, sum(widths), device=device, dtype=dtype)
            counts = torch.arange(N).remainder(slots).bincount(minlength=slots)
            used, ends = int((counts > 0).sum()), counts.cumsum(0, dtype=torch.int32).to(device)
            moved = x.nbytes + 2 * y.nbytes + a[:used].nbytes + b[:used].nbytes
            flops = 2 * N * rank * (len(widths) * in_size + sum(widths))
            label = f"N={N} {in_size}->{'+'.join(map(str, widths))}"
            yield Case("lora_add", label, (y, x, a, b, torch.arange(N, device=device), ends, widths), moved, flops)
