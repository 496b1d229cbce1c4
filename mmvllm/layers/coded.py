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

        def of_groups(values: Tensor) -> Tensor:
            return values[rows].repeat_interleave(self.group_size // size, dim=1)[:, groups]

        zeros = None if self.zeros is None else of_groups(self.zeros)
        return CodedWeight(self.codes[rows, columns], of_groups(self.scales), zeros)
