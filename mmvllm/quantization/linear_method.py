"""The interface of the forms that a weight can take."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from mmvllm.kernels.fp8 import Fp8Rows
from mmvllm.quantization.quantized_weight import CodedWeight


class WeightForm(ABC):
    """A weight (out, in) and a bias (out,), kept in the way in which a device multiplies them fastest or smallest."""

    @abstractmethod
    def __init__(self, weight: Tensor | CodedWeight, bias: Tensor | None): ...

    @abstractmethod
    def __call__(self, x: Tensor | Fp8Rows) -> Tensor:
        """x (N, in) -> x Wᵀ + b (N, out)."""

    @classmethod
    def num_bytes(cls, shape: torch.Size, dtype: torch.dtype, group_size: int | None = None) -> int:
        """Of a weight of this shape in a model of this dtype, without the bias.

        `group_size` is that of a checkpoint's own codes. By default the values keep the dtype.
        """
        return shape.numel() * dtype.itemsize
