"""Weights of 8-bit floats, and where they can be multiplied."""

import torch
from torch import Tensor

from mmvllm.kernels.common.dispatch import FP8_CAPABILITY
from mmvllm.kernels.fp8 import E4M3, Fp8Rows, quantize_rows, quantize_rows_torch, scaled_linear
from mmvllm.quantization.linear_method import WeightForm
from mmvllm.quantization.quantized_weight import CodedWeight

_MULTIPLE = 16  # of both sizes of a weight, for torch._scaled_mm on CUDA


class Fp8Weight(WeightForm):
    """A weight in e4m3 with a scale per row; inputs are rounded to 8 bits as well, unless they are already.

    On a rank that has some columns of a weight, a scale is that of these columns.
    """

    _CHUNK = 1024  # rows that are rounded at a time: intermediate results take little memory

    def __init__(self, weight: Tensor | CodedWeight, bias: Tensor | None):
        self.bias = bias
        if isinstance(weight, CodedWeight):
            assert weight.scales.shape[1] == 1, weight.scales.shape
            self.values, self.scale = weight.codes, weight.scales.flatten()
            return
        self.values = torch.empty_like(weight, dtype=E4M3)
        self.scale = torch.empty_like(weight[:, 0], dtype=torch.float32)
        for values, scale, rows in zip(*(t.split(self._CHUNK) for t in (self.values, self.scale, weight)), strict=True):
            quantized = quantize_rows_torch(rows)
            values.copy_(quantized.values)
            scale.copy_(quantized.scale)

    def __call__(self, x: Tensor | Fp8Rows) -> Tensor:
        rows = x if isinstance(x, Fp8Rows) else quantize_rows(x)
        return scaled_linear(rows, self.values, self.scale, self.bias)

    @classmethod
    def num_bytes(cls, shape: torch.Size, dtype: torch.dtype, group_size: int | None = None) -> int:
        return shape.numel() + 4 * shape[0]


def check_sizes(shape: torch.Size) -> None:
    """Raise ValueError for a weight (out, in) of a shape that GPUs do not multiply in 8 bits."""
    if any(size % _MULTIPLE for size in shape):
        sizes = " x ".join(map(str, shape))
        raise ValueError(f"quantization='fp8' needs weights whose sizes are multiples of {_MULTIPLE}; one is {sizes}")


def fp8_unusable(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why a model in this dtype cannot be multiplied in 8-bit floats on this device, or None if it can.

    A CPU computes the same values in float32, slowly, for any dtype.
    """
    if device.type == "cpu":
        return None
    if dtype != torch.bfloat16:
        return f"needs dtype bfloat16; this is {str(dtype).removeprefix('torch.')}"
    if (found := torch.cuda.get_device_capability(device)) < FP8_CAPABILITY:
        numbers = [".".join(map(str, pair)) for pair in (FP8_CAPABILITY, found)]
        return "needs a GPU of compute capability {} or above (Ada, Hopper, Blackwell); this has {}".format(*numbers)
    return _product_fails(device)


def _product_fails(device: torch.device) -> str | None:
    """What torch says about a small product: builds for Windows and some GPUs lack those with a scale per row."""
    rows = quantize_rows_torch(torch.ones(_MULTIPLE, _MULTIPLE, dtype=torch.bfloat16, device=device))
    try:
        scaled_linear(rows, rows.values, rows.scale, None).sum().item()
    except RuntimeError as error:
        return f"is not supported by this torch ({torch.__version__}) on this GPU: {str(error).partition(chr(10))[0]}"
    return None
