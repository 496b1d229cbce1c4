"""Products with weights of 4 bits on a CPU are as accurate as bfloat16 allows."""

import pytest
import torch
import torch.nn.functional as F

from mmvllm.quantization import onednn
from mmvllm.quantization.onednn import Int4Linear
from mmvllm.quantization.quantized_tensor import QuantizedTensor

EPS = torch.finfo(torch.bfloat16).eps


def coded(out_size: int, in_size: int, group_size: int, with_zeros: bool = True) -> QuantizedTensor:
    generator = torch.Generator().manual_seed(group_size)

    def codes(columns: int) -> torch.Tensor:
        return torch.randint(0, 16, (out_size, columns), generator=generator, dtype=torch.uint8)

    groups = in_size // group_size
    scales = 0.001 + 0.02 * torch.rand(out_size, groups, generator=generator)
    return QuantizedTensor(codes(in_size), scales, codes(groups) if with_zeros else None)


def rows(number: int, size: int) -> torch.Tensor:
    return torch.randn(number, size, generator=torch.Generator().manual_seed(number)).bfloat16()


def assert_close(weight: QuantizedTensor, bias: torch.Tensor | None, x: torch.Tensor, got: torch.Tensor) -> None:
    """Rounding to bfloat16 moves a value by at most half its epsilon, relatively.

    The scale, which 16 steps multiply at most, the zero, which is at most 8 steps or, without zeros, exact, and the
    weight are rounded; then the product, of which `exact` itself is a part, and its sum with the bias.
    """
    exact = F.linear(x.double(), weight.dequantized().double())
    steps = weight.scales.double().repeat_interleave(weight.group_size, dim=1)
    of_weight = F.linear(x.double().abs(), steps) * (16 + 8 + 16) * EPS / 2
    total = exact if bias is None else exact + bias.double()
    bound = 1.01 * (of_weight + (exact.abs() + total.abs()) * EPS / 2)
    assert got.shape == exact.shape and got.dtype == torch.bfloat16 and got.is_contiguous()
    assert ((got.double() - total).abs() <= bound).all()
    typical = (got.double() - total).square().mean().sqrt() / total.square().mean().sqrt()
    assert typical < 2 * EPS


@pytest.mark.parametrize("number", [1, 2, 3, 4, 17, 127, 128, 300])
@pytest.mark.parametrize("out_size, with_bias", [(192, True), (80, False), (5, True)])
@pytest.mark.parametrize("in_float32", [True, False])
def test_a_product_is_as_accurate_as_its_roundings_allow(number, out_size, with_bias, in_float32, monkeypatch):
    monkeypatch.setattr(onednn, "multiplies_float32_faster", lambda: in_float32)
    weight = coded(out_size, 256, 64)
    bias = torch.linspace(-1, 1, out_size).bfloat16() if with_bias else None
    x = rows(number, 256)
    assert_close(weight, bias, x, Int4Linear(weight, bias)(x))


@pytest.mark.parametrize("number", [1, 200])
@pytest.mark.parametrize("group_size", [32, 64, 96, 128, 384])
def test_groups_may_have_any_multiple_of_32_columns(number, group_size):
    weight = coded(64, 1152, group_size)
    x = rows(number, 1152)
    assert_close(weight, None, x, Int4Linear(weight, None)(x))


@pytest.mark.parametrize("number", [3, 200])
def test_codes_without_zeros_are_all_positive(number):
    weight = coded(64, 128, 32, with_zeros=False)
    x = rows(number, 128)
    assert_close(weight, None, x, Int4Linear(weight, None)(x))


def test_other_groups_are_refused():
    with pytest.raises(ValueError, match="groups of 48 columns are not a multiple of 32"):
        Int4Linear(coded(64, 96, 48), None)


def test_many_rows_are_multiplied_in_tiles_of_outputs(monkeypatch):
    weight = coded(320, 128, 32)
    x, layer = rows(200, 128), Int4Linear(weight, None)
    whole = layer(x)
    monkeypatch.setattr(Int4Linear, "_TILE", 128 * 64 * 2)
    torch.testing.assert_close(layer(x), whole)


def test_the_operator_multiplies_any_number_of_rows_where_the_layout_is_another(monkeypatch):
    weight = coded(128, 128, 32)
    x, layer = rows(200, 128), Int4Linear(weight, None)
    monkeypatch.setattr(onednn, "_stores_blocks_of_64", lambda: False)
    monkeypatch.setattr(onednn, "_unpack_int4", None)
    assert_close(weight, None, x, layer(x))


def test_rows_are_independent():
    layer = Int4Linear(coded(128, 128, 32), torch.ones(128).bfloat16())
    x = rows(40, 128)
    x[7] *= 1000
    x[8] = 0
    alone = torch.cat([layer(row[None]) for row in x])
    assert torch.equal(layer(x), alone)


def test_a_weight_takes_half_a_byte_and_four_bytes_a_group():
    layer = Int4Linear(coded(128, 256, 128), None)
    assert layer.qweight.nbytes + layer.scales_and_zeros.nbytes == 128 * (256 // 2 + 2 * 4)
