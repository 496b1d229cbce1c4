"""Attention backends: the decoder's attention over the paged KV cache, and the ViT's within frames or windows.

All compute the same results. `mmvllm.layers.attention_choice` chooses among them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from mmvllm.kernels.common.kv_cache import KVCache
from mmvllm.kernels.packed_attention import packed_attention_torch, packed_attention_triton
from mmvllm.kernels.paged_attention import paged_attention_torch, paged_attention_triton
from mmvllm.layers.batch import Batch
from mmvllm.utils.transfer import to_device

FLASH_BLOCK_SIZE = 256  # FlashAttention 2 needs a block size of the paged KV cache that is a multiple of this


@dataclass(frozen=True, slots=True)
class Segments:
    """Packed sequences, each of which attends only to itself."""

    lens: Sequence[int]
    cu_seqlens: Tensor  # (len(lens) + 1,) int32, the start of each, and the end of the last
    longest: int  # an upper limit of `lens`

    @classmethod
    def of(cls, lens: Sequence[int], device: torch.device, longest: int | None = None) -> "Segments":
        cu_seqlens = torch.tensor([0, *lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return cls(lens, to_device(cu_seqlens, device), longest or max(lens))

    def to(self, device: torch.device) -> "Segments":
        return replace(self, cu_seqlens=to_device(self.cu_seqlens, device))


class AttentionBackend(Protocol):
    """Causal attention of q (N, H, D) over cached keys and values, and full attention over k and v of q's shape."""

    name: ClassVar[str]
    block_size: ClassVar[int]  # default block size of the KV cache; smaller blocks share longer prefixes
    in_graphs: ClassVar[bool]  # whether a CUDA graph can capture it, because it reads no device values on the host

    @staticmethod
    def paged(q: Tensor, k_cache: KVCache, v_cache: KVCache, batch: Batch) -> Tensor: ...

    @staticmethod
    def packed(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> Tensor: ...


class TorchAttention:
    """Plain torch for any device, the reference for the other backends."""

    name, block_size, in_graphs = "torch", 16, False

    @staticmethod
    def paged(q: Tensor, k_cache: KVCache, v_cache: KVCache, batch: Batch) -> Tensor:
        return paged_attention_torch(q, k_cache, v_cache, *_paged_arguments(batch))

    @staticmethod
    def packed(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> Tensor:
        return packed_attention_torch(q, k, v, segments.cu_seqlens, segments.longest)


class TritonAttention:
    """The Triton kernels of `mmvllm.kernels`."""

    name, block_size, in_graphs = "triton", 16, True

    @staticmethod
    def paged(q: Tensor, k_cache: KVCache, v_cache: KVCache, batch: Batch) -> Tensor:
        return paged_attention_triton(q, k_cache, v_cache, *_paged_arguments(batch))

    @staticmethod
    def packed(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> Tensor:
        return packed_attention_triton(q, k, v, segments.cu_seqlens, segments.longest)


class FlashAttention:
    """The flash-attn package (arXiv 2307.08691)."""

    name, block_size, in_graphs = "flash", FLASH_BLOCK_SIZE, True

    @staticmethod
    def paged(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch) -> Tensor:
        from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

        S, n = len(batch.query_lens), _num_single(batch)
        if n:  # this function splits long contexts
            options = {"cache_seqlens": batch.kv_lens[:n], "block_table": batch.block_table[:n], "causal": True}
            singles = flash_attn_with_kvcache(q[:n, None], k_cache, v_cache, **options)[:, 0]
            if n == S:
                return singles
        out = flash_attn_varlen_func(
            q,  # all rows: cu_seqlens_q[n:] indexes them, and earlier rows are not written
            k_cache,
            v_cache,
            cu_seqlens_q=batch.cu_seqlens_q[n:],
            cu_seqlens_k=batch.cu_seqlens_k[n:],
            max_seqlen_q=max(batch.query_lens),
            max_seqlen_k=max(batch.context_lens),
            causal=True,
            block_table=batch.block_table[n:],
        )
        if n:
            out[:n] = singles
        return out

    @staticmethod
    def packed(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> Tensor:
        from flash_attn import flash_attn_varlen_func

        longest = segments.longest
        return flash_attn_varlen_func(q, k, v, segments.cu_seqlens, segments.cu_seqlens, longest, longest)


class Flash4Attention:
    """The flash-attn-4 package for prompts, on GPUs of compute capability 9.0 and 10.x.

    Single queries use the Triton kernel, because the package splits contexts only on capability 10.x, and not by
    default. It loads the keys of small blocks row by row, but blocks of its tiles' size as a whole: rows that no token
    has written may hold NaN, and zero times NaN is NaN.
    """

    name, block_size, in_graphs = "flash4", 16, True

    @staticmethod
    def paged(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch) -> Tensor:
        from flash_attn.cute import flash_attn_varlen_func

        S, n = len(batch.query_lens), _num_single(batch)
        if n:
            tensors = (batch.cu_seqlens_q, batch.kv_lens[:n], batch.block_table[:n])
            singles = paged_attention_triton(q[:n], k_cache, v_cache, *tensors, 1)
            if n == S:
                return singles
        out, _ = flash_attn_varlen_func(
            q,  # all rows, as above; host lengths are left out, as they would select kernels to compile
            k_cache,
            v_cache,
            cu_seqlens_q=batch.cu_seqlens_q[n:],
            seqused_k=batch.kv_lens[n:],
            page_table=batch.block_table[n:],
            causal=True,
        )
        if n:
            out[:n] = singles
        return out

    @staticmethod
    def packed(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> Tensor:
        from flash_attn.cute import flash_attn_varlen_func

        out, _ = flash_attn_varlen_func(q, k, v, cu_seqlens_q=segments.cu_seqlens, cu_seqlens_k=segments.cu_seqlens)
        return out


class TorchVarlenAttention:
    """torch's FlashAttention (torch/nn/attention/varlen.py), which takes a block table in some versions only."""

    name, block_size, in_graphs = "torch-varlen", FLASH_BLOCK_SIZE, True

    @staticmethod
    def paged(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        return varlen_attn(
            q,
            k_cache,
            v_cache,
            batch.cu_seqlens_q,
            None,
            max(batch.query_lens),
            max(batch.context_lens),
            window_size=(-1, 0),  # causal
            enable_gqa=True,
            seqused_k=batch.kv_lens,
            block_table=batch.block_table,
        )

    @staticmethod
    def packed(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        longest = segments.longest
        return varlen_attn(q, k, v, segments.cu_seqlens, segments.cu_seqlens, longest, longest)


def _num_single(batch: Batch) -> int:
    """Return how many of the first sequences are known to have one query each."""
    return len(batch.query_lens) if max(batch.query_lens) == 1 else batch.num_decodes


def _paged_arguments(batch: Batch) -> tuple[Tensor, Tensor, Tensor, int, int]:
    return batch.cu_seqlens_q, batch.kv_lens, batch.block_table, max(batch.query_lens), batch.num_decodes
