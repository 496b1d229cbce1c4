"""The rule for errors of kernels: against float64, at most twice the error of plain torch in the same dtype.

One value says little: the largest of two samples of the same errors differ by chance, and a bound that allows for this
hides errors of common values. So the rule compares the 99.9 % quantile (the tenth largest of a small sample) and bounds
the largest error more widely. An error is counted in units of the largest value of its row, so that rows of small
values count as much as others.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

NUM_VALUES = 10_000  # that a test on a GPU compares at least, with errors that are a matter of chance
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
        """What is wrong with the kernel, or None; NaN is."""
        bounds = {
            "quantile": (self.quantile, self.reference_quantile, QUANTILE_FACTOR),
            "largest": (self.largest, self.reference_largest, LARGEST_FACTOR),
        }
        for name, (error, reference, factor) in bounds.items():
            if not error <= factor * reference + self.rounding:
                return f"the {name} of {self.num_values} errors is {error:.3g}, the reference's {reference:.3g}"
        return None


def relative_errors(x: Tensor, exact: Tensor) -> Tensor:
    """Errors of x (..., D) against float64 values of its shape, in units of the largest of each row (N,)."""
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
