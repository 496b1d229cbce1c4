"""KV cache in 8 bits, with a scale per head and slot.

Scales are stored in blocks, like the values. One scale per block would not work: a later token may be larger than all
earlier ones, and requantizing the block would make results depend on prompt chunks and prefix cache hits.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmvllm.kernels.common.dispatch import supports_fp8

# The value that a head's largest magnitude is rounded to.
DTYPE_LIMITS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


@dataclass(frozen=True, slots=True)
class QuantizedKVCache:
    """A quantized KV cache: `values * scales`. Indexing applies to the leading axes, up to the slots of a block.

    Args:
        values: (..., num_blocks, block_size, K, D), int8 or float8_e4m3fn.
        scales: (..., num_blocks, block_size, K), float32.
    """

    values: Tensor
    scales: Tensor

    @classmethod
    def of(cls, x: Tensor, dtype: torch.dtype) -> "QuantizedKVCache":
        """Quantize x (num_blocks, block_size, K, D)."""
        cache = cls(torch.empty_like(x, dtype=dtype), torch.empty(x.shape[:-1], device=x.device))
        cache.write(torch.arange(x.shape[:2].numel(), device=x.device), x.flatten(0, 1))
        return cache

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def is_contiguous(self) -> bool:
        return self.values.is_contiguous() and self.scales.is_contiguous()

    def __iter__(self) -> Iterator["QuantizedKVCache"]:
        return map(QuantizedKVCache, self.values, self.scales)

    def __getitem__(self, index: Any) -> "QuantizedKVCache":
        return QuantizedKVCache(self.values.view(torch.int8)[index].view(self.values.dtype), self.scales[index])

    def __setitem__(self, index: Any, other: "QuantizedKVCache") -> None:
        self.values.view(torch.int8)[index] = other.values.view(torch.int8)
        self.scales[index] = other.scales

    def write(self, slots: Tensor, x: Tensor) -> None:
        """Quantize x (N, K, D) into its slots (N,).

        A head's scale is its largest magnitude divided by the dtype's limit; it depends on no other head or token.
        """
        wide = x.float()
        largest, limit = wide.abs().amax(dim=-1).clamp_(min=1e-12), DTYPE_LIMITS[self.values.dtype]
        values = wide * (limit / largest)[..., None]
        if self.values.dtype == torch.int8:
            values.round_()
        values = values.to(self.values.dtype).view(torch.int8)  # torch has no index_copy_ for 8-bit floats
        self.values.view(torch.int8).view(-1, *x.shape[1:]).index_copy_(0, slots, values)
        self.scales.view(-1, x.shape[1]).index_copy_(0, slots, largest / limit)

    def blocks(self, indices: Tensor, dtype: torch.dtype) -> Tensor:
        """Dequantize the blocks at `indices` (B,) to (B, block_size, K, D) in this dtype."""
        values = self.values.view(torch.int8).index_select(0, indices)
        scales = self.scales.index_select(0, indices)[..., None]
        wide = torch.float32 if dtype == torch.float16 else dtype  # float16 would lose bits of small scales
        if self.values.dtype == torch.int8:
            return values.to(wide).mul_(scales.to(wide)).to(dtype)
        return _as_halves(values).to(wide).mul_((2**8 * scales).to(wide)).to(dtype)


def _as_halves(bits: Tensor) -> Tensor:
    """Convert e4m3 bits to float16, times 2**-8, by extending the sign and shifting the bits into place.

    On a CPU, torch's conversion took 8 times as long (2.13). NaN becomes a number, but then the scale is NaN.
    """
    return bits.to(torch.int16).bitwise_left_shift_(7).bitwise_and_(0xBF80 - 2**16).view(torch.float16)


KVCache = Tensor | QuantizedKVCache


def kv_cache_dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    """Return the 8-bit dtypes of a KV cache that kernels on this device support."""
    return (torch.int8, torch.float8_e4m3fn) if supports_fp8(device) else (torch.int8,)


def values_and_scales(cache: KVCache) -> tuple[Tensor, Tensor | None]:
    """Return the tensors of a cache, as kernels take them; the scales of an unquantized cache are None."""
    return (cache.values, cache.scales) if isinstance(cache, QuantizedKVCache) else (cache, None)
