"""Kernels compared with their torch references."""

import torch

from mmvllm.bench.accuracy import compare, relative_errors


def assert_no_worse(got: torch.Tensor, reference: torch.Tensor, exact: torch.Tensor) -> None:
    """Against float64, the errors of `got` are at most twice those of the reference in the same dtype.

    `mmvllm.bench.accuracy` defines the rule. Of fewer than 1,000 values its quantile is the largest error.
    """
    assert got.shape == exact.shape and got.dtype == reference.dtype
    errors, allowed = (relative_errors(x.cpu(), exact.cpu()) for x in (got, reference))
    problem = compare(errors, allowed, got.dtype).problem
    assert problem is None, problem
