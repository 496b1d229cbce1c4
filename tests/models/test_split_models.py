"""A model whose weights are split over ranks computes the logits of the whole one, with the operations it names."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
import torch

from mmvllm.config import EngineConfig
from mmvllm.layers.attention import TorchAttention
from mmvllm.layers.batch import Batch, prompt_batch
from mmvllm.models.interface import Model
from mmvllm.models.registry import load_config
from mmvllm.models.rotary import inverse_frequencies
from mmvllm.models.splitting import PlannedRank, possible_sizes
from mmvllm.models.weights import load_model
from mmvllm.processes.ranks import SINGLE, ConnectedRanks, Operation, Ranks
from mmvllm.worker.memory import empty_kv_cache, num_kv_blocks
from tests.helpers.cpu import NEEDS_8_BITS, NEEDS_BFLOAT16
from tests.helpers.models.packing import pack_weights
from tests.helpers.models.ranks import on_ranks
from tests.helpers.models.reference import Float64, assert_no_worse
from tests.helpers.models.shapes import SHAPES

pytestmark = pytest.mark.thinned

CPU = torch.device("cpu")
N, BLOCK = 23, 4
SAMPLED = (0, 9, N - 1)
SIZES = (2, 3)


def heads(shape: str) -> tuple[int, int]:
    return SHAPES[shape]["text"]["heads"], SHAPES[shape]["text"]["kv_heads"]


def cases(shapes: Iterable[str]) -> list[tuple[str, int]]:
    """Each shape with the sizes that divide its heads, and its key-value heads unless there is one only."""
    return [(shape, n) for shape in shapes for n in SIZES if heads(shape)[0] % n == 0 and heads(shape)[1] in (1, n)]


# More ranks than key-value heads, or than experts, some of which have none.
MANY = [("mqa-tied", 5), ("gqa3-untied", 6), ("experts4-top2-vit72", 6), ("experts16-top8-tied", 5)]


def a_batch(vocab_size: int, logits_indices: Sequence[int], num_tokens: int) -> Batch:
    ids = torch.randint(vocab_size, (num_tokens,), generator=torch.Generator().manual_seed(0))
    batch = prompt_batch(num_tokens, 0, BLOCK, CPU)
    return replace(batch, input_ids=ids, logits_indices=torch.tensor(logits_indices, dtype=torch.int64))


def image_rows(model: Model) -> torch.Tensor:
    """Embeddings of a random image, if the model has a ViT."""
    vision, dtype = model.config.vision, next(model.parameters()).dtype
    if vision is None:
        return torch.empty(0, model.config.mm_embed_size, dtype=dtype)
    side = vision.spatial_merge_size
    grid = (1, 2 * side, 3 * side)
    patches = torch.randn(grid[1] * grid[2], vision.patch_dim, generator=torch.Generator().manual_seed(1))
    return model.encode(patches.to(dtype), [grid])


def logits_of(
    model: Model, rows: torch.Tensor | None = None, logits_indices: Sequence[int] = SAMPLED, num_tokens: int = N
) -> torch.Tensor:
    """Logits of a prompt with the embeddings of an image, by default the model's own."""
    rows = image_rows(model) if rows is None else rows
    batch = replace(
        a_batch(model.config.vocab_size, logits_indices, num_tokens), mm_token_indices=torch.arange(4, 4 + len(rows))
    )
    return model(batch, rows, empty_kv_cache(model.config, -(-num_tokens // BLOCK), BLOCK, rows.dtype, CPU))


def logits_in_float64(model: Model, rows: torch.Tensor) -> torch.Tensor:
    inverse_frequencies.cache_clear()
    with Float64():
        exact = logits_of(model.double(), rows.double())
    inverse_frequencies.cache_clear()
    return exact


def loaded(folder, ranks: Ranks = SINGLE, dtype: torch.dtype = torch.float32, **options) -> Model:
    return load_model(folder, load_config(folder), CPU, dtype, ranks=ranks, **options)


@pytest.mark.thinned(2)
@pytest.mark.parametrize(("shape", "size"), cases(SHAPES) + MANY)
def test_logits_are_those_of_the_whole_model(shape, size, checkpoints):
    folder, whole = checkpoints(shape), loaded(checkpoints(shape))
    got, *others = on_ranks(size, lambda ranks: logits_of(loaded(folder, ranks)))
    plain, rows = logits_of(whole), image_rows(whole)
    assert_no_worse(got, plain, logits_in_float64(whole, rows))
    assert got.is_contiguous() and torch.equal(got.argmax(dim=1), plain.argmax(dim=1))
    assert all(len(other) == len(got) for other in others)


def recorded(ranks: ConnectedRanks) -> list[Operation]:
    """The operations that a rank submits from now on."""
    submitted, take = [], ranks._take
    ranks._take = lambda operation: (submitted.append(operation), take(operation))
    return submitted


@pytest.mark.thinned(3)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("num_tokens", "logits_indices"), [(N, []), (N, [3, 8]), (2100, [0])])
def test_the_operations_of_a_step_are_those_that_a_model_names(shape, num_tokens, logits_indices, checkpoints):
    """One for the embedding, two in each layer, one for the logits if there are any; none per chunk of many rows."""
    config = load_config(checkpoints(shape))
    size = possible_sizes(config)[1]

    def run(ranks: ConnectedRanks) -> list[Operation]:
        model, submitted = loaded(checkpoints(shape), ranks), recorded(ranks)
        named = model.operations(num_tokens, [len(logits_indices)])
        ranks.expect(named)
        assert len(logits_of(model, logits_indices=logits_indices, num_tokens=num_tokens)) == len(logits_indices)
        assert submitted == named
        ranks.complete()
        return named

    named, *others = on_ranks(size, run)
    assert all(other == named for other in others)
    x = (num_tokens, config.hidden_size)
    sums = [Operation("all_reduce", x, torch.float32)] * (1 + 2 * config.num_hidden_layers)
    width = -(-config.vocab_size // size)
    gathers = [Operation("gather", (len(logits_indices), width), torch.float32)] if logits_indices else []
    assert named == sums + gathers


def test_a_single_rank_exchanges_nothing(checkpoint):
    assert loaded(checkpoint).operations(5, [1]) == []


def test_a_vocabulary_need_not_be_divisible(copy_of):
    """767 tokens over 2 ranks: the last row of the second is padding."""

    def shorter(tensors: dict) -> dict:
        words = ("embed_tokens.weight", "lm_head.weight")
        return {name: x[:767].contiguous() if name.endswith(words) else x for name, x in tensors.items()}

    def config(raw: dict) -> dict:
        return raw | {"vocab_size": 767, "text_config": raw["text_config"] | {"vocab_size": 767}}

    folder = copy_of("gqa3-untied", shorter, config)
    want = logits_of(loaded(folder))
    got, _ = on_ranks(2, lambda ranks: logits_of(loaded(folder, ranks)))
    assert got.shape == want.shape == (3, 767) and got.is_contiguous()
    torch.testing.assert_close(got, want)


# 8-bit floats need sizes that are multiples of 16, and no experts.
ROUNDED = ("gqa2-tied", "mha-untied", "windows2-vit80-untied", "qwen3-mqa-untied")
PACKED = (*ROUNDED, "deepstack3-tied", "experts4-top2-vit72")
KINDS = [(*case, "fp8") for case in cases(ROUNDED)] + [(*case, None) for case in cases(PACKED)]
KINDS += [pytest.param(*case, kind, marks=NEEDS_8_BITS) for kind in ("int8", "int4") for case in cases(PACKED)]


@NEEDS_BFLOAT16
@pytest.mark.thinned(3)
@pytest.mark.parametrize(("shape", "size", "quantization"), KINDS)
def test_packed_and_quantized_weights_of_ranks(shape, size, quantization, checkpoints):
    """The logits are as near to the exact ones as one process's with weights of the same kind."""
    folder, dtype = checkpoints(shape), torch.bfloat16

    def run(ranks: Ranks) -> torch.Tensor:
        model = loaded(folder, ranks, dtype)
        pack_weights(model, dtype, quantization)
        return logits_of(model)

    (got, *_), alone, exact = on_ranks(size, run), run(SINGLE), logits_of(loaded(folder)).double()
    error, allowed = ((logits.double() - exact).square().mean().sqrt() for logits in (got, alone))
    assert got.dtype == dtype and error <= 2 * allowed


@pytest.mark.parametrize("shape", ["gqa3-untied", "experts4-top2-vit72"])
def test_ranks_share_the_memory_of_the_weights(shape, checkpoints):
    """All but the ViT, norms and routers is divided; nothing is held twice."""
    folder = checkpoints(shape)

    def sizes(ranks: Ranks) -> dict[str, int]:
        return {name: parameter.numel() for name, parameter in loaded(folder, ranks).named_parameters()}

    whole, parts = sizes(SINGLE), on_ranks(2, sizes)
    for name, size in whole.items():
        is_everywhere = name.startswith("visual.") or "norm" in name or name.endswith("mlp.gate.weight")
        assert [part[name] for part in parts] == [size if is_everywhere else size // 2] * 2, name


@pytest.mark.slow
def test_the_config_of_a_rank_has_its_heads(checkpoints):
    config = load_config(checkpoints("gqa3-untied"))
    for size, heads, kv_heads in ((1, 6, 2), (2, 3, 1), (6, 1, 1)):
        (own, *_) = on_ranks(size, lambda ranks: loaded(checkpoints("gqa3-untied"), ranks).config)
        assert own == replace(config, num_attention_heads=heads, num_key_value_heads=kv_heads)
        assert empty_kv_cache(own, 1, 4, torch.float32, CPU).shape[4] == kv_heads


def test_blocks_of_a_rank_hold_its_heads(checkpoints):
    """Equal memory holds twice as many blocks, unless both ranks have the only head."""

    def num_blocks(shape: str, size: int) -> int:
        model = loaded(checkpoints(shape), PlannedRank(0, size))
        config = EngineConfig(cpu_kvcache_bytes=2**20, max_num_seqs=10**6)
        return num_kv_blocks(model, config, BLOCK, torch.float32, CPU, graphs=False)

    assert num_blocks("gqa3-untied", 2) == 2 * num_blocks("gqa3-untied", 1)
    assert num_blocks("windows2-vit80-untied", 2) == num_blocks("windows2-vit80-untied", 1)


@pytest.mark.slow
def test_the_backend_of_a_rank_sees_its_heads(checkpoints):
    seen = []

    class Watched(TorchAttention):
        @staticmethod
        def paged(q, k_cache, v_cache, batch):
            seen.append((q.shape[1], k_cache.shape[2]))
            return TorchAttention.paged(q, k_cache, v_cache, batch)

    folder = checkpoints("mqa-tied")
    on_ranks(5, lambda ranks: logits_of(loaded(folder, ranks, attention=Watched)))
    assert seen == [(1, 1)] * 5 * 5
