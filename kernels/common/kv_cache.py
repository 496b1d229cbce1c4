"""Keys and values in 8 bits: codes, and a scale for each head of each slot.

The scales are stored by blocks, as the codes are. One scale for all slots of a block would not do: a token that is
written later may be larger than all before it, and rounding these again would make what is read depend on how a prompt
was cut into steps, and on whether its first blocks came from the cache.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmvllm.kernels.common.dispatch import supports_fp8

CODE_LIMITS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # the code of a head's largest magnitude


@dataclass(frozen=True, slots=True)
class CodedCache:
    """A KV cache whose values are codes * scales; indexed as the tensor of its codes, up to the slots of a block.

    Args:
        codes: (..., num_blocks, block_size, K, D), int8 or float8_e4m3fn.
        scales: (..., num_blocks, block_size, K), float32.
    """

    codes: Tensor
    scales: Tensor

    @classmethod
    def of(cls, x: Tensor, dtype: torch.dtype) -> "CodedCache":
        """The values x (num_blocks, block_size, K, D), rounded."""
        cache = cls(torch.empty_like(x, dtype=dtype), torch.empty(x.shape[:-1], device=x.device))
        cache.write(torch.arange(x.shape[:2].numel(), device=x.device), x.flatten(0, 1))
        return cache

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def is_contiguous(self) -> bool:
        return self.codes.is_contiguous() and self.scales.is_contiguous()

    def __iter__(self) -> Iterator["CodedCache"]:
        return map(CodedCache, self.codes, self.scales)

    def __getitem__(self, index: Any) -> "CodedCache":
        return CodedCache(self.codes.view(torch.int8)[index].view(self.codes.dtype), self.scales[index])

    def __setitem__(self, index: Any, other: "CodedCache") -> None:
        self.codes.view(torch.int8)[index] = other.codes.view(torch.int8)
        self.scales[index] = other.scales

    def write(self, slots: Tensor, x: Tensor) -> None:
        """Round x (N, K, D) to its slots (N,): each head is divided by its largest magnitude, whatever is around it."""
        wide = x.float()
        largest, limit = wide.abs().amax(dim=-1).clamp_(min=1e-12), CODE_LIMITS[self.codes.dtype]
        codes = wide * (limit / largest)[..., None]
        if self.codes.dtype == torch.int8:
            codes.round_()
        codes = codes.to(self.codes.dtype).view(torch.int8)  # torch has no such operation on 8-bit floats
        self.codes.view(torch.int8).view(-1, *x.shape[1:]).index_copy_(0, slots, codes)
        self.scales.view(-1, x.shape[1]).index_copy_(0, slots, largest / limit)

    def blocks(self, indices: Tensor, dtype: torch.dtype) -> Tensor:
        """The values of some blocks (B,) -> (B, block_size, K, D) in this dtype."""
        codes = self.codes.view(torch.int8).index_select(0, indices)
        scales = self.scales.index_select(0, indices)[..., None]
        wide = torch.float32 if dtype == torch.float16 else dtype  # float16 would lose bits of small scales
        if self.codes.dtype == torch.int8:
            return codes.to(wide).mul_(scales.to(wide)).to(dtype)
        return _as_halves(codes).to(wide).mul_((2**8 * scales).to(wide)).to(dtype)


def _as_halves(bits: Tensor) -> Tensor:
    """e4m3 as float16, times 2**-8: the bits are moved to their places, signs extended before.

    On a CPU, torch's own conversion took 8 times as long (2.13). NaN becomes a number; its scale is NaN then.
    """
    return bits.to(torch.int16).bitwise_left_shift_(7).bitwise_and_(0xBF80 - 2**16).view(torch.float16)


KVCache = Tensor | CodedCache


def code_dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    """Those that kernels can store and read on this device; the code of a CPU reads all."""
    return (torch.int8, torch.float8_e4m3fn) if supports_fp8(device) else (torch.int8,)


def codes_and_scales(cache: KVCache) -> tuple[Tensor, Tensor | None]:
    """What kernels take of a cache: plain values have no scales."""
    return (cache.codes, cache.scales) if isinstance(cache, CodedCache) else (cache, None)
