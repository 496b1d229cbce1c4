"""The predicted bytes of weights equal the bytes that a loaded and packed model holds."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mmvllm.config import ModelConfig
from mmvllm.layers.attention import TorchAttention
from mmvllm.layers.linear import Linear, weight_bytes
from mmvllm.models.interface import Model
from mmvllm.models.quant_methods import choose_linear_methods
from mmvllm.models.registry import family_of, load_config
from mmvllm.models.splitting import PlannedRank
from mmvllm.models.weights import load_model
from mmvllm.processes.ranks import SINGLE, Ranks
from mmvllm.quantization.linear_method import LinearMethod
from tests.helpers.models.shapes import RICHEST

CPU = torch.device("cpu")


def tensors_of(held: object) -> Iterator[Tensor]:
    """The tensors of packed weights, and of lists of them."""
    if isinstance(held, Tensor):
        yield held
    elif isinstance(held, list | tuple):
        yield from (tensor for one in held for tensor in tensors_of(one))
    elif isinstance(held, LinearMethod):
        yield from tensors_of(list(vars(held).values()))


def held_bytes(model: nn.Module) -> int:
    """The bytes of all parameters and packed weights, each storage once."""
    sizes = {}
    held = [*model.parameters(), *model.buffers()]
    for tensor in [*held, *tensors_of([getattr(module, "linear_method", None) for module in model.modules()])]:
        if tensor.is_mkldnn:
            sizes[id(tensor)] = tensor.numel() * tensor.element_size()
        else:
            sizes[tensor.data_ptr()] = max(tensor.nbytes, sizes.get(tensor.data_ptr(), 0))
    return sum(sizes.values())


def weight_bytes_of(config: ModelConfig, dtype: torch.dtype, quantization: str | None, ranks: Ranks = SINGLE) -> int:
    return weight_bytes(planned(config, dtype, quantization, ranks), dtype)


def planned(config: ModelConfig, dtype: torch.dtype, quantization: str | None, ranks: Ranks = SINGLE) -> Model:
    """A model without weights."""
    with torch.device("meta"):
        model = family_of(config.architecture).build(config, TorchAttention, ranks=ranks)
    model.tie_head()
    choose_linear_methods(model, CPU, dtype, quantization)
    return model


def load(folder: Path, dtype: torch.dtype, quantization: str | None, ranks: Ranks = SINGLE) -> Model:
    prepare = partial(choose_linear_methods, device=CPU, dtype=dtype, quantization=quantization)
    return load_model(folder, load_config(folder), CPU, dtype, ranks=ranks, prepare=prepare)


KINDS = [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, "int8")]


@pytest.mark.thinned(6)
@pytest.mark.parametrize("shape", RICHEST)
@pytest.mark.parametrize(("dtype", "quantization"), [*KINDS, (torch.bfloat16, "int4")])
def test_bytes_of_a_loaded_model(shape, dtype, quantization, checkpoints):
    loaded = load(checkpoints(shape), dtype, quantization)
    predicted = weight_bytes_of(load_config(checkpoints(shape)), dtype, quantization)
    assert predicted == pytest.approx(held_bytes(loaded), rel=1e-3)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("shape", ["gqa2-tied", "experts8-top3"])
@pytest.mark.parametrize(("dtype", "quantization"), KINDS)
def test_bytes_of_each_rank(shape, dtype, quantization, checkpoints):
    """Ranks have equal parts; together they hold the whole model once, except the ViT, norms and routers."""
    config = load_config(checkpoints(shape))
    held = []
    for ranks in (SINGLE, PlannedRank(0, 2), PlannedRank(1, 2)):
        held.append(held_bytes(load(checkpoints(shape), dtype, quantization, ranks)))
        assert weight_bytes_of(config, dtype, quantization, ranks) == pytest.approx(held[-1], rel=1e-3)
    whole, first, second = held
    vision = weight_bytes(planned(config, dtype, quantization).visual, dtype)
    assert first == second and whole == pytest.approx(first + second - vision, rel=0.02)


@pytest.mark.parametrize("shape", RICHEST[:-1])
def test_bytes_of_8_bit_floats(shape, checkpoints):
    config, dtype = load_config(checkpoints(shape)), torch.float32
    plain, predicted = (weight_bytes_of(config, dtype, quantization) for quantization in (None, "fp8"))
    layers = [m for m in planned(config, dtype, None).decoder.modules() if isinstance(m, Linear)]
    assert plain - predicted == sum(3 * layer.weight.numel() - 4 * len(layer.weight) for layer in layers)
    assert predicted == held_bytes(load(checkpoints(shape), dtype, "fp8"))


@pytest.mark.parametrize(("shape", "quantization"), [("gqa2-tied", "int8"), ("gqa2-tied", "fp8"), ("gqa2-tied", None)])
def test_a_weight_is_converted_before_the_next_is_read(shape, quantization, checkpoints, monkeypatch):
    """Beside the converted weights, at most one module has its weight in the model's dtype."""
    unprocessed, process = [], Linear.process_weights_after_loading

    def watched(module: Linear) -> None:
        process(module)
        layers = [m for m in models[0].modules() if isinstance(m, Linear)]
        waiting = [
            m for m in layers if m.weight is not None and not m.weight.is_meta and m.linear_method_cls is not None
        ]
        unprocessed.append(len(waiting))

    models = []
    monkeypatch.setattr(Linear, "process_weights_after_loading", watched)

    def prepare(model: Model) -> None:
        models.append(model)
        choose_linear_methods(model, CPU, torch.bfloat16, quantization)

    load_model(checkpoints(shape), load_config(checkpoints(shape)), CPU, torch.bfloat16, prepare=prepare)
    assert len(unprocessed) > 5 and max(unprocessed) <= 1
