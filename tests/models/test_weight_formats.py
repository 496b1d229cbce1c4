"""Dummy, quantized and half-precision weights."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mmvllm import SamplingParams
from tests.helpers.engine.requests import ask, noise_image
from tests.helpers.models.weights import assert_same, load, state

GREEDY = SamplingParams(max_tokens=32, ignore_eos=True)


@pytest.fixture
def bare(checkpoint, tmp_path) -> Path:
    """A folder with only the config and the tokenizer."""
    folder = tmp_path / "bare"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(checkpoint / name, folder)
    return folder


def test_dummy_weights_need_only_config_and_tokenizer(bare, make_llm):
    options = {"load_format": "dummy", "seed": 3}
    first, second = (make_llm(bare, **options) for _ in range(2))
    request = ask(noise_image(70, 60), "What?")
    outputs = [llm.generate_multimodal([request], GREEDY)[0].token_ids for llm in (first, second)]
    assert outputs[0] == outputs[1] and len(outputs[0]) == 32
    with pytest.raises(ValueError, match=r"no \*\.safetensors weights .* pass load_format='dummy'"):
        make_llm(bare)


def test_dummy_weights_depend_only_on_the_seed(bare):
    def weights(seed: int) -> dict[str, torch.Tensor]:
        return load(bare, load_format="dummy", seed=seed).state_dict()

    assert_same(weights(5), weights(5))
    one, other = weights(5), weights(6)
    assert not torch.equal(one["decoder.embed_tokens.weight"], other["decoder.embed_tokens.weight"])
    assert all(tensor.isfinite().all() for tensor in one.values())
    weights(2**64 + 5)


def test_dummy_weights_of_a_quantized_checkpoint_need_no_codes(copy_of):
    folder = copy_of("gqa2-tied", config=lambda c: c | {"quantization_config": {"quant_method": "awq", "bits": 4}})
    load(folder, load_format="dummy")


def test_weights_of_an_unknown_method_are_refused(copy_of):
    folder = copy_of("gqa2-tied", config=lambda c: c | {"quantization_config": {"quant_method": "hqq"}})
    with pytest.raises(ValueError, match=r"config\.json: is quantized with 'hqq', which is not supported; supported: "):
        load(folder)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_weights_become_float32_exactly(dtype, copy_of):
    folder = copy_of("gqa2-tied", lambda tensors: {name: tensor.to(dtype) for name, tensor in tensors.items()})
    tensors, got = load_file(folder / "model.safetensors"), state(folder)
    assert {tensor.dtype for tensor in tensors.values()} == {dtype}
    assert {tensor.dtype for tensor in got.values()} == {torch.float32}
    assert torch.equal(got["decoder.embed_tokens.weight"], tensors["model.embed_tokens.weight"].float())
    qkv = [tensors[f"model.layers.0.self_attn.{name}_proj.weight"].float() for name in "qkv"]
    assert torch.equal(got["decoder.layers.0.self_attn.qkv_proj.weight"], torch.cat(qkv))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs_on_a_cpu(dtype, checkpoint, make_llm):
    llm = make_llm(checkpoint, dtype=dtype)
    assert {p.dtype for p in llm.engine.model_runner.model.parameters()} == {getattr(torch, dtype)}
    request = ask(noise_image(91, 64), "Describe this image.")
    (output,) = llm.generate_multimodal([request], SamplingParams(max_tokens=4, ignore_eos=True, logprobs=1))
    assert len(output.token_ids) == 4 and all(logprob <= 0 for step in output.logprobs for logprob in step.values())
