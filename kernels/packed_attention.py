"""Attention within segments of packed rows, such as a ViT's images, and functions that all attention kernels use."""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from mmvllm.kernels.common.dispatch import Case, KernelShapes, multiplies_float32_faster, runs_triton, tl, triton

LOG2_E = math.log2(math.e)  # scales the scores for exp2, which is a single instruction, unlike exp


def packed_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """Return full attention (P, H, D) of q, k, v (P, H, D) within segments [cu_seqlens[i], cu_seqlens[i + 1]).

    q, k and v may be strided except in their last dimension; cu_seqlens is (segments + 1,) int32. No segment is longer
    than max_seqlen, and some may be empty.
    """
    attention = packed_attention_triton if runs_triton(q) else packed_attention_torch
    return attention(q, k, v, cu_seqlens, max_seqlen)


def packed_attention_torch(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """Compute the reference for `packed_attention`, one segment after another."""
    out = q.new_empty(q.shape)
    segment_lens = [length for length in cu_seqlens.diff().tolist() if length]
    segments = zip(*(x.split(segment_lens) for x in (q, k, v, out)), strict=True)
    for q_part, k_part, v_part, out_part in segments:
        heads_first = (x.transpose(0, 1) for x in (q_part, k_part, v_part))
        out_part.copy_(attention_torch(*heads_first, causal=False).transpose(0, 1))
    return out


def attention_torch(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Return grouped-query attention (H, n, D) of a sequence's last queries q (H, n, D) over k and v (K, T, D)."""
    (H, n, _), (K, T, _) = q.shape, k.shape
    if q.dtype == torch.bfloat16 and q.device.type == "cpu":
        if H == K and not causal and multiplies_float32_faster():
            wide = (x.float()[None] for x in (q, k, v))
            return F.scaled_dot_product_attention(*wide)[0].to(q.dtype)
        return _attention_by_tiles(q.contiguous(), k.contiguous(), v.contiguous(), causal)
    if H != K:
        k, v = (x.repeat_interleave(H // K, dim=0) for x in (k, v))
    mask = torch.ones(n, T, dtype=torch.bool, device=q.device).tril(T - n) if causal and n != T else None
    # Four dimensions, although the first is 1: with three, torch does not use its fused kernels.
    q, k, v = (x[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal and mask is None)[0]


def _attention_by_tiles(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Compute attention by tiles of scores that fit a core's cache (1 MiB), for bfloat16 on a CPU.

    This is 1.3 to 1.8 times as fast as torch's fused attention (AVX512-BF16, 2 cores; heads of 80 and 128, 256 to 4096
    keys). Scores are rounded to bfloat16, as in the textbook formula. An offset common to all keys, such as a bias,
    makes scores large and their rounding coarse. It does not change the softmax, so the mean key is subtracted first,
    as in SageAttention (arXiv 2410.02367).
    """
    (H, n, D), (K, T, _) = q.shape, k.shape
    k = k - k.float().mean(dim=1, keepdim=True).to(k.dtype)
    group, out = H // K, torch.empty_like(q)
    rows = max(32, min(n, 2**19 // (group * T)))
    heads = max(1, torch.get_num_threads() * 2**19 // (group * rows * T))
    q_groups, out_groups = q.view(K, group, n, D), out.view(K, group, n, D)
    zero = q.new_zeros(())
    for first in range(0, K, heads):
        some = slice(first, min(K, first + heads))
        for start in range(0, n, rows):
            end = min(n, start + rows)
            seen = T - n + end if causal else T
            tile = q_groups[some, :, start:end].flatten(1, 2)  # (heads, group * rows, D)
            scores = torch.baddbmm(zero, tile, k[some, :seen].transpose(1, 2), beta=0, alpha=D**-0.5)
            if causal:
                future = torch.ones(end - start, end - start, dtype=torch.bool).triu(1)
                scores.unflatten(1, (group, -1))[..., seen - (end - start) :].masked_fill_(future, float("-inf"))
            torch.softmax(scores, dim=-1, out=scores)
            out_groups[some, :, start:end] = torch.bmm(scores, v[some, :seen]).unflatten(1, (group, -1))
    return out


def packed_attention_triton(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """Compute `packed_attention` in one kernel, with a program per tile of rows, head and segment."""
    (_, H, D), segments = q.shape, len(cu_seqlens) - 1
    out = q.new_empty(q.shape)
    block_m, block_n, num_warps = tile_sizes(D, q.dtype)
    _packed_attention_kernel[(triton.cdiv(max_seqlen, block_m), segments, H)](
        *(q, k, v, out, cu_seqlens),
        *(stride for x in (q, k, v) for stride in x.stride()[:2]),
        LOG2_E / math.sqrt(D),
        *(H, D, *head_pieces(D), block_m, block_n),
        num_warps=num_warps,
        num_stages=3,
        enable_fp_fusion=True,  # see `attend`
    )
    return out


def head_pieces(head_dim: int) -> tuple[int, int]:
    """Return two powers of two that cover a head: 80 = 64 + 16 is less work than 128. A power of two needs only one."""
    main = 1 << (head_dim.bit_length() - 1)
    return main, max(16, triton.next_power_of_2(head_dim - main))


def tile_sizes(head_dim: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Return query rows and keys of a tile, and its number of warps.

    Half precision uses the sizes of torch's FlexAttention for heads of 128 on A100 and H100 (torch/_inductor). The
    others are not tuned, only small enough for registers and shared memory: float32 needs twice the space and does not
    use tensor cores.
    """
    if dtype == torch.float32:
        return (32, 32, 4) if head_dim <= 128 else (16, 16, 4)
    return (128, 64, 8) if head_dim <= 128 else (64, 16, 4)


@triton.jit
def load_rows(rows, exists, D: tl.constexpr, D_MAIN: tl.constexpr, D_TAIL: tl.constexpr):
    """Load R heads at `rows` as two pieces (R, D_MAIN) and (R, D_TAIL), which are 0 where not `exists`."""
    tail_columns = D_MAIN + tl.arange(0, D_TAIL)
    main = tl.load(rows[:, None] + tl.arange(0, D_MAIN)[None, :], mask=exists[:, None], other=0.0)
    tail = tl.load(rows[:, None] + tail_columns[None, :], mask=exists[:, None] & (tail_columns < D)[None, :], other=0.0)
    return main, tail


@triton.jit
def store_rows(rows, exists, main, tail, D: tl.constexpr, D_MAIN: tl.constexpr, D_TAIL: tl.constexpr):
    """Store two pieces of heads, the inverse of `load_rows`, in the pointers' dtype."""
    tl.store(rows[:, None] + tl.arange(0, D_MAIN)[None, :], main, mask=exists[:, None])
    if D > D_MAIN:
        tail_columns = D_MAIN + tl.arange(0, D_TAIL)
        tl.store(rows[:, None] + tail_columns[None, :], tail, mask=exists[:, None] & (tail_columns < D)[None, :])


@triton.jit
def empty_state(ROWS: tl.constexpr, D_MAIN: tl.constexpr, D_TAIL: tl.constexpr):
    """Return the initial state of `attend`: value sums (ROWS, D_MAIN), (ROWS, D_TAIL), largest scores, weight sums."""
    return (
        tl.zeros((ROWS, D_MAIN), tl.float32),
        tl.zeros((ROWS, D_TAIL), tl.float32),
        tl.full((ROWS,), float("-inf"), tl.float32),
        tl.zeros((ROWS,), tl.float32),
    )


@triton.jit
def attend(
    q,
    q_tail,
    k_rows,
    v_rows,
    exists,
    visible,
    acc,
    acc_tail,
    top,
    total,
    scale,
    D: tl.constexpr,
    k_scales=None,
    v_scales=None,
):
    """Add one tile of keys and values to an online softmax in base 2 (FlashAttention-2, arXiv 2307.08691).

    q is (R, D_MAIN), q_tail (R, D_TAIL); k_rows and v_rows point to the tile's rows, of which some `exists` (BLOCK_N,).
    `visible` (1 or R, BLOCK_N) must include at least one key of the first tile for each row. Quantized rows, whose
    values any dtype of q holds exactly, have scales (BLOCK_N,): one multiplication per key instead of one per value.

    Kernels that call this are compiled with enable_fp_fusion: the exponents scores * scale - top are then rounded once,
    and the rounding of `top`, which all keys share, cancels however large the scores are.
    """
    D_MAIN: tl.constexpr = q.shape[1]
    D_TAIL: tl.constexpr = q_tail.shape[1]
    k, k_tail = load_rows(k_rows, exists, D, D_MAIN, D_TAIL)
    scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")  # (R, BLOCK_N)
    if D > D_MAIN:
        scores = tl.dot(q_tail, tl.trans(k_tail.to(q.dtype)), scores, input_precision="ieee")
    if k_scales is not None:
        scores *= k_scales[None, :]
    scores = tl.where(visible, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - new_top[:, None])
    decay = tl.exp2(top - new_top)
    total = total * decay + tl.sum(weights, 1)
    v, v_tail = load_rows(v_rows, exists, D, D_MAIN, D_TAIL)
    if v_scales is not None:
        weights *= v_scales[None, :]
    weights = weights.to(q.dtype)
    acc = tl.dot(weights, v.to(q.dtype), acc * decay[:, None], input_precision="ieee")
    if D > D_MAIN:
        acc_tail = tl.dot(weights, v_tail.to(q.dtype), acc_tail * decay[:, None], input_precision="ieee")
    return acc, acc_tail, new_top, total


@triton.jit(do_not_specialize_on_alignment=["cu_seqlens"])
def _packed_attention_kernel(
    q,
    k,
    v,
    out,
    cu_seqlens,
    q_row_stride,
    q_head_stride: tl.constexpr,  # as a run-time value, only multiples of 16 are aligned, and heads of 72 are not
    k_row_stride,
    k_head_stride: tl.constexpr,
    v_row_stride,
    v_head_stride: tl.constexpr,
    scale,
    H: tl.constexpr,
    D: tl.constexpr,
    D_MAIN: tl.constexpr,
    D_TAIL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    segment, head = tl.program_id(1), tl.program_id(2)
    begin = tl.load(cu_seqlens + segment).to(tl.int64)
    length = (tl.load(cu_seqlens + segment + 1) - begin).to(tl.int32)
    first = tl.program_id(0) * BLOCK_M  # rows and keys are counted from the segment's first: 32 bits are enough
    if first >= length:
        return
    q += begin * q_row_stride + head * q_head_stride
    k += begin * k_row_stride + head * k_head_stride
    v += begin * v_row_stride + head * v_head_stride
    out += (begin * H + head) * D
    row = first + tl.arange(0, BLOCK_M)
    q_main, q_tail = load_rows(q + row * q_row_stride, row < length, D, D_MAIN, D_TAIL)
    acc, acc_tail, top, total = empty_state(BLOCK_M, D_MAIN, D_TAIL)

    # Full tiles need no mask: the compiler removes a constant one. Only the last tile can be partial.
    always = tl.full((BLOCK_N,), True, tl.int1)
    whole = length // BLOCK_N * BLOCK_N
    for start in range(0, whole, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        k_rows, v_rows = k + key * k_row_stride, v + key * v_row_stride
        acc, acc_tail, top, total = attend(
            q_main, q_tail, k_rows, v_rows, always, always[None, :], acc, acc_tail, top, total, scale, D
        )
    if whole < length:
        key = whole + tl.arange(0, BLOCK_N)
        k_rows, v_rows, exists = k + key * k_row_stride, v + key * v_row_stride, key < length
        acc, acc_tail, top, total = attend(
            q_main, q_tail, k_rows, v_rows, exists, exists[None, :], acc, acc_tail, top, total, scale, D
        )
    acc, acc_tail = acc / total[:, None], acc_tail / total[:, None]
    store_rows(out + row * (H * D), row < length, acc, acc_tail, D, D_MAIN, D_TAIL)


def cases(shapes: KernelShapes, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Yield a thumbnail, an image of 896 x 896 pixels, and sixteen packed images of 448 x 448."""
    if shapes.vision is None:
        return
    H, D = shapes.vision.num_heads, shapes.vision.head_dim
    for lens in ([64], [4096], [1024] * 16):
        P = sum(lens)
        q, k, v = torch.randn(P, 3, H, D, device=device, dtype=dtype).unbind(1)
        cu_seqlens = torch.tensor([0, *lens], device=device).cumsum(0, dtype=torch.int32)
        yield Case(
            "packed_attention",
            label=f"P={P} segments={len(lens)} H={H} D={D}",
            args=(q, k, v, cu_seqlens, max(lens)),
            bytes=4 * P * H * D * dtype.itemsize,
            flops=4 * H * D * sum(n * n for n in lens),
        )
