"""Configs of checkpoints are read as transformers reads them, or refused with the reason."""

import copy
import json

import pytest

from mmvllm.models.registry import FAMILIES, load_config
from tests.helpers.models.configs import DECODER, assert_equals_transformers

FLAT = {  # the layout of the published checkpoints
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "model_type": "qwen2_vl",
    "eos_token_id": 45,
    "hidden_act": "silu",
    "hidden_size": 64,
    "image_token_id": 50,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    "rope_theta": 5000.0,
    "sliding_window": 256,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vision_config": {
        "depth": 5,
        "embed_dim": 48,
        "hidden_size": 64,
        "in_chans": 3,
        "mlp_ratio": 2,
        "num_heads": 3,
        "patch_size": 7,
        "spatial_merge_size": 4,
        "spatial_patch_size": 7,
        "temporal_patch_size": 1,
    },
    "vocab_size": 80,
}


DECODER_KEYS = (*DECODER, "num_key_value_heads", "rms_norm_eps", "vocab_size", "eos_token_id", "hidden_act")


NESTED = {  # the layout that transformers 5 saves
    **{key: FLAT[key] for key in ("architectures", "model_type", "image_token_id", "tie_word_embeddings")},
    "dtype": "bfloat16",
    "text_config": {
        **{key: FLAT[key] for key in DECODER_KEYS},
        "model_type": "qwen2_vl_text",
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "mrope_section": [2, 3, 3]},
    },
    "vision_config": FLAT["vision_config"],
}
SPARSE = {**FLAT, "vision_config": {"hidden_size": 64, "in_chans": 3, "model_type": "qwen2_vl"}}
UNTIED = {key: value for key, value in FLAT.items() if key != "tie_word_embeddings"}
TEXT_ONLY = {
    **{key: FLAT[key] for key in DECODER_KEYS},
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "rope_theta": 5000.0,
    "torch_dtype": "float16",
}
LAYOUTS = {"flat": FLAT, "nested": NESTED, "sparse vision": SPARSE, "untied": UNTIED, "text-only": TEXT_ONLY}


@pytest.fixture
def folder_of(tmp_path):
    """A folder with the given config.json, and generation_config.json if there is one."""

    def write(config, generation=None):
        (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return tmp_path

    return write


def with_value(config: dict, value, *keys: str) -> dict:
    """A copy with one value replaced, at config[key][key]...; the copy lacks it where value is `...`."""
    config = inner = copy.deepcopy(config)
    for key in keys[:-1]:
        inner = inner[key]
    if value is ...:
        del inner[keys[-1]]
    else:
        inner[keys[-1]] = value
    return config


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_equals_transformers(layout, folder_of):
    got = assert_equals_transformers(folder_of(LAYOUTS[layout]))
    assert got.eos_token_ids == {45}


def test_the_flat_and_the_nested_layout_give_the_same_config(folder_of):
    assert load_config(folder_of(FLAT)) == load_config(folder_of(NESTED))


def test_a_config_saved_by_transformers_equals_transformers(checkpoints):
    for shape in ("gqa2-tied", "gqa3-untied"):
        assert_equals_transformers(checkpoints(shape))


def test_missing_vision_values_have_the_defaults_of_transformers(folder_of):
    vision = load_config(folder_of(SPARSE)).vision
    assert (vision.depth, vision.embed_dim, vision.num_heads, vision.head_dim) == (32, 1280, 16, 80)
    assert vision.patch_dim == 3 * 2 * 14 * 14


def test_derived_sizes(folder_of):
    config = load_config(folder_of(FLAT))
    assert (config.head_dim, config.vision.head_dim, config.vision.patch_dim) == (16, 16, 3 * 7 * 7)


@pytest.mark.parametrize(
    ("generation", "want"),
    [
        (None, {45}),
        ({"eos_token_id": [45, 43]}, {45, 43}),
        ({"eos_token_id": 7}, {7}),
        ({"eos_token_id": 0}, {0}),
        ({"eos_token_id": None}, {45}),
        ({"temperature": 0.1}, {45}),
    ],
)
@pytest.mark.parametrize("layout", ["flat", "nested"])
def test_eos_ids_of_the_generation_config_have_precedence(layout, generation, want, folder_of):
    assert load_config(folder_of(LAYOUTS[layout], generation)).eos_token_ids == want


@pytest.mark.parametrize(
    ("config", "keys", "same_as"),
    [
        (NESTED, ("text_config", "dtype"), NESTED),
        (NESTED, ("text_config", "tie_word_embeddings"), NESTED),
        (NESTED, ("rope_scaling",), NESTED),
        (NESTED, ("quantization_config",), NESTED),
        (FLAT, ("text_config",), FLAT),
        (FLAT, ("head_dim",), FLAT),
        (FLAT, ("sliding_window",), FLAT),
        (FLAT, ("use_sliding_window",), FLAT),
        (FLAT, ("rope_parameters",), FLAT),
        (FLAT, ("rope_scaling", "rope_type"), FLAT),
        (FLAT, ("hidden_act",), FLAT),
        (FLAT, ("vision_config", "depth"), with_value(FLAT, 32, "vision_config", "depth")),
        (FLAT, ("image_token_id",), with_value(FLAT, 151655, "image_token_id")),
        (FLAT, ("torch_dtype",), with_value(FLAT, "float32", "torch_dtype")),
        (FLAT, ("tie_word_embeddings",), with_value(FLAT, False, "tie_word_embeddings")),
        (FLAT, ("num_key_value_heads",), with_value(FLAT, 4, "num_key_value_heads")),
        (FLAT, ("max_position_embeddings",), with_value(FLAT, 32768, "max_position_embeddings")),
        (FLAT, ("eos_token_id",), with_value(FLAT, [], "eos_token_id")),
        (TEXT_ONLY, ("vision_config",), TEXT_ONLY),
        (TEXT_ONLY, ("rope_scaling",), TEXT_ONLY),
    ],
    ids=lambda value: ".".join(value) if isinstance(value, tuple) else "",
)
def test_null_means_absent(config, keys, same_as, folder_of):
    want = load_config(folder_of(same_as))
    assert load_config(folder_of(with_value(config, None, *keys))) == want


def test_a_vision_model_without_a_vision_config_has_the_default_vit(folder_of):
    """transformers uses its defaults then; the model must not be served as text-only."""
    big = {**FLAT, "hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4}
    del big["vision_config"], big["rope_scaling"], big["image_token_id"]
    config = load_config(folder_of(big))
    assert (config.vision.depth, config.vision.embed_dim, config.vision.intermediate_size) == (32, 1280, 5120)
    assert (config.mrope_section, config.image_token_id) == ((16, 24, 24), 151655)


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_the_quantization_method_is_recorded(method, folder_of):
    config = {**FLAT, "quantization_config": {"quant_method": method, "bits": 4}}
    assert load_config(folder_of(config)).quantization.method == method
    assert load_config(folder_of(FLAT)).quantization is None


def test_a_folder_without_config_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"not a checkpoint folder, it has no config\.json"):
        load_config(tmp_path)
    with pytest.raises(ValueError, match=r"absent: not a checkpoint folder"):
        load_config(tmp_path / "absent")


@pytest.mark.parametrize("text", ["", '{"hidden_size": 64,', "[1, 2]", "null", "\x00", "[" * 100_000])
def test_damaged_json_is_refused(text, folder_of):
    with pytest.raises(ValueError, match=r"config\.json is damaged: .*; download it again"):
        load_config(folder_of(text))


@pytest.mark.parametrize(("generation", "want"), [(None, None), ({}, None), ({"max_new_tokens": 7}, 7)])
def test_the_limit_of_completions_is_that_of_the_generation_config(generation, want, folder_of):
    assert load_config(folder_of(NESTED, generation)).max_new_tokens == want


@pytest.mark.parametrize("value", [0, -1, "7", 1.5, True])
def test_a_wrong_limit_of_completions_is_refused(value, folder_of):
    with pytest.raises(ValueError, match=r"generation_config\.json's max_new_tokens must be an integer.*, got .*"):
        load_config(folder_of(NESTED, {"max_new_tokens": value}))


def test_damaged_generation_config_is_refused(folder_of, tmp_path):
    (tmp_path / "generation_config.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"generation_config\.json is damaged"):
        load_config(folder_of(FLAT))


@pytest.mark.parametrize(
    "name",
    [
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
        "rms_norm_eps",
        "rope_theta",
    ],
)
@pytest.mark.parametrize("value", [..., None], ids=["missing", "null"])
def test_a_missing_value_is_named(name, value, folder_of):
    with pytest.raises(ValueError, match=rf"config\.json: does not give {name}$"):
        load_config(folder_of(with_value(FLAT, value, name)))


def test_all_missing_values_are_named(folder_of):
    nested = with_value(with_value(NESTED, ..., "text_config", "vocab_size"), ..., "text_config", "hidden_size")
    with pytest.raises(ValueError, match=r"does not give hidden_size, vocab_size$"):
        load_config(folder_of(nested))


@pytest.mark.parametrize(
    ("keys", "value", "match"),
    [
        (("hidden_size",), "64", "hidden_size must be an integer of at least 1, got '64'"),
        (("num_attention_heads",), 0, "num_attention_heads must be an integer of at least 1, got 0"),
        (("num_attention_heads",), 64, "the head size must be even, got 1"),
        (("num_hidden_layers",), True, "num_hidden_layers must be an integer.*, got True"),
        (("num_key_value_heads",), 3, "num_attention_heads must be a multiple of num_key_value_heads, 3, got 4"),
        (("max_position_embeddings",), -1, "max_position_embeddings must be an integer.*, got -1"),
        (("use_sliding_window",), True, "sliding-window attention, which is not supported"),
        (("layer_types",), ["full_attention", "sliding_attention"], "sliding-window attention, which is not supported"),
        (("layer_types",), 5, "layer_types must be a list of names, got 5"),
        (("torch_dtype",), "int8", "dtype must be float32, float16 or bfloat16, got 'int8'"),
        (("torch_dtype",), ["bfloat16"], r"dtype must be float32, float16 or bfloat16, got \['bfloat16'\]"),
        (("hidden_act",), "gelu", "hidden_act must be 'silu', got 'gelu'"),
        (("rope_scaling", "type"), "yarn", "asks for 'yarn' rotary scaling; supported: 'default', 'mrope'"),
        (("rope_scaling", "rope_type"), "llama3", "asks for 'llama3' rotary scaling"),
        (("rope_scaling", "mrope_section"), [2, 3, 4], r"mrope_section must be three .* half .* 16, got \[2, 3, 4\]"),
        (("rope_scaling", "mrope_section"), [4, 4], r"mrope_section must be three numbers.*, got \[4, 4\]"),
        (("rope_scaling", "mrope_section"), 8, "mrope_section must be a list of integers, got 8"),
        (("rope_scaling", "mrope_section"), [-2, 5, 5], "each item of mrope_section must be an .*, got -2"),
        (("rope_scaling", "mrope_section"), [2.0, 3.0, 3.0], r"each item of mrope_section must be an .*, got 2\.0"),
        (("eos_token_id",), "45", "eos_token_id must be a token id or a list of them, got '45'"),
        (("eos_token_id",), [45, 1.5], r"eos_token_id must be a token id or a list of them, got \[45, 1\.5\]"),
        (("rope_theta",), 0, "rope_theta must be a number of at least 1.*, got 0"),
        (("rope_theta",), "5000", "rope_theta must be a number of at least 1.*, got '5000'"),
        (("rope_theta",), 1e-40, "rope_theta must be a number of at least 1.*, got 1e-40"),
        (("rms_norm_eps",), float("nan"), "rms_norm_eps must be a number above 0.*, got nan"),
        (("rms_norm_eps",), 10**400, "rms_norm_eps must be a number above 0.*, got 10*"),
        (("vision_config", "patch_size"), 10**400, "vision_config's patch_size must be at most.*, got 10*"),
        (("rope_theta",), float("inf"), "rope_theta must be a number of at least 1.*, got inf"),
        (("rope_theta",), 10**400, "rope_theta must be a number of at least 1.*, got 10*"),
        (("rope_scaling",), "mrope", "rope_parameters must be a JSON object, got 'mrope'"),
        (("text_config",), [1], r"text_config must be a JSON object, got \[1\]"),
        (("vision_config",), "vit", "vision_config must be a JSON object, got 'vit'"),
        (
            ("vision_config", "hidden_size"),
            32,
            "out_hidden_size must be the decoder's hidden_size, 64, got 32",
        ),
        (("image_token_id",), "<|image_pad|>", r"image_token_id must be a token id, got '<.image_pad.>'"),
        (("vision_start_token_id",), True, "vision_start_token_id must be a token id, got True"),
        (("vision_config", "patch_size"), [14, 14], r"vision_config's patch_size must be an integer.*, got \[14, 14\]"),
        (("vision_config", "embed_dim"), 42, "the ViT's head size must be a multiple of 4, got 14"),
        (("vision_config", "in_channels"), 1, "vision_config's in_channels must be 3 .RGB images., got 1"),
        (("vision_config", "rope_parameters"), {"rope_type": "yarn"}, "rope_type must be 'axial', got 'yarn'"),
        (("vision_config", "num_heads"), 5, "the ViT's width must be a multiple of its number of heads, 5, got 48"),
    ],
    ids=str,
)
def test_unsupported_values_are_refused(keys, value, match, folder_of):
    with pytest.raises(ValueError, match=r"config\.json: .*" + match):
        load_config(folder_of(with_value(FLAT, value, *keys)))


@pytest.mark.parametrize(
    "config",
    [
        {**FLAT, "architectures": ["Qwen3_5ForConditionalGeneration"]},
        {"architectures": ["GPT2LMHeadModel"], "n_embd": 768},
        {"architectures": ["LlamaForCausalLM"], "rope_scaling": {"rope_type": "llama3"}, "use_sliding_window": True},
        {"model_type": "bert"},
        {},
    ],
    ids=lambda config: (config.get("architectures") or [config.get("model_type", "nothing")])[0],
)
def test_an_unsupported_architecture_is_refused_before_its_values_are_checked(config, folder_of):
    name = (config.get("architectures") or [config.get("model_type", "unknown")])[0]
    with pytest.raises(ValueError, match=f"architecture '{name}' is not supported; supported: {', '.join(FAMILIES)}"):
        load_config(folder_of(config))


@pytest.mark.parametrize("token_id", [768, -1])
def test_a_placeholder_that_is_no_token_is_refused(token_id, copy_of, make_llm):
    folder = copy_of("deepstack3-tied", config=lambda config: config | {"image_token_id": token_id})
    with pytest.raises(ValueError, match=rf"image_token_id must be a token id below vocab_size, .*, got {token_id}"):
        make_llm(folder, load_format="dummy")


def test_an_unknown_vision_activation_is_refused(checkpoint, tmp_path, make_llm):
    config = json.loads((checkpoint / "config.json").read_text())
    for path in checkpoint.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(with_value(config, "tanh", "vision_config", "hidden_act")))
    with pytest.raises(ValueError, match="hidden_act is 'tanh'; supported: quick_gelu, gelu, gelu_pytorch_tanh, silu"):
        make_llm(tmp_path)
