"""While a model is loaded, the weights of a module are freed as soon as they have taken their form."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from mmvllm.layers.experts import Experts
from mmvllm.layers.linear import Linear, LinearMethodModule
from mmvllm.models import weights
from mmvllm.quantization.linear_method import LinearMethod
from tests.helpers.models.quantized_checkpoints import quantized_checkpoint
from tests.helpers.models.weights import load


class Discarded(LinearMethod):
    """Nothing of a weight."""

    def __init__(self, weight, bias):
        pass

    def __call__(self, x):
        raise NotImplementedError

    @classmethod
    def num_bytes(cls, shape, dtype, group_size=None):
        return 0


@pytest.fixture
def processed(monkeypatch) -> list[str]:
    """Kinds of processed modules; fails if weights that were processed are still in memory."""
    kinds, held = [], []
    for module_type in (Linear, Experts):
        monkeypatch.setattr(
            module_type,
            "process_weights_after_loading",
            _noting(module_type.process_weights_after_loading, kinds, held),
        )

    def check() -> None:
        # The caller still holds the quantized tensors that were read last.
        before = held[:-1] if kinds[-1] == "quantized" else held
        assert all(storage.expired() for storages in before for storage in storages)

    monkeypatch.setattr(weights, "return_freed_memory", check)
    return kinds


def _noting(process, kinds, held):
    def noted(module) -> None:
        quantized = getattr(module, "quantized_parts", None)
        parts = [] if quantized is None else [part.qweight for _, part in quantized._parts]
        of_matrices = [parameter for parameter in module.parameters(recurse=False) if parameter.dim() > 1]
        kinds.append("quantized" if parts else type(module).__name__)
        held.append([StorageWeakRef(tensor.untyped_storage()) for tensor in (*parts, *of_matrices)])
        del quantized, parts, of_matrices
        process(module)

    return noted


def _discard(model) -> None:
    for module in model.modules():
        if isinstance(module, LinearMethodModule):
            module.linear_method_cls = Discarded


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_plain_weights_are_freed(load_format, checkpoints, processed):
    load(checkpoints("experts8-top3"), torch.bfloat16, load_format=load_format, prepare=_discard)
    assert {"Linear", "MergedLinear", "Experts"} <= {*processed}


def test_quantized_weights_are_freed(checkpoints, processed, tmp_path):
    def prepare(model) -> None:
        _discard(model)
        for layer in model.decoder.layers:
            layer.mlp.down_proj.keep_quantized(64)

    saved = quantized_checkpoint(checkpoints("gqa2-tied"), tmp_path, "w8a8")
    load(saved.quantized, torch.bfloat16, prepare=prepare)
    assert processed.count("quantized") == 2
