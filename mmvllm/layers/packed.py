"""Products with weights that are stored for a CPU: in oneDNN's layout, or in 8 bits.

A plain matrix product reorders parts of the weight in every call. With weights reordered once, by the operators that
torch.compile uses, products of few rows with Qwen2-VL-2B's weights are 1.5 to 2 times as fast.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from mmvllm.layers.coded import CodedWeight, round_to_codes
from mmvllm.layers.form import WeightForm

# Products of five or six rows read a weight at 30 GB/s, of one row at 22 (bfloat16, AVX512-BF16, 2 cores).
_MIN_ROWS = 6


class PackedWeight(WeightForm):
    """A weight (out, in) in oneDNN's layout, and its bias; fewer than `min_rows` rows are padded."""

    def __init__(self, weight: Tensor, bias: Tensor | None, min_rows: int = _MIN_ROWS):
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        self.bias, self.min_rows = bias, min_rows

    def __call__(self, x: Tensor) -> Tensor:
        """x (N, in) -> x Wᵀ + b (N, out)."""
        rows = _pad_rows(x, self.min_rows)
        return torch.ops.mkldnn._linear_pointwise(rows, self.weight, self.bias, "none", [], "")[: len(x)]

    @staticmethod
    def num_bytes(shape: torch.Size, dtype: torch.dtype) -> int:
        return shape.numel() * dtype.itemsize


class PackedGate(WeightForm):
    """Two weights (I, in), gate and up, in oneDNN's layout; SiLU and the product are fused into the matrix products."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        reorder = torch.ops.mkldnn._reorder_linear_weight
        self.gate, self.up = (reorder(part.contiguous(), None) for part in weight.chunk(2))
        self.gate_bias, self.up_bias = (None, None) if bias is None else bias.chunk(2)

    def __call__(self, x: Tensor) -> Tensor:
        """x (N, in) -> silu(x Gᵀ + g) * (x Uᵀ + u) (N, I)."""
        rows = _pad_rows(x)
        gate = torch.ops.mkldnn._linear_pointwise(rows, self.gate, self.gate_bias, "swish", [], "")
        return torch.ops.mkldnn._linear_pointwise.binary(rows, gate, self.up, self.up_bias, "mul")[: len(x)]

    num_bytes = PackedWeight.num_bytes


class Int8Weight(WeightForm):
    """A weight (out, in) in 8 bits with a scale per output; inputs are quantized dynamically, with a scale per row.

    Symmetric and round-to-nearest, as in LLM.int8() (arXiv 2208.07339) without its outliers. A row's scale depends on
    that row alone, so results do not depend on the batch. They may depend on how a prompt is chunked: an input that
    differs in its last bit can be rounded to the next of the 8-bit values.
    """

    _CHUNK = 256  # rows quantized at a time: intermediate results stay in the CPU cache, and take little memory

    def __init__(self, weight: Tensor | CodedWeight, bias: Tensor | None):
        coded = weight if isinstance(weight, CodedWeight) else round_to_codes(weight, bits=8)
        if coded.zeros is not None or coded.scales.shape[1] > 1:  # codes in groups are rounded again
            coded = round_to_codes(coded.dequantized(), bits=8)
        self.scale = coded.scales.flatten()
        self.weight = torch.ops.onednn.qlinear_prepack(coded.codes, None)
        self.zero_point, self.bias = torch.zeros(len(self.scale), dtype=torch.int64), bias

    def __call__(self, x: Tensor) -> Tensor:
        """x (N, in) -> x Wᵀ + b (N, out), both in x's dtype."""
        quantized, scale = self._quantize(x)
        y = torch.ops.onednn.qlinear_pointwise(
            quantized, 1.0, 128, self.weight, self.scale, self.zero_point, None, 1.0, 0, x.dtype, "none", [], ""
        )
        return y.mul_(scale) if self.bias is None else torch.addcmul(self.bias, y, scale)

    @staticmethod
    def num_bytes(shape: torch.Size, dtype: torch.dtype) -> int:
        return shape.numel() + 12 * shape[0]

    def _quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x (N, in) -> uint8 around 128 (N, in), and the scale of each row (N, 1) in x's dtype."""
        scale, quantized = x.new_empty(len(x), 1), torch.empty_like(x, dtype=torch.uint8)
        for rows, factor, out in zip(*(t.split(self._CHUNK) for t in (x, scale, quantized)), strict=True):
            # Slightly fewer than 127 steps, because the scale, rounded to x's dtype, may be slightly too small.
            factor.copy_(rows.abs().amax(dim=1, keepdim=True).float().div_(126.5).clamp_(min=1e-12))
            out.copy_((rows / factor.float()).add_(128.5))  # truncation after adding 0.5 rounds
        return quantized, scale


def _pad_rows(x: Tensor, min_rows: int = _MIN_ROWS) -> Tensor:
    return x if len(x) >= min_rows else F.pad(x, (0, 0, 0, min_rows - len(x)))
