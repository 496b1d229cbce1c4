"""Scatter new keys and values into the paged KV cache."""

from collections.abc import Iterator

import torch
from torch import Tensor

from mmvllm.kernels.common.dispatch import Case, KernelShapes, runs_triton, tl, triton
from mmvllm.kernels.common.kv_cache import KVCache, QuantizedKVCache


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write k and v (N, K, D) to their slots of the caches (num_blocks, block_size, K, D), in place.

    slot_mapping (N,) int64 has unique slots, block * block_size + offset. k and v may be views with a contiguous last
    dimension; the caches are contiguous.
    """
    assert k.stride(2) == v.stride(2) == 1 and k_cache.is_contiguous() and v_cache.is_contiguous()
    write = write_kv_triton if runs_triton(k) else write_kv_torch
    write(k, v, k_cache, v_cache, slot_mapping)


def write_kv_torch(k: Tensor, v: Tensor, k_cache: KVCache, v_cache: KVCache, slot_mapping: Tensor) -> None:
    """Compute the reference for `write_kv`; caches may also be quantized."""
    for x, cache in ((k, k_cache), (v, v_cache)):
        if isinstance(cache, QuantizedKVCache):
            cache.write(slot_mapping, x)
        else:
            cache.view(-1, *x.shape[1:]).index_copy_(0, slot_mapping, x)


def write_kv_triton(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    N, K, D = k.shape
    strides = (*k.stride()[:2], *v.stride()[:2])
    block = triton.next_power_of_2(K * D)
    num_warps = min(8, max(1, block // 256))  # 8 values per thread, 16 bytes of a 16-bit dtype; not tuned
    _write_kv_kernel[(N,)](
        *(k, v, k_cache, v_cache, slot_mapping, *strides),
        **{"K": K, "D": D, "BLOCK": block},
        num_warps=num_warps,
        enable_fp_fusion=False,
    )


@triton.jit(do_not_specialize_on_alignment=["slot_ptr"])  # may be a view at any token
def _write_kv_kernel(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slot_ptr,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    K: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per token."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < K * D
    head, dim = at // D, at % D
    slot = tl.load(slot_ptr + token)  # int64: a cache has more than 2**31 values
    # The compiler moves no load above a store: with all loads first, their latencies overlap.
    k = tl.load(k_ptr + token * k_token_stride + head * k_head_stride + dim, mask=mask)
    v = tl.load(v_ptr + token * v_token_stride + head * v_head_stride + dim, mask=mask)
    tl.store(k_cache_ptr + slot * (K * D) + at, k, mask=mask)
    tl.store(v_cache_ptr + slot * (K * D) + at, v, mask=mask)


def cases(shapes: KernelShapes, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    K, D, block_size = shapes.num_kv_heads, shapes.head_dim, 16
    for N in (1, 64, 1024, 4096):
        k, v = torch.randn(2, N, K, D, device=device, dtype=dtype)
        k_cache, v_cache = torch.zeros(2, N // block_size + 1, block_size, K, D, device=device, dtype=dtype)
        slots = torch.randperm(N, device=device)
        moved = 4 * N * K * D * dtype.itemsize + N * slots.itemsize
        yield Case("write_kv", f"N={N} K={K} D={D}", (k, v, k_cache, v_cache, slots), moved)
