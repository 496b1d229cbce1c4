"""Kernels compared with their torch references."""

import torch

from mmvllm.kernels.common.accuracy import compare, relative_errors
from mmvllm.kernels.fp8 import Fp8Rows


def assert_no_worse(got: torch.Tensor, reference: torch.Tensor, exact: torch.Tensor) -> None:
    """Against float64, the errors of `got` are at most twice the reference's in the same dtype.

    `mmvllm.kernels.common.accuracy` defines the rule.
    """
    assert got.shape == exact.shape and got.dtype == reference.dtype
    errors, allowed = (relative_errors(x.cpu(), exact.cpu()) for x in (got, reference))
    problem = compare(errors, allowed, got.dtype).problem
    assert problem is None, problem


def round_to_e4m3_exactly(monkeypatch) -> None:
    """Let Triton's interpreter convert to e4m3 as GPUs do: to the nearest value, ties to even.

    Its own conversion drops bits of subnormal values, does not carry into the exponent and loses NaN (Triton 3.9).
    """
    from triton.language import float8e4nv, float32
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def exact(values, from_dtype, to_dtype, rounding_mode):
        if to_dtype != float8e4nv:
            return convert(values, from_dtype, to_dtype, rounding_mode)
        assert from_dtype == float32
        rounded = torch.from_numpy(values.copy()).to(torch.float8_e4m3fn)
        return rounded.view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", exact)


def assert_same_rows(got: Fp8Rows, want: Fp8Rows) -> None:
    """Equal bits, scales and dtypes."""
    assert got.dtype == want.dtype and torch.equal(got.scale, want.scale)
    assert torch.equal(got.values.view(torch.uint8), want.values.view(torch.uint8))
