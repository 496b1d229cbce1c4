"""Quantized layers in the published layouts, written from the descriptions of the formats and not from their reader.

Each packer takes a weight (out, in) and returns the tensors of the layer by their names inside it, and its
dequantized values, (out, in) in float32, computed one group at a time.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight neighboring outputs the nibbles have, the lowest first
IN_ORDER = tuple(range(8))


class PackedLayer(NamedTuple):
    tensors: dict[str, Tensor]
    values: Tensor


class Rounded(NamedTuple):
    """Codes (out, in), and by group (out, groups) the scales, in float16, and the codes of zero."""

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    values: Tensor


def round_weight(weight: Tensor, bits: int, group_size: int, symmetric: bool) -> Rounded:
    """To codes from 0 to 2^bits - 1."""
    size, top = group_size if group_size > 0 else weight.shape[1], 2**bits - 1
    groups = weight.float().numpy().reshape(len(weight), -1, size)
    if symmetric:
        scales = np.abs(groups).max(axis=2) / (top // 2)
        zeros = np.full(scales.shape, (top + 1) // 2)
    else:
        low, high = groups.min(axis=2).clip(max=0), groups.max(axis=2).clip(min=0)
        scales = (high - low) / top
        zeros = np.rint(-low / scales).clip(0, top).astype(int)
    scales = scales.astype(np.float16)
    codes = (np.rint(groups / scales[..., None].astype(float)) + zeros[..., None]).clip(0, top).astype(int)
    values = (codes - zeros[..., None]).astype(np.float32) * scales[..., None].astype(np.float32)
    return Rounded(codes.reshape(weight.shape), scales, zeros, torch.from_numpy(values.reshape(weight.shape)))


def words(codes: np.ndarray, bits: int, order: tuple[int, ...] = IN_ORDER) -> Tensor:
    """Codes from 0 on (rows, columns) -> int32 (rows, columns * bits / 32); missing columns are zeros."""
    per_word = 32 // bits
    columns = -(-codes.shape[1] // per_word)
    padded = np.zeros((len(codes), columns * per_word), dtype=np.uint32)
    padded[:, : codes.shape[1]] = codes
    out = np.zeros((len(codes), columns), dtype=np.uint32)
    for place in range(per_word):
        out |= padded[:, order[place] :: per_word] << np.uint32(bits * place)
    return torch.from_numpy(out.view(np.int32))


def pack_awq(weight: Tensor, group_size: int = 128) -> PackedLayer:
    """AutoAWQ's gemm layout: words along the outputs."""
    rounded = round_weight(weight, 4, group_size, symmetric=False)
    tensors = {
        "qweight": words(rounded.codes.T, 4, AWQ_ORDER),
        "qzeros": words(rounded.zeros.T, 4, AWQ_ORDER),
        "scales": torch.from_numpy(rounded.scales.T.copy()),
    }
    return PackedLayer(tensors, rounded.values)


def pack_gptq(
    weight: Tensor, bits: int = 4, group_size: int = 128, symmetric: bool = True, version: int = 1
) -> PackedLayer:
    """AutoGPTQ's layout: words along the inputs; zero points along the outputs and, in version 1, less 1."""
    rounded = round_weight(weight, bits, group_size, symmetric)
    zeros = (rounded.zeros - (1 if version == 1 else 0)) % 2**bits
    size = group_size if group_size > 0 else weight.shape[1]
    tensors = {
        "qweight": words(rounded.codes, bits).T.contiguous(),
        "qzeros": words(zeros.T, bits),
        "scales": torch.from_numpy(rounded.scales.T.copy()),
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // size,
    }
    return PackedLayer(tensors, rounded.values)


def pack_compressed(weight: Tensor, bits: int = 4, group_size: int = 128, symmetric: bool = True) -> PackedLayer:
    """compressed-tensors' pack-quantized: words along the columns; zero points along the rows."""
    rounded = round_weight(weight, bits, group_size, symmetric)
    tensors = {
        "weight_packed": words(rounded.codes, bits),
        "weight_scale": torch.from_numpy(rounded.scales),
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = words(rounded.zeros.T, bits).T.contiguous()
    return PackedLayer(tensors, rounded.values)


def pack_int8(weight: Tensor, group_size: int = -1, symmetric: bool = True) -> PackedLayer:
    """compressed-tensors' int-quantized: codes in int8 around 0."""
    rounded = round_weight(weight, 8, group_size, symmetric)
    tensors = {
        "weight": torch.from_numpy((rounded.codes - 128).astype(np.int8)),
        "weight_scale": torch.from_numpy(rounded.scales),
    }
    if not symmetric:
        tensors["weight_zero_point"] = torch.from_numpy((rounded.zeros - 128).astype(np.int8))
    return PackedLayer(tensors, rounded.values)


def pack_fp8(weight: Tensor, block: tuple[int, int] | None = (128, 128), scale_name="weight_scale_inv") -> PackedLayer:
    """8-bit floats; the scale of a block, or of the whole weight, is in float32 and multiplies them."""
    rows, columns = block or weight.shape
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    values = torch.empty(weight.shape)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scales[i, j] = weight[at].float().abs().max() / 448
            codes[at] = (weight[at].float() / scales[i, j]).to(codes.dtype)
            values[at] = codes[at].float() * scales[i, j]
    return PackedLayer({"weight": codes, scale_name: scales if block else scales.reshape(())}, values)
