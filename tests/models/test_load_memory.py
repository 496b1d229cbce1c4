"""While a model is loaded, the weights of a module are freed as soon as they have taken their form."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from mmvllm.layers.experts import Experts
from mmvllm.layers.linear import ConvertedModule, Linear
from mmvllm.models import weights
from mmvllm.quantization.linear_method import WeightForm
from tests.helpers.models.quantized_checkpoints import quantized_checkpoint
from tests.helpers.models.weights import load


class Discarded(WeightForm):
    """Nothing of a weight."""

    def __init__(self, weight, bias):
        pass

    def __call__(self, x):
        raise NotImplementedError

    @classmethod
    def num_bytes(cls, shape, dtype, group_size=None):
        return 0


@pytest.fixture
def converted(monkeypatch) -> list[str]:
    """Kinds of converted modules; fails if weights that were converted are still in memory."""
    kinds, held = [], []
    for module_type in (Linear, Experts):
        monkeypatch.setattr(module_type, "convert", _noting(module_type.convert, kinds, held))

    def check() -> None:
        before = held[:-1] if kinds[-1] == "codes" else held  # codes read last are still held by those who read them
        assert all(storage.expired() for storages in before for storage in storages)

    monkeypatch.setattr(weights, "return_freed_memory", check)
    return kinds


def _noting(convert, kinds, held):
    def noted(module) -> None:
        codes = [] if getattr(module, "codes", None) is None else [part.codes for _, part in module.codes._parts]
        of_matrices = [parameter for parameter in module.parameters(recurse=False) if parameter.dim() > 1]
        kinds.append("codes" if codes else type(module).__name__)
        held.append([StorageWeakRef(tensor.untyped_storage()) for tensor in (*codes, *of_matrices)])
        del codes, of_matrices
        convert(module)

    return noted


def _discard(model) -> None:
    for module in model.modules():
        if isinstance(module, ConvertedModule):
            module.form = Discarded


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_plain_weights_are_freed(load_format, checkpoints, converted):
    load(checkpoints("experts8-top3"), torch.bfloat16, load_format=load_format, prepare=_discard)
    assert {"Linear", "MergedLinear", "Experts"} <= {*converted}


def test_stored_codes_are_freed(checkpoints, converted, tmp_path):
    def prepare(model) -> None:
        _discard(model)
        for layer in model.decoder.layers:
            layer.mlp.down_proj.keep_codes(64)

    saved = quantized_checkpoint(checkpoints("gqa2-tied"), tmp_path, "w8a8")
    load(saved.quantized, torch.bfloat16, prepare=prepare)
    assert converted.count("codes") == 2
