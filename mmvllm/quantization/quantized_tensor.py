"""Quantized weights: values of few bits, with a scale for each group of columns. Rounding, slicing and joining them."""

from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A weight (out, in), quantized in groups of columns: (qweight - zeros) * scales.

    Args:
        qweight: (out, in); uint8 from 0 to 15 for 4 bits, int8 for 8 bits, float8_e4m3fn for 8-bit floats.
        scales: (out, in / group_size), float32.
        zeros: zero points, of the shape of `scales` and the dtype of `qweight`; None if all are 0.
    """

    qweight: Tensor
    scales: Tensor
    zeros: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return self.qweight.shape

    @property
    def group_size(self) -> int:
        return self.qweight.shape[1] // self.scales.shape[1]

    def to(self, device: torch.device) -> "QuantizedTensor":
        zeros = None if self.zeros is None else self.zeros.to(device)
        return QuantizedTensor(self.qweight.to(device), self.scales.to(device), zeros)

    def dequantized(self) -> Tensor:
        """The weight (out, in) in float32."""
        values = self.qweight.float().unflatten(1, (-1, self.group_size))
        if self.zeros is not None:
            values = values - self.zeros.float()[..., None]
        return (values * self.scales[..., None]).flatten(1)

    def part(self, rows: slice, columns: slice) -> "QuantizedTensor":
        """A slice of rows and columns. The groups get smaller if the columns start or end inside a group."""
        size = gcd(self.group_size, columns.start, columns.stop)
        groups = slice(columns.start // size, columns.stop // size)
        if self.scales.shape[1] == 1:  # a scale per row is one for any columns
            size, groups = self.group_size, slice(None)
        whole = self.with_group_size(size)
        zeros = None if whole.zeros is None else whole.zeros[rows, groups]
        return QuantizedTensor(self.qweight[rows, columns], whole.scales[rows, groups], zeros)

    def with_group_size(self, size: int) -> "QuantizedTensor":
        """Split the groups into smaller ones; `size` must divide the group size."""
        times = self.group_size // size
        if times == 1:
            return self
        zeros = None if self.zeros is None else self.zeros.repeat_interleave(times, dim=1)
        return QuantizedTensor(self.qweight, self.scales.repeat_interleave(times, dim=1), zeros)


class QuantizedParts:
    """Collects the parts of a quantized weight of this shape while it is loaded; rows that no part covers are zero."""

    def __init__(self, shape: torch.Size):
        self.shape = shape
        self._parts: list[tuple[slice, QuantizedTensor]] = []

    def view(self, rows: slice, columns: slice) -> "QuantizedPartView":
        """The view that a part of the checkpoint is copied to; columns after `columns` are padding."""
        return QuantizedPartView(self, rows, columns)

    def add(self, rows: slice, quantized: QuantizedTensor) -> None:
        self._parts.append((rows, quantized))

    def joined(self) -> QuantizedTensor:
        """Join all parts, in groups that divide the groups of every part."""
        (_, first), (num_rows, num_columns) = self._parts[0], self.shape
        size = gcd(num_columns, *(part.group_size for _, part in self._parts))
        if num_columns == first.shape[1] and all(part.scales.shape[1] == 1 for _, part in self._parts):
            size = num_columns
        has_zeros = any(part.zeros is not None for _, part in self._parts)
        qweight = first.qweight.new_zeros(self.shape)
        scales = first.scales.new_zeros(num_rows, num_columns // size)
        zeros = qweight.new_zeros(scales.shape) if has_zeros else None
        for rows, part in self._parts:
            part = part.with_group_size(size)
            groups = slice(part.scales.shape[1])
            qweight[rows, : part.shape[1]] = part.qweight
            scales[rows, groups] = part.scales
            if part.zeros is not None:
                zeros[rows, groups] = part.zeros
        return QuantizedTensor(qweight, scales, zeros)


class QuantizedPartView:
    """Has the methods of a tensor that loading uses, and adds what is copied to it to a `QuantizedParts`."""

    def __init__(self, parts: QuantizedParts, rows: slice, columns: slice):
        self._parts, self._rows = parts, rows
        self.shape = torch.Size((rows.stop - rows.start, columns.stop))

    def dim(self) -> int:
        return 2

    def numel(self) -> int:
        return self.shape.numel()

    def copy_(self, quantized: QuantizedTensor) -> None:
        assert quantized.shape == self.shape, (quantized.shape, self.shape)
        if self.numel():
            self._parts.add(self._rows, quantized)


def int4_group_size(num_columns: int) -> int | None:
    """Group size for rounding weights to 4 bits; None if no supported size divides the columns."""
    return next((size for size in (128, 64, 32) if num_columns % size == 0), None)


def quantize(weight: Tensor, bits: int, group_size: int | None = None) -> QuantizedTensor:
    """Quantize a weight (out, in), rounding to nearest; by default a row is one group.

    4 bits: 0 to 15 from a group's least to its largest value, and 0 is among the values. 8 bits: symmetric, -127 to
    127, as in LLM.int8() (arXiv 2208.07339) without its outliers.
    """
    (num_rows, num_columns), size = weight.shape, group_size or weight.shape[1]
    qweight = torch.empty_like(weight, dtype=torch.uint8 if bits == 4 else torch.int8)
    scales = torch.empty(num_rows, num_columns // size, device=weight.device)
    zeros = torch.empty_like(scales, dtype=torch.uint8) if bits == 4 else None
    for start in range(0, num_rows, _CHUNK):
        at = slice(start, start + _CHUNK)
        groups = weight[at].float().unflatten(1, (-1, size))
        if bits == 4:
            rounded, scales[at], zeros[at] = _rounded_4(groups)
        else:
            rounded, scales[at] = _rounded_8(groups)
        qweight[at] = rounded.flatten(1)
    return QuantizedTensor(qweight, scales, zeros)


_CHUNK = 256  # rows that are rounded at a time: intermediate results stay in a CPU's cache, and take little memory


def _rounded_8(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Values (R, groups, size) -> quantized values, and scales (R, groups)."""
    scales = groups.abs().amax(dim=2).clamp_(min=1e-12) / 127
    return (groups / scales[..., None]).round_(), scales


def _rounded_4(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Values (R, groups, size) -> quantized values, scales (R, groups) and zero points (R, groups)."""
    least, largest = groups.amin(dim=2).clamp_(max=0), groups.amax(dim=2).clamp_(min=0)
    scales = (largest - least).clamp_(min=1e-12) / 15
    zeros = (-least / scales).round_()
    qweight = (groups / scales[..., None] + zeros[..., None]).round_().clamp_(0, 15)
    return qweight, scales, zeros
