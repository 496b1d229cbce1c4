"""Which layers a `quantization_config` says are quantized, and how."""

import pytest

from mmvllm.quantization.config import WeightScheme, parse_quantization
from tests.helpers.models.quantized_tensors import AWQ, FP8, GPTQ, compressed

DOWN, EXPERT, GATE = (f"layers.0.mlp.{name}" for name in ("down_proj", "experts.3.gate_proj", "gate"))
PREFIXES = ("", "model.", "model.language_model.", "language_model.model.")
VISUAL, HEAD = ("visual.blocks.0.attn.qkv", "model.visual.blocks.0.attn.qkv"), ("lm_head", "language_model.lm_head")
LINEAR8 = compressed("int-quantized", num_bits=8, type="int", strategy="channel")


def under(name: str) -> list[str]:
    """The names of a layer in all versions of transformers."""
    return [prefix + name for prefix in PREFIXES]


def groups(*schemes: tuple[list[str], int], **others) -> dict:
    """A compressed-tensors config of several groups, of targets and bits."""
    config_groups = {
        f"group_{i}": {"targets": targets, "weights": {"num_bits": bits, "type": "int", "group_size": 64}}
        for i, (targets, bits) in enumerate(schemes)
    }
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": config_groups, **others}


@pytest.mark.parametrize(
    ("config", "plain"),
    [
        (AWQ | {"modules_to_not_convert": ["visual"]}, [*VISUAL, *HEAD]),
        (AWQ | {"modules_to_not_convert": ["model.layers.0.mlp.gate."]}, [*VISUAL, *HEAD]),
        (AWQ | {"modules_to_not_convert": ["layers.0.mlp.down_proj"]}, [*VISUAL, *HEAD, *under(DOWN)]),
        (GPTQ | {"bits": 4}, [*VISUAL, *HEAD]),
        (GPTQ | {"bits": 4, "lm_head": True}, VISUAL),
        (GPTQ | {"bits": 4, "dynamic": {r"-:.*mlp\.down_proj": {}}}, [*VISUAL, *HEAD, *under(DOWN)]),
        (FP8 | {"modules_to_not_convert": ["lm_head", "model.visual"]}, [*VISUAL, *HEAD]),
        (FP8 | {"modules_to_not_convert": ["visual", "mlp.gate"]}, [*VISUAL, *under(GATE)]),
        (FP8 | {"ignored_layers": ["model.layers.0.mlp"]}, [*under(DOWN), *under(EXPERT), *under(GATE)]),
        (LINEAR8 | {"ignore": ["lm_head", "re:visual.*", "re:.*mlp.gate$"]}, [*VISUAL, *HEAD, *under(GATE)]),
        (LINEAR8 | {"ignore": ["model.layers.0.mlp.down_proj"]}, under(DOWN)),
        (groups((["re:.*layers.*"], 4)), [*VISUAL, *HEAD]),
    ],
)  # fmt: skip
def test_layers_that_are_stored_as_usual(config, plain):
    parsed = parse_quantization(config)
    names = [*VISUAL, *HEAD, *under(DOWN), *under(EXPERT), *under(GATE)]
    assert {name for name in names if parsed.scheme_of(name) is None} == set(plain)


def test_the_most_specific_target_counts():
    down = "model.layers.0.mlp.down_proj"
    parsed = parse_quantization(groups((["Linear"], 4), (["re:.*down_proj"], 8), ([down], 4)))
    assert parsed.scheme_of("model.layers.0.mlp.up_proj").bits == 4
    assert parsed.scheme_of("model.layers.1.mlp.down_proj").bits == 8
    assert parsed.scheme_of("model.language_model.layers.0.mlp.down_proj").bits == 4


def test_a_layer_in_codes_that_is_ignored_has_the_only_scheme():
    parsed = parse_quantization(groups((["Linear"], 4), ignore=["lm_head"]))
    assert parsed.scheme_of("lm_head") is None and parsed.scheme_for("lm_head").bits == 4
    parsed = parse_quantization(groups((["Linear"], 4), (["re:.*down_proj"], 8), ignore=["lm_head"]))
    with pytest.raises(ValueError, match="lm_head is quantized, but quantization_config does not say how"):
        parsed.scheme_for("lm_head")


@pytest.mark.parametrize(
    ("config", "scheme"),
    [
        (AWQ, WeightScheme("awq", "int4", (1, 128), has_zeros=True)),
        (AWQ | {"version": "GEMM", "group_size": -1}, WeightScheme("awq", "int4", (1, None), has_zeros=True)),
        (GPTQ | {"bits": 8, "group_size": 128}, WeightScheme("gptq", "int8", (1, 128), has_zeros=True, zero_offset=1)),
        (GPTQ | {"bits": 4, "checkpoint_format": "gptq_v2"}, WeightScheme("gptq", "int4", (1, None), has_zeros=True)),
        (FP8 | {"weight_block_size": [128, 128]}, WeightScheme("plain", "float8_e4m3fn", (128, 128))),
        (FP8 | {"activation_scheme": "static"}, WeightScheme("plain", "float8_e4m3fn", (None, None))),
        (LINEAR8, WeightScheme("plain", "int8", (1, None))),
        (
            compressed("pack-quantized", num_bits=4, group_size=64, symmetric=False, actorder="weight"),
            WeightScheme("packed", "int4", (1, 64), has_zeros=True),
        ),
        (
            compressed("naive-quantized", num_bits=8, type="float", strategy="block", block_structure="128x64"),
            WeightScheme("plain", "float8_e4m3fn", (128, 64)),
        ),
        (
            compressed("pack-quantized", num_bits=8, strategy="tensor", actorder="group"),
            WeightScheme("packed", "int8", (None, None), act_order=True),
        ),
    ],
)
def test_schemes(config, scheme):
    assert parse_quantization(config).schemes == {scheme}


def test_a_method_is_described():
    assert str(parse_quantization(AWQ)) == "awq (4-bit integers)"
    assert str(parse_quantization(FP8)) == "fp8 (8-bit floats)"
    mixed = parse_quantization(groups((["Linear"], 4), (["re:.*down_proj"], 8)))
    assert str(mixed) == "compressed-tensors (4-bit integers, 8-bit integers)"
