"""Checkpoints in every published format answer as their dequantized values do."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmvllm import LLM
from mmvllm.models.interface import Model
from mmvllm.models.quant_methods import choose_linear_methods, keep_quantized
from mmvllm.models.splitting import PlannedRank
from mmvllm.processes.ranks import SINGLE
from mmvllm.quantization.linear_method import LinearMethod
from mmvllm.quantization.onednn import Int4Linear, Int8Linear, OneDNNLinear
from tests.helpers.cpu import NEEDS_8_BITS, PACKS_BFLOAT16, SUMS_8_BITS
from tests.helpers.models.adapters import make_adapter
from tests.helpers.models.packers import pack_int8
from tests.helpers.models.parity import GREEDY, REQUESTS
from tests.helpers.models.quantized_checkpoints import FORMATS, quantized_checkpoint
from tests.helpers.models.reference import Reference
from tests.helpers.models.shapes import RICHEST
from tests.helpers.models.weights import CPU, assert_same, load, state

SHAPES = (*RICHEST, "qwen2-gqa3-untied", "deepstack1-vit72-untied")
QUICK = {(RICHEST[i % len(RICHEST)], method) for i, method in enumerate(FORMATS)}  # one family of each format
PAIRS = [
    pytest.param(shape, method, marks=() if (shape, method) in QUICK else pytest.mark.slow)
    for method in FORMATS
    for shape in SHAPES
]
WITH_IMAGES = [pair for pair in PAIRS if pair.values[0] in RICHEST]
REQUEST = REQUESTS["two apart"]


@pytest.mark.thinned(2)
@pytest.mark.parametrize(("shape", "method"), PAIRS)
def test_float32_weights_are_the_values_exactly(shape, method, checkpoints, tmp_path):
    saved = quantized_checkpoint(checkpoints(shape), tmp_path, method)
    assert_same(state(saved.quantized), state(saved.dequantized))


@pytest.mark.essential(2)
@pytest.mark.slow
@pytest.mark.parametrize(("shape", "method"), WITH_IMAGES)
def test_greedy_tokens_equal_transformers_with_the_values(shape, method, checkpoints, make_llm, tmp_path):
    saved = quantized_checkpoint(checkpoints(shape), tmp_path, method)
    (output,) = make_llm(saved.quantized).generate_multimodal([REQUEST], GREEDY)
    assert output.token_ids == Reference(saved.dequantized).generate(REQUEST)


@pytest.mark.slow
def test_biases_of_zeros_that_a_tool_added_are_left_out(checkpoints, tmp_path):
    saved = quantized_checkpoint(checkpoints("gqa2-tied"), tmp_path, "gptq-int4")
    file, bias = saved.quantized / "model.safetensors", "model.layers.0.mlp.down_proj.bias"
    tensors = load_file(file)
    width = tensors["model.layers.0.mlp.down_proj.qweight"].shape[1]
    save_file(tensors | {bias: torch.zeros(width)}, file)
    assert_same(state(saved.quantized), state(saved.dequantized))
    save_file(tensors | {bias: torch.ones(width)}, file)
    with pytest.raises(ValueError, match=rf"belong to no parameter .*{bias}"):
        load(saved.quantized)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("method", FORMATS)
def test_scales_that_are_not_finite_are_named(method, value, checkpoints, make_llm, tmp_path):
    saved = quantized_checkpoint(checkpoints("gqa2-tied"), tmp_path, method)
    file, layer = saved.quantized / "model.safetensors", "model.layers.1.self_attn.k_proj"
    tensors = load_file(file)
    (scales,) = (name for name in tensors if name.startswith(layer) and "scale" in name)
    tensors[scales].view(-1)[-1] = value
    save_file(tensors, file)
    for read in (load, make_llm):  # to float32, and as codes where an engine keeps them
        with pytest.raises(ValueError, match=rf"NaN, infinite, or too large for the dtype \(1\): {layer}\.weight$"):
            read(saved.quantized)


def test_layers_that_are_not_complete_are_named(checkpoints, tmp_path):
    saved = quantized_checkpoint(checkpoints("gqa2-tied"), tmp_path, "awq")
    file, layer = saved.quantized / "model.safetensors", "model.layers.1.self_attn.k_proj"
    tensors = load_file(file)
    del tensors[f"{layer}.scales"]
    save_file(tensors, file)
    with pytest.raises(ValueError, match=rf"not complete \(1\): {layer} has qweight, qzeros but no scales"):
        load(saved.quantized)


def test_a_quantized_head_that_is_tied_has_the_values_of_the_embedding(checkpoints, tmp_path):
    saved = quantized_checkpoint(checkpoints("gqa2-tied"), tmp_path, "w8a8")
    file, embedding = saved.quantized / "model.safetensors", "model.embed_tokens.weight"
    tensors = load_file(file)
    packed = pack_int8(tensors[embedding])
    head = {f"lm_head.{name}": part for name, part in packed.tensors.items()}
    save_file(tensors | head | {embedding: packed.values}, file)
    assert torch.equal(state(saved.quantized)["lm_head.weight"], packed.values)
    save_file(tensors | head, file)
    with pytest.raises(ValueError, match=r"differ from those they are tied to \(1\): lm_head.weight"):
        load(saved.quantized)


def _without_a_row(tensors: dict, prefix: str) -> dict:
    return tensors | {name: tensor[:-1] for name, tensor in tensors.items() if name.startswith(prefix)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors, expert: _without_a_row(tensors, f"{expert}.3.gate_proj"),
            r"one shape .* it has \(23, 64\) and \(24, 64\)",
        ),
        (
            lambda tensors, expert: {name.replace(f"{expert}.0.", f"{expert}.8."): t for name, t in tensors.items()},
            r"experts\.8\..* is of an expert that there is not; the config has 8",
        ),
    ],
)
def test_experts_that_do_not_belong_together_are_refused(change, message, checkpoints, tmp_path):
    saved = quantized_checkpoint(checkpoints("experts8-top3"), tmp_path, "w8a8")
    file = saved.quantized / "model.safetensors"
    tensors = load_file(file)
    expert = next(name for name in sorted(tensors) if ".experts.0." in name).partition(".experts")[0] + ".experts"
    save_file({name: tensor.contiguous() for name, tensor in change(tensors, expert).items()}, file)
    with pytest.raises(ValueError, match=message):
        load(saved.quantized)


LINEAR_METHODS = {"awq": Int4Linear, "gptq-int4": Int4Linear, "w4a16": Int4Linear, "w4a16-zeros": Int4Linear}
LINEAR_METHODS |= {"gptq-int8": Int8Linear, "w8a8": Int8Linear, "fp8": OneDNNLinear, "fp8-dynamic": OneDNNLinear}


def method_here(method: type[LinearMethod]) -> type[LinearMethod] | None:
    """On a CPU that may lack the products of a method."""
    if method is Int8Linear and not SUMS_8_BITS:
        method = OneDNNLinear
    return None if method is OneDNNLinear and not PACKS_BFLOAT16 else method


def prepare(model: Model) -> None:
    choose_linear_methods(model, CPU, torch.bfloat16)
    keep_quantized(model, CPU, torch.bfloat16)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("ranks", [SINGLE, PlannedRank(0, 2), PlannedRank(1, 2)], ids=["alone", "first", "second"])
@pytest.mark.parametrize("method", FORMATS)
def test_bfloat16_products_are_near_those_of_the_values(method, ranks, checkpoints, tmp_path):
    """Quantized weights are multiplied where a CPU can: 8-bit integers by inputs in 8 bits, 4-bit ones in bfloat16."""
    linear_method = method_here(LINEAR_METHODS[method])
    saved = quantized_checkpoint(checkpoints("gqa2-tied"), tmp_path, method)
    quantized = load(saved.quantized, torch.bfloat16, ranks=ranks, prepare=prepare)
    exact = load(saved.dequantized, ranks=ranks)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        layer, plain = (model.get_submodule(f"decoder.layers.1.{name}") for model in (quantized, exact))
        assert layer.linear_method is None if linear_method is None else type(layer.linear_method) is linear_method
        x = torch.randn(7, layer.in_features, generator=torch.Generator().manual_seed(0)).bfloat16()
        error = (layer(x) - plain(x.float())).norm() / plain(x.float()).norm()
        assert error < (0.02 if linear_method is Int8Linear else 0.008)


def test_an_adapter_is_not_merged_into_codes(checkpoints, tmp_path):
    saved = quantized_checkpoint(checkpoints("gqa2-tied"), tmp_path, "awq")
    adapter = make_adapter(tmp_path / "adapter", saved.dequantized, target_modules="all-linear")
    with pytest.raises(ValueError, match="an adapter cannot be merged into quantized weights"):
        load(saved.quantized, torch.bfloat16, lora=adapter, prepare=prepare)
    assert_same(load(saved.quantized, lora=adapter).state_dict(), load(saved.dequantized, lora=adapter).state_dict())


@NEEDS_8_BITS
def test_weights_in_4_bits_are_not_rounded_to_4_bits_again(checkpoints, tmp_path):
    saved = quantized_checkpoint(checkpoints("gqa2-tied"), tmp_path, "awq")
    with pytest.raises(ValueError, match=r"the checkpoint has weights in 4 bits, awq \(4-bit integers\); leave it out"):
        LLM(saved.quantized, device="cpu", dtype="bfloat16", quantization="int4")
