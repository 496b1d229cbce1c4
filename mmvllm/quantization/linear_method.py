"""The interface of linear methods: how a layer's weight is stored and multiplied on a device."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from mmvllm.kernels.fp8 import Fp8Rows
from mmvllm.quantization.quantized_tensor import QuantizedTensor


class LinearMethod(ABC):
    """The weight (out, in) and bias (out,) of one layer, stored for fast products or little memory."""

    @abstractmethod
    def __init__(self, weight: Tensor | QuantizedTensor, bias: Tensor | None): ...

    @abstractmethod
    def __call__(self, x: Tensor | Fp8Rows) -> Tensor:
        """x (N, in) -> x Wᵀ + b (N, out)."""

    @classmethod
    def num_bytes(cls, shape: torch.Size, dtype: torch.dtype, group_size: int | None = None) -> int:
        """Bytes of a processed weight of this shape in a model of this dtype, without the bias.

        `group_size` is given if the checkpoint's quantized weight is kept. By default the values keep the dtype.
        """
        return shape.numel() * dtype.itemsize
