"""Bytes that a loaded model's weights take as they are stored, with the scales of weights in few bits."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from mmvllm.layers.linear import ConvertedModule
from mmvllm.quantization.linear_method import WeightForm


@dataclass(frozen=True, slots=True)
class StoredBytes:
    """What a decode step reads: all layers of the decoder, of which `experts` are those of experts, and the head.

    The embedding, of which a step reads a few rows, is left out; a head that is tied to it counts.
    """

    decoder: int
    experts: int
    head: int

    @classmethod
    def of(cls, model: nn.Module) -> "StoredBytes":
        sizes = {name: _num_bytes(module) for name, module in model.named_modules()}

        def total(prefix: str, part: str = "") -> int:
            return sum(size for name, size in sizes.items() if name.startswith(prefix) and part in name)

        return cls(total("decoder.") - total("decoder.embed_tokens"), total("decoder.", ".experts"), total("lm_head"))


def _num_bytes(module: nn.Module) -> int:
    """Of what the module holds itself; a tensor in oneDNN's layout has no `nbytes`."""
    tensors = {id(tensor): tensor for tensor in _own_tensors(module)}  # a packed weight has the module's bias, too
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _own_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Parameters and buffers, and tensors of the weights that are in another form."""
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)
    if isinstance(module, ConvertedModule):
        yield from _tensors_in(module.converted)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, WeightForm | list | tuple):
        for part in vars(value).values() if isinstance(value, WeightForm) else value:
            yield from _tensors_in(part)
