"""Rotary embedding of queries and keys, alone and fused with RMSNorm before it and the KV cache write after it."""

from collections.abc import Iterator

import torch
from torch import Tensor

from mmvllm.kernels.common.dispatch import Case, KernelShapes, runs_triton, tl, triton
from mmvllm.kernels.common.kv_cache import KVCache, QuantizedKVCache, kv_cache_dtypes, values_and_scales
from mmvllm.kernels.rms_norm import rms_norm_torch
from mmvllm.kernels.write_kv import write_kv_torch

QKNorm = tuple[Tensor, Tensor, float]  # weights (D,) of queries and keys, eps


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate q (N, H, D) and k (N, K, D), whose pair j is (j, j + D / 2), by angles given as cos and sin (N, D / 2).

    q and k may be views with a contiguous last dimension; cos and sin are contiguous, in any float dtype. The results
    are contiguous and in q's dtype. The caller computes the angles, so M-RoPE and the ViT's 2-D rotary embedding both
    use this (arXiv 2104.09864, 2409.12191).
    """
    assert q.stride(2) == k.stride(2) == 1 and cos.is_contiguous() and sin.is_contiguous()
    return (rotary_triton if runs_triton(q) else rotary_torch)(q, k, cos, sin)


def rotary_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: KVCache,
    v_cache: KVCache,
    slot_mapping: Tensor,
    qk_norm: QKNorm | None = None,
) -> Tensor:
    """Rotate q and k like `rotary`; return q, and write k and v (N, K, D) to the caches like `write_kv`.

    With `qk_norm`, every head of q and k is first normalized like in `rms_norm` (arXiv 2302.05442).
    """
    assert q.stride(2) == k.stride(2) == v.stride(2) == 1 and cos.is_contiguous() and sin.is_contiguous()
    assert k_cache.is_contiguous() and v_cache.is_contiguous()
    rotate = rotary_write_kv_triton if runs_triton(q) else rotary_write_kv_torch
    return rotate(q, k, v, cos, sin, k_cache, v_cache, slot_mapping, qk_norm)


def rotary_torch(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return _rotated(q, cos, sin), _rotated(k, cos, sin)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = x.to(cos.dtype)
    out = wide.new_empty(wide.shape)
    (first, second), (out_first, out_second) = (t.chunk(2, dim=-1) for t in (wide, out))
    cos, sin = cos[:, None], sin[:, None]
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin)
    return out.to(x.dtype)


def rotary_write_kv_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: KVCache,
    v_cache: KVCache,
    slot_mapping: Tensor,
    qk_norm: QKNorm | None = None,
) -> Tensor:
    if qk_norm is not None:
        q_weight, k_weight, eps = qk_norm
        q, k = rms_norm_torch(q, q_weight, eps), rms_norm_torch(k, k_weight, eps)
    q, k = rotary_torch(q, k, cos, sin)
    write_kv_torch(k, v, k_cache, v_cache, slot_mapping)
    return q


def rotary_triton(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    strides = (*q.stride()[:2], *k.stride()[:2])
    _rotary_kernel[(len(q),)](q, k, cos, sin, q_out, k_out, *strides, **_sizes(q, k))
    return q_out, k_out


def rotary_write_kv_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: KVCache,
    v_cache: KVCache,
    slot_mapping: Tensor,
    qk_norm: QKNorm | None = None,
) -> Tensor:
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    caches = (*values_and_scales(k_cache), *values_and_scales(v_cache))
    tensors = (q, k, v, cos, sin, q_out, *caches, slot_mapping)
    strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2])
    norm = (None, None, 0.0) if qk_norm is None else qk_norm
    _rotary_write_kv_kernel[(len(q),)](*tensors, *norm, *strides, NORM=qk_norm is not None, **_sizes(q, k))
    return q_out


def _sizes(q: Tensor, k: Tensor) -> dict[str, int]:
    (H, D), K = q.shape[1:], k.shape[1]
    H_block, K_block, half_block = (triton.next_power_of_2(size) for size in (H, K, D // 2))
    return {
        "H": H,
        "K": K,
        "HALF": D // 2,
        "H_BLOCK": H_block,
        "K_BLOCK": K_block,
        "HALF_BLOCK": half_block,
        "num_warps": min(8, max(1, H_block * half_block // 256)),  # 8 pairs of q per thread; not tuned
        "enable_fp_fusion": False,  # the compiler would choose which product to fuse, and the two kernels would differ
    }


@triton.jit
def _rotary_kernel(
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    q_out_ptr,
    k_out_ptr,
    q_token_stride,
    q_head_stride: tl.constexpr,
    k_token_stride,
    k_head_stride: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    HALF: tl.constexpr,
    H_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
):
    """One program per token, with all its heads."""
    token = tl.program_id(0).to(tl.int64)
    # The compiler moves no load above a store: with all loads first, their latencies overlap.
    q1, q2 = _load_pairs(q_ptr + token * q_token_stride, q_head_stride, H, HALF, H_BLOCK, HALF_BLOCK)
    k1, k2 = _load_pairs(k_ptr + token * k_token_stride, k_head_stride, K, HALF, K_BLOCK, HALF_BLOCK)
    cos = _load_angles(cos_ptr + token * HALF, HALF, HALF_BLOCK)
    sin = _load_angles(sin_ptr + token * HALF, HALF, HALF_BLOCK)
    q1, q2 = _rotate(q1, q2, cos, sin)
    _store_pairs(q_out_ptr + token * (H * 2 * HALF), q1, q2, H, HALF, H_BLOCK, HALF_BLOCK)
    k1, k2 = _rotate(k1, k2, cos, sin)
    _store_pairs(k_out_ptr + token * (K * 2 * HALF), k1, k2, K, HALF, K_BLOCK, HALF_BLOCK)


@triton.jit(do_not_specialize_on_alignment=["slot_ptr"])  # may be a view at any token
def _rotary_write_kv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    q_out_ptr,
    k_cache_ptr,
    k_scales_ptr,
    v_cache_ptr,
    v_scales_ptr,
    slot_ptr,
    q_weight_ptr,
    k_weight_ptr,
    eps,
    q_token_stride,
    q_head_stride: tl.constexpr,
    k_token_stride,
    k_head_stride: tl.constexpr,
    v_token_stride,
    v_head_stride: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    HALF: tl.constexpr,
    H_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    NORM: tl.constexpr,
):
    """Like `_rotary_kernel`, but stores rotated keys and unchanged values in their slots of the caches."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token)  # int64: a cache has more than 2**31 values
    q1, q2 = _load_pairs(q_ptr + token * q_token_stride, q_head_stride, H, HALF, H_BLOCK, HALF_BLOCK)
    k1, k2 = _load_pairs(k_ptr + token * k_token_stride, k_head_stride, K, HALF, K_BLOCK, HALF_BLOCK)
    v1, v2 = _load_pairs(v_ptr + token * v_token_stride, v_head_stride, K, HALF, K_BLOCK, HALF_BLOCK)
    cos = _load_angles(cos_ptr + token * HALF, HALF, HALF_BLOCK)
    sin = _load_angles(sin_ptr + token * HALF, HALF, HALF_BLOCK)
    if NORM:
        q1, q2 = _normalize(q1, q2, q_weight_ptr, eps, HALF, HALF_BLOCK)
        k1, k2 = _normalize(k1, k2, k_weight_ptr, eps, HALF, HALF_BLOCK)
    q1, q2 = _rotate(q1, q2, cos, sin)
    _store_pairs(q_out_ptr + token * (H * 2 * HALF), q1, q2, H, HALF, H_BLOCK, HALF_BLOCK)
    k1, k2 = _rotate(k1, k2, cos, sin)
    k_at, v_at = k_cache_ptr + slot * (K * 2 * HALF), v_cache_ptr + slot * (K * 2 * HALF)
    if k_scales_ptr is None:
        _store_pairs(k_at, k1, k2, K, HALF, K_BLOCK, HALF_BLOCK)
        _store_pairs(v_at, v1, v2, K, HALF, K_BLOCK, HALF_BLOCK)
    else:
        _store_quantized(k_at, k_scales_ptr + slot * K, k1, k2, K, HALF, K_BLOCK, HALF_BLOCK)
        _store_quantized(v_at, v_scales_ptr + slot * K, v1, v2, K, HALF, K_BLOCK, HALF_BLOCK)


@triton.jit
def _load_pairs(
    ptr,
    head_stride,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
):
    """Load the first and second halves (HEADS_BLOCK, HALF_BLOCK) of the heads of the token at `ptr`, zero-padded."""
    heads, pairs = tl.arange(0, HEADS_BLOCK)[:, None], tl.arange(0, HALF_BLOCK)[None, :]
    at, mask = ptr + heads * head_stride + pairs, (heads < HEADS) & (pairs < HALF)
    return tl.load(at, mask=mask, other=0.0), tl.load(at + HALF, mask=mask, other=0.0)


@triton.jit
def _load_angles(ptr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr):
    pairs = tl.arange(0, HALF_BLOCK)[None, :]
    return tl.load(ptr + pairs, mask=pairs < HALF).to(tl.float32)  # (1, HALF_BLOCK)


@triton.jit
def _normalize(first, second, weight_ptr, eps, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr):
    """Normalize the halves of heads; round to their dtype before and after the weight, like the reference."""
    wide_first, wide_second = first.to(tl.float32), second.to(tl.float32)
    squares = tl.sum(wide_first * wide_first, 1) + tl.sum(wide_second * wide_second, 1)
    scale = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
    first, second = (wide_first * scale).to(first.dtype), (wide_second * scale).to(second.dtype)
    pairs = tl.arange(0, HALF_BLOCK)[None, :]
    weight_first = tl.load(weight_ptr + pairs, mask=pairs < HALF).to(tl.float32)
    weight_second = tl.load(weight_ptr + HALF + pairs, mask=pairs < HALF).to(tl.float32)
    return (weight_first * first).to(first.dtype), (weight_second * second).to(second.dtype)


@triton.jit
def _rotate(first, second, cos, sin):
    first, second = first.to(tl.float32), second.to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _store_pairs(
    ptr,
    first,
    second,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
):
    """Store the halves of a token's heads packed at `ptr`, rounded to its dtype."""
    heads, pairs = tl.arange(0, HEADS_BLOCK)[:, None], tl.arange(0, HALF_BLOCK)[None, :]
    at, mask = ptr + heads * (2 * HALF) + pairs, (heads < HEADS) & (pairs < HALF)
    tl.store(at, first, mask=mask)
    tl.store(at + HALF, second, mask=mask)


@triton.jit
def _store_quantized(
    ptr,
    scale_ptr,
    first,
    second,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
):
    """Quantize the halves of a token's heads to `ptr`'s dtype and store them, like `QuantizedKVCache.write`."""
    IS_INT: tl.constexpr = ptr.dtype.element_ty == tl.int8
    LIMIT: tl.constexpr = 127.0 if IS_INT else 448.0
    first, second = first.to(tl.float32), second.to(tl.float32)
    largest = tl.maximum(tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1)), 1e-12)
    heads = tl.arange(0, HEADS_BLOCK)
    tl.store(scale_ptr + heads, tl.div_rn(largest, LIMIT), mask=heads < HEADS)
    inverse = tl.div_rn(LIMIT, largest)[:, None]
    first, second = first * inverse, second * inverse
    if IS_INT:  # adding and subtracting 1.5 * 2**23 rounds to the nearest integer, ties to even
        first, second = first + 12582912.0 - 12582912.0, second + 12582912.0 - 12582912.0
    first, second = first.to(ptr.dtype.element_ty), second.to(ptr.dtype.element_ty)
    _store_pairs(ptr, first, second, HEADS, HALF, HEADS_BLOCK, HALF_BLOCK)


def cases(shapes: KernelShapes, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Yield the decoder's heads for 1 to 4096 tokens, and the ViT's with float32 angles for an image's patches."""
    for N in (1, 64, 1024, 4096):
        H, K, D = shapes.num_heads, shapes.num_kv_heads, shapes.head_dim
        q, k, v, cos, sin = _arguments(N, H, K, D, dtype, device, dtype)
        caches, slots = torch.zeros(2, N, 1, K, D, device=device, dtype=dtype), torch.randperm(N, device=device)
        shape, moved = f"N={N} H={H} K={K} D={D}", 2 * (q.nbytes + k.nbytes) + 2 * cos.nbytes
        yield Case("rotary", shape, (q, k, cos, sin), moved)
        moved += 2 * v.nbytes + slots.nbytes
        arguments, norm = (q, k, v, cos, sin, *caches, slots), (*torch.randn(2, D, device=device, dtype=dtype), 1e-6)
        yield Case("rotary_write_kv", shape, arguments, moved)
        yield Case("rotary_write_kv", f"{shape} normalized", (*arguments, norm), moved + 2 * norm[0].nbytes)
        for kv_dtype in kv_cache_dtypes(device):
            quantized = [QuantizedKVCache.of(cache, kv_dtype) for cache in caches]
            arguments, less = (q, k, v, cos, sin, *quantized, slots), caches.nbytes - 2 * quantized[0].nbytes
            yield Case("rotary_write_kv", f"{shape} {kv_dtype}".replace("torch.", ""), arguments, moved - less)
    for P in (1024, 16384) if shapes.vision else ():
        H, D = shapes.vision.num_heads, shapes.vision.head_dim
        q, k, _, cos, sin = _arguments(P, H, H, D, torch.float32, device, dtype)
        yield Case("rotary", f"P={P} H={H} D={D}", (q, k, cos, sin), 2 * (q.nbytes + k.nbytes) + 2 * cos.nbytes)


def _arguments(
    N: int, H: int, K: int, D: int, angle_dtype: torch.dtype, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Return q, k and v, views of one tensor as in the models, and cos and sin."""
    q, k, v = torch.randn(N, H + 2 * K, D, device=device, dtype=dtype).split([H, K, K], dim=1)
    angles = torch.randn(N, D // 2, device=device)
    return q, k, v, angles.cos().to(angle_dtype), angles.sin().to(angle_dtype)
