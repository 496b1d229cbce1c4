"""Assembles the tensors of each quantized layer of a checkpoint into one quantized weight."""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from mmvllm.quantization.checkpoint_formats import (
    StoredQuantizedTensor,
    StoredTensor,
    check_order,
    read_quantized_layer,
)
from mmvllm.quantization.config import CheckpointQuantization, WeightScheme
from mmvllm.quantization.quantized_experts import StackedTensor, dequantized_experts, stacked_experts

# The tensors of a layer in each layout: required, and optional (`_BESIDES`).
_NEEDED = {
    "awq": ("qweight", "qzeros", "scales"),
    "gptq": ("qweight", "qzeros", "scales"),
    "packed": ("weight_packed", "weight_scale", "weight_shape"),
    "plain": ("weight", "weight_scale"),
}
_ZEROS = "weight_zero_point"
_ORDER = {"gptq": "g_idx", "packed": "weight_g_idx", "plain": "weight_g_idx"}
_BESIDES = {"awq": (), "gptq": ("g_idx",), "packed": (_ZEROS, "weight_g_idx"), "plain": (_ZEROS, "weight_g_idx")}
_PARTS = {name for parts in (*_NEEDED.values(), *_BESIDES.values()) for name in parts} - {"weight"}
_SAME = {"weight_scale_inv": "weight_scale"}  # both are scales of the weight
# Scales for activations and the KV cache are ignored: mmvllm quantizes those dynamically, or not at all.
_ACTIVATIONS = {
    *("input_scale", "input_zero_point", "output_scale", "output_zero_point", "activation_scale"),
    *("q_scale", "k_scale", "v_scale", "k_zero_point", "v_zero_point"),
}
_QUANTIZED_DTYPES = (torch.int8, torch.float8_e4m3fn)


def assembled(
    tensors: Iterable[tuple[str, StoredTensor]], quantization: CheckpointQuantization, num_experts: int = 0
) -> Iterator[tuple[str, StoredTensor | StoredQuantizedTensor | StackedTensor]]:
    """Yield names and tensors of a checkpoint, with one weight in place of the tensors of each quantized layer.

    The tensors tell which layers are quantized, `quantization` how. Tensors may come in any order; only
    incomplete layers are held in memory. Quantized experts are dequantized when they are read, and stacked if each
    expert is a layer. Raises ValueError, which names the layer, for tensors that are missing, have the wrong shape or
    dtype, or are stored in an unsupported way.
    """
    return stacked_experts(_layers(dequantized_experts(tensors, quantization), quantization), num_experts)


def _layers(
    tensors: Iterable[tuple[str, StoredTensor]], quantization: CheckpointQuantization
) -> Iterator[tuple[str, StoredTensor | StoredQuantizedTensor]]:
    layers: dict[str, dict[str, Tensor]] = {}
    for name, stored in tensors:
        layer, _, part = name.rpartition(".")
        part = _SAME.get(part, part)
        if part not in _PARTS and not _is_quantized(part, stored):
            if part not in _ACTIVATIONS:
                yield name, stored
            continue
        scheme = quantization.scheme_for(layer)
        _check_part(layer, part, scheme)
        if part == _ORDER.get(scheme.layout):
            check_order(layer, stored[...], scheme)
        if part in _needed(scheme):
            parts = layers.setdefault(layer, {})
            parts[part] = stored[...]
            if len(parts) == len(_needed(scheme)):
                yield f"{layer}.weight", StoredQuantizedTensor(read_quantized_layer(layer, layers.pop(layer), scheme))
    _check_complete(layers, quantization)


def adds_nothing(name: str, stored: StoredTensor) -> bool:
    """Whether a tensor is an all-zero bias; some tools add one to every layer that they quantize."""
    return name.endswith(".bias") and not stored[...].any()


def _is_quantized(part: str, stored: StoredTensor) -> bool:
    return part == "weight" and len(stored.get_shape()) == 2 and stored[:1].dtype in _QUANTIZED_DTYPES


def _check_part(layer: str, part: str, scheme: WeightScheme) -> None:
    expected = (*_NEEDED[scheme.layout], *_BESIDES[scheme.layout])
    if part not in expected:
        raise ValueError(f"{layer} has a tensor {part}; quantization_config says that it has {', '.join(expected)}")


def _needed(scheme: WeightScheme) -> list[str]:
    """The tensors that are required to build the weight."""
    zeros = [_ZEROS] if scheme.has_zeros and _ZEROS in _BESIDES[scheme.layout] else []
    order = [_ORDER[scheme.layout]] if scheme.act_order else []
    return [*_NEEDED[scheme.layout], *zeros, *order]


def _check_complete(layers: Mapping[str, Mapping[str, Tensor]], quantization: CheckpointQuantization) -> None:
    lacking = []
    for layer, parts in layers.items():
        missing = [name for name in _needed(quantization.scheme_for(layer)) if name not in parts]
        lacking.append(f"{layer} has {', '.join(sorted(parts))} but no {', '.join(missing)}")
    if lacking:
        raise ValueError(f"quantized layers are not complete ({len(lacking)}): {'; '.join(lacking[:5])}")
