"""Weights of each family load from every layout of names into the same model; problems are told by published names."""

import re

import pytest
import torch
from safetensors.torch import load_file

from mmvllm.models.weights import checkpoint_views
from tests.helpers.models.shapes import RICHEST, SHAPES, TEXT_SHAPES
from tests.helpers.models.weights import assert_same, load, state

# Where the ViT, the decoder and the head are.
LAYOUTS = {
    "Qwen2-VL and Qwen2.5-VL": ("visual.", "model.", "lm_head."),
    "Qwen3-VL": ("model.visual.", "model.language_model.", "lm_head."),
    "transformers 4.52": ("visual.", "language_model.model.", "language_model.lm_head."),
}
OTHERS = (RICHEST[1], RICHEST[2], RICHEST[3], TEXT_SHAPES[-1])


def layout_of(shape: str) -> str:
    """The layout that transformers saves, which is the published one."""
    return "Qwen3-VL" if SHAPES[shape]["family"].startswith("qwen3_vl") else "Qwen2-VL and Qwen2.5-VL"


def renamed(old: str, new: str):
    """Rename tensors of one layout to another; the longest prefix counts."""
    prefixes = sorted(zip(LAYOUTS[old], LAYOUTS[new], strict=True), key=lambda pair: -len(pair[0]))

    def rename(name: str) -> str:
        return next(new + name.removeprefix(old) for old, new in prefixes if name.startswith(old))

    return lambda tensors: {rename(name): tensor for name, tensor in tensors.items()}


@pytest.mark.thinned(4)
@pytest.mark.parametrize("shape", OTHERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_names_of_every_layout_give_the_same_model(shape, layout, checkpoints, copy_of):
    prefixes = LAYOUTS[layout_of(shape)]
    names = load_file(checkpoints(shape) / "model.safetensors")
    assert all(name.startswith(prefixes) for name in names)
    assert_same(state(copy_of(shape, renamed(layout_of(shape), layout))), state(checkpoints(shape)))


def with_transposed_experts(tensors: dict) -> dict:
    """The published layout: (experts, in, out)."""
    return {name: tensor.mT.contiguous() if ".experts." in name else tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if SHAPES[shape]["family"] == "qwen3_vl_moe"])
def test_experts_of_both_layouts_give_the_same_model(shape, checkpoints, copy_of):
    """transformers saves (experts, out, in)."""
    tensors, text = load_file(checkpoints(shape) / "model.safetensors"), SHAPES[shape]["text"]
    experts = [tensor for name, tensor in tensors.items() if name.endswith("experts.gate_up_proj")]
    assert experts and all(len(tensor) == text["num_experts"] for tensor in experts)
    assert all(tensor.shape[1] == 2 * text["moe_intermediate_size"] for tensor in experts)
    assert_same(state(copy_of(shape, with_transposed_experts)), state(checkpoints(shape)))


@pytest.mark.parametrize("shape", OTHERS)
def test_each_place_is_called_by_the_published_name_of_its_tensor(shape, checkpoints):
    model, tensors = load(checkpoints(shape)), load_file(checkpoints(shape) / "model.safetensors")
    places = [(name, part) for name, part, *_ in checkpoint_views(model) if name in dict(model.named_parameters())]
    assert {model.checkpoint_name(*place) for place in places} == tensors.keys()
    assert {model.parameter_for(name) for name in tensors} == set(places)


@pytest.mark.parametrize(
    ("shape", "name", "size", "needed"),
    [
        ("windows4-tied", "visual.blocks.0.mlp.up_proj.weight", (96, 48), (92, 48)),
        ("windows4-tied", "visual.blocks.2.mlp.down_proj.weight", (48, 96), (48, 92)),
        ("windows4-tied", "visual.blocks.1.mlp.gate_proj.bias", (96,), (92,)),
        ("deepstack3-tied", "model.visual.pos_embed.weight", (64, 48), (49, 48)),
        ("deepstack3-tied", "model.visual.deepstack_merger_list.1.norm.weight", (48,), (192,)),
        ("deepstack3-tied", "model.visual.merger.norm.weight", (192,), (48,)),
        ("deepstack3-tied", "model.language_model.layers.0.self_attn.k_norm.weight", (48,), (24,)),
        ("experts8-top3", "model.language_model.layers.0.mlp.gate.weight", (4, 64), (8, 64)),
    ],
)
def test_a_misshapen_tensor_is_named_with_both_shapes(shape, name, size, needed, copy_of):
    folder = copy_of(shape, lambda tensors: tensors | {name: torch.ones(size)})
    with pytest.raises(ValueError) as error:
        load(folder)
    assert str(error.value).endswith(f"tensors of the wrong shape (1): {name} is {size}, needs {needed}")


@pytest.mark.parametrize("size", [(8, 48, 63), (7, 48, 64), (8, 47, 64)])
def test_misshapen_experts_are_named(size, copy_of):
    name = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    folder = copy_of("experts8-top3", lambda tensors: tensors | {name: torch.ones(size)})
    with pytest.raises(ValueError, match=rf"tensors of the wrong shape \(1\): {name} is {re.escape(str(size))}, needs"):
        load(folder)


def test_a_deepstack_merger_that_the_config_does_not_name_is_extra(copy_of):
    name = "model.visual.deepstack_merger_list.3.norm.weight"
    folder = copy_of("deepstack3-tied", lambda tensors: tensors | {name: torch.ones(192)})
    with pytest.raises(ValueError, match=rf"tensors that belong to no parameter or come twice \(1\): {name}$"):
        load(folder)


def test_padding_of_the_vits_mlp_is_zero(checkpoints):
    """92 values are padded to 96: the padded rows and columns add nothing."""
    mlp = load(checkpoints("windows4-tied")).visual.blocks[0].mlp
    gate, up = mlp.gate_up_proj.weight.chunk(2)
    assert len(gate) == len(up) == mlp.down_proj.weight.shape[1] == 96
    assert not gate[92:].any() and not up[92:].any() and not mlp.down_proj.weight[:, 92:].any()
    assert gate[:92].any(dim=1).all() and mlp.down_proj.weight[:, :92].any(dim=0).all()
