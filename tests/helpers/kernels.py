"""Kernels compared with their plain torch references."""

import torch


def assert_no_worse(got: torch.Tensor, twin: torch.Tensor, exact: torch.Tensor) -> None:
    """Against float64, the worst error of `got` is at most twice that of the plain twin in the same dtype.

    The floor is half a unit in the last place of the largest value: what rounding the exact result itself costs.
    """
    assert got.shape == exact.shape and got.dtype == twin.dtype
    floor = torch.finfo(got.dtype).eps / 2 * exact.abs().max().item()
    error, allowed = ((x.double().cpu() - exact.cpu()).abs().max().item() for x in (got, twin))
    assert error <= 2 * allowed + floor, f"errs by {error:.3g}, the plain twin by {allowed:.3g}"
