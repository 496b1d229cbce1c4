"""Quantized checkpoints that are damaged, or stored in a way that is not supported, are refused by name."""

import re

import pytest
import torch

from mmvllm.quantization.config import parse_quantization
from tests.helpers.models.packers import pack_awq, pack_compressed, pack_fp8, pack_gptq, pack_int8
from tests.helpers.models.quantized_tensors import AWQ, FP8, GPTQ, LAYER, compressed, named, read, weight_of

GROUPS = {"group_size": 32}
PACKED = compressed("pack-quantized", num_bits=4, type="int", group_size=32, symmetric=True)
TOKEN = {"num_bits": 8, "type": "float", "strategy": "channel"}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"quant_method": "bitsandbytes"},
            "'bitsandbytes', which is not supported; supported: 'awq', 'gptq',",
        ),
        ({"quant_method": ["awq"]}, "is quantized with ['awq'], which is not supported"),
        ({"bits": 4}, "is quantized with 'unknown'"),
        (AWQ | {"version": "gemv"}, "awq has version 'gemv', which is not supported; supported: 'gemm'"),
        (AWQ | {"bits": 8}, "awq has bits 8"),
        (AWQ | {"zero_point": False}, "awq has zero_point False"),
        (AWQ | {"group_size": 0}, "group_size must be an integer of at least 1, got 0"),
        (AWQ | {"modules_to_not_convert": "visual"}, "modules_to_not_convert must be a list of names, got 'visual'"),
        (GPTQ | {"bits": 3}, "gptq has bits 3, which is not supported; supported: 4 and 8"),
        (GPTQ | {"bits": 4, "checkpoint_format": "marlin"}, "gptq has checkpoint_format 'marlin'"),
        (GPTQ | {"bits": 4, "dynamic": {"+:.*down.*": {"bits": 8}}}, "gptq has `dynamic` widths of layers"),
        (GPTQ | {"bits": 4, "dynamic": {"-:(": {}}}, "gptq: the expression '(?:().*' is not valid: missing )"),
        (FP8 | {"fmt": "e5m2"}, "fp8 has fmt 'e5m2'"),
        (FP8 | {"weight_block_size": [128]}, "weight_block_size must be two integers, got [128]"),
        (FP8 | {"weight_block_size": [128, 0]}, "weight_block_size must be an integer of at least 1, got 0"),
        (compressed("nvfp4-pack-quantized"), "format 'nvfp4-pack-quantized'"),
        (compressed("pack-quantized", num_bits=3), "weights of pack-quantized, (type, num_bits) ('int', 3)"),
        (compressed("float-quantized", **TOKEN, symmetric=False), "symmetric of float weights False"),
        (compressed("float-quantized", **TOKEN | {"strategy": "tensor_group"}), "weights' strategy 'tensor_group'"),
        (PACKED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config's format 'sparse-24-bitmask'"),
        (PACKED | {"transform_config": {"config_groups": {"u": {}}}}, "has transforms, which are not supported"),
        (PACKED | {"sparsity_config": [1]}, "sparsity_config must be a JSON object, got [1]"),
        (PACKED | {"transform_config": "u"}, "transform_config must be a JSON object, got 'u'"),
        (PACKED | {"config_groups": []}, "config_groups must be a JSON object, got []"),
        (PACKED | {"config_groups": {}}, "quantizes no layers"),
    ],
)
def test_configs_are_refused_with_what_is_supported(config, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_quantization(config)


SLOW = r"(?:\w|\w\w|.)*\d[A-Z]"


@pytest.mark.parametrize(
    "config",
    [
        GPTQ | {"bits": 4, "dynamic": {f"-:{SLOW}": {}}},
        FP8 | {"ignored_layers": [SLOW]},
        PACKED | {"ignore": [f"re:{SLOW}"]},
        PACKED | {"config_groups": {"a": next(iter(PACKED["config_groups"].values())) | {"targets": [f"re:{SLOW}"]}}},
    ],
)
def test_an_expression_that_takes_too_long_ends_the_load(config, monkeypatch):
    monkeypatch.setattr("mmvllm.utils.patterns.MATCH_SECONDS", 0.1)
    with pytest.raises(ValueError, match="takes too long to match"):
        parse_quantization(config).scheme_of("model.language_model.layers.10.self_attn.q_proj")


AWQ_LAYER, GPTQ_LAYER = pack_awq(weight_of(), 32).tensors, pack_gptq(weight_of(), 4, 32).tensors
PACKED_LAYER, INT8_LAYER = pack_compressed(weight_of(), 4, 32).tensors, pack_int8(weight_of()).tensors
FP8_LAYER = pack_fp8(weight_of(), (32, 32)).tensors
BLOCKS = FP8 | {"weight_block_size": [32, 32]}
INT8 = compressed("int-quantized", num_bits=8, type="int", strategy="channel")
SHUFFLED = GPTQ_LAYER["g_idx"].flip(0)


@pytest.mark.parametrize(
    ("config", "tensors", "changes", "message"),
    [
        (AWQ | GROUPS, AWQ_LAYER, {"qzeros": None}, "has qweight, scales but no qzeros"),
        (AWQ | GROUPS, AWQ_LAYER, {"scales": torch.ones(3, 47)}, "scales is (3, 47) in float32, needs (3, 48)"),
        (AWQ | GROUPS, AWQ_LAYER, {"qweight": torch.ones(96, 6)}, "(96, 6) in float32, needs (any, any) in int32"),
        (AWQ, AWQ_LAYER, {}, "qzeros is (3, 6) in int32, needs (1, 6) in int32"),
        (AWQ | GROUPS, AWQ_LAYER, {"g_idx": SHUFFLED}, "has a tensor g_idx; quantization_config says"),
        (GPTQ | GROUPS | {"bits": 8}, GPTQ_LAYER, {}, "qzeros is (3, 6) in int32, needs (2, 12) in int32"),
        (GPTQ | GROUPS | {"bits": 4}, GPTQ_LAYER, {"qweight": torch.ones(0, 48).int()}, "qweight is (0, 48) in int32"),
        (GPTQ | GROUPS | {"bits": 4}, GPTQ_LAYER, {"g_idx": torch.tensor(0)}, "indices of groups in 0 dimensions"),
        (PACKED, PACKED_LAYER, {"weight_shape": torch.tensor(48)}, "weight_shape is () in int64, needs two sizes"),
        (PACKED, PACKED_LAYER, {"weight_shape": torch.tensor([48.0, 96.0])}, "weight_shape is (2,) in float32, needs"),
        (GPTQ | GROUPS | {"bits": 4}, GPTQ_LAYER, {"g_idx": SHUFFLED}, "groups of another order (act-order)"),
        (GPTQ | GROUPS | {"bits": 4, "desc_act": True}, GPTQ_LAYER, {"g_idx": None}, "but no g_idx"),
        (PACKED, PACKED_LAYER, {"weight_shape": torch.tensor([48, 97])}, "(48, 12) in int32, needs (48, 13)"),
        (PACKED, PACKED_LAYER, {"weight_shape": torch.tensor([48])}, "weight_shape is (1,) in int64, needs two sizes"),
        (PACKED, PACKED_LAYER, {"weight_g_idx": SHUFFLED}, "groups of another order (act-order)"),
        (INT8, INT8_LAYER, {"weight_scale": torch.ones(47, 1)}, "(47, 1) in float32, needs (48, 1) for"),
        (INT8, FP8_LAYER, {}, "weight is (48, 96) in float8_e4m3fn, needs two dimensions in int8"),
        (INT8, {}, {"weight_scale": torch.ones(48, 1)}, "has weight_scale but no weight"),
        (BLOCKS, FP8_LAYER, {"weight_scale_inv": None}, "has weight but no weight_scale"),
        (BLOCKS, FP8_LAYER, {"weight_scale_inv": torch.ones(2, 2)}, "(2, 2) in float32, needs (2, 3) for"),
        (BLOCKS, INT8_LAYER, {}, "weight is (48, 96) in int8, needs two dimensions in float8_e4m3fn"),
    ],
)  # fmt: skip
def test_layers_are_refused_with_their_names(config, tensors, changes, message):
    tensors = {name: tensor for name, tensor in (tensors | changes).items() if tensor is not None}
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        read(named(tensors), config)
    assert LAYER in str(error.value)


def test_experts_are_refused_with_their_names():
    qweight, scales = FP8_LAYER["weight"].expand(4, -1, -1), torch.ones(4, 2, 3)
    name = "model.layers.0.mlp.experts.down_proj"
    with pytest.raises(ValueError, match=r"experts\.down_proj has no scale"):
        read({name: qweight}, BLOCKS, num_experts=4)
    with pytest.raises(ValueError, match=r"experts\.down_proj_scale_inv is \(3, 2, 3\), needs 4 experts"):
        read({name: qweight, f"{name}_scale_inv": scales[:3]}, BLOCKS, num_experts=4)
    layers = {f"{name.removesuffix('down_proj')}{i}.down_proj": FP8_LAYER for i in range(3)}
    tensors = {f"{layer}.{part}": tensor for layer, own in layers.items() for part, tensor in own.items()}
    with pytest.raises(ValueError, match=r"weights of 4 experts are not complete \(1\): .*down_proj has 3"):
        read(tensors, BLOCKS, num_experts=4)
