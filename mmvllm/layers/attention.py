"""Attention over packed sequences: the decoder's over the paged KV cache, the ViT's within each picture.

Every function has a plain torch path, which runs anywhere and is the reference, and uses flash-attn where that is
installed and fits. `flash_unusable` says why it does not.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from mmvllm.engine.batch import Batch

FLASH_BLOCK_SIZE = 256  # flash-attn 2 reads paged KV in blocks of a multiple of this


@cache
def flash_unusable(
    device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int | None = None
) -> str | None:
    """Why flash-attn cannot be used here, or None if it can; `block_size` is None where there is no KV cache."""
    if device.type != "cuda":
        return f"needs a CUDA device, this is {device.type}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "needs a GPU of compute capability 8.0 or above"
    try:
        from flash_attn import flash_attn_varlen_func  # noqa: F401
    except ImportError as error:
        return f"flash-attn cannot be imported ({error}); pip install 'mmvllm[flash]'"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"needs float16 or bfloat16, the model runs in {dtype}"
    if head_dim > 256 or head_dim % 8:
        return f"needs a head size that is a multiple of 8 up to 256, this is {head_dim}"
    if block_size is not None and block_size % FLASH_BLOCK_SIZE:
        return f"needs kvcache_block_size to be a multiple of {FLASH_BLOCK_SIZE}, it is {block_size}"
    return None


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write k and v (N, K, D) to their slots of the caches (num_blocks, block_size, K, D), in place."""
    k_cache.view(-1, *k.shape[1:]).index_copy_(0, slot_mapping, k)
    v_cache.view(-1, *v.shape[1:]).index_copy_(0, slot_mapping, v)


def paged_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch) -> Tensor:
    """Causal grouped-query attention of q (N, H, D) over each sequence's cached keys and values -> (N, H, D).

    A sequence's queries are its last ones: query i of n sees keys up to kv_len - n + i.
    """
    if flash_unusable(q.device, q.dtype, q.shape[-1], k_cache.shape[1]) is None:
        from flash_attn import flash_attn_varlen_func

        return flash_attn_varlen_func(
            q,
            k_cache,
            v_cache,
            cu_seqlens_q=batch.cu_seqlens_q,
            cu_seqlens_k=F.pad(batch.kv_lens.cumsum(0, dtype=torch.int32), (1, 0)),
            max_seqlen_q=max(batch.query_lens),
            max_seqlen_k=max(batch.context_lens),
            causal=True,
            block_table=batch.block_table,
        )
    block_size, out, start = k_cache.shape[1], torch.empty_like(q), 0
    for s, (query_len, kv_len) in enumerate(zip(batch.query_lens, batch.context_lens, strict=True)):
        blocks = batch.block_table[s, : -(-kv_len // block_size)]
        k = k_cache[blocks].flatten(0, 1)[:kv_len]  # (kv_len, K, D)
        v = v_cache[blocks].flatten(0, 1)[:kv_len]
        out[start : start + query_len] = _causal_attention(q[start : start + query_len], k, v)
        start += query_len
    return out


def _causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    (n, H, D), (T, K, _) = q.shape, k.shape
    k, v = k.transpose(0, 1), v.transpose(0, 1)  # (K, T, D)
    # Four dimensions, though the first is 1: with three, torch does not take its fused kernels.
    if n == 1:  # the heads that share a KV head are its queries, and all see all keys
        return F.scaled_dot_product_attention(q.view(1, K, H // K, D), k[None], v[None]).reshape(1, H, D)
    k, v = (x.repeat_interleave(H // K, dim=0)[None] for x in (k, v))  # (1, H, T, D)
    mask = None if n == T else torch.ones(n, T, dtype=torch.bool, device=q.device).tril(T - n)
    out = F.scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, attn_mask=mask, is_causal=mask is None)
    return out[0].transpose(0, 1)


def packed_attention(q: Tensor, k: Tensor, v: Tensor, segment_lens: list[int]) -> Tensor:
    """Full attention of q, k, v (P, H, D) within each segment of the given lengths -> (P, H, D)."""
    if flash_unusable(q.device, q.dtype, q.shape[-1]) is None:
        from flash_attn import flash_attn_varlen_func

        lens = torch.tensor(segment_lens, dtype=torch.int32, device=q.device)
        cu_seqlens = F.pad(lens.cumsum(0, dtype=torch.int32), (1, 0))
        longest = max(segment_lens)
        return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, longest, longest)
    out = torch.empty_like(q)
    segments = zip(*(x.split(segment_lens) for x in (q, k, v, out)), strict=True)
    for q_part, k_part, v_part, out_part in segments:
        attended = F.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in (q_part, k_part, v_part)))
        out_part.copy_(attended[0].transpose(0, 1))
    return out
