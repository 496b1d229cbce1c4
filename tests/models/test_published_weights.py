"""Weights of the published checkpoints: each tensor has its place, with the right shape; the values are not needed."""

import json
from collections import defaultdict
from math import prod

import pytest
import torch

from mmvllm.models import weights
from mmvllm.models.interface import Model
from mmvllm.models.registry import load_config
from tests.helpers.models.metadata import ROOT, Shapes, needs_metadata, published_shapes, read_index, write_sparse_zeros

pytestmark = needs_metadata

WITH_INDEX = (
    "Qwen2-VL-2B-Instruct",
    "Qwen2-VL-7B-Instruct",
    "Qwen2.5-VL-3B-Instruct",
    "Qwen2.5-VL-7B-Instruct",
    "Qwen3-VL-4B-Instruct",
    "Qwen3-VL-8B-Instruct",
    "Qwen3-4B",
)
WITHOUT_INDEX = ("Qwen3-VL-2B-Instruct", "Qwen3-VL-32B-Instruct", "Qwen3-VL-30B-A3B-Instruct")
ALL = (*WITH_INDEX, *WITHOUT_INDEX)


class MetaTensor:
    """A stored tensor without values."""

    def __init__(self, shape: torch.Size):
        self.tensor = torch.empty(shape, dtype=torch.bfloat16, device="meta")

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
        return self.tensor[index]


def load_on_meta(name: str, folder) -> Model:
    return weights.load_model(folder, load_config(ROOT / name), torch.device("meta"), torch.bfloat16)


@pytest.fixture
def load(monkeypatch):
    """A function that loads a model from tensors of the given shapes, all on the meta device."""

    def call(name: str, shapes: Shapes) -> Model:
        tensors = [(key, MetaTensor(shape)) for key, shape in shapes.items()]
        monkeypatch.setattr(weights, "weight_files", lambda folder: [])
        monkeypatch.setattr(weights, "_tensors", lambda files, progress: tensors)
        return load_on_meta(name, ROOT / name)

    return call


def num_values(shapes: Shapes) -> int:
    return sum(map(prod, shapes.values()))


@pytest.mark.parametrize("name", WITH_INDEX)
def test_transformers_has_the_tensors_of_the_index(name):
    index, shapes = read_index(name), published_shapes(name)
    assert index["weight_map"].keys() == shapes.keys()
    assert 2 * num_values(shapes) == index["metadata"]["total_size"]


def test_transformers_has_the_size_of_a_single_published_file():
    header = 4_255_140_312 - 2 * num_values(published_shapes("Qwen3-VL-2B-Instruct"))
    assert 0 < header < 100_000


@pytest.mark.essential(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_published_tensors_and_parameters_match_one_to_one(name, load):
    model, shapes = load(name, published_shapes(name)), published_shapes(name)
    views = dict(places(model))
    assert sum(view.numel() for view in views.values()) == num_values(shapes)
    assert {model.checkpoint_name(*place) for place in views} == shapes.keys()
    assert {model.parameter_for(tensor) for tensor in shapes} == views.keys()


def places(model: Model):
    """((parameter, part), view) of each tensor of a checkpoint; a tied head has none."""
    for name, part, view, _ in weights.checkpoint_views(model):
        if not (model.config.tie_word_embeddings and name == "lm_head.weight"):
            yield (name, part), view


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_a_missing_tensor_is_named_as_published(name, load):
    shapes = published_shapes(name)
    for tensor in list(shapes)[:: len(shapes) // 7]:
        with pytest.raises(ValueError) as error:
            load(name, {key: shape for key, shape in shapes.items() if key != tensor})
        assert str(error.value).endswith(f"does not match its config.json: missing tensors (1): {tensor}")


@pytest.mark.slow
def test_published_shards_are_read(tmp_path):
    """The shards are files, with their index."""
    name = WITH_INDEX[0]
    index, shapes = read_index(name), published_shapes(name)
    shards = defaultdict(dict)
    for tensor, file in index["weight_map"].items():
        shards[file][tensor] = shapes[tensor]
    for file, inside in shards.items():
        write_sparse_zeros(tmp_path / file, inside)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    model = load_on_meta(name, tmp_path)
    assert sum(parameter.numel() for parameter in model.parameters()) == num_values(shapes)
