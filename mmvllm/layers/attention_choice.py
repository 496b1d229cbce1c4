"""Choose the attention backends of the decoder and of the ViT, and give the reasons."""

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from itertools import accumulate

import torch
from torch import Tensor

from mmvllm.kernels.common.accuracy import compare, relative_errors
from mmvllm.kernels.common.dispatch import supports_fp8, triton_unusable
from mmvllm.kernels.common.kv_cache import DTYPE_LIMITS, KVCache
from mmvllm.kernels.fp8 import E4M3
from mmvllm.layers.attention import (
    FLASH_BLOCK_SIZE,
    AttentionBackend,
    Flash4Attention,
    FlashAttention,
    Segments,
    TorchAttention,
    TorchVarlenAttention,
    TritonAttention,
)
from mmvllm.layers.batch import Batch
from mmvllm.utils.text import listed

Backend = type[AttentionBackend]
WhyNot = Callable[[Backend], str | None]

NAMES = ("flash", "flash4", "triton", "torch")
# Fastest first. The ViT needs no block table, so torch's FlashAttention comes before the Triton kernels there.
DECODER: tuple[Backend, ...] = (FlashAttention, Flash4Attention, TritonAttention, TorchVarlenAttention, TorchAttention)
VISION: tuple[Backend, ...] = (FlashAttention, Flash4Attention, TorchVarlenAttention, TritonAttention, TorchAttention)
IMPORTS = {
    FlashAttention: ("flash_attn", ("flash_attn_varlen_func", "flash_attn_with_kvcache")),
    Flash4Attention: ("flash_attn.cute", ("flash_attn_varlen_func",)),
    TorchVarlenAttention: ("torch.nn.attention.varlen", ("varlen_attn",)),
}


def choose_attention(
    name: str,
    head_dim: int,
    device: torch.device,
    dtype: torch.dtype,
    block_size: int | None,
    kv_dtype: torch.dtype | None = None,
) -> tuple[Backend, str]:
    """Return the decoder's backend called `name`, or the fastest usable one for "auto", and the reason for the choice.

    `block_size` is None if the backend may choose it, and `kv_dtype` if keys and values are stored in `dtype`. Raises
    ValueError with the reason if `name` is unknown or unusable, and for 8-bit floats that the GPU does not support.
    """
    if kv_dtype == E4M3 and not supports_fp8(device):
        raise ValueError("kv_cache_dtype='fp8' needs a GPU of compute capability 8.9 or above; 'int8' runs on any")
    options = {"device": device, "dtype": dtype, "block_size": block_size, "kv_dtype": kv_dtype}
    why_not = partial(_why_not_paged, head_dim=head_dim, **options)
    return _choose("attention_backend", name, DECODER, why_not, device)


def choose_vision_attention(
    name: str, decoder: str, head_dim: int, device: torch.device, dtype: torch.dtype
) -> tuple[Backend, str]:
    """Choose the ViT's backend as `choose_attention` does; "auto" prefers the backend named for the decoder."""
    why_not = partial(_why_not_packed, head_dim=head_dim, device=device, dtype=dtype)
    if name == "auto" != decoder:
        try:
            return _choose("attention_backend", decoder, VISION, why_not, device)
        except ValueError as error:
            backend, reason = _choose("vision_attention_backend", name, VISION, why_not, device)
            return backend, f"{error} for the ViT; {reason}"
    return _choose("vision_attention_backend", name, VISION, why_not, device)


def unusable_backends(
    head_dim: int,
    device: torch.device,
    dtype: torch.dtype,
    block_size: int | None,
    kv_dtype: torch.dtype | None = None,
) -> dict[str, str | None]:
    """Return for each backend why the decoder cannot use it, or None if it can; the fastest first."""
    reasons = {
        backend.name: _why_not_paged(backend, head_dim, device, dtype, block_size, kv_dtype)
        for backend in DECODER
        if backend is not TorchVarlenAttention
    }
    return reasons | {"torch": None}


def warm_up_attention(backend: Backend, num_heads: int, kv_cache: KVCache, dtype: torch.dtype) -> None:
    """Compile the kernels of the decoder's attention for queries of this dtype, before requests need them.

    kv_cache (2, num_blocks, block_size, K, D), of one layer, may hold any values; it is only read.
    """
    k_cache, v_cache = kv_cache
    for batch in _small_steps(kv_cache.device):
        q = torch.zeros(len(batch.input_ids), num_heads, k_cache.shape[-1], dtype=dtype, device=kv_cache.device)
        backend.paged(q, k_cache, v_cache, batch)


def _choose(
    option: str, name: str, candidates: tuple[Backend, ...], why_not: WhyNot, device: torch.device
) -> tuple[Backend, str]:
    """Return the first usable candidate for `name`, and the reasons against the candidates before it."""
    if name not in ("auto", *NAMES):
        raise ValueError(f"{option} must be {listed(('auto', *NAMES))}, got {name!r}")
    reasons: dict[str, str] = {}  # by backend
    for backend in _answering(name, candidates, device):
        reason = why_not(backend)
        if reason is None:
            asked = ["requested"] if name != "auto" else []
            return backend, "; ".join([*asked, *map(" ".join, reasons.items())]) or "the fastest"
        reasons[backend.name] = reason
    raise ValueError(f"{option} is {name!r}, which {next(iter(reasons.values()))}")


def _answering(name: str, candidates: tuple[Backend, ...], device: torch.device) -> Iterator[Backend]:
    """Yield the candidates for an option's value; "torch" is both torch's FlashAttention and plain torch."""
    for backend in candidates:
        if backend is TorchVarlenAttention and device.type != "cuda":
            continue
        if name == "auto":
            # On a CPU, Triton is usable only in its interpreter, which is far too slow to choose.
            if backend is not TritonAttention or device.type == "cuda" or triton_unusable(device):
                yield backend
        elif backend.name.removesuffix("-varlen") == name:
            yield backend


def _why_not_paged(
    backend: Backend,
    head_dim: int,
    device: torch.device,
    dtype: torch.dtype,
    block_size: int | None,
    kv_dtype: torch.dtype | None,
) -> str | None:
    """Return why a backend cannot run the decoder, or None if it can."""
    if backend is TorchAttention:
        return None
    if backend is TritonAttention:
        return triton_unusable(device)
    if device.type == "cuda" and kv_dtype in DTYPE_LIMITS:
        return "does not read keys and values in 8 bits"
    reason = _why_not(backend, head_dim, device, dtype) or _wrong_block_size(backend, block_size)
    return reason or _failure(lambda: _try_paged(backend, head_dim, device, dtype, block_size))


def _wrong_block_size(backend: Backend, block_size: int | None) -> str | None:
    if block_size is None:
        return None
    if backend is Flash4Attention:  # its tiles have 64 keys or more, see `Flash4Attention`
        return f"needs kvcache_block_size to be below 64, it is {block_size}" if block_size >= 64 else None
    if block_size % FLASH_BLOCK_SIZE:
        return f"needs kvcache_block_size to be a multiple of {FLASH_BLOCK_SIZE}, it is {block_size}"
    return None


def _why_not_packed(backend: Backend, head_dim: int, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why a backend cannot run the ViT, or None if it can."""
    if backend is TorchAttention:
        return None
    if backend is TritonAttention:
        return triton_unusable(device)
    return _why_not(backend, head_dim, device, dtype) or _failure(lambda: _try_packed(backend, head_dim, device, dtype))


def _why_not(backend: Backend, head_dim: int, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why a package's kernels cannot be used, as far as this is known without running them."""
    if device.type != "cuda":
        return f"needs a CUDA device, this is {device.type}"
    return _import_failure(backend) or _unsupported(backend, head_dim, device, dtype)


def _import_failure(backend: Backend) -> str | None:
    """Return why a package cannot be imported: it is missing, broken, or another one with a part of its name."""
    module, names = IMPORTS[backend]
    try:
        found = import_module(module)
        missing = [name for name in names if not hasattr(found, name)]
    except ModuleNotFoundError as error:
        if error.name and f"{module}.".startswith(f"{error.name}."):
            return f"is not installed; pip install 'mmvllm[{backend.name}]'"
        return f"cannot be imported: {error}"
    except Exception as error:  # a binary for another torch or CUDA may raise anything
        return f"cannot be imported: {error}"
    return f"cannot be imported: {module} has no {missing[0]}" if missing else None


def _unsupported(backend: Backend, head_dim: int, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why FlashAttention has no kernel for this model on this device; torch includes version 2."""
    capability = torch.cuda.get_device_capability(device)
    largest = 256
    if backend is Flash4Attention:
        if capability[0] not in (9, 10):
            return "needs a GPU of compute capability 9.0 or 10.x"
        largest = 256 if capability[0] == 9 else 128
    elif capability < (8, 0):
        return "needs a GPU of compute capability 8.0 or above"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"needs float16 or bfloat16, the model runs in {dtype}"
    if head_dim > largest or head_dim % 8:
        return f"needs a head size that is a multiple of 8 up to {largest}, this is {head_dim}"
    return None


def _failure(run: Callable[[], None]) -> str | None:
    """Return the error that a backend raises on a small input, in one line, or None."""
    try:
        with torch.inference_mode():
            run()
    except Exception as error:  # versions differ in the cases that they support and in the errors that they raise
        text = " ".join(str(error).split())
        return f"fails on a small input: {type(error).__name__}: {text[:200]}"
    return None


def _try_paged(
    backend: Backend, head_dim: int, device: torch.device, dtype: torch.dtype, block_size: int | None
) -> None:
    """Raise if the errors of a few small steps are too large."""
    generator = torch.Generator(device).manual_seed(0)
    normal = partial(torch.randn, generator=generator, device=device, dtype=dtype)
    k_cache, v_cache = (normal(1, block_size or backend.block_size, 1, head_dim) for _ in range(2))
    for batch in _small_steps(device):
        tensors = normal(len(batch.input_ids), 2, head_dim), k_cache, v_cache
        exact = TorchAttention.paged(*(one.double() for one in tensors), batch)
        _check_errors(*(one.paged(*tensors, batch) for one in (backend, TorchAttention)), exact)


def _try_packed(backend: Backend, head_dim: int, device: torch.device, dtype: torch.dtype) -> None:
    generator = torch.Generator(device).manual_seed(0)
    segments = Segments.of([3, 130], device)
    tensors = torch.randn(133, 3, 2, head_dim, generator=generator, device=device, dtype=dtype).unbind(1)
    exact = TorchAttention.packed(*(one.double() for one in tensors), segments)
    _check_errors(*(one.packed(*tensors, segments) for one in (backend, TorchAttention)), exact)


def _check_errors(got: Tensor, plain: Tensor, exact: Tensor) -> None:
    """Raise ValueError if the results of a backend are worse than plain torch's, by the rule of the kernels' tests."""
    errors, allowed = (relative_errors(one, exact) for one in (got, plain))
    if (problem := compare(errors, allowed, got.dtype).problem) is not None:
        raise ValueError(problem)


def _small_steps(device: torch.device) -> Iterator[Batch]:
    """Yield batches: decodes, a short and a longer prompt, and all of them in one step."""
    for query_lens, num_decodes in (([1, 1], 2), ([3], 0), ([300], 0), ([1, 3, 300], 1)):
        yield _small_step(query_lens, num_decodes, device)


def _small_step(query_lens: list[int], num_decodes: int, device: torch.device) -> Batch:
    """Return sequences with four keys before their queries; all entries of their block tables are block 0."""
    kv_lens = [length + 4 for length in query_lens]
    tokens = torch.zeros(sum(query_lens), dtype=torch.int64, device=device)
    return Batch(
        input_ids=tokens,
        positions=tokens.repeat(3, 1),
        slot_mapping=tokens,
        cu_seqlens_q=_running_sum(query_lens, device),
        kv_lens=torch.tensor(kv_lens, dtype=torch.int32, device=device),
        cu_seqlens_k=_running_sum(kv_lens, device),
        block_table=torch.zeros(len(kv_lens), max(kv_lens), dtype=torch.int32, device=device),
        logits_indices=tokens[:0],
        mm_token_indices=tokens[:0],
        query_lens=tuple(query_lens),
        context_lens=tuple(kv_lens),
        num_decodes=num_decodes,
    )


def _running_sum(lens: list[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *accumulate(lens)], dtype=torch.int32, device=device)
