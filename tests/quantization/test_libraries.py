"""Layers that the library of a format packs are read to the values that it gives for them."""

import pytest
import torch

from tests.helpers.models.quantized_tensors import compressed, named, read, weight_of

REASON = "compressed-tensors is not installed"


@pytest.fixture(scope="module")
def library():
    """compressed-tensors' registry of compressors and its descriptions of schemes."""
    pytest.importorskip("compressed_tensors", reason=REASON)
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    def of(layout: str, weights: dict):
        scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
        return BaseCompressor.get_value_from_registry(layout), scheme

    return of


def parameters(weight: torch.Tensor, weights: dict) -> dict[str, torch.Tensor]:
    """Scales and zero points of a weight (out, in), as the library expects them."""
    rows, columns = weights.get("block_structure") or (1, weights.get("group_size") or weight.shape[1])
    rows, columns = weight.shape if weights["strategy"] == "tensor" else (rows, columns)
    blocks = weight.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    low, high = blocks.amin((1, 3)).clamp(max=0), blocks.amax((1, 3)).clamp(min=0)
    steps = 448 if weights["type"] == "float" else 2 ** (weights["num_bits"] - 1) - 1
    if weights["symmetric"]:
        scale = torch.maximum(-low, high) / steps
        return {"weight_scale": scale.reshape(1) if weights["strategy"] == "tensor" else scale}
    scale = (high - low) / (2 * steps + 1)
    return {"weight_scale": scale, "weight_zero_point": (-steps - 1 - low / scale).round().to(torch.int8)}


INT, FLOAT = {"type": "int", "symmetric": True}, {"type": "float", "num_bits": 8, "symmetric": True}
GROUP, CHANNEL = {"strategy": "group", "group_size": 32}, {"strategy": "channel"}
CASES = {
    "w4a16": ("pack-quantized", INT | GROUP | {"num_bits": 4}),
    "w4a16 with zero points": ("pack-quantized", INT | GROUP | {"num_bits": 4, "symmetric": False}),
    "w4a16 by rows": ("pack-quantized", INT | CHANNEL | {"num_bits": 4, "symmetric": False}),
    "w8a16": ("pack-quantized", INT | GROUP | {"num_bits": 8}),
    "w8a16 with zero points": ("pack-quantized", INT | GROUP | {"num_bits": 8, "symmetric": False}),
    "w8a8": ("int-quantized", INT | CHANNEL | {"num_bits": 8}),
    "w8a8 with zero points": ("int-quantized", INT | CHANNEL | {"num_bits": 8, "symmetric": False}),
    "fp8 by rows": ("float-quantized", FLOAT | CHANNEL),
    "fp8": ("naive-quantized", FLOAT | {"strategy": "tensor"}),
    "fp8 in blocks": ("float-quantized", FLOAT | {"strategy": "block", "block_structure": [16, 32]}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("size", [(48, 96), (44, 96)], ids=str)
def test_compressed_tensors(case, size, library):
    layout, weights = CASES[case]
    if "block_structure" in weights and size[0] % weights["block_structure"][0]:
        size = (32, 64)
    compressor, scheme = library(layout, weights)
    weight = weight_of(*size)
    tensors = compressor.compress({"weight": weight} | parameters(weight, weights), scheme)
    want = compressor.decompress(tensors, scheme)["weight"]
    (got,) = read(named(tensors), compressed(layout, **weights)).values()
    assert torch.equal(got.weight.dequantized(), want)
