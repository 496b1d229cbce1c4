"""Layers of ranks that have a part of the weights each: their results add up to the whole layer's."""

import pytest
import torch
from torch import nn

from mmvllm.config import ExpertsConfig
from mmvllm.kernels import grouped_linear, silu_mul
from mmvllm.layers import experts as file
from mmvllm.layers.experts import SparseMLP
from mmvllm.layers.linear import Linear, MergedLinear
from mmvllm.layers.mlp import GatedMLP
from mmvllm.layers.sharding import Shard
from mmvllm.layers.vocabulary import VocabularyEmbedding, VocabularyHead
from mmvllm.models.splitting import PlannedRank
from mmvllm.models.weights import checkpoint_views
from mmvllm.processes.ranks import SINGLE, Operation
from tests.helpers.cpu import NEEDS_BFLOAT16, kinds
from tests.helpers.models.kernels import assert_no_worse
from tests.helpers.models.packing import pack_weights
from tests.helpers.models.ranks import on_ranks

pytestmark = pytest.mark.thinned

C = 48


def tokens(number: int) -> torch.Tensor:
    return torch.randn(number, C, generator=torch.Generator().manual_seed(number))


def filled(layer: nn.Module) -> nn.Module:
    """With the values that the whole layer would have; zeros where there is padding."""
    generator = torch.Generator().manual_seed(3)
    for parameter in layer.requires_grad_(False).parameters():
        parameter.zero_()
    for place in checkpoint_views(nn.ModuleDict({"layer": layer})):
        place.view.copy_(torch.randn(place.whole_shape, generator=generator)[place.index] / 5)
    return layer


def ranks_of(size: int) -> list[PlannedRank]:
    return [PlannedRank(rank, size) for rank in range(size)]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_columns_and_rows_of_linear_layers(size):
    """A product with a part of the rows, then one with the same part of the columns."""
    inner, x = 30, tokens(7)
    whole = [filled(Linear(C, inner)), filled(Linear(inner, C, bias=False))]
    parts = [Shard.cut(inner, ranks) for ranks in ranks_of(size)]
    first = [filled(Linear(C, part)) for part in parts]
    torch.testing.assert_close(torch.cat([layer(x) for layer in first], dim=1), whole[0](x))
    results = [
        filled(Linear(part, C, bias=False))(layer(x)) for part, layer in zip(parts, first, strict=True) if part.length
    ]
    torch.testing.assert_close(sum(results), whole[1](whole[0](x)))
    with pytest.raises(AssertionError, match="each rank would add the bias"):
        Linear(parts[0], C)


def test_merged_layers_have_a_part_of_each_output():
    whole, x = filled(MergedLinear(C, [24, 6], bias=True)), tokens(5)
    parts = [filled(MergedLinear(C, [Shard.cut(24, ranks), Shard(0, 6, 6)], bias=True)) for ranks in ranks_of(3)]
    outputs = [layer(x) for layer in parts]
    torch.testing.assert_close(torch.cat([first for first, _ in outputs], dim=1), whole(x)[0])
    for _, second in outputs:
        torch.testing.assert_close(second, whole(x)[1])


@pytest.mark.parametrize(("inner", "size"), [(80, 2), (100, 3), (4, 3), (96, 4)])
@pytest.mark.parametrize("number", [1, 30])
def test_gated_mlps_of_any_number_of_ranks(inner, size, number):
    """Widths that do not divide are padded; a rank may have none of a narrow one."""
    x, whole = tokens(number), filled(GatedMLP(C, inner))
    parts = [filled(GatedMLP(C, Shard.cut(inner, ranks))) for ranks in ranks_of(size)]
    assert {len(part.gate_up_proj.weight) % 32 for part in parts} == {0}
    assert_no_worse(sum(part(x) for part in parts), whole(x), filled(GatedMLP(C, inner)).double()(x.double()))


def sparse_mlp(experts: ExpertsConfig, ranks=SINGLE) -> SparseMLP:
    return filled(SparseMLP(C, experts, ranks))


@pytest.mark.parametrize("implementation", ["in a loop", "grouped"])
@pytest.mark.parametrize(("num_experts", "top_k", "size"), [(8, 4, 2), (8, 2, 3), (4, 2, 3), (16, 8, 5)])
@pytest.mark.parametrize("number", [1, 7, 40])
def test_experts_are_dealt_out(implementation, num_experts, top_k, size, number, monkeypatch):
    """Rows of other ranks' experts, which products do not write, add nothing even where the memory holds NaN."""
    if implementation == "grouped":
        for module in (file, grouped_linear, silu_mul):
            monkeypatch.setattr(module, "runs_triton", lambda x: True)
    experts = ExpertsConfig(num_experts=num_experts, num_experts_per_tok=top_k, intermediate_size=40)
    x, whole, product = tokens(number), sparse_mlp(experts)(tokens(number)), file.grouped_linear

    def with_nan(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        out = product(rows, weight, ends)
        out[int(ends[-1]) :] = torch.nan
        return out

    monkeypatch.setattr(file, "grouped_linear", with_nan)
    parts = [sparse_mlp(experts, ranks)(x) for ranks in ranks_of(size)]
    torch.testing.assert_close(sum(parts), whole)
    assert all(part.isfinite().all() for part in parts)


@NEEDS_BFLOAT16
@pytest.mark.parametrize("quantization", kinds([None, "int8"]))
def test_experts_of_a_rank_are_packed(quantization):
    experts = ExpertsConfig(num_experts=4, num_experts_per_tok=2, intermediate_size=40)
    x, results = tokens(20).bfloat16(), []
    for ranks in [SINGLE, *ranks_of(3)]:
        mlp = sparse_mlp(experts, ranks).bfloat16()
        pack_weights(mlp, torch.bfloat16, quantization)
        results.append(mlp(x).double())
    assert len(mlp.experts.linear_method) == 0  # 4 experts over 3 ranks: the last has none
    torch.testing.assert_close(sum(results[1:]), results[0], rtol=0.02, atol=0.02)


@pytest.mark.parametrize(("vocab_size", "size"), [(20, 2), (20, 3), (7, 5)])
def test_the_vocabulary_is_split(vocab_size, size):
    ids, x = torch.randint(vocab_size, (50,), generator=torch.Generator().manual_seed(0)), tokens(3)
    embedding = filled(VocabularyEmbedding(vocab_size, C))
    head = filled(VocabularyHead(C, vocab_size))
    width = -(-vocab_size // size)

    def run(ranks) -> tuple[torch.Tensor, torch.Tensor]:
        ranks.expect([Operation("all_reduce", (50, C), x.dtype), Operation("gather", (3, width), x.dtype)])
        part = filled(VocabularyHead(C, vocab_size, ranks))
        result = filled(VocabularyEmbedding(vocab_size, C, ranks))(ids), part(x)
        assert part(x[:0]).shape == (0, vocab_size)
        return result

    results = on_ranks(size, run)
    for rows, _ in results:
        assert torch.equal(rows, embedding(ids))
    assert results[0][1].is_contiguous()
    torch.testing.assert_close(results[0][1], head(x))
    assert all(logits.shape == (3, width) for _, logits in results[1:])
