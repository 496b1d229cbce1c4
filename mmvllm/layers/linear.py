"""A linear layer whose weight stacks several of the checkpoint's, so that one product does the work of all."""

from itertools import accumulate

from torch import Tensor, nn


class MergedLinear(nn.Linear):
    """x -> one output per entry of `out_sizes`; `rows[i]` is where the checkpoint's i-th weight goes."""

    def __init__(self, in_size: int, out_sizes: list[int], bias: bool):
        super().__init__(in_size, sum(out_sizes), bias=bias)
        self.out_sizes = out_sizes
        ends = list(accumulate(out_sizes))
        self.rows = [slice(end - size, end) for end, size in zip(ends, out_sizes, strict=True)]

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return super().forward(x).split(self.out_sizes, dim=-1)
