"""Tensors of a checkpoint with quantized layers: those of each such layer become one weight in codes."""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from mmvllm.quantization.checkpoint_formats import QuantizedTensor, StoredTensor, check_order, coded_weight
from mmvllm.quantization.config import CheckpointQuantization, WeightScheme
from mmvllm.quantization.quantized_experts import StackedTensor, dequantized_experts, stacked_experts

# The tensors of a layer in each layout, and those that there may be besides.
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
_SAME = {"weight_scale_inv": "weight_scale"}  # both multiply the codes
# What activations and the KV cache were to be rounded with, which are rounded in other ways, or not at all.
_ACTIVATIONS = {
    *("input_scale", "input_zero_point", "output_scale", "output_zero_point", "activation_scale"),
    *("q_scale", "k_scale", "v_scale", "k_zero_point", "v_zero_point"),
}
_CODE_DTYPES = (torch.int8, torch.float8_e4m3fn)


def assembled(
    tensors: Iterable[tuple[str, StoredTensor]], quantization: CheckpointQuantization, num_experts: int = 0
) -> Iterator[tuple[str, StoredTensor | QuantizedTensor | StackedTensor]]:
    """Names and tensors of a checkpoint, with one weight in place of all tensors of each quantized layer.

    The tensors tell which layers are quantized, `quantization` how. Those of a layer may come in any order, with others
    between them; only layers that are not complete yet are held. Quantized experts are dequantized when they are read,
    and stacked if there is a layer for each of them. Raises ValueError, which names the layer, for tensors that are
    missing, have the wrong shape or dtype, or are stored in a way that is not supported.
    """
    return stacked_experts(_layers(dequantized_experts(tensors, quantization), quantization), num_experts)


def _layers(
    tensors: Iterable[tuple[str, StoredTensor]], quantization: CheckpointQuantization
) -> Iterator[tuple[str, StoredTensor | QuantizedTensor]]:
    layers: dict[str, dict[str, Tensor]] = {}
    for name, stored in tensors:
        layer, _, part = name.rpartition(".")
        part = _SAME.get(part, part)
        if part not in _PARTS and not _has_codes(part, stored):
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
                yield f"{layer}.weight", QuantizedTensor(coded_weight(layer, layers.pop(layer), scheme))
    _check_complete(layers, quantization)


def adds_nothing(name: str, stored: StoredTensor) -> bool:
    """Whether a tensor is a bias of zeros, which some tools give to every layer that they quantize."""
    return name.endswith(".bias") and not stored[...].any()


def _has_codes(part: str, stored: StoredTensor) -> bool:
    return part == "weight" and len(stored.get_shape()) == 2 and stored[:1].dtype in _CODE_DTYPES


def _check_part(layer: str, part: str, scheme: WeightScheme) -> None:
    expected = (*_NEEDED[scheme.layout], *_BESIDES[scheme.layout])
    if part not in expected:
        raise ValueError(f"{layer} has a tensor {part}; quantization_config says that it has {', '.join(expected)}")


def _needed(scheme: WeightScheme) -> list[str]:
    """The tensors without which a weight is not known."""
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
