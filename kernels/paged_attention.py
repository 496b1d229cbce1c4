"""Causal grouped-query attention over the paged KV cache, for one new token per sequence or for many."""

import math
from collections.abc import Iterator
from functools import cache as cached
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from mmvllm.kernels.common.dispatch import Case, KernelShapes, runs_triton, tl, triton
from mmvllm.kernels.common.kv_cache import KVCache, QuantizedKVCache, kv_cache_dtypes, values_and_scales
from mmvllm.kernels.packed_attention import (
    LOG2_E,
    attend,
    attention_torch,
    empty_state,
    head_pieces,
    load_rows,
    store_rows,
    tile_sizes,
)

MIN_TILES = 2  # minimum number of key tiles in a split; combining shorter splits costs more than it saves; not tuned
MAX_SPLITS = 32  # one program combines the results of all splits; not tuned
PAGED_STAGES = 5  # a key's address depends on a block-table load: 5 stages keep two tiles in flight


def paged_attention(
    q: Tensor,
    k_cache: KVCache,
    v_cache: KVCache,
    cu_seqlens_q: Tensor,
    kv_lens: Tensor,
    block_table: Tensor,
    max_query_len: int,
    num_decodes: int = 0,
) -> Tensor:
    """Return attention (N, H, D) of q (N, H, D) over each sequence's cached keys and values.

    A sequence's queries are its last tokens: query i of n sees keys up to kv_len - n + i. q may be strided except in
    its last dimension; the caches (num_blocks, block_size, K, D) are contiguous, in q's dtype or quantized;
    cu_seqlens_q (S + 1,), kv_lens (S,) and block_table (S, max_blocks) are int32. No sequence has more queries than
    max_query_len. The first num_decodes sequences have one query each. Others may have one too, but run fastest if
    num_decodes includes all or none.
    """
    attention = paged_attention_triton if runs_triton(q) else paged_attention_torch
    return attention(q, k_cache, v_cache, cu_seqlens_q, kv_lens, block_table, max_query_len, num_decodes)


def paged_attention_torch(
    q: Tensor,
    k_cache: KVCache,
    v_cache: KVCache,
    cu_seqlens_q: Tensor,
    kv_lens: Tensor,
    block_table: Tensor,
    max_query_len: int,
    num_decodes: int = 0,
) -> Tensor:
    """Compute the reference for `paged_attention`.

    Single-query sequences are batched by similar context length, others run one by one. Single queries are found by
    their lengths, so `num_decodes` has no effect.
    """
    starts, lens = cu_seqlens_q.tolist(), kv_lens.tolist()
    single: dict[int, list[int]] = {}  # by the bit length of their contexts, which limits padding to half
    for s, kv_len in enumerate(lens):
        if starts[s + 1] - starts[s] == 1:
            single.setdefault(kv_len.bit_length(), []).append(s)
    if len(single) == 1 and max_query_len == 1:
        return _decode_torch(q, k_cache, v_cache, kv_lens, block_table)
    out = q.new_empty(q.shape)
    for group in single.values():
        rows = [starts[s] for s in group]
        out[rows] = _decode_torch(q[rows], k_cache, v_cache, kv_lens[group], block_table[group])
    for s, kv_len in enumerate(lens):
        own = slice(starts[s], starts[s + 1])
        if own.stop - own.start > 1:
            blocks = block_table[s : s + 1, : -(-kv_len // k_cache.shape[1])]
            k, v = (_gather(cache, blocks, q.dtype)[0, :, :kv_len] for cache in (k_cache, v_cache))
            out[own] = attention_torch(q[own].transpose(0, 1), k, v, causal=True).transpose(0, 1)
    return out


def _decode_torch(q: Tensor, k_cache: KVCache, v_cache: KVCache, kv_lens: Tensor, block_table: Tensor) -> Tensor:
    """Return attention of one query per sequence (S, H, D), padded to the longest context."""
    (S, H, D), (_, block_size, K, _) = q.shape, k_cache.shape
    lens = kv_lens.tolist()
    longest = max(lens)
    blocks = block_table[:, : -(-longest // block_size)]
    k, v = (_gather(cache, blocks, q.dtype)[:, :, :longest] for cache in (k_cache, v_cache))  # (S, K, longest, D)
    mask = None
    if min(lens) < longest:
        mask = torch.zeros(S, 1, H // K, longest, dtype=q.dtype, device=q.device)
        for s, kv_len in enumerate(lens):
            # Stale KV beyond a context can contain NaN, which masking does not remove: 0 * NaN is NaN.
            k[s, :, kv_len:] = 0
            v[s, :, kv_len:] = 0
            mask[s, ..., kv_len:] = float("-inf")
    # Heads that share a KV head become its queries, so no key is read twice.
    return F.scaled_dot_product_attention(q.view(S, K, H // K, D), k, v, attn_mask=mask).reshape(S, H, D)


def _gather(cache: KVCache, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """Return cached keys or values of blocks (S, B) of S sequences: (S, K, B * block_size, D), a view of a copy."""
    if isinstance(cache, QuantizedKVCache):
        rows = cache.blocks(blocks.flatten(), dtype)
    else:
        rows = cache.index_select(0, blocks.flatten())  # 5 times as fast as cache[blocks] on a CPU
    return rows.view(len(blocks), -1, *cache.shape[2:]).transpose(1, 2)


def paged_attention_triton(
    q: Tensor,
    k_cache: KVCache,
    v_cache: KVCache,
    cu_seqlens_q: Tensor,
    kv_lens: Tensor,
    block_table: Tensor,
    max_query_len: int,
    num_decodes: int = 0,
) -> Tensor:
    """Compute `paged_attention` in two kernels, one for single queries; a graph capture must not be its first call."""
    S, out = len(kv_lens), q.new_empty(q.shape)
    num_decodes = S if max_query_len == 1 else num_decodes
    if num_decodes:
        _decode(q, k_cache, v_cache, out, kv_lens, block_table, num_decodes)
    if num_decodes < S:
        others = (x[num_decodes:] for x in (cu_seqlens_q, kv_lens, block_table))
        _prefill(q, k_cache, v_cache, out, *others, len(q) - num_decodes)
    return out


def _prefill(
    q: Tensor,
    k_cache: KVCache,
    v_cache: KVCache,
    out: Tensor,
    cu_seqlens_q: Tensor,
    kv_lens: Tensor,
    block_table: Tensor,
    num_queries: int,
) -> None:
    """Write the rows of `out` from cu_seqlens_q[0] on; earlier rows of q and out belong to other sequences."""
    (_, H, D), (_, block_size, K, _), S = q.shape, k_cache.shape, len(kv_lens)
    block_m, block_n, num_warps = tile_sizes(D, q.dtype)
    if isinstance(k_cache, QuantizedKVCache):
        block_n = max(16, block_n // 2)  # quantized values become operands in registers, which have no room for more
    block_m = max(block_m, triton.next_power_of_2(H // K))
    block_q = block_m // (H // K)
    _paged_attention_kernel[(num_queries // block_q + S, K)](
        *(q, *values_and_scales(k_cache), *values_and_scales(v_cache), out, cu_seqlens_q, kv_lens, block_table),
        *(S, block_table.stride(0), q.stride(0), q.stride(1), LOG2_E / math.sqrt(D)),
        *(H, K, D, *head_pieces(D), block_size, block_q, block_m, block_n),
        num_warps=num_warps,
        num_stages=PAGED_STAGES,
        enable_fp_fusion=True,  # see `attend`
    )


def _decode(
    q: Tensor, k_cache: KVCache, v_cache: KVCache, out: Tensor, kv_lens: Tensor, block_table: Tensor, S: int
) -> None:
    """Write the first S rows of `out`, for the first S sequences, which have one query each."""
    (_, H, D), (_, block_size, K, _) = q.shape, k_cache.shape
    block_n = decode_block_n(D, q.dtype)
    splits = num_splits(S * K, block_table.shape[1] * block_size, block_n, q.device)
    parts = q.new_empty(S, K, splits, H // K, D, dtype=torch.float32)
    part_weights = q.new_empty(S, K, splits, H // K, dtype=torch.float32)
    done = done_counts(triton.next_power_of_2(max(S * K, 1024)), q.device)
    _paged_attention_decode_kernel[(S, K, splits)](
        *(q, *values_and_scales(k_cache), *values_and_scales(v_cache)),
        *(out, kv_lens, block_table, parts, part_weights, done),
        *(block_table.stride(0), q.stride(0), q.stride(1), LOG2_E / math.sqrt(D)),
        *(H, K, D, *head_pieces(D), triton.next_power_of_2(D), block_size),
        *(max(16, triton.next_power_of_2(H // K)), block_n, MIN_TILES),
        num_warps=4,
        num_stages=PAGED_STAGES,
        enable_fp_fusion=True,
    )


def decode_block_n(head_dim: int, dtype: torch.dtype) -> int:
    """Return the keys per tile: at most 64 keys and 16 KiB, but no fewer than the 16 that tl.dot needs."""
    return max(16, min(64, 1 << (16384 // (head_dim * dtype.itemsize)).bit_length() - 1))


def num_splits(groups: int, max_context: int, block_n: int, device: torch.device) -> int:
    """Return the number of splits of each of `groups` contexts, such that two programs run on every multiprocessor.

    It depends only on values that are fixed in a CUDA graph, not on current context lengths.
    """
    useful = triton.cdiv(max_context, MIN_TILES * block_n)
    return min(triton.cdiv(2 * _multiprocessors(device), groups), useful, MAX_SPLITS)


@cached
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 16


@cached
def done_counts(number: int, device: torch.device) -> Tensor:
    """Return zeros (number,) int32, one per sequence and KV head; each kernel resets them for the next one."""
    return torch.zeros(number, dtype=torch.int32, device=device)


@triton.jit
def _heads_at(blocks, key, exists, K: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Return the offset of the first of K heads in each key's slot, for the sequence's block-table row `blocks`."""
    block = tl.load(blocks + key // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
    return (block * BLOCK_SIZE + key % BLOCK_SIZE) * K


@triton.jit
def _load_scales(scales, heads, exists):
    """Load the scales (BLOCK_N,) of these heads; None for an unquantized cache."""
    if scales is None:
        return None
    else:
        return tl.load(scales + heads, mask=exists, other=0.0)


# Values that change between steps are not specialized: Triton would compile variants for 1, for multiples of 16 and for
# others, while requests wait.
@triton.jit(
    do_not_specialize=["num_seqs", "max_blocks"],
    do_not_specialize_on_alignment=["cu_seqlens_q", "kv_lens", "block_table"],  # views that begin at any sequence
)
def _paged_attention_kernel(
    q,
    k_cache,
    k_scales,
    v_cache,
    v_scales,
    out,
    cu_seqlens_q,
    kv_lens,
    block_table,
    num_seqs,
    max_blocks,
    q_token_stride,
    q_head_stride,
    scale,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    D_MAIN: tl.constexpr,
    D_TAIL: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Any number of queries per sequence; a tile's rows are BLOCK_Q queries times the heads of one KV head.

    This follows vLLM's unified attention (vllm/attention/ops/triton_unified_attention.py, arXiv 2511.11581).
    """
    GROUP: tl.constexpr = H // K
    kv_head = tl.program_id(1)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the last queries attend to the most keys, so they start first
    # Sequence s has the tiles from (cu_seqlens_q[s] - base) // BLOCK_Q + s on, possibly one more than it needs.
    base = tl.load(cu_seqlens_q)
    low, high = 0, num_seqs
    while low < high:
        middle = (low + high) // 2
        if (tl.load(cu_seqlens_q + middle) - base) // BLOCK_Q + middle <= tile:
            low = middle + 1
        else:
            high = middle
    sequence = low - 1
    begin = tl.load(cu_seqlens_q + sequence)
    query_len = tl.load(cu_seqlens_q + sequence + 1) - begin
    first = (tile - (begin - base) // BLOCK_Q - sequence) * BLOCK_Q
    if first >= query_len:
        return

    row = tl.arange(0, BLOCK_M)
    query = first + row // GROUP  # in the sequence
    exists = (query < query_len) & (row < BLOCK_Q * GROUP)
    head = kv_head * GROUP + row % GROUP
    token = (begin + query).to(tl.int64)
    q_main, q_tail = load_rows(q + token * q_token_stride + head * q_head_stride, exists, D, D_MAIN, D_TAIL)
    context = tl.load(kv_lens + sequence) - query_len  # keys visible to every query of the sequence
    unseen = context + query + 1  # (BLOCK_M,) the first key that is masked for a row
    end = context + tl.minimum(first + BLOCK_Q, query_len)
    blocks = block_table + sequence * max_blocks
    acc, acc_tail, top, total = empty_state(BLOCK_M, D_MAIN, D_TAIL)
    for start in range(0, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        key_exists, visible = key < end, key[None, :] < unseen[:, None]
        heads = _heads_at(blocks, key, key_exists, K, BLOCK_SIZE) + kv_head
        k_rows, v_rows = k_cache + heads * D, v_cache + heads * D
        k_scale, v_scale = _load_scales(k_scales, heads, key_exists), _load_scales(v_scales, heads, key_exists)
        acc, acc_tail, top, total = attend(
            q_main, q_tail, k_rows, v_rows, key_exists, visible, acc, acc_tail, top, total, scale, D, k_scale, v_scale
        )
    acc, acc_tail = acc / total[:, None], acc_tail / total[:, None]
    store_rows(out + (token * H + head) * D, exists, acc, acc_tail, D, D_MAIN, D_TAIL)


@triton.jit(do_not_specialize=["max_blocks"], do_not_specialize_on_alignment=["kv_lens", "block_table"])
def _paged_attention_decode_kernel(
    q,
    k_cache,
    k_scales,
    v_cache,
    v_scales,
    out,
    kv_lens,
    block_table,
    parts,
    part_weights,
    done,
    max_blocks,
    q_token_stride,
    q_head_stride,
    scale,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    D_MAIN: tl.constexpr,
    D_TAIL: tl.constexpr,
    D_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_TILES: tl.constexpr,
):
    """One query per sequence; a program takes the heads of one KV head over one split of the context (flash-decoding).

    The last program of a KV head to finish combines the splits, as in Stream-K (arXiv 2301.03598), which avoids a
    second kernel. Splits consist of whole tiles; splits beyond the end of a short context return at once.
    """
    GROUP: tl.constexpr = H // K
    sequence, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_len = tl.load(kv_lens + sequence)
    tiles = tl.cdiv(kv_len, BLOCK_N)
    split_tiles = tl.maximum(tl.cdiv(tiles, tl.num_programs(2)), MIN_TILES)
    splits = tl.maximum(tl.cdiv(tiles, split_tiles), 1)
    if split >= splits:
        return

    row = tl.arange(0, ROWS)
    head = kv_head * GROUP + row
    q_rows = q + sequence.to(tl.int64) * q_token_stride + head * q_head_stride
    q_main, q_tail = load_rows(q_rows, row < GROUP, D, D_MAIN, D_TAIL)
    blocks = block_table + sequence * max_blocks
    acc, acc_tail, top, total = empty_state(ROWS, D_MAIN, D_TAIL)
    end = tl.minimum((split + 1) * split_tiles * BLOCK_N, kv_len)
    for start in range(split * split_tiles * BLOCK_N, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        exists = key < end
        heads = _heads_at(blocks, key, exists, K, BLOCK_SIZE) + kv_head
        k_rows, v_rows = k_cache + heads * D, v_cache + heads * D
        k_scale, v_scale = _load_scales(k_scales, heads, exists), _load_scales(v_scales, heads, exists)
        acc, acc_tail, top, total = attend(
            q_main,
            q_tail,
            k_rows,
            v_rows,
            exists,
            exists[None, :],
            acc,
            acc_tail,
            top,
            total,
            scale,
            D,
            k_scale,
            v_scale,
        )
    total = tl.where(total > 0, total, 1.0)  # a padding row of a CUDA graph may have no keys
    acc, acc_tail = acc / total[:, None], acc_tail / total[:, None]
    out_rows = out + (sequence * H + head) * D
    if splits == 1:
        store_rows(out_rows, row < GROUP, acc, acc_tail, D, D_MAIN, D_TAIL)
    else:
        group = sequence * K + kv_head
        part_rows = group * tl.num_programs(2) * GROUP + row  # of split 0
        part_row = part_rows + split * GROUP
        store_rows(parts + part_row * D, row < GROUP, acc, acc_tail, D, D_MAIN, D_TAIL)
        tl.store(part_weights + part_row, top + tl.log2(total), mask=row < GROUP)
        tl.debug_barrier()  # one thread increments the count, after all threads have stored
        if tl.atomic_add(done + group, 1, sem="acq_rel") == splits - 1:
            _combine(out_rows, parts, part_weights, part_rows, row, splits, GROUP, D, D_PADDED, ROWS)
            tl.store(done + group, 0)


@triton.jit
def _combine(
    out_rows,
    parts,
    part_weights,
    part_rows,
    row,
    splits,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Store the mean of the splits' results, weighted by their base-2 log-sum-exps."""
    column = tl.arange(0, D_PADDED)
    exists = (row < GROUP)[:, None] & (column < D)[None, :]
    acc = tl.zeros((ROWS, D_PADDED), tl.float32)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for split in tl.range(0, splits, num_stages=4):
        part_row = part_rows + split * GROUP
        weight = tl.load(part_weights + part_row, mask=row < GROUP, other=0.0)
        part = tl.load(parts + part_row[:, None] * D + column[None, :], mask=exists, other=0.0)
        new_top = tl.maximum(top, weight)
        decay, weight = tl.exp2(top - new_top), tl.exp2(weight - new_top)
        acc = acc * decay[:, None] + part * weight[:, None]
        total = total * decay + weight
        top = new_top
    tl.store(out_rows[:, None] + column[None, :], acc / total[:, None], mask=exists)


def cases(shapes: KernelShapes, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Yield one decoding sequence, 64 of them, and a whole prompt, in blocks of 16, also with 8-bit keys and values."""
    H, K, D = shapes.num_heads, shapes.num_kv_heads, shapes.head_dim
    steps = ((1, 1, 4096), (64, 1, 1024), (1, 1024, 1024))
    for (S, query_len, kv_len), kv_dtype in product(steps, (dtype, *kv_cache_dtypes(device))):
        blocks = kv_len // 16
        cache = torch.randn(2, S * blocks, 16, K, D, device=device, dtype=dtype)
        if kv_dtype != dtype:
            cache = [QuantizedKVCache.of(x, kv_dtype) for x in cache]
        seen = S * (query_len * (kv_len - query_len) + query_len * (query_len + 1) // 2)  # (query, key) pairs
        stored = "" if kv_dtype == dtype else f" {kv_dtype}".replace("torch.", "")
        yield Case(
            "paged_attention",
            label=f"S={S} queries={query_len} keys={kv_len} H={H} K={K} D={D}{stored}",
            args=(
                torch.randn(S * query_len, H, D, device=device, dtype=dtype),
                *cache,
                torch.arange(0, (S + 1) * query_len, query_len, dtype=torch.int32, device=device),
                torch.full((S,), kv_len, dtype=torch.int32, device=device),
                torch.randperm(S * blocks, device=device).to(torch.int32).view(S, blocks),
                query_len,
            ),
            bytes=2 * S * query_len * H * D * dtype.itemsize + sum(x.nbytes for x in cache),
            flops=4 * H * D * seen,
        )
