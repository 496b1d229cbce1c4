"""Linear methods of GPUs for quantized weights and 16-bit activations (`kernels/quantized_linear.py`)."""

from typing import ClassVar

import torch
from torch import Tensor

from mmvllm.kernels.quantized_linear import PACKED_COLUMNS, pack_int4, quantized_linear
from mmvllm.quantization.linear_method import LinearMethod
from mmvllm.quantization.quantized_tensor import QuantizedTensor, int4_group_size, quantize


class WNA16Linear(LinearMethod):
    """A weight of 8-bit integers or floats, quantized in groups of columns; inputs keep their dtype."""

    bits: ClassVar[int] = 8

    def __init__(self, weight: Tensor | QuantizedTensor, bias: Tensor | None):
        if not isinstance(weight, QuantizedTensor):
            weight = quantize(weight, self.bits, int4_group_size(weight.shape[1]) if self.bits == 4 else None)
        self.qweight = pack_int4(weight.qweight) if self.bits == 4 else weight.qweight
        # (groups, out) in memory, which takes the fewest accesses.
        self.scales, self.zeros = (
            part if part is None else part.t().contiguous().t() for part in (weight.scales, weight.zeros)
        )
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """x (N, in) -> x Wᵀ + b (N, out)."""
        return quantized_linear(x.contiguous(), self.qweight, self.scales, self.zeros, self.bias)

    @classmethod
    def num_bytes(cls, shape: torch.Size, dtype: torch.dtype, group_size: int | None = None) -> int:
        rows, columns = shape
        columns = -(-columns // PACKED_COLUMNS) * PACKED_COLUMNS if cls.bits == 4 else columns
        size = group_size or (int4_group_size(shape[1]) if cls.bits == 4 else shape[1])
        return rows * (columns * cls.bits // 8 + shape[1] // size * 5)


class W4A16Linear(WNA16Linear):
    """A weight of 4-bit integers, two in a byte."""

    bits = 4
