"""Kernels compared with their torch references."""

import torch


def assert_no_worse(got: torch.Tensor, reference: torch.Tensor, exact: torch.Tensor) -> None:
    """Against float64, the worst error of `got` is at most twice that of the reference in the same dtype.

    The floor is half a unit in the last place of the largest value: the error of rounding the exact result.
    """
    assert got.shape == exact.shape and got.dtype == reference.dtype
    floor = torch.finfo(got.dtype).eps / 2 * exact.abs().max().item()
    error, allowed = ((x.double().cpu() - exact.cpu()).abs().max().item() for x in (got, reference))
    assert error <= 2 * allowed + floor, f"the error is {error:.3g}, the reference's {allowed:.3g}"
