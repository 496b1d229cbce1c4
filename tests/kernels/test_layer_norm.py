import pytest
import torch
import torch.nn.functional as F

from mmvllm.kernels.layer_norm import add_layer_norm, add_layer_norm_torch, add_layer_norm_triton
from tests.helpers.models.kernels import assert_no_worse

EPS = 1e-6


def arguments(N, C, device, dtype):
    """Rows of different sizes, the smallest near eps, with means that are not zero."""
    torch.manual_seed(0)
    scale = torch.logspace(-3, 2, N, device=device)[:, None]
    x, residual = (scale * (torch.randn(2, N, C, device=device) + 0.7)).to(dtype)
    return x, residual, *torch.randn(2, C, device=device).to(dtype)


@pytest.mark.parametrize("N,C", [(3, 1280), (2, 1152), (5, 67), (4, 2)])
def test_error_is_bounded_by_the_reference(N, C, device, dtype):
    x, residual, weight, bias = arguments(N, C, device, dtype)
    before = x.clone(), residual.clone()
    got, total = add_layer_norm_triton(x, residual, weight, bias, EPS)
    reference, reference_total = add_layer_norm_torch(x, residual, weight, bias, EPS)
    assert torch.equal(total, reference_total)
    exact = F.layer_norm(total.double(), (C,), weight.double(), bias.double(), EPS)
    assert_no_worse(got, reference, exact)
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


def test_the_sum_is_rounded_before_it_is_normalized(device):
    """2049 and 2051 are 2048 and 2052 in float16."""
    x = torch.tensor([[1.0, 3.0] * 32], dtype=torch.float16, device=device)
    ones = torch.ones(64, dtype=torch.float16, device=device)
    for add in (add_layer_norm, add_layer_norm_triton):
        got, total = add(x, torch.full_like(x, 2048), ones, 0 * ones, EPS)
        assert total.unique().tolist() == [2048, 2052]
        assert got.unique().tolist() == [-1, 1]


def test_rows_are_independent(device, dtype):
    x, residual, *affine = arguments(5, 67, device, dtype)
    for add in (add_layer_norm, add_layer_norm_triton):
        whole, alone = add(x, residual, *affine, EPS), add(x[3:4], residual[3:4], *affine, EPS)
        assert torch.equal(whole[0][3:4], alone[0]) and torch.equal(whole[1][3:4], alone[1])
