"""Which form each weight of a model takes on a device."""

import torch
from torch import nn

from mmvllm.layers.experts import Experts
from mmvllm.layers.form import WeightForm
from mmvllm.layers.fp8 import Fp8Weight, check_sizes, fp8_unusable
from mmvllm.layers.linear import ConvertedModule
from mmvllm.layers.packed import Int8Weight, PackedWeight

_DECODER = "decoder.layers."


def choose_forms(model: nn.Module, device: torch.device, dtype: torch.dtype, quantization: str | None = None) -> None:
    """Set the forms of all weights, before they are loaded.

    On a CPU, weights are packed for fast products. Float32 weights are not, because packed products have about twice
    the rounding error, nor are weights of a dtype that oneDNN does not support on this CPU.
    Raises ValueError for a kind of quantization that the model does not support; what the device supports,
    `check_quantization` says.
    """
    for name, module in model.named_modules():
        if isinstance(module, ConvertedModule):
            module.form = _form(name, module, device, dtype, quantization)


def _form(
    name: str, module: ConvertedModule, device: torch.device, dtype: torch.dtype, quantization: str | None
) -> type[WeightForm] | None:
    if quantization == "int8":
        return Int8Weight
    if quantization == "fp8" and name.startswith(_DECODER):
        return _fp8(module)
    return PackedWeight if device.type == "cpu" and packs_well(dtype) else None


def _fp8(module: ConvertedModule) -> type[WeightForm]:
    if isinstance(module, Experts):
        raise ValueError("quantization='fp8' does not support mixtures of experts")
    for shape in module.weight_shapes():
        check_sizes(shape)
    return Fp8Weight


def check_quantization(quantization: str | None, device: torch.device, dtype: torch.dtype) -> None:
    """Raise ValueError for a kind that this device, or this dtype on it, does not support."""
    if quantization is not None:
        _CHECKS[quantization](device, dtype)


def _check_int8(device: torch.device, dtype: torch.dtype) -> None:
    if device.type != "cpu":
        raise ValueError(f"quantization='int8' runs on a CPU only; this is {device.type}, where 'fp8' may run")
    if not torch.backends.mkldnn.is_available():
        raise ValueError("quantization='int8' needs a torch with oneDNN, which this torch lacks")
    if dtype == torch.float16:
        raise ValueError("quantization='int8' needs dtype float32 or bfloat16; this is float16")
    if not sums_8_bits():
        raise ValueError("quantization='int8' needs a CPU that adds 8-bit products in 32 bits (VNNI or AMX)")


def _check_fp8(device: torch.device, dtype: torch.dtype) -> None:
    if reason := fp8_unusable(device, dtype):
        raise ValueError(f"quantization='fp8' {reason}")


_CHECKS = {"int8": _check_int8, "fp8": _check_fp8}


def packs_well(dtype: torch.dtype) -> bool:
    """Whether oneDNN supports packed weights of this dtype on this CPU."""
    if not torch.backends.mkldnn.is_available():
        return False
    ops = torch.ops.mkldnn
    supported = {torch.bfloat16: ops._is_mkldnn_bf16_supported, torch.float16: ops._is_mkldnn_fp16_supported}
    return dtype in supported and supported[dtype]()


def sums_8_bits() -> bool:
    """Whether int8 products are exact: without VNNI, oneDNN adds pairs of them in 16 bits, which overflow."""
    ones = torch.ones(16, 64)
    return bool((Int8Weight(ones, None)(ones) - 64).abs().max() < 1)
