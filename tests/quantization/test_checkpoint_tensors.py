"""Quantized layers in every published layout are dequantized exactly."""

from itertools import permutations

import pytest
import torch

from mmvllm.quantization.checkpoint_formats import StoredQuantizedTensor
from tests.helpers.models.packers import pack_awq, pack_compressed, pack_fp8, pack_gptq, pack_int8
from tests.helpers.models.quantized_tensors import AWQ, FP8, GPTQ, LAYER, compressed, named, read, weight_of

CASES = {
    "awq": (pack_awq, {"group_size": 32}, AWQ | {"group_size": 32}),
    "awq, one group": (pack_awq, {"group_size": -1}, AWQ | {"group_size": -1}),
    **{
        f"gptq {bits} {size} {symmetric} {version}": (
            pack_gptq,
            {"bits": bits, "group_size": size, "symmetric": symmetric, "version": version},
            GPTQ
            | {"bits": bits, "group_size": size, "sym": symmetric}
            | ({"checkpoint_format": "gptq_v2"} if version == 2 else {}),
        )
        for bits in (4, 8)
        for size in (32, -1)
        for symmetric in (True, False)
        for version in (1, 2)
    },
    **{
        f"packed {bits} {size} {symmetric}": (
            pack_compressed,
            {"bits": bits, "group_size": size, "symmetric": symmetric},
            compressed("pack-quantized", num_bits=bits, type="int", group_size=size, symmetric=symmetric),
        )
        for bits in (4, 8)
        for size in (32, -1)
        for symmetric in (True, False)
    },
    **{
        f"int8 {symmetric}": (
            pack_int8,
            {"symmetric": symmetric},
            compressed("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=symmetric),
        )
        for symmetric in (True, False)
    },
    "fp8 in blocks": (
        pack_fp8,
        {"block": (32, 16)},
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 16]},
    ),
    "fp8 in blocks that do not fit": (
        pack_fp8,
        {"block": (32, 64)},
        {"quant_method": "fp8", "weight_block_size": [32, 64]},
    ),
    "fp8 with one scale": (
        pack_fp8,
        {"block": None, "scale_name": "weight_scale"},
        {"quant_method": "fp8", "activation_scheme": "static"},
    ),
    "fp8 by rows": (
        pack_fp8,
        {"block": (1, 96), "scale_name": "weight_scale"},
        compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
    ),
    "fp8 with one scale, naive": (
        pack_fp8,
        {"block": None, "scale_name": "weight_scale"},
        compressed("naive-quantized", num_bits=8, type="float", strategy="tensor"),
    ),
    "fp8 in blocks, compressed": (
        pack_fp8,
        {"block": (16, 32), "scale_name": "weight_scale"},
        compressed("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[16, 32]),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_layer_is_read_to_the_values_that_were_packed(case):
    pack, options, config = CASES[case]
    packed = pack(weight_of(), **options)
    got = read(named(packed.tensors), config)
    assert got.keys() == {f"{LAYER}.weight"}
    tensor = got[f"{LAYER}.weight"]
    assert isinstance(tensor, StoredQuantizedTensor) and tensor.get_shape() == [48, 96]
    assert torch.equal(tensor.weight.dequantized(), packed.values)
    part = tensor[slice(8, 24), slice(32, 80)]
    assert torch.equal(part.dequantized(), packed.values[8:24, 32:80])


def test_tensors_of_a_layer_may_come_in_any_order_among_others():
    packed, plain = pack_gptq(weight_of(), group_size=32), torch.ones(3)
    config = GPTQ | {"bits": 4, "group_size": 32}
    for order in permutations(packed.tensors):
        tensors = {"first": plain, **named({name: packed.tensors[name] for name in order}), f"{LAYER}.bias": plain}
        got = read(tensors, config)
        assert got.keys() == {"first", f"{LAYER}.weight", f"{LAYER}.bias"} and got["first"].tensor is plain
        assert torch.equal(got[f"{LAYER}.weight"].weight.dequantized(), packed.values)


def test_fused_experts_are_read_in_the_published_layout():
    """(E, in, out), with the scales of blocks in the same order."""
    name = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    packed = [pack_fp8(weight_of(96, out), (32, 16)) for out in (48, 48, 48)]
    qweight, scales = (torch.stack([one.tensors[part] for one in packed]) for part in ("weight", "weight_scale_inv"))
    config = FP8 | {"weight_block_size": [32, 16]}
    got = read({f"{name}_scale_inv": scales, name: qweight}, config, num_experts=3)[name]
    assert got.get_shape() == [3, 96, 48]
    want = torch.stack([one.values for one in packed])
    assert torch.equal(got[slice(1, 3), slice(0, 96), slice(16, 48)], want[1:, :, 16:])


def test_scales_of_activations_and_of_the_cache_are_left_out():
    packed = pack_fp8(weight_of(), None, "weight_scale")
    others = {f"{LAYER}.input_scale": torch.ones(1), "model.layers.3.self_attn.k_scale": torch.ones(1)}
    got = read(named(packed.tensors) | others, FP8 | {"activation_scheme": "static"})
    assert got.keys() == {f"{LAYER}.weight"}


def test_zero_points_and_orders_that_say_nothing_may_come_late():
    packed = pack_compressed(weight_of(), 4, 32)
    extra = {"weight_zero_point": torch.zeros(48, 3, dtype=torch.int8), "weight_g_idx": torch.full((96,), -1)}
    config = compressed("pack-quantized", num_bits=4, type="int", group_size=32, symmetric=True)
    (got,) = read(named(packed.tensors | extra), config).values()
    assert torch.equal(got.weight.dequantized(), packed.values)
