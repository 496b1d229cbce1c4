"""Costs compared with a checkpoint's number of values, and with torch's operation counts of transformers' model."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode

from mmvllm.bench.costs import ModelCosts, keys_seen
from mmvllm.models.folder import BUNDLED
from mmvllm.models.registry import load_config
from tests.helpers.models.shapes import IMAGE_SHAPES

pytestmark = pytest.mark.thinned


@pytest.fixture(params=[None, *IMAGE_SHAPES], ids=lambda shape: shape or "bundled")
def shape(request) -> str | None:
    return request.param


@pytest.fixture
def folder(shape, checkpoints):
    return BUNDLED if shape is None else checkpoints(shape)


@pytest.fixture
def model(shape, reference):
    """transformers' model with eager attention, because torch does not count operations of the fused one."""
    model = reference(shape).model
    model.set_attn_implementation("eager")
    yield model
    model.set_attn_implementation("sdpa")


def count_flops(work) -> int:
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        work()
    return counter.get_total_flops()


@pytest.mark.thinned(4)
def test_parameters_equal_those_of_the_checkpoint(folder):
    costs = ModelCosts(load_config(folder))
    counts = dict.fromkeys(("vision", "decoder", "embedding", "head"), 0)
    for name, tensor in load_file(folder / "model.safetensors").items():
        parts = {"visual": "vision", "embed_tokens": "embedding", "lm_head": "head"}
        counts[next((part for key, part in parts.items() if key in name), "decoder")] += tensor.numel()
    assert costs.num_parameters == counts
    enough = 1000  # tokens to choose every expert
    assert costs.weights_read_by_a_step(enough) == counts["decoder"] + counts["embedding"]


@pytest.mark.thinned(6)
@pytest.mark.parametrize("grid", [(1, 2, 2), (1, 4, 6), (1, 10, 14)])
def test_operations_of_the_vit(grid, folder, model):
    config, P = load_config(folder), grid[1] * grid[2]
    patches = torch.zeros(P, config.vision.patch_dim)
    flops = count_flops(lambda: model.model.visual(patches, torch.tensor([grid])))
    assert flops == ModelCosts(config).vision_flops(grid)


@pytest.mark.thinned(6)
def test_operations_of_a_prompt_and_of_a_decode_step(folder, model):
    costs, T = ModelCosts(load_config(folder)), 37
    prompt = torch.zeros(1, T, dtype=torch.int64)
    output = {}
    flops = count_flops(lambda: output.update(model(prompt, use_cache=True, logits_to_keep=1)))
    # Eager attention computes the products of every token with all keys, and masks later tokens.
    assert flops == costs.decoder_flops(T, T * T) + costs.head_flops(1)
    name = "cache" if "cache" in output else "past_key_values"  # until transformers 5.23
    flops = count_flops(lambda: model(prompt[:, :1], **{name: output[name]}))
    assert flops == costs.decoder_flops(1, keys_seen(T, T + 1)) + costs.head_flops(1)


def test_a_step_reads_the_experts_that_its_tokens_choose(checkpoints):
    """8 experts, of which each token chooses 3: a second token finds 3 / 8 of the others."""
    costs = ModelCosts(load_config(checkpoints("experts8-top3")))
    rest = costs.num_parameters["decoder"] + costs.num_parameters["head"] - costs.num_expert_parameters
    for num_tokens, share in ((1, 3 / 8), (2, 3 / 8 + 5 / 8 * 3 / 8), (1000, 1)):
        expected = rest + share * costs.num_expert_parameters
        assert costs.weights_read_by_a_step(num_tokens) == pytest.approx(expected)


@pytest.mark.thinned(3)
def test_a_text_only_model_has_no_vision_costs(folder):
    config = load_config(folder)
    text_only = replace(config, architecture="Qwen2ForCausalLM", vision=None, mrope_section=None, image_token_id=None)
    whole, text = ModelCosts(config), ModelCosts(text_only)
    assert text.num_parameters == whole.num_parameters | {"vision": 0}
    assert text.decoder_flops(5, 15) == whole.decoder_flops(5, 15)


def test_tokens_see_their_own_key_and_all_before():
    assert keys_seen(0, 1) == 1
    assert keys_seen(0, 4) == 1 + 2 + 3 + 4
    assert keys_seen(10, 13) == 11 + 12 + 13
