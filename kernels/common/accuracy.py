"""The bound on errors of kernels: against float64, at most twice the error of plain torch in the same dtype.

The largest errors of two samples differ by chance even if the distribution is the same, and a bound that allows for
this hides errors of common values. The rule therefore compares the 99.9 % quantile (the tenth largest of a small
sample) and has a wider bound for the largest error. Errors are in units of the largest value of their row, which gives
rows of small values the same weight.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

NUM_VALUES = 10_000  # minimum that a test on a GPU compares if errors are a matter of chance
PER_QUANTILE = 1_000  # one value in 1,000 lies above the quantile
FEW = 10  # minimum number of values above the quantile, but at most 1 % of all values
QUANTILE_FACTOR = 2.0
LARGEST_FACTOR = 4.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """Errors of a kernel and of its reference, in units of the largest value of their rows.

    Args:
        num_values: size of the sample.
        quantile, largest: of the kernel's errors; `reference_quantile`, `reference_largest` of the reference's.
        rounding: the error of rounding the exact result, which is always allowed.
    """

    num_values: int
    quantile: float
    reference_quantile: float
    largest: float
    reference_largest: float
    rounding: float

    @property
    def problem(self) -> str | None:
        """Why the kernel's errors exceed the bounds, which NaN does, or None."""
        bounds = {
            "quantile": (self.quantile, self.reference_quantile, QUANTILE_FACTOR),
            "largest": (self.largest, self.reference_largest, LARGEST_FACTOR),
        }
        for name, (error, reference, factor) in bounds.items():
            if not error <= factor * reference + self.rounding:
                return f"the {name} of {self.num_values} errors is {error:.3g}, the reference's {reference:.3g}"
        return None


def relative_errors(x: Tensor, exact: Tensor) -> Tensor:
    """Return errors (N,) of x (..., D) against exact float64 values, in units of the largest value of each row."""
    exact = exact.to(x.device)
    scale = exact.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    return ((x.double() - exact).abs() / scale).flatten()


def compare(errors: Tensor, reference_errors: Tensor, dtype: torch.dtype) -> Comparison:
    """Compare `relative_errors` (N,) of a kernel and of its reference, both computed in `dtype`."""
    number = errors.numel()
    rank = max(1, min(FEW, number // 100), number // PER_QUANTILE)
    (largest, quantile), (reference_largest, reference_quantile) = (
        (top[0].item(), top[-1].item()) for top in (x.topk(rank).values for x in (errors, reference_errors))
    )
    return Comparison(
        number, quantile, reference_quantile, largest, reference_largest, rounding=torch.finfo(dtype).eps / 2
    )
