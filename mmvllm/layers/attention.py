"""Attention backends: the decoder's attention over the paged KV cache, and the ViT's within frames or windows.

All compute the same results. `choose_attention` returns the backend that the user chose, or the fastest usable one.
"""

import importlib.util
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from mmvllm.batch import Batch
from mmvllm.kernels.dispatch import triton_unusable
from mmvllm.kernels.packed_attention import packed_attention_torch, packed_attention_triton
from mmvllm.kernels.paged_attention import paged_attention_torch, paged_attention_triton
from mmvllm.text import listed
from mmvllm.transfer import to_device

FLASH_BLOCK_SIZE = 256  # FlashAttention 2 reads paged KV in blocks of a multiple of this


@dataclass(frozen=True, slots=True)
class Segments:
    """Lengths of packed sequences, each of which attends to itself only."""

    lens: list[int]
    cu_seqlens: Tensor  # (len(lens) + 1,) int32, the start of each, and the end of the last

    @classmethod
    def of(cls, lens: list[int], device: torch.device) -> "Segments":
        cu_seqlens = torch.tensor([0, *lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return cls(lens, to_device(cu_seqlens, device))


class AttentionBackend(Protocol):
    """Causal attention of q (N, H, D) over cached keys and values, and full attention over k and v of q's shape."""

    name: ClassVar[str]
    block_size: ClassVar[int]  # of the KV cache by default: smaller blocks share longer prefixes
    in_graphs: ClassVar[bool]  # whether a decode step can be captured: it reads no device values on the host

    @staticmethod
    def paged(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch) -> Tensor: ...

    @staticmethod
    def packed(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> Tensor: ...


class TorchAttention:
    """Plain torch, for any device; the reference of the others."""

    name, block_size, in_graphs = "torch", 16, False

    @staticmethod
    def paged(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch) -> Tensor:
        return paged_attention_torch(q, k_cache, v_cache, *_paged_arguments(batch))

    @staticmethod
    def packed(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> Tensor:
        return packed_attention_torch(q, k, v, segments.cu_seqlens, max(segments.lens))


class TritonAttention:
    """The kernels of `mmvllm.kernels`."""

    name, block_size, in_graphs = "triton", 16, True

    @staticmethod
    def paged(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch) -> Tensor:
        return paged_attention_triton(q, k_cache, v_cache, *_paged_arguments(batch))

    @staticmethod
    def packed(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> Tensor:
        return packed_attention_triton(q, k, v, segments.cu_seqlens, max(segments.lens))


class FlashAttention:
    """The flash-attn package (arXiv 2307.08691)."""

    name, block_size, in_graphs = "flash", FLASH_BLOCK_SIZE, True

    @staticmethod
    def paged(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch) -> Tensor:
        from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

        if max(batch.query_lens) == 1:  # this function splits long contexts
            return flash_attn_with_kvcache(
                q[:, None], k_cache, v_cache, cache_seqlens=batch.kv_lens, block_table=batch.block_table, causal=True
            )[:, 0]
        return flash_attn_varlen_func(
            q,
            k_cache,
            v_cache,
            cu_seqlens_q=batch.cu_seqlens_q,
            cu_seqlens_k=batch.cu_seqlens_k,
            max_seqlen_q=max(batch.query_lens),
            max_seqlen_k=max(batch.context_lens),
            causal=True,
            block_table=batch.block_table,
        )

    @staticmethod
    def packed(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> Tensor:
        from flash_attn import flash_attn_varlen_func

        longest = max(segments.lens)
        return flash_attn_varlen_func(q, k, v, segments.cu_seqlens, segments.cu_seqlens, longest, longest)


class TorchVarlenAttention:
    """FlashAttention as built into torch from 2.13 on (torch/nn/attention/varlen.py)."""

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

        longest = max(segments.lens)
        return varlen_attn(q, k, v, segments.cu_seqlens, segments.cu_seqlens, longest, longest)


def _paged_arguments(batch: Batch) -> tuple[Tensor, Tensor, Tensor, int]:
    return batch.cu_seqlens_q, batch.kv_lens, batch.block_table, max(batch.query_lens)


def unusable_backends(
    head_dims: Sequence[int], device: torch.device, dtype: torch.dtype, block_size: int | None
) -> dict[str, str | None]:
    """Why each backend cannot be used, or None if it can; the fastest first.

    `head_dims` are the head sizes of the model's attention layers; `block_size` is None if the backend may choose it.
    """
    return {
        "flash": _flash_unusable(head_dims, device, dtype, block_size),
        "triton": triton_unusable(device),
        "torch": None,
    }


def choose_attention(
    name: str, head_dims: Sequence[int], device: torch.device, dtype: torch.dtype, block_size: int | None
) -> tuple[type[AttentionBackend], str]:
    """The backend called `name`, or the fastest usable one for "auto", and the reason for the choice.

    Arguments as for `unusable_backends`. Raises ValueError if `name` is unknown or cannot be used, with the reason.
    """
    unusable = unusable_backends(head_dims, device, dtype, block_size)
    if name != "auto" and name not in unusable:
        raise ValueError(f"attention_backend is {name!r}, must be {listed(('auto', *unusable))}")
    if name != "auto" and unusable[name]:
        raise ValueError(f"attention_backend is {name!r}, which {unusable[name]}")
    chosen, reason = name, "requested"
    if name == "auto":
        # On a CPU, Triton is usable only in its interpreter, which is far too slow to choose.
        chosen = next(n for n, why in unusable.items() if why is None and (n != "triton" or device.type == "cuda"))
        reason = "; ".join(f"{n} {why}" for n, why in unusable.items() if why) or "the fastest"
    if chosen == "torch":
        return _torch_attention(head_dims, device, dtype, block_size), reason
    return {"flash": FlashAttention, "triton": TritonAttention}[chosen], reason


def _flash_unusable(
    head_dims: Sequence[int], device: torch.device, dtype: torch.dtype, block_size: int | None
) -> str | None:
    if device.type != "cuda":
        return f"needs a CUDA device, this is {device.type}"
    if importlib.util.find_spec("flash_attn") is None:
        return "is not installed; pip install 'mmvllm[flash]'"
    return _no_flash_kernel(head_dims, device, dtype, block_size)


def _no_flash_kernel(
    head_dims: Sequence[int], device: torch.device, dtype: torch.dtype, block_size: int | None
) -> str | None:
    """Why FlashAttention 2's CUDA kernels, from either package, cannot run this model on this device."""
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "needs a GPU of compute capability 8.0 or above"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"needs float16 or bfloat16, the model runs in {dtype}"
    for head_dim in head_dims:
        if head_dim > 256 or head_dim % 8:
            return f"needs a head size that is a multiple of 8 up to 256, this is {head_dim}"
    if block_size is not None and block_size % FLASH_BLOCK_SIZE:
        return f"needs kvcache_block_size to be a multiple of {FLASH_BLOCK_SIZE}, it is {block_size}"
    return None


def _torch_attention(
    head_dims: Sequence[int], device: torch.device, dtype: torch.dtype, block_size: int | None
) -> type[AttentionBackend]:
    """torch's varlen kernels if this torch has them with a block table and they fit, else the plain path."""
    if device.type != "cuda" or _no_flash_kernel(head_dims, device, dtype, block_size):
        return TorchAttention
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return TorchAttention
    return TorchVarlenAttention if "block_table" in inspect.signature(varlen_attn).parameters else TorchAttention
