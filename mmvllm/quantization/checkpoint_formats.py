"""Reads the tensors of one quantized layer, in each published layout, into a `QuantizedTensor`.

AutoAWQ's layout (awq/modules/linear/gemm.py), AutoGPTQ's (auto_gptq/nn_modules/qlinear) and compressed-tensors'
(compressors/pack_quantized and compressors/naive_quantized).
"""

from collections.abc import Mapping
from math import gcd, prod
from typing import Protocol

import torch
from torch import Tensor

from mmvllm.quantization.config import WeightScheme
from mmvllm.quantization.quantized_tensor import QuantizedTensor

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # of tensors that are not quantized

# The nibble of each of eight outputs; the nibbles, from the lowest, have the outputs 0, 2, 4, 6, 1, 3, 5 and 7.
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
_DTYPES = {"int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn}


class StoredTensor(Protocol):
    """A tensor in a file. An index reads a slice of it, as a view of the memory map where possible."""

    def get_shape(self) -> list[int]: ...

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor: ...


class StoredQuantizedTensor:
    """A quantized weight (out, in) of a checkpoint; an index of rows and columns gives a slice."""

    def __init__(self, weight: QuantizedTensor):
        self.weight = weight

    def get_shape(self) -> list[int]:
        return list(self.weight.shape)

    def __getitem__(self, index: tuple[slice, slice]) -> QuantizedTensor:
        return self.weight.part(*index)


def read_quantized_layer(layer: str, tensors: Mapping[str, Tensor], scheme: WeightScheme) -> QuantizedTensor:
    """Make the weight (out, in) of a layer of its tensors, given by their names inside the layer.

    Raises ValueError for inconsistent shapes or dtypes.
    """
    reader = {"awq": _awq, "gptq": _gptq, "packed": _packed, "plain": _plain}[scheme.layout]
    return reader(_Layer(layer, tensors, scheme))


def check_order(layer: str, indices: Tensor, scheme: WeightScheme) -> None:
    """Raise ValueError if the columns are not grouped in order; indices of -1 mean in order."""
    if indices.dim() != 1:
        raise ValueError(f"{layer} has indices of groups in {indices.dim()} dimensions, needs one")
    in_turn = torch.arange(len(indices)) // (scheme.block[1] or len(indices))
    if not torch.equal(indices.long(), in_turn) and not (indices == -1).all():
        raise ValueError(f"{layer} has its columns in groups of another order (act-order), which is not supported")


class _Layer:
    """The tensors of a layer, checked on access."""

    def __init__(self, name: str, tensors: Mapping[str, Tensor], scheme: WeightScheme):
        self.name, self.tensors, self.scheme = name, tensors, scheme

    def words(self, part: str, rows: int | None = None, columns: int | None = None) -> Tensor:
        """A tensor of packed int32 words; `rows` and `columns` are checked where given."""
        words = self.tensors[part]
        fits = (
            words.dim() == 2
            and words.numel() > 0
            and rows in (None, words.shape[0])
            and columns in (None, words.shape[1])
        )
        if words.dtype != torch.int32 or not fits:
            raise self.error(part, f"({rows or 'any'}, {columns or 'any'}) in int32")
        return words

    def num_groups(self, columns: int) -> int:
        return -(-columns // (self.scheme.block[1] or columns))

    def scales(self, part: str, shape: tuple[int, int]) -> Tensor:
        """Scales of a weight of this shape (out, in) -> (out, groups) float32."""
        scales = self.tensors[part]
        if not scales.is_floating_point():
            raise self.error(part, "floats")
        return self.spread(part, scales.float(), shape)

    def spread(self, part: str, values: Tensor, shape: tuple[int, int]) -> Tensor:
        """Repeat one value per block of a weight, or a single value, to (out, groups)."""
        rows, columns = (size or whole for size, whole in zip(self.scheme.block, shape, strict=True))
        if self.scheme.block == (None, None) and values.numel() == shape[0]:
            rows = 1  # one for each output
        blocks = -(-shape[0] // rows), -(-shape[1] // columns)
        if values.numel() != prod(blocks):
            raise self.error(part, f"{blocks} for a weight {tuple(shape)}")
        size = gcd(shape[1], columns)  # a last block that is narrower makes all groups smaller
        values = values.reshape(blocks).repeat_interleave(columns // size, dim=1)[:, : shape[1] // size]
        return values.repeat_interleave(rows, dim=0)[: shape[0]].contiguous()

    def error(self, part: str, needed: str) -> ValueError:
        tensor = self.tensors[part]
        dtype = str(tensor.dtype).removeprefix("torch.")
        return ValueError(f"{self.name}.{part} is {tuple(tensor.shape)} in {dtype}, needs {needed}")

    def weight(self, qweight: Tensor, scales: Tensor, zeros: Tensor | None) -> QuantizedTensor:
        """Build the weight; unsigned 8-bit values and zero points become signed."""
        if self.scheme.bits == 8 and qweight.dtype == torch.uint8:
            qweight, zeros = _signed(qweight), _signed(zeros)
        has_zeros = zeros is not None and bool(zeros.any())
        return QuantizedTensor(qweight.contiguous(), scales, zeros.contiguous() if has_zeros else None)


def _awq(layer: _Layer) -> QuantizedTensor:
    """qweight (in, out / 8), qzeros (groups, out / 8) and scales (groups, out)."""
    packed = layer.words("qweight")
    zeros = layer.words("qzeros", layer.num_groups(len(packed)), packed.shape[1])
    qweight, zeros = (
        _unpack(words, 4).unflatten(1, (-1, 8))[..., _AWQ_ORDER].flatten(1).T for words in (packed, zeros)
    )
    return _with_columns_of_scales(layer, qweight, zeros)


def _gptq(layer: _Layer) -> QuantizedTensor:
    """qweight (in / 8, out), qzeros (groups, out / 8) and scales (groups, out); for 8 bits with 4 instead of 8."""
    bits = layer.scheme.bits
    qweight = _unpack(layer.words("qweight").T, bits)
    stored = layer.words("qzeros", layer.num_groups(qweight.shape[1]), len(qweight) * bits // 32)
    zeros = (_unpack(stored, bits).T.int() + layer.scheme.zero_offset) % 2**bits
    return _with_columns_of_scales(layer, qweight, zeros.to(torch.uint8))


def _with_columns_of_scales(layer: _Layer, qweight: Tensor, zeros: Tensor) -> QuantizedTensor:
    """Build the weight of values (out, in) and zero points (out, groups), with scales (groups, out)."""
    scales = layer.tensors["scales"]
    if scales.shape != zeros.T.shape or not scales.is_floating_point():
        raise layer.error("scales", f"{tuple(zeros.T.shape)} in floats")
    scales, zeros = (layer.spread("scales", values, qweight.shape) for values in (scales.T.float(), zeros))
    return layer.weight(qweight, scales, zeros)


def _packed(layer: _Layer) -> QuantizedTensor:
    """weight_packed (out, in / 8), weight_scale, weight_shape, weight_zero_point packed along the outputs."""
    bits, sizes = layer.scheme.bits, layer.tensors["weight_shape"]
    if sizes.shape != (2,) or sizes.is_floating_point():
        raise layer.error("weight_shape", "two sizes, integers")
    shape = tuple(sizes.tolist())
    qweight = _unpack(layer.words("weight_packed", shape[0], -(-shape[1] * bits // 32)), bits)[:, : shape[1]]
    scales = layer.scales("weight_scale", shape)
    middle = torch.full_like(scales, 2 ** (bits - 1), dtype=torch.uint8)
    return layer.weight(qweight, scales, _packed_zeros(layer, shape) if layer.scheme.has_zeros else middle)


def _packed_zeros(layer: _Layer, shape: tuple[int, int]) -> Tensor:
    """Unsigned zero points (out, groups); some checkpoints store them as int8 instead of packed."""
    bits, zeros = layer.scheme.bits, layer.tensors["weight_zero_point"]
    if zeros.dtype == torch.int8:
        zeros = (zeros.int() + 2 ** (bits - 1)).to(torch.uint8)
    else:
        words = layer.words("weight_zero_point", -(-shape[0] * bits // 32), layer.num_groups(shape[1]))
        zeros = _unpack(words.T, bits).T[: shape[0]]
    return layer.spread("weight_zero_point", zeros, shape)


def _plain(layer: _Layer) -> QuantizedTensor:
    """weight (out, in), weight_scale and weight_zero_point, in int8 or in 8-bit floats."""
    qweight, zeros = layer.tensors["weight"], layer.tensors.get("weight_zero_point")
    if qweight.dim() != 2 or qweight.dtype != _DTYPES[layer.scheme.dtype]:
        raise layer.error("weight", f"two dimensions in {layer.scheme.dtype}")
    if zeros is not None and zeros.dtype != torch.int8:
        raise layer.error("weight_zero_point", "int8")
    zeros = None if zeros is None else layer.spread("weight_zero_point", zeros, qweight.shape)
    return layer.weight(qweight, layer.scales("weight_scale", qweight.shape), zeros)


def _unpack(words: Tensor, bits: int) -> Tensor:
    """int32 (rows, columns) -> uint8 (rows, columns * 32 / bits), lowest bits first."""
    octets = words.contiguous().view(torch.uint8)
    return octets if bits == 8 else torch.stack((octets & 15, octets >> 4), dim=-1).flatten(1)


def _signed(qweight: Tensor) -> Tensor:
    """uint8 -> int8, shifted by 128."""
    return (qweight ^ 128).view(torch.int8)
