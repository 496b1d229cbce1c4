"""The formulas against counts: of a checkpoint's values, and of what torch sees transformers' model compute."""

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode

from mmvllm.bench.costs import (
    decoder_flops,
    head_flops,
    keys_seen,
    num_parameters,
    vision_flops,
    weights_read_by_a_step,
)
from mmvllm.models.registry import load_config
from mmvllm.models.weights import BUNDLED
from tests.helpers.checkpoints import SHAPES


@pytest.fixture(params=[None, *SHAPES], ids=lambda shape: shape or "bundled")
def shape(request) -> str | None:
    return request.param


@pytest.fixture
def folder(shape, checkpoints):
    return BUNDLED if shape is None else checkpoints(shape)


@pytest.fixture
def model(shape, reference):
    """transformers' model; its attention is two products here, because torch does not count the fused one."""
    model = reference(shape).model
    model.set_attn_implementation("eager")
    yield model
    model.set_attn_implementation("sdpa")


def count_flops(work) -> int:
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        work()
    return counter.get_total_flops()


def test_parameters_are_those_of_the_checkpoint(folder):
    config, counts = load_config(folder), dict.fromkeys(("vision", "decoder", "embedding", "head"), 0)
    for name, tensor in load_file(folder / "model.safetensors").items():
        parts = {"visual": "vision", "embed_tokens": "embedding", "lm_head": "head"}
        counts[next((part for key, part in parts.items() if key in name), "decoder")] += tensor.numel()
    assert num_parameters(config) == counts
    assert weights_read_by_a_step(config) == counts["decoder"] + counts["embedding"]


@pytest.mark.parametrize("grid", [(1, 2, 2), (1, 4, 6), (1, 10, 14)])
def test_operations_of_the_vit(grid, folder, model):
    vision, P = load_config(folder).vision, grid[1] * grid[2]
    patches = torch.zeros(P, vision.patch_dim)
    assert count_flops(lambda: model.model.visual(patches, torch.tensor([grid]))) == vision_flops(vision, P)


def test_operations_of_a_prompt_and_of_a_decode_step(folder, model):
    config, T = load_config(folder), 37
    prompt = torch.zeros(1, T, dtype=torch.int64)
    made = {}
    flops = count_flops(lambda: made.update(model(prompt, use_cache=True, logits_to_keep=1)))
    # There, every token's product with all keys is computed, and those of later tokens are masked.
    assert flops == decoder_flops(config, T, T * T) + head_flops(config, 1)
    flops = count_flops(lambda: model(prompt[:, :1], past_key_values=made["past_key_values"]))
    assert flops == decoder_flops(config, 1, keys_seen(T, T + 1)) + head_flops(config, 1)


def test_keys_seen_are_a_token_s_own_and_those_before():
    assert keys_seen(0, 1) == 1
    assert keys_seen(0, 4) == 1 + 2 + 3 + 4
    assert keys_seen(10, 13) == 11 + 12 + 13
