"""Weights of 8-bit floats: where they can be multiplied, and how they are filled while a checkpoint is read."""

import torch
from torch import Tensor

from mmvllm.kernels.fp8 import CAPABILITY, quantize_rows_torch, scaled_linear

_MULTIPLE = 16  # of both sizes of a weight, for torch._scaled_mm on CUDA


class Fp8View:
    """A part (out, in) of an e4m3 weight and the scales (out,) of its rows, used as the tensor that is copied to it.

    On a rank that has some columns of a weight, a scale is that of these columns.
    """

    dtype = torch.bfloat16  # of random values
    _CHUNK = 1024  # rows that are rounded at a time: intermediate results take little memory

    def __init__(self, values: Tensor, scale: Tensor):
        self.values, self.scale, self.shape = values, scale, values.shape

    def dim(self) -> int:
        return self.values.dim()

    def numel(self) -> int:
        return self.values.numel()

    def copy_(self, tensor: Tensor) -> None:
        """Round a tensor of any float dtype to 8 bits, on the device of the weight."""
        for values, scale, rows in zip(*(t.split(self._CHUNK) for t in (self.values, self.scale, tensor)), strict=True):
            quantized = quantize_rows_torch(rows.to(values.device))
            values.copy_(quantized.values)
            scale.copy_(quantized.scale)


def check_sizes(weight: Tensor) -> None:
    """Raise ValueError for a weight (out, in) that GPUs do not multiply in 8 bits."""
    if any(size % _MULTIPLE for size in weight.shape):
        sizes = " x ".join(map(str, weight.shape))
        raise ValueError(f"quantization='fp8' needs weights whose sizes are multiples of {_MULTIPLE}; one is {sizes}")


def fp8_unusable(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why a model in this dtype cannot be multiplied in 8-bit floats on this device, or None if it can.

    A CPU computes the same values in float32, slowly, for any dtype.
    """
    if device.type == "cpu":
        return None
    if dtype != torch.bfloat16:
        return f"needs dtype bfloat16; this is {str(dtype).removeprefix('torch.')}"
    if (found := torch.cuda.get_device_capability(device)) < CAPABILITY:
        numbers = [".".join(map(str, pair)) for pair in (CAPABILITY, found)]
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
