"""Weights in few bits: codes, and a scale for each group of them."""

from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class CodedWeight:
    """A weight (out, in) as codes in groups of columns: (codes - zeros) * scales.

    Args:
        codes: (out, in); uint8 from 0 to 15 for 4 bits, int8 for 8 bits, float8_e4m3fn for 8-bit floats.
        scales: (out, in / group_size), float32.
        zeros: the codes of zero, of the shape of `scales` and the dtype of `codes`; None if they are all 0.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def group_size(self) -> int:
        return self.codes.shape[1] // self.scales.shape[1]

    def to(self, device: torch.device) -> "CodedWeight":
        zeros = None if self.zeros is None else self.zeros.to(device)
        return CodedWeight(self.codes.to(device), self.scales.to(device), zeros)

    def dequantized(self) -> Tensor:
        """The weight (out, in) in float32."""
        values = self.codes.float().unflatten(1, (-1, self.group_size))
        if self.zeros is not None:
            values = values - self.zeros.float()[..., None]
        return (values * self.scales[..., None]).flatten(1)

    def part(self, rows: slice, columns: slice) -> "CodedWeight":
        """Some rows and columns; in smaller groups where columns begin or end inside a group."""
        size = gcd(self.group_size, columns.start, columns.stop)
        groups = slice(columns.start // size, columns.stop // size)
        if self.scales.shape[1] == 1:  # a scale per row is one for any columns
            size, groups = self.group_size, slice(None)
        whole = self.in_groups_of(size)
        zeros = None if whole.zeros is None else whole.zeros[rows, groups]
        return CodedWeight(self.codes[rows, columns], whole.scales[rows, groups], zeros)

    def in_groups_of(self, size: int) -> "CodedWeight":
        """The same weight in groups whose size divides that of its own."""
        times = self.group_size // size
        if times == 1:
            return self
        zeros = None if self.zeros is None else self.zeros.repeat_interleave(times, dim=1)
        return CodedWeight(self.codes, self.scales.repeat_interleave(times, dim=1), zeros)


class CodedParts:
    """The rows of a weight `shape` as codes that come one part after another; what no part covers is zero."""

    def __init__(self, shape: torch.Size):
        self.shape = shape
        self._parts: list[tuple[slice, CodedWeight]] = []

    def view(self, rows: slice, columns: slice) -> "CodesView":
        """Some rows, and the columns that are not padding, which follows them."""
        return CodesView(self, rows, columns)

    def add(self, rows: slice, coded: CodedWeight) -> None:
        self._parts.append((rows, coded))

    def joined(self) -> CodedWeight:
        """All of it, in groups that fit those of every part."""
        (_, first), (num_rows, num_columns) = self._parts[0], self.shape
        size = gcd(num_columns, *(part.group_size for _, part in self._parts))
        if num_columns == first.shape[1] and all(part.scales.shape[1] == 1 for _, part in self._parts):
            size = num_columns
        has_zeros = any(part.zeros is not None for _, part in self._parts)
        codes = first.codes.new_zeros(self.shape)
        scales = first.scales.new_zeros(num_rows, num_columns // size)
        zeros = codes.new_zeros(scales.shape) if has_zeros else None
        for rows, part in self._parts:
            part = part.in_groups_of(size)
            groups = slice(part.scales.shape[1])
            codes[rows, : part.shape[1]] = part.codes
            scales[rows, groups] = part.scales
            if part.zeros is not None:
                zeros[rows, groups] = part.zeros
        return CodedWeight(codes, scales, zeros)


class CodesView:
    """A part of `CodedParts`, used as the tensor that a part of a checkpoint is copied to."""

    def __init__(self, parts: CodedParts, rows: slice, columns: slice):
        self._parts, self._rows = parts, rows
        self.shape = torch.Size((rows.stop - rows.start, columns.stop))

    def dim(self) -> int:
        return 2

    def numel(self) -> int:
        return self.shape.numel()

    def copy_(self, coded: CodedWeight) -> None:
        assert coded.shape == self.shape, (coded.shape, self.shape)
        if self.numel():
            self._parts.add(self._rows, coded)


def int4_group_size(num_columns: int) -> int | None:
    """Columns in a group that weights are rounded to 4 bits in; None for a number that has no such groups."""
    return next((size for size in (128, 64, 32) if num_columns % size == 0), None)


def round_to_codes(weight: Tensor, bits: int, group_size: int | None = None) -> CodedWeight:
    """Round a weight (out, in) to the nearest codes; a group is a row by default.

    4 bits: 0 to 15 from a group's least to its largest value, and 0 is among the values. 8 bits: symmetric, -127 to
    127, as in LLM.int8() (arXiv 2208.07339) without its outliers.
    """
    (num_rows, num_columns), size = weight.shape, group_size or weight.shape[1]
    codes = torch.empty_like(weight, dtype=torch.uint8 if bits == 4 else torch.int8)
    scales = torch.empty(num_rows, num_columns // size, device=weight.device)
    zeros = torch.empty_like(scales, dtype=torch.uint8) if bits == 4 else None
    for start in range(0, num_rows, _CHUNK):
        at = slice(start, start + _CHUNK)
        groups = weight[at].float().unflatten(1, (-1, size))
        if bits == 4:
            rounded, scales[at], zeros[at] = _rounded_4(groups)
        else:
            rounded, scales[at] = _rounded_8(groups)
        codes[at] = rounded.flatten(1)
    return CodedWeight(codes, scales, zeros)


_CHUNK = 256  # rows that are rounded at a time: intermediate results stay in a CPU's cache, and take little memory


def _rounded_8(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Of (R, groups, size): codes, and scales (R, groups)."""
    scales = groups.abs().amax(dim=2).clamp_(min=1e-12) / 127
    return (groups / scales[..., None]).round_(), scales


def _rounded_4(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `_rounded_8`, and zeros (R, groups)."""
    least, largest = groups.amin(dim=2).clamp_(max=0), groups.amax(dim=2).clamp_(min=0)
    scales = (largest - least).clamp_(min=1e-12) / 15
    zeros = (-least / scales).round_()
    codes = (groups / scales[..., None] + zeros[..., None]).round_().clamp_(0, 15)
    return codes, scales, zeros
