"""Packed sampling parameters whose random numbers are given."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mmvllm.kernels.common.row_params import ROW_PARAMS, column, packed
from mmvllm.kernels.common.uniforms import FIRST, SECOND, STEP

NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0}


def stream_with(uniform: float) -> int:
    """A stream whose number 0 is `uniform`, to 53 bits: the mixing of `uniforms` in reverse."""
    z = int(uniform * 2**53) << 11
    z = _unshifted(z, 31) * pow(SECOND, -1, 2**64) % 2**64
    z = _unshifted(z, 27) * pow(FIRST, -1, 2**64) % 2**64
    z = (_unshifted(z, 30) - STEP) % 2**64
    return z - (z >> 63 << 64)


def _unshifted(z: int, bits: int) -> int:
    """The x of which z = x ^ x >> bits."""
    x = z
    for _ in range(64 // bits):
        x = z ^ x >> bits
    return x


def row_params(count: int, V: int, *, uniform=None, device: torch.device | str = "cpu", **setting) -> Tensor:
    """Packed rows (count, 12); settings are numbers or tensors (count,), `uniform` is each row's number 0."""
    params = np.zeros(count, ROW_PARAMS)
    for name, value in (NEUTRAL | {"top_k": V} | setting).items():
        params[name] = value
    if uniform is not None:
        numbers = np.broadcast_to(np.asarray(uniform, np.float64), count)
        params["stream"] = [stream_with(number) for number in numbers.tolist()]
    return packed(params).to(device)


def every_row(count: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """`rows` and `ends` of sequences 0 to count - 1 without any token."""
    rows = torch.arange(count, dtype=torch.int32, device=device)
    return rows, torch.zeros_like(rows)


def with_uniforms(params: Tensor, numbers: Sequence[float]) -> Tensor:
    """One packed row (1, 12), repeated with each of the numbers."""
    repeated = params.repeat(len(numbers), 1)
    column(repeated, "stream")[:] = torch.tensor([stream_with(number) for number in numbers])[:, None]
    return repeated
