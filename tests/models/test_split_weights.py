"""Each rank reads or makes only its part of the weights, which together equal one process's."""

from collections import defaultdict
from functools import partial
from math import prod

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from mmvllm.kernels.fp8 import quantize_rows
from mmvllm.layers.sharding import Shard
from mmvllm.models import weights
from mmvllm.models.interface import Model
from mmvllm.models.quant_methods import choose_linear_methods
from mmvllm.models.registry import load_config
from mmvllm.models.splitting import PlannedRank, key_value_heads, possible_sizes, query_heads, rank_config
from mmvllm.models.weights import checkpoint_views
from mmvllm.processes.ranks import SINGLE
from mmvllm.quantization.fp8 import Fp8Linear
from tests.helpers.models.shapes import RICHEST, SHAPES, TEXT_SHAPES
from tests.helpers.models.weights import CPU, assert_same, load

EVERY = (*RICHEST, *TEXT_SHAPES, "experts16-top8-tied")


def size_of(shape: str, checkpoints) -> int:
    """The smallest number of ranks that a model can be split over."""
    return possible_sizes(load_config(checkpoints(shape)))[1]


def split(folder, size: int, **options) -> list[Model]:
    return [load(folder, ranks=PlannedRank(rank, size), **options) for rank in range(size)]


def rebuilt(models: list[Model], shapes: dict[str, torch.Size]) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors from the ranks' parts; what none of them has is NaN."""
    tensors = {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}
    for model in models:
        for place in checkpoint_views(model):
            name = model.checkpoint_name(place.parameter, place.part)
            if name in tensors:  # not a tied head
                tensor = tensors[name].flatten(1) if tensors[name].dim() == 5 else tensors[name]
                tensor[place.index] = place.view
    return tensors


@pytest.mark.thinned(3)
@pytest.mark.parametrize("shape", EVERY)
@pytest.mark.parametrize("index", [1, -1], ids=["fewest ranks", "most ranks"])
def test_the_parts_of_all_ranks_are_the_checkpoint(shape, index, checkpoints):
    size = possible_sizes(load_config(checkpoints(shape)))[index]
    tensors = load_file(checkpoints(shape) / "model.safetensors")
    models = split(checkpoints(shape), size)
    assert_same(rebuilt(models, {name: tensor.shape for name, tensor in tensors.items()}), tensors)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("shape", EVERY)
def test_only_the_parts_of_a_rank_are_read(shape, checkpoints, monkeypatch):
    """Together they read a tensor once, except those that each needs whole."""
    folder, size = checkpoints(shape), size_of(shape, checkpoints)
    read, tensors_of = defaultdict(list), weights._tensors

    class Watched:
        def __init__(self, name: str, stored: weights.StoredTensor):
            self.name, self.stored, self.get_shape = name, stored, stored.get_shape

        def __getitem__(self, index) -> torch.Tensor:
            part = self.stored[index]
            read[self.name].append(part.numel())
            return part

    def watched(files, progress):
        return ((name, Watched(name, stored)) for name, stored in tensors_of(files, progress))

    monkeypatch.setattr(weights, "_tensors", watched)
    split(folder, size)
    kv_heads = SHAPES[shape]["text"]["kv_heads"]
    for name, tensor in load_file(folder / "model.safetensors").items():
        is_kept_whole = "visual." in name or "norm" in name or name.endswith("mlp.gate.weight")
        if is_kept_whole or (kv_heads == 1 and (".k_proj." in name or ".v_proj." in name)):
            assert read[name] == [tensor.numel()] * size, name
        else:
            assert len(read[name]) == size and sum(read[name]) == tensor.numel(), name
            assert max(read[name]) <= 1.05 * tensor.numel() / size or ".experts." in name, name


@pytest.mark.thinned(1)
@pytest.mark.parametrize("shape", ["experts8-top3", "experts16-top8-tied"])
def test_experts_of_both_layouts_give_the_same_parts(shape, checkpoints, copy_of):
    def published(tensors: dict) -> dict:
        return {name: x.mT.contiguous() if ".experts." in name else x for name, x in tensors.items()}

    size = size_of(shape, checkpoints)
    pairs = zip(split(copy_of(shape, published), size), split(checkpoints(shape), size), strict=True)
    for got, want in pairs:
        assert_same(got.state_dict(), want.state_dict())


@pytest.mark.thinned(4)
@pytest.mark.parametrize("shape", EVERY)
def test_dummy_weights_are_those_of_one_process(shape, checkpoints):
    options = {"load_format": "dummy", "seed": 7}
    whole, parts = (
        load(checkpoints(shape), **options),
        split(checkpoints(shape), size_of(shape, checkpoints), **options),
    )
    names = load_file(checkpoints(shape) / "model.safetensors").keys()
    places = {whole.checkpoint_name(place.parameter, place.part): place for place in checkpoint_views(whole)}
    shapes = {name: torch.Size(places[name].whole_shape) for name in names}
    assert_same(rebuilt(parts, shapes), rebuilt([whole], shapes))


@pytest.mark.parametrize(("load_format", "dtype"), [("auto", torch.float32), ("dummy", torch.bfloat16)])
def test_8_bit_floats_of_a_rank_are_rounded_with_the_scales_of_its_own_parts(load_format, dtype, checkpoints):
    folder, options = checkpoints("gqa2-tied"), {"load_format": load_format, "dtype": dtype}
    in_8_bits = partial(choose_linear_methods, device=CPU, dtype=dtype, quantization="fp8")
    models = zip(split(folder, 2, **options), split(folder, 2, prepare=in_8_bits, **options), strict=True)
    for plain, rounded in models:
        weights = {
            name: layer.linear_method for name, layer in rounded.decoder.layers.named_modules() if is_quantized(layer)
        }
        assert len(weights) == 4 * plain.config.num_hidden_layers
        for name, weight in weights.items():
            want = quantize_rows(plain.decoder.layers.get_submodule(name).weight)
            assert torch.equal(weight.values.float(), want.values.float())
            assert torch.equal(weight.scale, want.scale)


def is_quantized(module: nn.Module) -> bool:
    return getattr(module, "linear_method_cls", None) is Fp8Linear


def test_padding_of_ranks_is_zero(checkpoints):
    """128 inner values over 3 ranks are 43, 43 and 42, each padded to 48; 768 tokens over 5 are 154, the last 152."""
    for model, width in zip(split(checkpoints("qwen3-mqa-untied"), 3), (43, 43, 42), strict=True):
        mlp = model.decoder.layers[1].mlp
        gate, up = mlp.gate_up_proj.weight.chunk(2)
        assert len(gate) == len(up) == mlp.down_proj.weight.shape[1] == 48
        assert not gate[width:].any() and not up[width:].any() and not mlp.down_proj.weight[:, width:].any()
        assert gate[:width].any(dim=1).all() and mlp.down_proj.weight[:, :width].any(dim=0).all()
    last = split(checkpoints("mqa-tied"), 5)[-1]
    assert len(last.decoder.embed_tokens.weight) == 154 and not last.lm_head.weight[152:].any()


@pytest.mark.parametrize(
    ("name", "shape", "needed"),
    [
        ("model.layers.0.self_attn.v_proj.weight", (64, 32), (32, 64)),
        ("model.layers.0.self_attn.o_proj.weight", (64, 32), (64, 64)),
        ("model.layers.0.mlp.gate_proj.weight", (64, 64), (128, 64)),
        ("model.embed_tokens.weight", (384, 64), (768, 64)),
        ("visual.patch_embed.proj.weight", (48, 3, 2, 14, 7), (48, 1176)),
    ],
)
def test_a_tensor_of_a_ranks_size_is_misshapen(name, shape, needed, copy_of):
    folder = copy_of("gqa2-tied", lambda tensors: tensors | {name: torch.ones(shape)})
    with pytest.raises(ValueError) as error:
        load(folder, ranks=PlannedRank(1, 2))
    assert str(error.value).endswith(f"tensors of the wrong shape (1): {name} is {shape}, needs {needed}")


def test_a_missing_tensor_is_named_by_each_rank(copy_of):
    name = "model.layers.1.mlp.down_proj.weight"
    folder = copy_of("gqa2-tied", lambda tensors: {key: tensors[key] for key in tensors if key != name})
    for rank in range(2):
        with pytest.raises(ValueError, match=rf"missing tensors \(1\): {name}$"):
            load(folder, ranks=PlannedRank(rank, 2))


def test_a_tied_head_that_differs_is_refused_by_the_rank_that_has_the_difference(copy_of):
    def with_head(tensors: dict) -> dict:
        head = tensors["model.embed_tokens.weight"].clone()
        head[500] += 1
        return tensors | {"lm_head.weight": head}

    folder = copy_of("gqa2-tied", with_head)
    load(folder, ranks=PlannedRank(0, 2))
    with pytest.raises(ValueError, match=r"tensors that differ from those they are tied to \(1\): lm_head\.weight$"):
        load(folder, ranks=PlannedRank(1, 2))


@pytest.mark.parametrize(
    ("shape", "size", "message"),
    [
        ("gqa3-untied", 3, "3; this model's 6 attention and 2 key-value heads can be split over 1, 2 or 6 devices"),
        ("gqa2-tied", 8, "8; this model's 4 attention and 2 key-value heads can be split over 1, 2 or 4 devices"),
        ("mqa-tied", 2, "2; this model's 5 attention and 1 key-value head can be split over 1 or 5 devices"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_with_those_that_do(shape, size, message, checkpoints):
    with pytest.raises(ValueError, match=f"tensor_parallel_size is {message}$"):
        rank_config(load_config(checkpoints(shape)), size)
    with pytest.raises(ValueError, match="tensor_parallel_size is"):
        load(checkpoints(shape), ranks=PlannedRank(0, size))


@pytest.mark.parametrize("shape", SHAPES)
def test_each_query_head_is_with_the_key_value_head_that_it_reads(shape, checkpoints):
    config = load_config(checkpoints(shape))
    H, K = config.num_attention_heads, config.num_key_value_heads
    for size in possible_sizes(config):
        own = rank_config(config, size)
        for rank in (PlannedRank(rank, size) for rank in range(size)):
            queries, keys = query_heads(config, rank), key_value_heads(config, rank)
            assert (queries.length, keys.length) == (own.num_attention_heads, own.num_key_value_heads)
            for i in range(queries.length):
                read = keys.start + i // (queries.length // keys.length)
                assert read == (queries.start + i) // (H // K)


@pytest.mark.parametrize(("whole", "size"), [(8, 1), (8, 2), (8, 3), (3, 5), (9, 4), (151936, 7)])
def test_shards_follow_each_other_and_cover_the_whole(whole, size):
    shards = [Shard.cut(whole, PlannedRank(rank, size)) for rank in range(size)]
    ends = [0, *(shard.start + shard.length for shard in shards)]
    assert [shard.start for shard in shards] == ends[:-1] and ends[-1] == whole
    assert max(shard.length for shard in shards) == -(-whole // size)
    assert Shard.of(whole) == Shard.cut(whole, SINGLE) == Shard(0, whole, whole)
    assert prod(shards[0].times(3).slice.indices(10**6)) == 0 and shards[-1].times(3).whole == 3 * whole
