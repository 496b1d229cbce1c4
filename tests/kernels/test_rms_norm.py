import pytest
import torch
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from mmvllm.kernels.rms_norm import (
    add_rms_norm,
    add_rms_norm_torch,
    add_rms_norm_triton,
    rms_norm,
    rms_norm_torch,
    rms_norm_triton,
)
from tests.helpers.models.kernels import assert_no_worse

SIZES = pytest.mark.parametrize("N,C", [(3, 1536), (2, 3584), (5, 67), (4, 1)])
EPS = 1e-6


def rows_and_weight(N, C, device, dtype):
    torch.manual_seed(0)
    scale = torch.logspace(-3, 2, N, device=device)[:, None]  # eps matters for the smallest row
    rows = (scale * torch.randn(N, C, device=device)).to(dtype)
    return rows, torch.randn(C, device=device, dtype=dtype)


def in_float64(x, weight):
    x = x.double()
    return weight.double() * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


@SIZES
def test_error_is_bounded_by_the_reference(N, C, device, dtype):
    x, weight = rows_and_weight(N, C, device, dtype)
    assert_no_worse(rms_norm_triton(x, weight, EPS), rms_norm_torch(x, weight, EPS), in_float64(x, weight))


@SIZES
def test_error_with_a_residual_is_bounded_by_the_reference(N, C, device, dtype):
    x, weight = rows_and_weight(N, C, device, dtype)
    residual = x.flip(1) / 3
    before = x.clone(), residual.clone()
    got, total = add_rms_norm_triton(x, residual, weight, EPS)
    reference, reference_total = add_rms_norm_torch(x, residual, weight, EPS)
    assert torch.equal(total, reference_total)
    assert_no_worse(got, reference, in_float64(total, weight))
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


def test_the_sum_is_rounded_before_it_is_normalized(device):
    """2049 and 2051 are 2048 and 2052 in float16; normalized, that is 0.9990 and 1.0010, not 0.9995 and 1.0005."""
    x = torch.tensor([[1.0, 3.0] * 32], dtype=torch.float16, device=device)
    weight = torch.ones(64, dtype=torch.float16, device=device)
    for add in (add_rms_norm, add_rms_norm_triton):
        got, total = add(x, torch.full_like(x, 2048), weight, EPS)
        assert total.unique().tolist() == [2048, 2052]
        assert got.unique().tolist() == [1 - 2**-10, 1 + 2**-10]


def test_reference_equals_transformers(dtype, device):
    x, weight = rows_and_weight(5, 67, device, dtype)
    theirs = Qwen2RMSNorm(67, EPS)
    theirs.weight.data = weight
    assert torch.equal(rms_norm_torch(x, weight, EPS), theirs(x))


def test_rows_are_independent(device, dtype):
    x, weight = rows_and_weight(5, 67, device, dtype)
    assert torch.equal(rms_norm(x, weight, EPS)[3:4], rms_norm(x[3:4], weight, EPS))
    assert torch.equal(rms_norm_triton(x, weight, EPS)[3:4], rms_norm_triton(x[3:4], weight, EPS))
