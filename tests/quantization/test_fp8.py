"""Linear layers in 8-bit floats: their accuracy, how they are loaded, and where they are refused."""

import logging
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from mmvllm import LLM, SamplingParams
from mmvllm.kernels import fp8 as kernels
from mmvllm.kernels.fp8 import Fp8Rows, quantize_rows
from mmvllm.layers.linear import Linear, MergedLinear, PaddedLinear
from mmvllm.layers.mlp import GatedMLP
from mmvllm.layers.norm import RMSNorm
from mmvllm.models.quant_methods import choose_linear_methods
from mmvllm.models.registry import load_config
from mmvllm.models.weights import load_model
from mmvllm.quantization.fp8 import Fp8Linear, check_sizes, fp8_unusable

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BFLOAT16 = torch.bfloat16


def in_fp8(layer: torch.nn.Module, tensors: dict[tuple[str, int | None], torch.Tensor]) -> torch.nn.Module:
    """The layer with its tensors rounded to 8 bits; what they do not cover is zero."""
    layer.linear_method_cls = Fp8Linear
    for parameter in layer.requires_grad_(False).parameters():
        parameter.zero_()
    for name, part, view, _ in layer.checkpoint_views():
        view.copy_(tensors[name, part])
    layer.process_weights_after_loading()
    return layer


def rows(number: int, size: int, dtype: torch.dtype = BFLOAT16) -> torch.Tensor:
    return torch.randn(number, size, generator=torch.Generator().manual_seed(number)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16])
@pytest.mark.parametrize("number", [1, 2, 7, 64])
def test_products_are_as_accurate_as_the_steps_allow(number, dtype):
    """Normal values of e4m3 have 3 bits after the first: rounding moves a value by at most 1/16 of it."""
    weight, bias = rows(80, 96) / 10, rows(1, 80)[0].to(dtype)
    layer = in_fp8(Linear(96, 80).to(dtype), {("weight", None): weight, ("bias", None): bias})
    x = rows(number, 96, dtype)
    got = layer(x)
    exact = F.linear(x.double(), weight.double(), bias.double())
    assert got.dtype == dtype and got.shape == exact.shape
    bound = F.linear(x.double().abs(), weight.double().abs()) * (2 / 16 + 1 / 256) + 0.02 * exact.abs() + 1e-3
    assert ((got.double() - exact).abs() <= bound).all()
    typical = (got.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert 0.01 < typical < 0.05


def test_rows_that_are_rounded_already_give_the_same_product():
    layer = in_fp8(Linear(96, 80, bias=False).to(BFLOAT16), {("weight", None): rows(80, 96)})
    x = rows(5, 96)
    assert torch.equal(layer(x), layer(quantize_rows(x)))


def test_parts_of_merged_and_padded_weights_are_rounded_by_row():
    parts = {("weight", i): rows(size, 32) * 10**i for i, size in enumerate((16, 8, 8))}
    biases = {("bias", i): rows(1, size)[0] for i, size in enumerate((16, 8, 8))}
    merged = in_fp8(MergedLinear(32, [16, 8, 8], bias=True).to(BFLOAT16), parts | biases)
    whole = quantize_rows(torch.cat(list(parts.values())))
    assert torch.equal(merged.linear_method.values.float(), whole.values.float())
    assert torch.equal(merged.linear_method.scale, whole.scale)
    assert torch.equal(merged.bias, torch.cat(list(biases.values())))
    padded = in_fp8(PaddedLinear(30, 16, bias=False, padding=2).to(BFLOAT16), {("weight", None): rows(16, 30)})
    assert torch.equal(padded.linear_method.values[:, :30].float(), quantize_rows(rows(16, 30)).values.float())
    assert not padded.linear_method.values[:, 30:].float().any()


def test_many_rows_are_rounded_in_chunks():
    weight = rows(2500, 16)
    got, want = Fp8Linear(weight, None), quantize_rows(weight)
    assert torch.equal(got.values.float(), want.values.float()) and torch.equal(got.scale, want.scale)


def test_the_gated_mlp_rounds_what_it_multiplies():
    """Its inner size is padded from 44 to 48."""
    gate, up, down = rows(44, 32) / 4, rows(44, 32).flip(0) / 4, rows(32, 44) / 4
    mlp = GatedMLP(32, 44).to(BFLOAT16)
    in_fp8(mlp.gate_up_proj, {("weight", 0): gate, ("weight", 1): up})
    in_fp8(mlp.down_proj, {("weight", None): down})
    x = rows(9, 32)
    assert isinstance(mlp.gate_up_proj(x), Fp8Rows)
    exact = (F.silu(x.double() @ gate.double().T) * (x.double() @ up.double().T)) @ down.double().T
    for given in (x, quantize_rows(x)):
        error = (mlp(given).double() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
        assert error < 0.08


def test_norms_round_after_the_first_layer_and_in_it():
    norm, x = RMSNorm(32, 1e-6).to(BFLOAT16).requires_grad_(False), rows(3, 32)
    for residual in (None, rows(3, 32).flip(0)):
        (got, total), (plain, want) = norm.add_fp8(x, residual), norm.add(x, residual)
        assert torch.equal(total, want) and torch.equal(got.values.float(), quantize_rows(plain).values.float())


@pytest.mark.parametrize(("load_format", "dtype"), [("auto", torch.float32), ("dummy", BFLOAT16)])
def test_only_linear_layers_of_the_decoder_are_rounded(load_format, dtype, checkpoint):
    config = load_config(checkpoint)
    plain = load_model(checkpoint, config, CPU, dtype, load_format)
    in_8_bits = partial(choose_linear_methods, device=CPU, dtype=dtype, quantization="fp8")
    loaded = load_model(checkpoint, config, CPU, dtype, load_format, prepare=in_8_bits)
    layers = "self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"
    rounded, modules = set(), dict(plain.named_modules())
    for name, module in loaded.named_modules():
        if isinstance(module, Linear) and isinstance(module.linear_method, Fp8Linear):
            want = quantize_rows(modules[name].weight)
            rounded.add(name)
            assert torch.equal(module.linear_method.values.float(), want.values.float())
            assert torch.equal(module.linear_method.scale, want.scale)
    numbers = range(config.num_hidden_layers)
    assert rounded == {f"decoder.layers.{number}.{layer}" for number in numbers for layer in layers}
    for name, tensor in loaded.named_parameters():
        assert torch.equal(tensor, plain.get_parameter(name))


def test_completions_do_not_depend_on_the_batch(checkpoint, make_llm):
    llm = make_llm(checkpoint, quantization="fp8", enable_prefix_caching=False)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    prompts = [[5 + i, 6, 7 * i + 1, 300, 20 + i] for i in range(7)]
    together = llm.generate(prompts, params)
    alone = [llm.generate([prompt], params)[0] for prompt in prompts]
    assert [output.token_ids for output in together] == [output.token_ids for output in alone]


def test_a_cpu_is_a_slow_reference(checkpoint, make_llm, caplog):
    with caplog.at_level(logging.WARNING):
        make_llm(checkpoint, quantization="fp8")
    assert "quantization='fp8' is slow on a CPU: only a reference for GPUs" in caplog.text


def test_mixtures_of_experts_and_odd_sizes_are_refused(checkpoints):
    options = {"device": "cpu", "quantization": "fp8"}
    with pytest.raises(ValueError, match="quantization='fp8' does not support mixtures of experts"):
        LLM(checkpoints("experts8-top3"), **options)
    with pytest.raises(ValueError, match="needs weights whose sizes are multiples of 16; one is 160 x 56"):
        LLM(checkpoints("deepstack1-vit72-untied"), **options)
    with pytest.raises(ValueError, match="one is 48 x 24"):
        check_sizes(torch.Size((48, 24)))


@pytest.mark.parametrize(
    ("capability", "dtype", "reason"),
    [
        ((8, 9), torch.float16, "needs dtype bfloat16; this is float16"),
        ((9, 0), torch.float32, "needs dtype bfloat16; this is float32"),
        ((8, 0), BFLOAT16, "needs a GPU of compute capability 8.9 or above (Ada, Hopper, Blackwell); this has 8.0"),
        ((8, 6), BFLOAT16, "needs a GPU of compute capability 8.9 or above (Ada, Hopper, Blackwell); this has 8.6"),
    ],
)
def test_gpus_and_dtypes_that_are_refused(capability, dtype, reason, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert fp8_unusable(CUDA, dtype) == reason
    assert fp8_unusable(CPU, dtype) is None


def test_a_gpu_whose_product_fails_is_refused_with_the_reason(monkeypatch):
    """A build of torch for Windows says this; the product is a probe's of small tensors, here on the CPU."""

    def fails(*args, **options):
        raise RuntimeError("Rowwise scaling is not currently supported on your device\nat somewhere")

    ones = torch.ones
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 0))
    monkeypatch.setattr(torch, "ones", lambda *sizes, dtype, device: ones(*sizes, dtype=dtype))
    assert fp8_unusable(CUDA, BFLOAT16) is None
    monkeypatch.setattr(kernels, "scaled_linear_torch", fails)
    reason = fp8_unusable(CUDA, BFLOAT16)
    assert reason.endswith("on this GPU: Rowwise scaling is not currently supported on your device")


def test_int8_names_the_kind_for_gpus(checkpoint, monkeypatch):
    monkeypatch.setattr("mmvllm.config.EngineConfig.resolve_device", lambda config: CUDA)
    monkeypatch.setattr("mmvllm.config.EngineConfig.with_limits", lambda config, device: config)
    with pytest.raises(ValueError, match="quantization='int8' runs on a CPU only; this is cuda, where"):
        LLM(checkpoint, quantization="int8")
    with pytest.raises(ValueError, match="quantization='fp8' needs dtype bfloat16; this is float32"):
        LLM(checkpoint, quantization="fp8", dtype="float32")
