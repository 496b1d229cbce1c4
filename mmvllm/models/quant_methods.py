"""Choose the linear method of each layer: how its weight is stored and multiplied on a device."""

from math import gcd

import torch
from torch import nn

from mmvllm.kernels.common.dispatch import multiplies_float32_faster, supports_fp8
from mmvllm.layers.experts import Experts
from mmvllm.layers.linear import Linear, LinearMethodModule
from mmvllm.layers.vocabulary import VocabularyHead
from mmvllm.models.interface import Model
from mmvllm.quantization.config import CheckpointQuantization, WeightScheme
from mmvllm.quantization.fp8 import Fp8Linear, check_sizes, fp8_unusable
from mmvllm.quantization.linear_method import LinearMethod
from mmvllm.quantization.onednn import Float32Linear, Int4Linear, Int8Linear, OneDNNLinear
from mmvllm.quantization.quantized_tensor import int4_group_size
from mmvllm.quantization.wna16 import W4A16Linear, WNA16Linear

_DECODER, _VIT = "decoder.layers.", "visual."
_HALF = (torch.float16, torch.bfloat16)


def choose_linear_methods(
    model: nn.Module, device: torch.device, dtype: torch.dtype, quantization: str | None = None
) -> None:
    """Set the linear methods of all layers, before weights are loaded.

    On a CPU, weights are packed for fast products, except in float32, because packed products have about twice the
    rounding error, and in dtypes that oneDNN does not support on this CPU. Raises ValueError for a quantization that
    the model does not support; `check_quantization` checks the device.
    """
    for name, module in model.named_modules():
        if isinstance(module, LinearMethodModule):
            module.linear_method_cls = _linear_method(name, module, device, dtype, quantization)


def _linear_method(
    name: str, module: LinearMethodModule, device: torch.device, dtype: torch.dtype, quantization: str | None
) -> type[LinearMethod] | None:
    is_cpu, in_decoder = device.type == "cpu", name.startswith(_DECODER)
    if quantization == "fp8" and in_decoder:
        return _fp8(module)
    if quantization == "int4" and in_decoder and _in_groups(module) and (is_cpu or isinstance(module, Linear)):
        return Int4Linear if is_cpu else W4A16Linear
    if is_cpu and quantization in ("int8", "int4"):
        return Int8Linear
    if is_cpu and dtype == torch.bfloat16 and name.startswith(_VIT) and multiplies_float32_faster():
        return Float32Linear
    return OneDNNLinear if is_cpu and packs_well(dtype) else None


def _in_groups(module: LinearMethodModule) -> bool:
    return all(int4_group_size(shape[1]) for shape in module.weight_shapes())


def _fp8(module: LinearMethodModule) -> type[LinearMethod]:
    if isinstance(module, Experts):
        raise ValueError("quantization='fp8' does not support mixtures of experts")
    for shape in module.weight_shapes():
        check_sizes(shape)
    return Fp8Linear


def keep_quantized(model: Model, device: torch.device, dtype: torch.dtype) -> None:
    """Let layers keep a checkpoint's quantized weights where the device supports them.

    Call it after `choose_linear_methods`. The weights of all other layers are dequantized while they are loaded.
    """
    layers = {
        name: m for name, m in model.named_modules() if isinstance(m, Linear) and not isinstance(m, VocabularyHead)
    }
    chosen = {name: _quantized_method(model, name, layer, device, dtype) for name, layer in layers.items()}
    for name, method in chosen.items():
        if method is Fp8Linear and any(
            chosen[other] is not method for other in chosen if _block(other) == _block(name)
        ):
            method = None  # a decoder layer quantizes the inputs of all its products, or of none
        if method is not None:
            layers[name].linear_method_cls = method
            layers[name].keep_quantized(_group_size(layers[name], _scheme(model, name, layers[name])))


def _block(name: str) -> str:
    """Return the decoder layer that a linear layer belongs to."""
    return ".".join(name.split(".")[:3])


def _quantized_method(
    model: Model, name: str, layer: Linear, device: torch.device, dtype: torch.dtype
) -> type[LinearMethod] | None:
    """Return the linear method that multiplies a layer's quantized weight on this device, or None."""
    scheme = _scheme(model, name, layer)
    if scheme is None:
        return None
    in_groups = _group_size(layer, scheme) % 32 == 0
    if device.type == "cpu":
        if scheme.dtype == "int4":
            return Int4Linear if dtype == torch.bfloat16 and in_groups else None
        return Int8Linear if scheme.dtype == "int8" and dtype == torch.bfloat16 and sums_8_bits() else None
    if device.type != "cuda" or dtype not in _HALF or not in_groups:
        return None
    if scheme.dtype == "int4":
        return W4A16Linear
    if scheme.dtype == "int8":
        return WNA16Linear
    has_row_scales = scheme.block[0] in (None, 1) and scheme.block[1] is None
    fits = name.startswith(_DECODER) and layer.in_features % 16 == layer.out_features % 16 == 0
    if has_row_scales and fits and model.config.experts is None and fp8_unusable(device, dtype) is None:
        return Fp8Linear
    return WNA16Linear if supports_fp8(device) else None


def _scheme(model: Model, name: str, layer: Linear) -> WeightScheme | None:
    """Return the scheme that all tensors of a layer share; None if they are not quantized, or differ."""
    parts = [view.part for view in layer.checkpoint_views() if view.parameter == "weight"]
    names = [model.checkpoint_name(f"{name}.weight", part).removesuffix(".weight") for part in parts]
    schemes = {model.config.quantization.scheme_of(published) for published in names}
    return schemes.pop() if len(schemes) == 1 else None


def _group_size(layer: Linear, scheme: WeightScheme) -> int:
    """Return a group size for this rank's part of a layer, whose group boundaries include the checkpoint's."""
    columns, size = layer.columns, scheme.block[1]
    if size is None:
        return layer.in_features if columns.length == layer.in_features else gcd(columns.length, layer.in_features)
    return gcd(size, columns.start, columns.length, layer.in_features)


def check_quantization(
    quantization: str | None,
    device: torch.device,
    dtype: torch.dtype,
    published: CheckpointQuantization | None = None,
) -> None:
    """Raise ValueError if the device, the dtype on it, or a quantized checkpoint does not support the quantization."""
    if quantization is not None:
        _CHECKS[quantization](device, dtype)
    if quantization == "int4" and published is not None and any(scheme.bits == 4 for scheme in published.schemes):
        raise ValueError(f"quantization is 'int4', but the checkpoint has weights in 4 bits, {published}; leave it out")


def _check_int8(device: torch.device, dtype: torch.dtype) -> None:
    if device.type != "cpu":
        raise ValueError(
            f"quantization='int8' runs on a CPU only; this is {device.type}, where 'fp8' and 'int4' may run"
        )
    _check_cpu("int8", (torch.float32, torch.bfloat16), dtype)


def _check_int4(device: torch.device, dtype: torch.dtype) -> None:
    if device.type == "cpu":
        _check_cpu("int4", (torch.bfloat16,), dtype)
    elif dtype not in _HALF:
        raise ValueError(f"quantization='int4' needs dtype float16 or bfloat16; this is {_name(dtype)}")


def _check_cpu(kind: str, dtypes: tuple[torch.dtype, ...], dtype: torch.dtype) -> None:
    if not torch.backends.mkldnn.is_available():
        raise ValueError(f"quantization='{kind}' needs a torch with oneDNN, which this torch lacks")
    if dtype not in dtypes:
        names = " or ".join(map(_name, dtypes))
        raise ValueError(f"quantization='{kind}' needs dtype {names} on a CPU; this is {_name(dtype)}")
    if not sums_8_bits():
        raise ValueError(f"quantization='{kind}' needs a CPU that adds 8-bit products in 32 bits (VNNI or AMX)")


def _check_fp8(device: torch.device, dtype: torch.dtype) -> None:
    if reason := fp8_unusable(device, dtype):
        raise ValueError(f"quantization='fp8' {reason}")


_CHECKS = {"int8": _check_int8, "int4": _check_int4, "fp8": _check_fp8}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def packs_well(dtype: torch.dtype) -> bool:
    """Return whether oneDNN supports packed weights of this dtype on this CPU."""
    if not torch.backends.mkldnn.is_available():
        return False
    ops = torch.ops.mkldnn
    supported = {torch.bfloat16: ops._is_mkldnn_bf16_supported, torch.float16: ops._is_mkldnn_fp16_supported}
    return dtype in supported and supported[dtype]()


def sums_8_bits() -> bool:
    """Return whether int8 products are exact; without VNNI, oneDNN adds pairs in 16 bits, which overflow."""
    ones = torch.ones(16, 64)
    return bool((Int8Linear(ones, None)(ones) - 64).abs().max() < 1)
