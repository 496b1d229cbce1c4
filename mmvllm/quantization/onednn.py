"""Linear methods of CPUs: weights in oneDNN's layout, in 8 bits, or in 4 bits.

A plain matrix product reorders parts of the weight in every call. With weights reordered once, by the operators that
torch.compile uses, products of few rows with Qwen2-VL-2B's weights are 1.5 to 2 times as fast.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from mmvllm.kernels.common.dispatch import multiplies_float32_faster
from mmvllm.quantization.linear_method import LinearMethod
from mmvllm.quantization.quantized_tensor import QuantizedTensor, int4_group_size, quantize

_BITS = {torch.bfloat16: (torch.int16, 2**15 - 1), torch.float32: (torch.int32, 2**31 - 1)}


class OneDNNLinear(LinearMethod):
    """A weight (out, in) in oneDNN's layout. Inputs with few rows are padded to `min_rows` (default: `_min_rows`)."""

    def __init__(self, weight: Tensor, bias: Tensor | None, min_rows: int | None = None):
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        self.bias, self.min_rows = bias, min_rows

    def __call__(self, x: Tensor) -> Tensor:
        """x (N, in) -> x Wᵀ + b (N, out)."""
        rows = _pad_rows(x, self.min_rows)
        return torch.ops.mkldnn._linear_pointwise(rows, self.weight, self.bias, "none", [], "")[: len(x)]


class Float32Linear(LinearMethod):
    """A bfloat16 weight (out, in), converted to float32 in each product.

    It is used for a ViT on a CPU where `multiplies_float32_faster`: the conversion takes 2 % of the time of 1,024 rows.
    """

    _CHUNK = 1024  # rows multiplied at a time: their float32 results take little memory

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self.weight, self.bias = weight.contiguous(), bias

    def __call__(self, x: Tensor) -> Tensor:
        """x (N, in) -> x Wᵀ + b (N, out), rounded once."""
        # oneDNN's result of a row does not depend on the number of rows; that of F.linear does.
        multiply = torch.ops.mkldnn._linear_pointwise
        weight, bias = self.weight.float(), None if self.bias is None else self.bias.float()
        out = x.new_empty(len(x), len(weight))
        for rows, part in zip(x.split(self._CHUNK), out.split(self._CHUNK), strict=True):
            wide = _pad_rows(rows.float(), 2)  # a single row takes another code path
            part.copy_(multiply(wide, weight, bias, "none", [], "")[: len(rows)])
        return out


class OneDNNGate(LinearMethod):
    """Gate and up weights (I, in) in oneDNN's layout; SiLU and multiplication are fused into the matrix products."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        reorder = torch.ops.mkldnn._reorder_linear_weight
        self.gate, self.up = (reorder(part.contiguous(), None) for part in weight.chunk(2))
        self.gate_bias, self.up_bias = (None, None) if bias is None else bias.chunk(2)

    def __call__(self, x: Tensor) -> Tensor:
        """x (N, in) -> silu(x Gᵀ + g) * (x Uᵀ + u) (N, I)."""
        rows = _pad_rows(x)
        gate = torch.ops.mkldnn._linear_pointwise(rows, self.gate, self.gate_bias, "swish", [], "")
        return torch.ops.mkldnn._linear_pointwise.binary(rows, gate, self.up, self.up_bias, "mul")[: len(x)]


class Int8Linear(LinearMethod):
    """A weight (out, in) in 8 bits with a scale per output; inputs are quantized dynamically, with a scale per row.

    Symmetric and round-to-nearest, as in LLM.int8() (arXiv 2208.07339) without its outliers. A row's scale depends on
    that row alone, so results do not depend on the batch. They may depend on how a prompt is chunked: an input that
    differs in its last bit can be rounded to the next of the 8-bit values.
    """

    _CHUNK = 2**17  # values quantized at a time: intermediate results stay in the CPU cache, and take little memory

    def __init__(self, weight: Tensor | QuantizedTensor, bias: Tensor | None):
        quantized = weight if isinstance(weight, QuantizedTensor) else quantize(weight, bits=8)
        if quantized.zeros is not None or quantized.scales.shape[1] > 1:  # quantized again, with one scale per row
            quantized = quantize(quantized.dequantized(), bits=8)
        self.scale = quantized.scales.flatten()
        self.weight = torch.ops.onednn.qlinear_prepack(quantized.qweight, None)
        self.zero_point, self.bias = torch.zeros(len(self.scale), dtype=torch.int64), bias

    def __call__(self, x: Tensor) -> Tensor:
        """x (N, in) -> x Wᵀ + b (N, out), both in x's dtype."""
        quantized, scale = self._quantize(x)
        y = torch.ops.onednn.qlinear_pointwise(
            quantized, 1.0, 128, self.weight, self.scale, self.zero_point, None, 1.0, 0, x.dtype, "none", [], ""
        )
        return y.mul_(scale) if self.bias is None else torch.addcmul(self.bias, y, scale)

    @classmethod
    def num_bytes(cls, shape: torch.Size, dtype: torch.dtype, group_size: int | None = None) -> int:
        return shape.numel() + 12 * shape[0]

    def _quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x (N, in) -> uint8 around 128 (N, in), and the scale of each row (N, 1) in x's dtype."""
        scale, quantized = x.new_empty(len(x), 1), torch.empty_like(x, dtype=torch.int8)
        chunk = max(1, self._CHUNK // x.shape[1])
        for rows, factor, out in zip(*(t.split(chunk) for t in (x, scale, quantized)), strict=True):
            # Slightly fewer than 127 steps, because the scale, rounded to x's dtype, may be slightly too small.
            factor.copy_(_largest_magnitude(rows).float().div_(126.5).clamp_(min=1e-12))
            out.copy_(rows.to(torch.float32, copy=True).mul_(factor.float().reciprocal()).round_())
        return quantized.bitwise_xor_(-128).view(torch.uint8), scale  # which adds 128


class Int4Linear(LinearMethod):
    """A weight (out, in) in 4 bits with a scale and a zero per group of columns; inputs and outputs are bfloat16.

    Scales, and zeros times scales, are rounded to bfloat16. A row's result does not depend on other rows but for their
    number: many rows are multiplied by the weight rounded to bfloat16, few by exact products of integers and scales.
    """

    _GROUPS = (256, 128, 64, 32)  # sizes that torch's operator supports
    _BLOCK = 64  # outputs that AVX512 computes at a time, whose values are stored together
    _TILE = 2**19  # weights dequantized at a time: 1 MiB stays in the CPU cache
    # Dequantizing takes 1.2 ns a weight, and then a row 0.011 to 0.02 instead of 0.027 to 0.03 (AVX512-BF16, one core).
    _MANY_ROWS = 128

    def __init__(self, weight: Tensor | QuantizedTensor, bias: Tensor | None):
        if not isinstance(weight, QuantizedTensor):
            weight = quantize(weight, 4, int4_group_size(weight.shape[1]))
        self.group_size = next((size for size in self._GROUPS if weight.group_size % size == 0), None)
        if self.group_size is None:
            raise ValueError(f"groups of {weight.group_size} columns are not a multiple of 32")
        self.bias, self.out_size = bias, weight.shape[0]
        padding = -self.out_size % self._BLOCK
        self.qweight = _pack_int4(F.pad(weight.qweight, (0, 0, 0, padding)))
        scales = weight.scales.bfloat16()
        zeros = (8 - (0 if weight.zeros is None else weight.zeros.float())) * scales
        both = torch.stack([scales, zeros.bfloat16()], dim=-1)
        both = both.repeat_interleave(weight.group_size // self.group_size, dim=1).transpose(0, 1)
        self.scales_and_zeros = F.pad(both, (0, 0, 0, padding)).contiguous()  # (groups, out, 2)

    def __call__(self, x: Tensor) -> Tensor:
        """x (N, in) -> x Wᵀ + b (N, out)."""
        if len(x) < self._MANY_ROWS or not _stores_blocks_of_64():
            multiply = torch.ops.aten._weight_int4pack_mm_for_cpu
            y = multiply(x.contiguous(), self.qweight, self.group_size, self.scales_and_zeros)
        else:
            y = self._multiply_dequantized(x)
        y = y[:, : self.out_size].contiguous()
        return y if self.bias is None else y.add_(self.bias)

    @classmethod
    def num_bytes(cls, shape: torch.Size, dtype: torch.dtype, group_size: int | None = None) -> int:
        rows, size = -(-shape[0] // cls._BLOCK) * cls._BLOCK, group_size or int4_group_size(shape[1])
        operator_size = next(own for own in cls._GROUPS if size % own == 0)
        return rows * (shape[1] // 2 + shape[1] // operator_size * 4)

    def _multiply_dequantized(self, x: Tensor) -> Tensor:
        """In float32 where that is faster, though the weight is rounded to bfloat16 elsewhere."""
        dtype = torch.float32 if multiplies_float32_faster() else x.dtype
        rows, y = x.to(dtype), x.new_empty(len(x), len(self.qweight))
        blocks = self.qweight.view(-1, x.shape[1], self._BLOCK // 2)
        tile = max(1, self._TILE // (x.shape[1] * self._BLOCK))
        scales, zeros = self.scales_and_zeros.unflatten(1, (-1, self._BLOCK)).permute(3, 1, 0, 2).unsqueeze(3)
        tiles = zip(*(t.split(tile) for t in (blocks, scales, zeros)), y.split(tile * self._BLOCK, dim=1), strict=True)
        for qweight, scale, zero, out in tiles:
            steps = _unpack_int4(qweight).sub_(8).to(dtype).unflatten(1, (-1, self.group_size))
            weight = torch.addcmul(zero.to(dtype), steps, scale.to(dtype)).flatten(1, 2)  # (tile, in, 64)
            out.copy_(rows @ weight.transpose(0, 1).flatten(1))
        return y


def _largest_magnitude(x: Tensor) -> Tensor:
    """The largest magnitude of each row (N, 1), compared as integers: faster, and ordered as positive floats are."""
    integer, all_but_sign = _BITS[x.dtype]
    return x.view(integer).bitwise_and(all_but_sign).amax(dim=1, keepdim=True).view(x.dtype)


def _pack_int4(qweight: Tensor) -> Tensor:
    """Values (out, in) from 0 to 15, `out` a multiple of 64 -> the same two in a byte, in the layout of this CPU."""
    pack = torch.ops.aten._convert_weight_to_int4pack_for_cpu
    return torch.cat([pack(rows.int().contiguous(), 1) for rows in qweight.split(1024)])


def _unpack_int4(blocks: Tensor) -> Tensor:
    """Values of blocks of 64 outputs (B, in, 32) -> (B, in, 64) int8.

    A byte holds the values of outputs i and i + 32: see weight_to_int4pack_kernel in torch's int4mm_kernel.cpp.
    """
    qweight = torch.empty(*blocks.shape[:2], 64, dtype=torch.int8)
    torch.bitwise_and(blocks, 15, out=qweight[..., :32])
    torch.bitwise_right_shift(blocks, 4, out=qweight[..., 32:])
    return qweight


@cache
def _stores_blocks_of_64() -> bool:
    """Whether this CPU stores int4 as `_unpack_int4` expects; without AVX512, it stores blocks of 32."""
    qweight = torch.arange(128 * 32).view(128, 32) * 7 % 16
    unpacked = _unpack_int4(_pack_int4(qweight).view(-1, 32, 32))
    return torch.equal(unpacked.transpose(1, 2).flatten(0, 1), qweight.to(torch.int8))


def _pad_rows(x: Tensor, min_rows: int | None = None) -> Tensor:
    missing = (min_rows or _min_rows()) - len(x)
    return F.pad(x, (0, 0, 0, missing)) if missing > 0 else x


def _min_rows() -> int:
    """Rows of the fastest product of few, two at least: a single row's last bit may differ, with AMX that of any row.

    Six rows read a weight at 30 GB/s and one at 22, or, where bfloat16 is slow, six at 19 and two at 21 (2 cores).
    """
    return 2 if multiplies_float32_faster() else 6
