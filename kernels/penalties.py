"""Repetition (arXiv 1909.05858), presence and frequency penalties from counts of tokens that stay on the device.

Counts are int16, one row of the vocabulary per sequence with penalties: the sign bit says that a token occurs in the
prompt, the other bits how often it occurs in the completion, at most 32767 times.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from mmvllm.kernels.common.dispatch import Case, KernelShapes, runs_triton, tl, triton
from mmvllm.kernels.common.row_params import ROW_PARAMS, column, load_float, packed


def penalize(logits: Tensor, counts: Tensor, params: Tensor, rows: Tensor) -> Tensor:
    """Return penalized logits (R, V) float32, in new memory.

    `counts` (C, V) int16 are indexed by `counts_row`; sequence r has row `rows[r]` (int32) of `params` (N, 12) int32.
    Sequences without penalties have neutral parameters.
    """
    assert logits.stride(1) == 1 and params.is_contiguous() and counts.is_contiguous()
    return (penalize_triton if runs_triton(logits) else penalize_torch)(logits, counts, params, rows)


def count_tokens(counts: Tensor, params: Tensor, rows: Tensor, token_ids: Tensor) -> None:
    """Count one token (R,) int64 in [0, V) per sequence in its completion; sequences may share only row 0."""
    (count_tokens_triton if runs_triton(counts) else count_tokens_torch)(counts, params, rows, token_ids)


def penalize_torch(logits: Tensor, counts: Tensor, params: Tensor, rows: Tensor) -> Tensor:
    params = params.index_select(0, rows)
    counts = counts.index_select(0, column(params, "counts_row").squeeze(1))  # (R, V)
    # Products with a mask of 0 and 1 in float32 take a fifth of the time of `where` on a CPU.
    occurs = counts.float().ne_(0.0)
    factor = torch.lerp(torch.ones_like(occurs), column(params, "repetition_penalty"), occurs)
    number = counts.bitwise_and_(0x7FFF).float()  # in the completion
    minus = number * column(params, "frequency_penalty")
    minus.addcmul_(number.clamp_(max=1.0), column(params, "presence_penalty"))
    logits = logits.float()
    return (logits.clamp(min=0.0) / factor).addcmul_(logits.clamp(max=0.0), factor).sub_(minus)


def count_tokens_torch(counts: Tensor, params: Tensor, rows: Tensor, token_ids: Tensor) -> None:
    at = column(params.index_select(0, rows), "counts_row").squeeze(1).long() * counts.shape[1] + token_ids
    flat = counts.view(-1)
    old = flat.index_select(0, at)
    flat.index_copy_(0, at, old + ((old & 0x7FFF) < 0x7FFF))


def penalize_triton(logits: Tensor, counts: Tensor, params: Tensor, rows: Tensor, block: int = 4096) -> Tensor:
    """Launch the kernel; a program takes `block` logits, a power of two."""
    R, V = logits.shape
    out = torch.empty(R, V, dtype=torch.float32, device=logits.device)
    # 8 logits per thread: two 16-byte loads of float32; not tuned.
    _penalize_kernel[(triton.cdiv(V, block), R)](
        *(logits, counts, params, rows, out, logits.stride(0)),
        **{"V": V, "BLOCK": block},
        num_warps=16,
        enable_fp_fusion=False,  # products are rounded before they are subtracted, as in the reference
    )
    return out


def count_tokens_triton(counts: Tensor, params: Tensor, rows: Tensor, token_ids: Tensor) -> None:
    sizes = {"V": counts.shape[1], "num_warps": 1, "enable_fp_fusion": False}
    _count_tokens_kernel[(len(rows),)](counts, params, rows, token_ids, **sizes)


@triton.jit
def _penalize_kernel(
    logits_ptr, counts_ptr, params_ptr, rows_ptr, out_ptr, row_stride, V: tl.constexpr, BLOCK: tl.constexpr
):
    """One program per block of a row."""
    row = tl.program_id(1)
    params_ptr += tl.load(rows_ptr + row) * 12
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < V
    x = tl.load(logits_ptr + row.to(tl.int64) * row_stride + at, mask=mask, other=0.0).to(tl.float32)
    counts_row = tl.load(params_ptr + 7)
    if counts_row > 0:
        count = tl.load(counts_ptr + counts_row.to(tl.int64) * V + at, mask=mask, other=0).to(tl.int32)
        factor = tl.where(count != 0, load_float(params_ptr, 8), 1.0)
        number = (count & 0x7FFF).to(tl.float32)
        minus = number * load_float(params_ptr, 10) + tl.minimum(number, 1.0) * load_float(params_ptr, 9)
        x = tl.where(x > 0, tl.div_rn(x, factor), x * factor) - minus
    tl.store(out_ptr + row.to(tl.int64) * V + at, x, mask=mask)


@triton.jit
def _count_tokens_kernel(counts_ptr, params_ptr, rows_ptr, ids_ptr, V: tl.constexpr):
    """One program per sequence."""
    row = tl.program_id(0)
    counts_row = tl.load(params_ptr + tl.load(rows_ptr + row) * 12 + 7)
    if counts_row > 0:
        count_ptr = counts_ptr + counts_row.to(tl.int64) * V + tl.load(ids_ptr + row)
        count = tl.load(count_ptr)
        tl.store(count_ptr, tl.where((count & 0x7FFF) < 0x7FFF, count + 1, count))


def cases(shapes: KernelShapes, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Yield cases with float32 logits for every dtype."""
    V = shapes.vocab_size
    for R in (1, 8, 64):
        params = np.zeros(R, ROW_PARAMS)
        params["counts_row"] = np.arange(1, R + 1)
        params["repetition_penalty"], params["frequency_penalty"] = 1.1, 0.1
        on_device, logits = packed(params).to(device), 3 * torch.randn(R, V, device=device)
        counts = torch.randint(-2, 3, (R + 1, V), dtype=torch.int16, device=device)
        rows = torch.arange(R, dtype=torch.int32, device=device)
        label = f"R={R} V={V}"
        yield Case("penalize", label, (logits, counts, on_device, rows), 2 * logits.nbytes + counts[1:].nbytes)
        yield Case("count_tokens", label, (counts, on_device, rows, logits.argmax(-1)), 4 * R)
