"""Configs of the published checkpoints: parsed to the facts, or refused by name."""

import json

import pytest

from mmvllm import LLM
from mmvllm.models.registry import FAMILIES, load_config
from mmvllm.quantization.config import WeightScheme
from tests.helpers.models.configs import assert_equals_transformers
from tests.helpers.models.metadata import ROOT, needs_metadata

pytestmark = needs_metadata

QWEN2, QWEN2_5, QWEN3 = (1e6, (16, 24, 24), 32768), (1e6, (16, 24, 24), 128000), (5e6, (24, 20, 20), 262144)
# Hidden size, intermediate size, layers, query heads, KV heads, vocabulary, tied; theta, M-RoPE section, length; dtype.
DECODERS = {
    "Qwen2-VL-2B-Instruct": (1536, 8960, 28, 12, 2, 151936, True, *QWEN2, "bfloat16"),
    "Qwen2-VL-7B-Instruct": (3584, 18944, 28, 28, 4, 152064, False, *QWEN2, "bfloat16"),
    "Qwen2-VL-2B-Instruct-AWQ": (1536, 8960, 28, 12, 2, 151936, True, *QWEN2, "float16"),
    "Qwen2-VL-7B-Instruct-AWQ": (3584, 18944, 28, 28, 4, 152064, False, *QWEN2, "float16"),
    "Qwen2.5-VL-3B-Instruct": (2048, 11008, 36, 16, 2, 151936, True, *QWEN2_5, "bfloat16"),
    "Qwen2.5-VL-7B-Instruct": (3584, 18944, 28, 28, 4, 152064, False, *QWEN2_5, "bfloat16"),
    "Qwen2.5-VL-7B-Instruct-AWQ": (3584, 18944, 28, 28, 4, 152064, False, *QWEN2_5, "bfloat16"),
    "olmOCR-2-7B-1025-FP8": (3584, 18944, 28, 28, 4, 152064, False, *QWEN2_5, "bfloat16"),
    "Qwen3-VL-2B-Instruct": (2048, 6144, 28, 16, 8, 151936, True, *QWEN3, "bfloat16"),
    "Qwen3-VL-4B-Instruct": (2560, 9728, 36, 32, 8, 151936, True, *QWEN3, "bfloat16"),
    "Qwen3-VL-8B-Instruct": (4096, 12288, 36, 32, 8, 151936, False, *QWEN3, "bfloat16"),
    "Qwen3-VL-32B-Instruct": (5120, 25600, 64, 64, 8, 151936, False, *QWEN3, "bfloat16"),
    "Qwen3-VL-30B-A3B-Instruct": (2048, 6144, 48, 32, 4, 151936, False, *QWEN3, "bfloat16"),
    "Qwen3-4B": (2560, 9728, 36, 32, 8, 151936, True, 1e6, None, 40960, "bfloat16"),
}
# Depth, width, heads, inner size, patch, and what only this family has.
VITS = {
    "Qwen2-VL": (32, 1280, 16, 5120, 14, {}),
    "Qwen2.5-VL": (32, 1280, 16, 3420, 14, {"window_size": 112, "fullatt_block_indexes": {7, 15, 23, 31}}),
    "olmOCR-2": (32, 1280, 16, 3420, 14, {"window_size": 112, "fullatt_block_indexes": {7, 15, 23, 31}}),
    "Qwen3-VL-2B": (24, 1024, 16, 4096, 16, {"deepstack_visual_indexes": (5, 11, 17)}),
    "Qwen3-VL-4B": (24, 1024, 16, 4096, 16, {"deepstack_visual_indexes": (5, 11, 17)}),
    "Qwen3-VL": (27, 1152, 16, 4304, 16, {"deepstack_visual_indexes": (8, 16, 24)}),
}
QUANTIZED = {
    "Qwen2-VL-2B-Instruct-AWQ": "awq",
    "Qwen2-VL-7B-Instruct-AWQ": "awq",
    "Qwen2.5-VL-7B-Instruct-AWQ": "awq",
    "olmOCR-2-7B-1025-FP8": "compressed-tensors",
}
UNSUPPORTED = ("Qwen3.5-0.8B", "Qwen3.5-2B", "Qwen3.5-4B", "Qwen3.5-9B", "Qwen3.5-27B", "Qwen3.5-35B-A3B")


def test_every_folder_is_tested():
    folders = {path.parent.name for path in ROOT.glob("*/config.json")}
    assert folders == DECODERS.keys() | set(UNSUPPORTED)


@pytest.mark.parametrize("name", DECODERS)
def test_decoders_equal_transformers_and_the_facts(name):
    c = assert_equals_transformers(ROOT / name)
    sizes = (c.hidden_size, c.intermediate_size, c.num_hidden_layers, c.num_attention_heads, c.num_key_value_heads)
    rope = (c.rope_theta, c.mrope_section, c.max_position_embeddings)
    dtype = str(c.dtype).removeprefix("torch.")
    assert (*sizes, c.vocab_size, c.tie_word_embeddings, *rope, dtype) == DECODERS[name]
    assert (c.head_dim, c.rms_norm_eps) == (128, 1e-6)
    is_qwen3 = name.startswith("Qwen3")
    assert (c.qkv_bias, c.qk_norm, c.mrope_interleaved) == (not is_qwen3, is_qwen3, name.startswith("Qwen3-VL"))
    assert (c.quantization and c.quantization.method) == QUANTIZED.get(name)
    has_both = (ROOT / name / "generation_config.json").is_file() or name.startswith("Qwen3-4B")
    assert c.eos_token_ids == ({151645, 151643} if has_both else {151645})


@pytest.mark.parametrize("name", [name for name in DECODERS if name != "Qwen3-4B"])
def test_vits_equal_the_facts(name):
    vision = load_config(ROOT / name).vision
    *sizes, own = next(facts for prefix, facts in VITS.items() if name.startswith(prefix))
    got = (vision.depth, vision.embed_dim, vision.num_heads, vision.intermediate_size, vision.patch_size)
    assert got == tuple(sizes)
    assert {key: getattr(vision, key) for key in own} == own
    assert vision.patch_dim == 3 * 2 * vision.patch_size**2
    num_rows = 1 + len(own.get("deepstack_visual_indexes", ()))
    assert vision.mm_embed_size == num_rows * DECODERS[name][0]


def test_experts_equal_the_facts():
    experts = load_config(ROOT / "Qwen3-VL-30B-A3B-Instruct").experts
    assert (experts.num_experts, experts.num_experts_per_tok, experts.intermediate_size) == (128, 8, 768)
    assert not experts.dense_layers
    assert all(load_config(ROOT / name).experts is None for name in DECODERS if "A3B" not in name)


@pytest.mark.parametrize("name", QUANTIZED)
def test_layers_of_the_decoder_are_quantized_and_others_are_not(name):
    quantization, layer = load_config(ROOT / name).quantization, "model.layers.3.mlp.gate_proj"
    fp8 = WeightScheme("plain", "float8_e4m3fn", (1, None))
    awq = WeightScheme("awq", "int4", (1, 128), has_zeros=True)
    assert quantization.scheme_of(layer) == (fp8 if "FP8" in name else awq)
    plain = ("visual.blocks.3.mlp.gate_proj", "visual.blocks.31.attn.qkv", "visual.merger.mlp.0", "lm_head")
    assert not any(map(quantization.scheme_of, plain))


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_architectures_are_refused_with_the_list(name):
    architecture = json.loads((ROOT / name / "config.json").read_text())["architectures"][0]
    with pytest.raises(ValueError) as error:
        LLM(ROOT / name)
    assert str(error.value).endswith(
        f"architecture {architecture!r} is not supported; supported: {', '.join(FAMILIES)}"
    )
