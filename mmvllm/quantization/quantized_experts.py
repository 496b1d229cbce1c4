"""Dequantizes the experts of a checkpoint, and stacks them if each expert is a layer."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from mmvllm.quantization.checkpoint_formats import StoredQuantizedTensor, StoredTensor, read_quantized_layer
from mmvllm.quantization.config import CheckpointQuantization
from mmvllm.utils.text import listed

_SCALE = "_scale_inv"  # transformers' and vLLM's name of the scales of `experts.gate_up_proj` and `experts.down_proj`
_OF_ONE = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_STACKS = {"gate": ("gate_up_proj", 0), "up": ("gate_up_proj", 1), "down": ("down_proj", 0)}


class StackedTensor:
    """One tensor (E, rows, columns) of the weights of all experts; an index reads a slice, dequantized.

    Args:
        experts: for each expert, the weights whose rows are concatenated.
    """

    def __init__(self, experts: Sequence[Sequence[StoredTensor | StoredQuantizedTensor]]):
        self.experts = experts

    def get_shape(self) -> list[int]:
        shapes = [weight.get_shape() for weight in self.experts[0]]
        return [len(self.experts), sum(rows for rows, _ in shapes), shapes[0][1]]

    def __getitem__(self, index: tuple[slice, slice, slice]) -> Tensor:
        experts, rows, columns = index
        return torch.stack([torch.cat([*map(_values, one)])[rows, columns] for one in self.experts[experts]])


def _values(weight: StoredTensor | StoredQuantizedTensor) -> Tensor:
    return weight.weight.dequantized() if isinstance(weight, StoredQuantizedTensor) else weight[...]


def dequantized_experts(
    tensors: Iterable[tuple[str, StoredTensor]], quantization: CheckpointQuantization
) -> Iterator[tuple[str, StoredTensor | StackedTensor]]:
    """Combine fused 8-bit experts (E, rows, columns) with their scales; yield other tensors unchanged."""
    halves: dict[str, dict[str, StoredTensor]] = {}
    for name, stored in tensors:
        is_scale = name.endswith(_SCALE) and not name.endswith("weight" + _SCALE)
        if not is_scale and (len(stored.get_shape()) != 3 or stored[:1].dtype != torch.float8_e4m3fn):
            yield name, stored
            continue
        weight = name.removesuffix(_SCALE)
        half = halves.setdefault(weight, {})
        half["weight_scale" if is_scale else "weight"] = stored
        if len(half) == 2:
            yield weight, _all_experts(weight, quantization, **halves.pop(weight))
    if halves:
        lacking = [f"{name} has no {'scale' if 'weight' in half else 'weight'}" for name, half in halves.items()]
        raise ValueError(f"quantized experts are not complete ({len(lacking)}): {'; '.join(lacking[:5])}")


def _all_experts(
    name: str, quantization: CheckpointQuantization, weight: StoredTensor, weight_scale: StoredTensor
) -> StackedTensor:
    qweight, scales = weight[...], weight_scale[...]
    if scales.numel() == 1:
        scales = scales.reshape(1).expand(len(qweight))
    if len(scales) != len(qweight):
        raise ValueError(f"{name}{_SCALE} is {tuple(scales.shape)}, needs {len(qweight)} experts")
    scheme = quantization.scheme_for(name)
    pairs = zip(qweight, scales, strict=True)
    parts = [{"weight": values, "weight_scale": scale} for values, scale in pairs]
    return StackedTensor([[StoredQuantizedTensor(read_quantized_layer(name, part, scheme))] for part in parts])


def stacked_experts(
    tensors: Iterable[tuple[str, StoredTensor | StoredQuantizedTensor]], num_experts: int
) -> Iterator[tuple[str, StoredTensor | StoredQuantizedTensor | StackedTensor]]:
    """Stack the experts of a layer as `experts.gate_up_proj` and `experts.down_proj`; yield other tensors unchanged."""
    stacks: dict[str, dict[tuple[int, int], StoredTensor | StoredQuantizedTensor]] = {}
    for name, stored in tensors:
        if not (match := _OF_ONE.fullmatch(name)):
            yield name, stored
            continue
        stack, part = _STACKS[match[3]]
        key, width = f"{match[1]}.{stack}", 2 if stack == "gate_up_proj" else 1
        weights = stacks.setdefault(key, {})
        if int(match[2]) >= num_experts:
            raise ValueError(f"{name} is of an expert that there is not; the config has {num_experts}")
        weights[int(match[2]), part] = stored
        if len(weights) == num_experts * width:
            del stacks[key]
            _check_shapes(key, weights)
            yield key, StackedTensor([[weights[i, j] for j in range(width)] for i in range(num_experts)])
    if stacks:
        lacking = [f"{key} has {len(weights)}" for key, weights in stacks.items()]
        raise ValueError(
            f"weights of {num_experts} experts are not complete ({len(lacking)}): {'; '.join(lacking[:5])}"
        )


def _check_shapes(key: str, weights: Mapping[tuple[int, int], StoredTensor | StoredQuantizedTensor]) -> None:
    shapes = {tuple(weight.get_shape()) for weight in weights.values()}
    if len(shapes) > 1 or any(len(shape) != 2 for shape in shapes):
        raise ValueError(f"{key} needs experts of one shape in two dimensions; it has {listed(sorted(shapes), 'and')}")
