"""Weights in codes as they are stored, multiplied by one kernel on GPUs."""

from typing import ClassVar

import torch
from torch import Tensor

from mmvllm.kernels.coded_linear import PACKED_COLUMNS, coded_linear, pack_int4
from mmvllm.quantization.linear_method import WeightForm
from mmvllm.quantization.quantized_weight import CodedWeight, int4_group_size, round_to_codes


class GroupedWeight(WeightForm):
    """A weight in codes of 8 bits, or in 8-bit floats, in groups of columns; inputs keep their dtype."""

    bits: ClassVar[int] = 8

    def __init__(self, weight: Tensor | CodedWeight, bias: Tensor | None):
        if not isinstance(weight, CodedWeight):
            weight = round_to_codes(weight, self.bits, int4_group_size(weight.shape[1]) if self.bits == 4 else None)
        self.codes = pack_int4(weight.codes) if self.bits == 4 else weight.codes
        # (groups, out) in memory, which takes the fewest accesses.
        self.scales, self.zeros = (
            part if part is None else part.t().contiguous().t() for part in (weight.scales, weight.zeros)
        )
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """x (N, in) -> x Wᵀ + b (N, out)."""
        return coded_linear(x.contiguous(), self.codes, self.scales, self.zeros, self.bias)

    @classmethod
    def num_bytes(cls, shape: torch.Size, dtype: torch.dtype, group_size: int | None = None) -> int:
        rows, columns = shape
        columns = -(-columns // PACKED_COLUMNS) * PACKED_COLUMNS if cls.bits == 4 else columns
        size = group_size or (int4_group_size(shape[1]) if cls.bits == 4 else shape[1])
        return rows * (columns * cls.bits // 8 + shape[1] // size * 5)


class GroupedInt4Weight(GroupedWeight):
    """The same in codes of 4 bits."""

    bits = 4
