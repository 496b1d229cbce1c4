"""Published quantized checkpoints: each tensor of the index has its place, in the shape that the config gives it."""

import pytest
import torch

from mmvllm.models import weights
from mmvllm.models.registry import load_config
from mmvllm.quantization.config import WeightScheme
from tests.helpers.models.metadata import ROOT, needs_metadata, published_shapes, read_index
from tests.helpers.models.quantized_tensors import Stored

pytestmark = needs_metadata

NAMES = ("Qwen2.5-VL-7B-Instruct-AWQ", "olmOCR-2-7B-1025-FP8")


def shapes_of_layer(scheme: WeightScheme, out: int, columns: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shapes of the tensors of a layer in AutoAWQ's and in the naive layout."""
    if scheme.layout == "awq":
        groups = columns // scheme.block[1]
        words = {"qweight": (columns, out // 8), "qzeros": (groups, out // 8)}
        return {name: (shape, torch.int32) for name, shape in words.items()} | {
            "scales": ((groups, out), torch.float16)
        }
    return {"weight": ((out, columns), torch.float8_e4m3fn), "weight_scale": ((out, 1), torch.bfloat16)}


def published(name: str) -> dict[str, Stored]:
    """Tensors without values, by their published names: transformers' model, with the layers that the config names."""
    quantization, tensors = load_config(ROOT / name).quantization, {}
    for tensor, shape in published_shapes(name).items():
        layer = tensor.removesuffix(".weight")
        scheme = quantization.scheme_of(layer) if tensor.endswith("_proj.weight") else None
        parts = {tensor: (shape, torch.bfloat16)}
        if scheme is not None:
            parts = {f"{layer}.{part}": own for part, own in shapes_of_layer(scheme, *shape).items()}
        for part, (own, dtype) in parts.items():
            device = "cpu" if part.endswith("qzeros") else "meta"  # whether zero points are all 0 is looked at
            tensors[part] = Stored(torch.zeros(own, dtype=dtype, device=device))
    return tensors


@pytest.mark.thinned(1)
@pytest.mark.parametrize("name", NAMES)
def test_the_config_gives_the_tensors_of_the_index(name):
    assert published(name).keys() == read_index(name)["weight_map"].keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_sizes_add_up_to_that_of_the_index(name):
    total = sum(stored.tensor.nbytes for stored in published(name).values())
    assert total == read_index(name)["metadata"]["total_size"]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_has_its_place(name, monkeypatch):
    config, tensors = load_config(ROOT / name), published(name)
    monkeypatch.setattr(weights, "weight_files", lambda folder: [])
    monkeypatch.setattr(weights, "_tensors", lambda files, progress: iter(tensors.items()))
    model = weights.load_model(ROOT / name, config, torch.device("meta"), torch.bfloat16)
    want = sum(shape.numel() for shape in published_shapes(name).values())
    assert sum(parameter.numel() for parameter in model.parameters()) >= want
