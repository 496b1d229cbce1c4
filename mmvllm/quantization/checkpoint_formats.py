"""The tensors of one quantized layer, as they are published, and the weight in codes that they make.

AutoAWQ's layout (awq/modules/linear/gemm.py), AutoGPTQ's (auto_gptq/nn_modules/qlinear) and those of compressed-tensors
(compressors/pack_quantized and compressors/naive_quantized).
"""

from collections.abc import Mapping
from math import gcd, prod
from typing import Protocol

import torch
from torch import Tensor

from mmvllm.quantization.config import WeightScheme
from mmvllm.quantization.quantized_weight import CodedWeight

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # of tensors that are stored without codes

# The nibble of each of eight outputs; the nibbles, from the lowest, have the outputs 0, 2, 4, 6, 1, 3, 5 and 7.
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
_DTYPES = {"int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn}


class StoredTensor(Protocol):
    """A tensor of a file, not read yet; an index reads a part of it, as a view of the memory map where it can be."""

    def get_shape(self) -> list[int]: ...

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor: ...


class QuantizedTensor:
    """A weight (out, in) of a checkpoint in codes; an index, rows and columns, gives this part of it."""

    def __init__(self, weight: CodedWeight):
        self.weight = weight

    def get_shape(self) -> list[int]:
        return list(self.weight.shape)

    def __getitem__(self, index: tuple[slice, slice]) -> CodedWeight:
        return self.weight.part(*index)


def coded_weight(layer: str, tensors: Mapping[str, Tensor], scheme: WeightScheme) -> CodedWeight:
    """The weight (out, in) of a layer from its tensors, by their names inside the layer.

    Raises ValueError for shapes and dtypes that do not belong together.
    """
    reader = {"awq": _awq, "gptq": _gptq, "packed": _packed, "plain": _plain}[scheme.layout]
    return reader(_Layer(layer, tensors, scheme))


def check_order(layer: str, indices: Tensor, scheme: WeightScheme) -> None:
    """Raise ValueError if the columns of a layer are in other groups than one after the other; -1 stands for that."""
    if indices.dim() != 1:
        raise ValueError(f"{layer} has indices of groups in {indices.dim()} dimensions, needs one")
    in_turn = torch.arange(len(indices)) // (scheme.block[1] or len(indices))
    if not torch.equal(indices.long(), in_turn) and not (indices == -1).all():
        raise ValueError(f"{layer} has its columns in groups of another order (act-order), which is not supported")


class _Layer:
    """The tensors of a layer; each is checked when it is taken."""

    def __init__(self, name: str, tensors: Mapping[str, Tensor], scheme: WeightScheme):
        self.name, self.tensors, self.scheme = name, tensors, scheme

    def words(self, part: str, rows: int | None = None, columns: int | None = None) -> Tensor:
        """Codes in int32, in so many rows and columns where these are known."""
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
        """Of a weight of this shape (out, in), stored as (rows, groups): (out, groups), float32."""
        scales = self.tensors[part]
        if not scales.is_floating_point():
            raise self.error(part, "floats")
        return self.spread(part, scales.float(), shape)

    def spread(self, part: str, values: Tensor, shape: tuple[int, int]) -> Tensor:
        """One value of each block of a weight, or one for all, repeated to (out, groups)."""
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

    def weight(self, codes: Tensor, scales: Tensor, zeros: Tensor | None) -> CodedWeight:
        """Of codes and zero points from 0 on, which become signed if they have 8 bits, or of signed ones."""
        if self.scheme.bits == 8 and codes.dtype == torch.uint8:
            codes, zeros = _signed(codes), _signed(zeros)
        has_zeros = zeros is not None and bool(zeros.any())
        return CodedWeight(codes.contiguous(), scales, zeros.contiguous() if has_zeros else None)


def _awq(layer: _Layer) -> CodedWeight:
    """qweight (in, out / 8), qzeros (groups, out / 8) and scales (groups, out)."""
    packed = layer.words("qweight")
    zeros = layer.words("qzeros", layer.num_groups(len(packed)), packed.shape[1])
    codes, zeros = (_unpack(words, 4).unflatten(1, (-1, 8))[..., _AWQ_ORDER].flatten(1).T for words in (packed, zeros))
    return _with_columns_of_scales(layer, codes, zeros)


def _gptq(layer: _Layer) -> CodedWeight:
    """qweight (in / 8, out), qzeros (groups, out / 8) and scales (groups, out); for 8 bits with 4 instead of 8."""
    bits = layer.scheme.bits
    codes = _unpack(layer.words("qweight").T, bits)
    stored = layer.words("qzeros", layer.num_groups(codes.shape[1]), len(codes) * bits // 32)
    zeros = (_unpack(stored, bits).T.int() + layer.scheme.zero_offset) % 2**bits
    return _with_columns_of_scales(layer, codes, zeros.to(torch.uint8))


def _with_columns_of_scales(layer: _Layer, codes: Tensor, zeros: Tensor) -> CodedWeight:
    """Of codes (out, in) and zero points (out, groups), with scales (groups, out)."""
    scales = layer.tensors["scales"]
    if scales.shape != zeros.T.shape or not scales.is_floating_point():
        raise layer.error("scales", f"{tuple(zeros.T.shape)} in floats")
    scales, zeros = (layer.spread("scales", values, codes.shape) for values in (scales.T.float(), zeros))
    return layer.weight(codes, scales, zeros)


def _packed(layer: _Layer) -> CodedWeight:
    """weight_packed (out, in / 8), weight_scale, weight_shape, weight_zero_point packed along the outputs."""
    bits, sizes = layer.scheme.bits, layer.tensors["weight_shape"]
    if sizes.shape != (2,) or sizes.is_floating_point():
        raise layer.error("weight_shape", "two sizes, integers")
    shape = tuple(sizes.tolist())
    codes = _unpack(layer.words("weight_packed", shape[0], -(-shape[1] * bits // 32)), bits)[:, : shape[1]]
    scales = layer.scales("weight_scale", shape)
    middle = torch.full_like(scales, 2 ** (bits - 1), dtype=torch.uint8)
    return layer.weight(codes, scales, _packed_zeros(layer, shape) if layer.scheme.has_zeros else middle)


def _packed_zeros(layer: _Layer, shape: tuple[int, int]) -> Tensor:
    """(out, groups), from 0 on; they may be stored in int8 around 0 instead of packed."""
    bits, zeros = layer.scheme.bits, layer.tensors["weight_zero_point"]
    if zeros.dtype == torch.int8:
        zeros = (zeros.int() + 2 ** (bits - 1)).to(torch.uint8)
    else:
        words = layer.words("weight_zero_point", -(-shape[0] * bits // 32), layer.num_groups(shape[1]))
        zeros = _unpack(words.T, bits).T[: shape[0]]
    return layer.spread("weight_zero_point", zeros, shape)


def _plain(layer: _Layer) -> CodedWeight:
    """weight (out, in), weight_scale and weight_zero_point, in int8 around 0 or in 8-bit floats."""
    codes, zeros = layer.tensors["weight"], layer.tensors.get("weight_zero_point")
    if codes.dim() != 2 or codes.dtype != _DTYPES[layer.scheme.codes]:
        raise layer.error("weight", f"two dimensions in {layer.scheme.codes}")
    if zeros is not None and zeros.dtype != torch.int8:
        raise layer.error("weight_zero_point", "int8")
    zeros = None if zeros is None else layer.spread("weight_zero_point", zeros, codes.shape)
    return layer.weight(codes, layer.scales("weight_scale", codes.shape), zeros)


def _unpack(words: Tensor, bits: int) -> Tensor:
    """int32 (rows, columns) -> uint8 (rows, columns * 32 / bits); a word begins with its lowest bits."""
    octets = words.contiguous().view(torch.uint8)
    return octets if bits == 8 else torch.stack((octets & 15, octets >> 4), dim=-1).flatten(1)


def _signed(codes: Tensor) -> Tensor:
    """uint8 from 0 on -> int8 around 0."""
    return (codes ^ 128).view(torch.int8)
