"""Rows in 8 bits: their rounding, the kernels that round what they compute, and products of such rows."""

import pytest
import torch

from mmvllm.kernels.common.dispatch import FP8_CAPABILITY, supports_fp8
from mmvllm.kernels.fp8 import (
    E4M3,
    quantize_rows,
    quantize_rows_torch,
    quantize_rows_triton,
    scaled_linear,
    scaled_linear_torch,
)
from mmvllm.kernels.rms_norm import add_rms_norm_fp8_torch, add_rms_norm_fp8_triton, add_rms_norm_triton
from mmvllm.kernels.silu_mul import silu_mul_fp8_torch, silu_mul_fp8_triton, silu_mul_triton
from tests.helpers.models.kernels import assert_same_rows, round_to_e4m3_exactly

SIZES = pytest.mark.parametrize("N,C", [(3, 1536), (2, 3584), (5, 67), (4, 1)])
EPS = 1e-6


@pytest.fixture(autouse=True)
def exact_conversion(device, monkeypatch):
    if device.type == "cpu":
        round_to_e4m3_exactly(monkeypatch)
    elif not supports_fp8(device):
        pytest.skip("needs a GPU with 8-bit floats")


def rows(N, C, device, dtype):
    """From 1e-3 to 1e2, so that each has subnormal values of e4m3."""
    torch.manual_seed(0)
    return (torch.logspace(-3, 2, N, device=device)[:, None] * torch.randn(N, C, device=device)).to(dtype)


@SIZES
def test_the_kernel_equals_its_reference(N, C, device, dtype):
    x = rows(N, C, device, dtype)
    assert_same_rows(quantize_rows_triton(x), quantize_rows_torch(x))


def test_values_are_rounded_to_the_nearest_and_ties_to_even(device):
    """With 448 in the row, the scale is 1; steps are 2**-9 up to 2**-6, then 8 to each power of two."""
    odd = [448, 432, 416, -17, 17.01, -19, 2**-6 + 2**-10, 2**-10, 1.01 * 2**-10, 3 * 2**-10, 0]
    x = torch.tensor([odd], device=device)
    want = [448, 448, 416, -16, 18, -20, 2**-6, 0, 2**-9, 2**-8, 0]
    for quantize in (quantize_rows, quantize_rows_triton):
        assert quantize(x).values.float().tolist() == [want] and quantize(x).scale.tolist() == [1]


def test_rows_of_zeros_tiny_and_not_finite_values(device):
    x = torch.tensor([[0.0, 0.0], [1e-30, -1e-30], [1.0, torch.nan], [3e38, -1e38]], device=device)
    for quantize in (quantize_rows, quantize_rows_triton):
        got = quantize(x)
        back = got.values.float() * got.scale[:, None]
        assert back[:2].abs().max() < 1e-29 and back[2].isnan().any()
        assert torch.allclose(back[3], x[3], rtol=2**-4)


@SIZES
def test_the_fused_norm_equals_the_norm_rounded_afterwards(N, C, device, dtype):
    x, weight = rows(N, C, device, dtype), torch.randn(C, device=device).to(dtype)
    residual = x.flip(1) / 3
    got, total = add_rms_norm_fp8_triton(x, residual, weight, EPS)
    normalized, want_total = add_rms_norm_triton(x, residual, weight, EPS)
    assert torch.equal(total, want_total)
    assert_same_rows(got, quantize_rows_torch(normalized))
    assert torch.equal(total, add_rms_norm_fp8_torch(x, residual, weight, EPS)[1])


@pytest.mark.thinned(4)
@pytest.mark.parametrize("N,width", [(1, 8960), (3, 1024), (5, 1027), (4, 7), (33, 64)])
def test_the_fused_activation_equals_the_activation_rounded_afterwards(N, width, device, dtype):
    torch.manual_seed(0)
    gate_up = 3 * torch.randn(N, 2 * width, device=device).to(dtype)
    got = silu_mul_fp8_triton(gate_up)
    assert_same_rows(got, quantize_rows_torch(silu_mul_triton(gate_up)))
    torch.testing.assert_close(got.scale, silu_mul_fp8_torch(gate_up).scale, rtol=4 * torch.finfo(dtype).eps, atol=0)


def test_rows_are_independent(device, dtype):
    x = rows(5, 67, device, dtype)
    for quantize in (quantize_rows, quantize_rows_triton):
        whole, alone = quantize(x), quantize(x[3:4])
        assert torch.equal(whole.scale[3:4], alone.scale)
        assert torch.equal(whole.values[3:4].view(torch.uint8), alone.values.view(torch.uint8))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("N", [1, 17, 130])
def test_products_equal_those_of_the_rounded_values(N, has_bias, device):
    x = quantize_rows(rows(N, 96, device, torch.bfloat16))
    weight = quantize_rows(rows(48, 96, device, torch.bfloat16))
    bias = torch.randn(48, device=device).bfloat16() if has_bias else None
    exact = (x.values.double() * x.scale[:, None]) @ (weight.values.double() * weight.scale[:, None]).T
    exact = exact if bias is None else exact + bias
    for product in (scaled_linear, scaled_linear_torch):
        got = product(x, weight.values, weight.scale, bias)
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got.double(), exact, rtol=2**-8, atol=1e-3 * exact.abs().max().item())


def test_the_arguments_of_the_product_are_those_that_torch_takes(device):
    """torch has the same operator for CPUs, with the same rules of layout."""
    x, weight = (quantize_rows(rows(N, 96, device, torch.bfloat16)) for N in (5, 48))
    scales = x.scale[:, None], weight.scale[None]
    got = torch._scaled_mm(x.values, weight.values.t(), *scales, out_dtype=x.dtype, use_fast_accum=False)
    torch.testing.assert_close(got, scaled_linear(x, weight.values, weight.scale, None), rtol=2**-7, atol=1e-2)


def test_only_newer_gpus_have_8_bit_floats(monkeypatch):
    assert FP8_CAPABILITY == (8, 9) and E4M3.itemsize == 1
    for capability, expected in {(8, 0): False, (8, 6): False, (8, 9): True, (9, 0): True, (12, 0): True}.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert supports_fp8(torch.device("cuda")) is expected
    assert supports_fp8(torch.device("cpu"))
