"""Linear layers in 8-bit floats (W8A8), and which devices support them."""

import torch
from torch import Tensor

from mmvllm.kernels.common.dispatch import FP8_CAPABILITY
from mmvllm.kernels.fp8 import E4M3, Fp8Rows, quantize_rows, quantize_rows_torch, scaled_linear
from mmvllm.quantization.linear_method import LinearMethod
from mmvllm.quantization.quantized_tensor import QuantizedTensor

_MULTIPLE = 16  # of both sizes of a weight, for torch._scaled_mm on CUDA


class Fp8Linear(LinearMethod):
    """A weight in e4m3 with a scale per row; inputs are quantized dynamically, unless they are quantized already.

    A rank that holds a slice of the columns computes scales from that slice; scales of a checkpoint are kept.
    """

    _CHUNK = 1024  # rows quantized at a time, so that intermediate results take little memory

    def __init__(self, weight: Tensor | QuantizedTensor, bias: Tensor | None):
        self.bias = bias
        if isinstance(weight, QuantizedTensor):
            assert weight.scales.shape[1] == 1, weight.scales.shape
            self.values, self.scale = weight.qweight, weight.scales.flatten()
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
    """Raise ValueError for a weight (out, in) whose shape `torch._scaled_mm` does not support."""
    if any(size % _MULTIPLE for size in shape):
        sizes = " x ".join(map(str, shape))
        raise ValueError(f"quantization='fp8' needs weights whose sizes are multiples of {_MULTIPLE}; one is {sizes}")


def fp8_unusable(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why products in 8-bit floats are unsupported for this device and dtype, or None if they are supported.

    A CPU supports every dtype: it computes the same values in float32, slowly.
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
    """The error of a small product, or None: torch's builds for Windows, and some GPUs, support no scale per row."""
    rows = quantize_rows_torch(torch.ones(_MULTIPLE, _MULTIPLE, dtype=torch.bfloat16, device=device))
    try:
        scaled_linear(rows, rows.values, rows.scale, None).sum().item()
    except RuntimeError as error:
        return f"is not supported by this torch ({torch.__version__}) on this GPU: {str(error).partition(chr(10))[0]}"
    return None
