"""Linear layers with one weight per group of rows, such as the experts of a mixture."""

import sys
from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from mmvllm.kernels.common.dispatch import Case, KernelShapes, runs_triton, tl, triton


def grouped_linear(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Return x Wᵀ (N, out) for x (N, in) sorted by group, weight (E, out, in) and the ends of groups (E,) int32.

    x and weight are contiguous; rows after the last offset are not written. On CUDA, nothing is read on the host, so a
    CUDA graph can capture the call. torch's CUTLASS kernel runs if `runs_grouped_mm`, otherwise the Triton kernel.
    """
    assert x.is_contiguous() and weight.is_contiguous() and x.shape[1] == weight.shape[2]
    assert offsets.shape == weight.shape[:1] and offsets.dtype == torch.int32
    if not runs_triton(x):
        return grouped_linear_torch(x, weight, offsets)
    if runs_grouped_mm(x, weight):
        return F.grouped_mm(x, weight.transpose(1, 2), offs=offsets)
    return grouped_linear_triton(x, weight, offsets)


def runs_grouped_mm(x: Tensor, weight: Tensor) -> bool:
    """Return whether torch.nn.functional.grouped_mm exists (torch 2.10) and has a CUTLASS kernel for this case.

    That needs bfloat16, compute capability 9.0, Linux, fewer than 1024 groups, and rows and addresses that are
    multiples of 16 bytes. On GPUs up to 8.x, torch loops over the groups and reads the offsets on the host; on
    capability 10.x, its kernel is reported to fail in torch before 2.13.
    """
    E, out_size, in_size = weight.shape
    return (
        hasattr(F, "grouped_mm")
        and x.is_cuda
        and torch.cuda.get_device_capability(x.device) == (9, 0)
        and sys.platform == "linux"
        and x.dtype == torch.bfloat16
        and E < 1024
        and not (out_size % 8 or in_size % 8 or x.data_ptr() % 16 or weight.data_ptr() % 16)
    )


def grouped_linear_torch(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    out = x.new_empty(len(x), weight.shape[1])
    for group, (start, end) in enumerate(pairwise([0, *offsets.tolist()])):
        if start < end:
            torch.mm(x[start:end], weight[group].T, out=out[start:end])
    return out


def grouped_linear_triton(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    (N, in_size), (E, out_size, _) = x.shape, weight.shape
    out = x.new_empty(N, out_size)
    if N == 0:
        return out
    block_m, block_n, block_k, num_warps = _tile_sizes(N, E, x.dtype)
    # Every group with rows has at most one partial tile; the number of tiles is largest if min(E, N) groups have rows.
    groups = min(E, N)
    tiles = groups + (N - groups) // block_m
    _grouped_linear_kernel[(tiles, triton.cdiv(out_size, block_n))](
        *(x, weight, out, offsets),
        *(E, triton.next_power_of_2(E), out_size, in_size, block_m, block_n, block_k),
        num_warps=num_warps,
        enable_fp_fusion=True,  # float32 products are summed on CUDA cores: each rounded once, as in cuBLAS
    )
    return out


def _tile_sizes(N: int, E: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Return a tile's rows, outputs, inputs and warps; not tuned: small if groups have few rows on average."""
    if dtype == torch.float32:  # needs twice the space and does not use tensor cores
        return 16, 64, 32, 4
    if N <= 32 * E:
        return 16, 128, 64, 4
    return (64, 128, 64, 4) if N <= 128 * E else (128, 128, 64, 8)


@triton.jit
def _grouped_linear_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    offsets_ptr,
    E: tl.constexpr,
    E_BLOCK: tl.constexpr,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program per tile of a group's rows and of outputs. Programs beyond the last tile do nothing."""
    tile = tl.program_id(0)
    group = tl.arange(0, E_BLOCK)
    ends = tl.load(offsets_ptr + group, mask=group < E, other=0)
    starts = tl.load(offsets_ptr + group - 1, mask=(group > 0) & (group < E), other=0)
    tiles = tl.cdiv(ends - starts, BLOCK_M)  # of each group; padding up to E_BLOCK has none
    last_tiles = tl.cumsum(tiles, 0)
    if tile >= tl.sum(tiles, 0):
        return
    mine = (last_tiles - tiles <= tile) & (tile < last_tiles)  # one group
    expert = tl.sum(tl.where(mine, group, 0), 0).to(tl.int64)  # int64: weights have more than 2**31 values
    end = tl.sum(tl.where(mine, ends, 0), 0)
    row = tl.sum(tl.where(mine, starts + (tile - last_tiles + tiles) * BLOCK_M, 0), 0) + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    has_row, has_column = row[:, None] < end, column[:, None] < OUT
    x_rows = x_ptr + row[:, None].to(tl.int64) * IN
    weight_rows = weight_ptr + (expert * OUT + column[:, None]) * IN
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, IN, BLOCK_K):
        at = k + tl.arange(0, BLOCK_K)[None, :]
        x = tl.load(x_rows + at, mask=has_row & (at < IN), other=0.0)
        weight = tl.load(weight_rows + at, mask=has_column & (at < IN), other=0.0)
        acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee")
    out = out_ptr + row[:, None].to(tl.int64) * OUT + column[None, :]
    tl.store(out, acc, mask=has_row & (column < OUT)[None, :])


def cases(shapes: KernelShapes, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Yield both products of the experts for 1 to 4096 tokens, which are spread evenly over the experts."""
    if shapes.experts is None:
        return
    E, k = shapes.experts.num_experts, shapes.experts.num_experts_per_tok
    C, width = shapes.hidden_size, shapes.experts.intermediate_size
    for out_size, in_size in ((2 * width, C), (C, width)):
        weight = torch.randn(E, out_size, in_size, device=device, dtype=dtype)
        for N in (1, 64, 1024, 4096):
            x = torch.randn(N * k, in_size, device=device, dtype=dtype)
            counts = torch.arange(N * k).mul(7).remainder(E).bincount(minlength=E)
            hit, offsets = int((counts > 0).sum()), counts.cumsum(0, dtype=torch.int32).to(device)
            moved = x.nbytes + N * k * out_size * x.itemsize + weight[:hit].nbytes
            label = f"N={N * k} E={E} {in_size}->{out_size}"
            yield Case("grouped_linear", label, (x, weight, offsets), moved, 2 * N * k * in_size * out_size)
