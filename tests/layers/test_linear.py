"""Packed weights compute the same products as plain ones; 8-bit weights are as accurate as their steps allow."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from mmvllm import LLM, SamplingParams
from mmvllm.layers.linear import Linear, MergedLinear, SiluGate, by_rows
from mmvllm.quantization import onednn
from mmvllm.quantization.onednn import Float32Linear, Int8Linear
from tests.helpers.cpu import NEEDS_8_BITS, NEEDS_BFLOAT16, PACKS_BFLOAT16, SUMS_8_BITS
from tests.helpers.models.packing import pack_weights

ROWS = (1, 2, 5, 6, 7, 64, 300)


def filled(layer: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        parameter.data.normal_(0.0, 0.1, generator=generator)
    return layer.to(dtype).requires_grad_(False)


def rows(number: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(number, size, generator=torch.Generator().manual_seed(number)).to(dtype)


def worst(got: torch.Tensor, exact: torch.Tensor) -> float:
    return (got.double() - exact).abs().max().item()


@NEEDS_BFLOAT16
@pytest.mark.parametrize("make", [lambda: Linear(96, 72), lambda: Linear(96, 72, bias=False), lambda: SiluGate(96, 56)])
@pytest.mark.parametrize("number", ROWS)
def test_packed_layers_have_at_most_twice_the_error_of_plain_ones(make, number):
    dtype = torch.bfloat16
    plain, packed = filled(make(), dtype), filled(make(), dtype)
    pack_weights(packed, dtype)
    assert packed.linear_method is not None and packed.weight is None
    x = rows(number, 96, dtype)
    exact = filled(make(), dtype).double()(x.double())
    got, expected = packed(x), plain(x)
    assert got.shape == expected.shape and got.dtype == dtype
    assert worst(got, exact) <= 2 * worst(expected, exact) + torch.finfo(dtype).eps / 2 * exact.abs().max()


@NEEDS_BFLOAT16
@pytest.mark.parametrize("is_bfloat16_slow", [True, False])
def test_rows_of_packed_layers_are_independent(is_bfloat16_slow, monkeypatch):
    monkeypatch.setattr(onednn, "multiplies_float32_faster", lambda: is_bfloat16_slow)
    layer = onednn.OneDNNLinear(filled(Linear(1536, 4096), torch.bfloat16).weight, None)
    x = rows(64, 1536, torch.bfloat16)
    together = layer(x)
    for number in ROWS:
        assert_equal_but_for_amx(layer(x[:number]), together[:number])


def assert_equal_but_for_amx(got: torch.Tensor, expected: torch.Tensor) -> None:
    """With AMX, oneDNN adds in an order that depends on the number of rows: a last bit may differ."""
    if not torch.cpu._is_amx_tile_supported():
        assert torch.equal(got, expected)
    exact = expected.double().abs()
    last_bit = torch.finfo(torch.bfloat16).eps * exact.clamp(min=exact.mean())
    assert ((got.double() - expected.double()).abs() <= last_bit).all()


@pytest.mark.parametrize("with_bias", [True, False])
def test_a_widened_product_is_rounded_once(with_bias, monkeypatch):
    monkeypatch.setattr(Float32Linear, "_CHUNK", 128)
    plain = filled(Linear(96, 72, bias=with_bias), torch.bfloat16)
    x = rows(300, 96, torch.bfloat16)
    widened = Float32Linear(plain.weight, plain.bias)
    got = widened(x)
    exact = filled(Linear(96, 72, bias=with_bias), torch.bfloat16).double()(x.double())
    assert got.shape == exact.shape and got.dtype == torch.bfloat16
    assert worst(got, exact) <= 1.01 * torch.finfo(torch.bfloat16).eps / 2 * exact.abs().max()
    assert all(torch.equal(widened(x[:number]), got[:number]) for number in ROWS)


def test_float32_weights_are_not_packed():
    layer = filled(Linear(96, 72), torch.float32)
    pack_weights(layer, torch.float32)
    x = rows(3, 96, torch.float32)
    assert layer.linear_method is None and torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))


def test_merged_layers_split_their_output():
    layer = filled(MergedLinear(32, [16, 8, 8], bias=True), torch.bfloat16)
    x = rows(9, 32, torch.bfloat16)
    whole = F.linear(x, layer.weight, layer.bias)
    pack_weights(layer, torch.bfloat16)
    for part, expected in zip(layer(x), whole.split([16, 8, 8], dim=1), strict=True):
        torch.testing.assert_close(part, expected)


@NEEDS_8_BITS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("number", ROWS)
def test_int8_is_as_accurate_as_its_steps_allow(number, dtype):
    """Rounding a value moves it by at most half a step: about 1/127 of the row's largest, of x and of the weight."""
    layer = filled(Linear(96, 72), dtype)
    x, weight = rows(number, 96, dtype).double(), layer.weight.double()
    got = Int8Linear(layer.weight, layer.bias)(x.to(dtype))
    exact = F.linear(x, weight, layer.bias.double())
    x_step, w_step = (t.abs().amax(dim=1) / 126 for t in (x, weight))
    half_steps = x.abs().sum(dim=1)[:, None] * w_step / 2 + weight.abs().sum(dim=1) * x_step[:, None] / 2
    second_order = 96 * x_step[:, None] * w_step / 4
    rounding = 4 * torch.finfo(dtype).eps * (exact.abs() + F.linear(x.abs(), weight.abs()))
    assert ((got.double() - exact).abs() <= half_steps + second_order + rounding).all()
    typical = (got.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert typical < 0.02


def test_int8_rows_are_independent():
    layer = Int8Linear(filled(Linear(64, 48), torch.float32).weight, None)
    x = rows(40, 64, torch.float32)
    x[7] *= 1000
    x[8] = 0
    alone = torch.cat([layer(row[None]) for row in x])
    assert torch.equal(layer(x), alone)
    assert torch.equal(alone[8], torch.zeros(48))


def test_unsupported_quantization_is_refused(checkpoint):
    with pytest.raises(ValueError, match="needs dtype float32 or bfloat16 on a CPU; this is float16"):
        LLM(checkpoint, device="cpu", dtype="float16", quantization="int8")
    with pytest.raises(ValueError, match="quantization='int4' needs dtype bfloat16 on a CPU; this is float32"):
        LLM(checkpoint, device="cpu", quantization="int4")
    with pytest.raises(ValueError, match="quantization must be None, 'int8', 'int4' or 'fp8', got 'int2'"):
        LLM(checkpoint, quantization="int2")


@pytest.mark.skipif(platform.machine() != "x86_64" or sys.platform != "linux", reason="names of flags of other CPUs")
def test_what_a_cpu_can_multiply_is_what_its_flags_say():
    """Tests that need it are skipped elsewhere, and would be skipped here if this were wrong."""
    flags = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")).split()
    assert any(flag in flags for flag in ("avx512_vnni", "avx_vnni", "amx_int8")) == SUMS_8_BITS
    avx512 = all(flag in flags for flag in ("avx512bw", "avx512vl", "avx512dq"))
    assert (avx512 or "avx_ne_convert" in flags) == PACKS_BFLOAT16


@pytest.mark.slow
def test_int8_is_refused_where_sums_would_overflow():
    """oneDNN is limited to the instructions of CPUs without VNNI."""
    code = "from mmvllm import LLM; LLM(device='cpu', quantization='int8', skip_warmup=True)"
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert "needs a CPU that adds 8-bit products in 32 bits" in run.stderr


def test_weights_are_not_packed_without_onednn(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(torch.ops, "mkldnn", None)  # its operators do not exist then either
    layer = filled(Linear(96, 72), torch.bfloat16)
    pack_weights(layer, torch.bfloat16)
    assert layer.linear_method is None
    with pytest.raises(ValueError, match="needs a torch with oneDNN"):
        pack_weights(layer, torch.bfloat16, "int8")


@NEEDS_8_BITS
def test_int8_completions_do_not_depend_on_the_batch(checkpoint, make_llm):
    llm = make_llm(checkpoint, quantization="int8", enable_prefix_caching=False)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    prompts = [[5 + i, 6, 7 * i + 1, 300, 20 + i] for i in range(7)]
    together = llm.generate(prompts, params)
    alone = [llm.generate([prompt], params)[0] for prompt in prompts]
    assert [output.token_ids for output in together] == [output.token_ids for output in alone]


def test_chunked_rows_give_the_same_result():
    layer = filled(Linear(8, 8), torch.float32)
    x = rows(2500, 8, torch.float32)
    seen = []
    out = by_rows(lambda part: (seen.append(len(part)), layer(part))[1], x)
    torch.testing.assert_close(out, layer(x))
    assert seen == [1024, 1024, 452]
