"""The predicted bytes of weights are those of the tensors that a loaded and packed model holds."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from mmvllm.layers.attention import TorchAttention
from mmvllm.layers.linear import Linear, pack_weights, weight_bytes
from mmvllm.layers.packed import Int8Weight, PackedGate, PackedWeight
from mmvllm.models.registry import family_of, load_config
from mmvllm.models.splitting import PlannedRank
from mmvllm.models.weights import load_model
from mmvllm.ranks import SINGLE
from tests.helpers.shapes import RICHEST

CPU = torch.device("cpu")
PACKED = (PackedWeight, PackedGate, Int8Weight)


def tensors_of(held: object) -> Iterator[Tensor]:
    """Of packed weights, and of lists of them."""
    if isinstance(held, Tensor):
        yield held
    elif isinstance(held, list | tuple):
        yield from (tensor for one in held for tensor in tensors_of(one))
    elif isinstance(held, PACKED):
        yield from tensors_of(list(vars(held).values()))


def held_bytes(model: nn.Module) -> int:
    """Of all parameters and packed weights, each storage once."""
    sizes = {}
    held = [*model.parameters(), *model.buffers()]
    for tensor in [*held, *tensors_of([getattr(module, "packed", None) for module in model.modules()])]:
        if tensor.is_mkldnn:
            sizes[id(tensor)] = tensor.numel() * tensor.element_size()
        else:
            sizes[tensor.data_ptr()] = max(tensor.nbytes, sizes.get(tensor.data_ptr(), 0))
    return sum(sizes.values())


@pytest.mark.parametrize("shape", RICHEST)
@pytest.mark.parametrize(("dtype", "int8"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)])
def test_bytes_after_packing(shape, dtype, int8, checkpoints):
    config = load_config(checkpoints(shape))
    with torch.device("meta"):
        model = family_of(config.architecture).build(config, TorchAttention)
    model.tie_head()
    predicted = weight_bytes(model, dtype, CPU, int8)
    loaded = load_model(checkpoints(shape), config, CPU, dtype)
    pack_weights(loaded, dtype, int8)
    assert predicted == pytest.approx(held_bytes(loaded), rel=1e-3)


@pytest.mark.parametrize("shape", ["gqa2-tied", "experts8-top3"])
@pytest.mark.parametrize(("dtype", "int8"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)])
def test_bytes_of_each_rank(shape, dtype, int8, checkpoints):
    """Ranks have equal parts; together they hold the whole model once, except the ViT, norms and routers."""
    config = load_config(checkpoints(shape))
    held = []
    for ranks in (SINGLE, PlannedRank(0, 2), PlannedRank(1, 2)):
        with torch.device("meta"):
            model = family_of(config.architecture).build(config, TorchAttention, ranks=ranks)
        model.tie_head()
        loaded = load_model(checkpoints(shape), config, CPU, dtype, ranks=ranks)
        pack_weights(loaded, dtype, int8)
        held.append(held_bytes(loaded))
        assert weight_bytes(model, dtype, CPU, int8) == pytest.approx(held[-1], rel=1e-3)
    whole, first, second = held
    vision = weight_bytes(model.visual, dtype, CPU, int8)
    assert first == second and whole == pytest.approx(first + second - vision, rel=0.02)


@pytest.mark.parametrize("shape", RICHEST[:-1])
def test_bytes_of_8_bit_floats_while_loading_and_afterwards(shape, checkpoints, monkeypatch):
    """The memory of the model is allocated once, with the decoder's weights in 8 bits."""
    config, dtype = load_config(checkpoints(shape)), torch.float32
    with torch.device("meta"):
        model = family_of(config.architecture).build(config, TorchAttention)
    plain = weight_bytes(model, dtype, CPU)
    model.use_fp8()
    predicted = weight_bytes(model, dtype, CPU)
    layers = [module for module in model.decoder.modules() if isinstance(module, Linear)]
    assert plain - predicted == sum(3 * layer.weight.numel() - 4 * len(layer.weight) for layer in layers)
    allocated, to_empty = [], nn.Module.to_empty

    def watched(module, **options):
        allocated.append(sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers())))
        return to_empty(module, **options)

    monkeypatch.setattr(nn.Module, "to_empty", watched)
    loaded = load_model(checkpoints(shape), config, CPU, dtype, fp8=True)
    assert allocated == [predicted] == [held_bytes(loaded)]
