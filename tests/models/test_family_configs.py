"""Configs of each family in every layout are read as transformers reads them."""

import json
from itertools import product

import pytest
import transformers
from transformers import AutoConfig

from mmvllm.models.registry import load_config
from tests.helpers.models.configs import assert_equals_transformers
from tests.helpers.models.shapes import IMAGE_SHAPES, RICHEST, SHAPES


@pytest.fixture
def folder_of(tmp_path):
    """A folder with the given config.json."""

    def write(config: dict):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return write


def saved(folder) -> dict:
    return json.loads((folder / "config.json").read_text())


def with_old_names(text: dict) -> dict:
    """A decoder's values by the names of transformers 4, as published."""
    text = {**text, "torch_dtype": "bfloat16"}
    rope = text.pop("rope_parameters")
    rope_scaling = {"type": "mrope", "mrope_section": rope["mrope_section"]} if "mrope_section" in rope else None
    if "num_local_experts" in text:
        text["num_experts"] = text.pop("num_local_experts")
    return {**text, "rope_theta": rope["rope_theta"], "rope_scaling": rope_scaling}


def flat(config: dict) -> dict:
    """The published layout of Qwen2-VL and Qwen2.5-VL."""
    outer = {key: value for key, value in config.items() if key not in ("text_config", "dtype")}
    text = {key: value for key, value in config["text_config"].items() if key not in ("model_type", "layer_types")}
    return {**with_old_names(text), **outer}


def nested(config: dict) -> dict:
    """The published layout of Qwen3-VL."""
    outer = {key: value for key, value in config.items() if key != "dtype"}
    text = with_old_names(config["text_config"])
    text["rope_scaling"] |= {"type": "default", "mrope_interleaved": True}
    return {**outer, "text_config": text}


@pytest.mark.thinned(6)
@pytest.mark.parametrize("shape", SHAPES)
def test_configs_saved_by_transformers(shape, checkpoints):
    config = assert_equals_transformers(checkpoints(shape))
    assert config.tie_word_embeddings == SHAPES[shape]["tied"]


@pytest.mark.parametrize("shape", IMAGE_SHAPES)
def test_published_layouts_give_the_same_config(shape, checkpoints, folder_of):
    layout = flat if SHAPES[shape]["family"].startswith("qwen2") else nested
    config = layout(saved(checkpoints(shape)))
    got, want = assert_equals_transformers(folder_of(config)), load_config(checkpoints(shape))
    for name in got.__slots__:
        assert getattr(got, name) == getattr(want, name) or name == "dtype", name


@pytest.mark.parametrize("shape", RICHEST)
def test_a_vision_config_that_says_little_has_the_defaults_of_transformers(shape, checkpoints, folder_of):
    config = saved(checkpoints(shape))
    width = "hidden_size" if shape == RICHEST[0] else "out_hidden_size"
    vision = {"model_type": config["model_type"], width: config["text_config"]["hidden_size"]}
    assert_equals_transformers(folder_of({**config, "vision_config": vision}))


@pytest.mark.parametrize("shape", RICHEST)
@pytest.mark.parametrize(
    "name",
    ["decoder_sparse_step", "hidden_act", "mlp_only_layers", "moe_intermediate_size", "num_experts_per_tok"],
)
def test_a_missing_value_of_the_decoder_has_the_default_of_transformers(name, shape, checkpoints, folder_of):
    config = saved(checkpoints(shape))
    config["text_config"].pop(name, None)
    if config["text_config"].get("num_local_experts"):
        config["text_config"]["num_local_experts"] = 8
    assert_equals_transformers(folder_of(config))


@pytest.mark.parametrize("shape", ["deepstack3-tied", "qwen3-mqa-untied", "experts8-top3"])
def test_a_missing_head_size_is_that_of_transformers(shape, checkpoints, folder_of):
    """128 for a dense Qwen3, whatever the width of the decoder."""
    config = saved(checkpoints(shape))
    text = config.get("text_config", config)
    del text["head_dim"]
    section = [32, 16, 16] if shape.startswith("deep") else [4, 2, 2]
    if "text_config" in config:
        text["rope_parameters"]["mrope_section"] = section
    assert assert_equals_transformers(folder_of(config)).head_dim == (16 if shape.startswith("experts") else 128)


@pytest.mark.slow
@pytest.mark.parametrize("shape", RICHEST)
def test_the_head_is_tied_as_in_transformers(shape, checkpoints, folder_of):
    """Families of transformers read the value at the top, or the one in `text_config`."""
    for top, inner in product((None, False, True), repeat=2):
        config = saved(checkpoints(shape))
        for part, value in ((config, top), (config["text_config"], inner)):
            part.pop("tie_word_embeddings", None)
            part |= {} if value is None else {"tie_word_embeddings": value}
        folder = folder_of(config)
        model = getattr(transformers, config["architectures"][0])(AutoConfig.from_pretrained(folder))
        tied = model.lm_head.weight is model.get_input_embeddings().weight
        assert load_config(folder).tie_word_embeddings == tied, (top, inner)


@pytest.mark.parametrize(
    ("shape", "part", "name"),
    [
        ("windows4-tied", "vision_config", "fullatt_block_indexes"),
        ("deepstack3-tied", "vision_config", "deepstack_visual_indexes"),
        ("experts8-top3", "text_config", "mlp_only_layers"),
    ],
)
def test_what_is_no_list_of_layers_is_named(shape, part, name, checkpoints, folder_of):
    for value, match in (
        (3, f"{name} must be a list of integers, got 3"),
        ([[1]], rf"each item of {name} .*, got \[1\]"),
    ):
        config = saved(checkpoints(shape))
        config[part][name] = value
        with pytest.raises(ValueError, match=rf"config\.json: .*{match}"):
            load_config(folder_of(config))
