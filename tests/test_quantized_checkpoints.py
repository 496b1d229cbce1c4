"""Checkpoints in every published format answer as the values answer that they stand for."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.parity import GREEDY, REQUESTS
from tests.helpers.quantized_checkpoints import FORMATS, quantized_checkpoint
from tests.helpers.reference import Reference
from tests.helpers.shapes import RICHEST
from tests.helpers.weights import assert_same, load, state

SHAPES = (*RICHEST, "qwen2-gqa3-untied", "deepstack1-vit72-untied")
QUICK = {(RICHEST[i % len(RICHEST)], method) for i, method in enumerate(FORMATS)}  # one family of each format
PAIRS = [
    pytest.param(shape, method, marks=() if (shape, method) in QUICK else pytest.mark.slow)
    for method in FORMATS
    for shape in SHAPES
]
WITH_IMAGES = [pair for pair in PAIRS if pair.values[0] in RICHEST]
REQUEST = REQUESTS["two apart"]


@pytest.mark.parametrize(("shape", "method"), PAIRS)
def test_float32_weights_are_the_values_exactly(shape, method, checkpoints, tmp_path):
    saved = quantized_checkpoint(checkpoints(shape), tmp_path, method)
    assert_same(state(saved.quantized), state(saved.dequantized))


@pytest.mark.parametrize(("shape", "method"), WITH_IMAGES)
def test_greedy_tokens_equal_transformers_with_the_values(shape, method, checkpoints, make_llm, tmp_path):
    saved = quantized_checkpoint(checkpoints(shape), tmp_path, method)
    (output,) = make_llm(saved.quantized).generate_multimodal([REQUEST], GREEDY)
    assert output.token_ids == Reference(saved.dequantized).generate(REQUEST)


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


def test_layers_that_are_not_complete_are_named(checkpoints, tmp_path):
    saved = quantized_checkpoint(checkpoints("gqa2-tied"), tmp_path, "awq")
    file, layer = saved.quantized / "model.safetensors", "model.layers.1.self_attn.k_proj"
    tensors = load_file(file)
    del tensors[f"{layer}.scales"]
    save_file(tensors, file)
    with pytest.raises(ValueError, match=rf"not complete \(1\): {layer} has qweight, qzeros but no scales"):
        load(saved.quantized)
