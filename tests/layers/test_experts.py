"""The mixture of experts compared with transformers', packed and quantized weights with plain ones."""

import pytest
import torch
from torch import nn
from transformers import Qwen3VLMoeTextConfig
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeTextSparseMoeBlock

from mmvllm.config import ExpertsConfig
from mmvllm.kernels import grouped_linear, silu_mul
from mmvllm.layers import experts as file
from mmvllm.layers.experts import SparseMLP
from mmvllm.quantization.onednn import Int8Linear, OneDNNLinear
from tests.helpers.cpu import NEEDS_8_BITS, NEEDS_BFLOAT16
from tests.helpers.models.kernels import assert_no_worse
from tests.helpers.models.packing import pack_weights

pytestmark = pytest.mark.thinned

C, WIDTH = 48, 40
SIZES = pytest.mark.parametrize("num_experts,top_k", [(4, 2), (8, 4), (16, 8), (4, 4)])
IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["in a loop", "grouped"])


@pytest.fixture
def use(monkeypatch):
    """Choose between the loop of CPUs and the grouped products of CUDA, whose kernels then run in the interpreter."""

    def choose(implementation: str) -> None:
        if implementation == "grouped":
            for module in (file, grouped_linear, silu_mul):
                monkeypatch.setattr(module, "runs_triton", lambda x: True)

    return choose


def sparse_mlp(num_experts: int, top_k: int, dtype: torch.dtype = torch.float32) -> SparseMLP:
    config = ExpertsConfig(num_experts=num_experts, num_experts_per_tok=top_k, intermediate_size=WIDTH)
    mlp = SparseMLP(C, config)
    generator = torch.Generator().manual_seed(num_experts + top_k)
    for parameter in mlp.parameters():
        parameter.data.normal_(0.0, 0.2, generator=generator)
    return mlp.to(dtype).requires_grad_(False)


def in_transformers(mlp: SparseMLP) -> Qwen3VLMoeTextSparseMoeBlock:
    """Transformers' block with the same weights, whose names are the same."""
    sizes = {"hidden_size": C, "moe_intermediate_size": WIDTH, "num_experts": mlp.experts.shard.whole}
    config = Qwen3VLMoeTextConfig(**sizes, num_experts_per_tok=mlp.num_experts_per_tok)
    config._experts_implementation = "eager"
    block = Qwen3VLMoeTextSparseMoeBlock(config)
    block.load_state_dict(mlp.state_dict())
    return block.requires_grad_(False)


def tokens(number: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(number, C, generator=torch.Generator().manual_seed(number)).to(dtype)


def in_float64(mlp: SparseMLP, x: torch.Tensor) -> torch.Tensor:
    """The definition: every expert for every token, weighted with its renormalized probability, or with zero."""
    x, router, gate_up, down = (t.double() for t in (x, *mlp.parameters()))
    probs = (x @ router.T).softmax(-1)
    top = probs.topk(mlp.num_experts_per_tok, dim=-1)
    weights = torch.zeros_like(probs).scatter(1, top.indices, top.values / top.values.sum(-1, keepdim=True))
    gate, up = torch.einsum("nc,eic->eni", x, gate_up).chunk(2, dim=-1)
    return torch.einsum("eni,eci,ne->nc", nn.functional.silu(gate) * up, down, weights)


@IMPLEMENTATIONS
@SIZES
@pytest.mark.parametrize("number", [1, 2, 7, 64])
def test_error_is_bounded_by_that_of_transformers(implementation, num_experts, top_k, number, use):
    mlp, x = sparse_mlp(num_experts, top_k), tokens(number)
    use(implementation)
    assert_no_worse(mlp(x), in_transformers(mlp)(x[None])[0], in_float64(mlp, x))


@pytest.mark.slow
@IMPLEMENTATIONS
def test_experts_without_tokens_and_with_all_of_them(implementation, use):
    """A router that always prefers experts 2 and 5 of eight."""
    mlp, x = sparse_mlp(8, 2), tokens(50)
    x[:, 0] = 1
    mlp.gate.weight.data[:, 0] = torch.tensor([0, 0, 80, 0, 0, 81, 0, 0])
    use(implementation)
    assert_no_worse(mlp(x), in_transformers(mlp)(x[None])[0], in_float64(mlp, x))


@IMPLEMENTATIONS
def test_no_tokens(implementation, use):
    use(implementation)
    assert sparse_mlp(4, 2)(tokens(0)).shape == (0, C)


@pytest.mark.slow
@IMPLEMENTATIONS
def test_rows_do_not_depend_on_the_batch(implementation, use):
    """Within rounding: the matrix products, not the sums of experts, round differently for other numbers of rows."""
    mlp, x = sparse_mlp(8, 4), tokens(40)
    use(implementation)
    together = mlp(x)
    for rows in (slice(0, 1), slice(3, 5), slice(10, 40)):
        torch.testing.assert_close(mlp(x[rows]), together[rows], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@IMPLEMENTATIONS
def test_results_are_added_in_an_order_that_depends_on_the_token_alone(implementation, use, monkeypatch):
    """With diagonal weights, whose products are exact for any number of rows, a row has the same bits in any batch."""
    mlp, x = sparse_mlp(8, 4), tokens(40)
    diagonals = torch.randn(2, 8, C, generator=torch.Generator().manual_seed(0))
    mlp.experts.gate_up_proj.data, mlp.experts.down_proj.data = torch.diag_embed(diagonals)
    monkeypatch.setattr(file, "silu_mul", lambda rows: rows)
    weights, chosen = mlp.gate(x).softmax(-1).topk(4)
    use(implementation)
    together = mlp.experts(x, chosen, weights)
    exact = torch.einsum("nc,nkc,nk->nc", x.double(), diagonals.double().prod(0)[chosen], weights.double())
    torch.testing.assert_close(together.double(), exact, rtol=1e-5, atol=1e-5)
    for rows in (slice(0, 1), slice(3, 5), slice(10, 40)):
        assert torch.equal(mlp.experts(x[rows], chosen[rows], weights[rows]), together[rows])


@NEEDS_BFLOAT16
@pytest.mark.parametrize("number", [1, 5, 64, 3000])
def test_packed_experts_have_at_most_twice_the_error_of_plain_ones(number):
    dtype = torch.bfloat16
    mlp, x = sparse_mlp(4, 2, dtype), tokens(number, dtype)
    reference, exact = mlp(x), in_float64(mlp, x)
    pack_weights(mlp, dtype)
    assert isinstance(mlp.experts.linear_method[3][0], OneDNNLinear)
    assert [name for name, _ in mlp.named_parameters()] == ["gate.weight"]
    assert_no_worse(mlp(x), reference, exact)


@NEEDS_8_BITS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_experts_are_as_accurate_as_8_bits_allow(dtype):
    mlp, x = sparse_mlp(4, 2, dtype), tokens(100, dtype)
    plain = mlp(x).double()
    pack_weights(mlp, dtype, "int8")
    assert isinstance(mlp.experts.linear_method[0][1], Int8Linear)
    assert [name for name, _ in mlp.named_parameters()] == ["gate.weight"]
    assert (mlp(x).double() - plain).square().mean().sqrt() / plain.square().mean().sqrt() < 0.03


@NEEDS_8_BITS
def test_int8_rows_are_independent():
    mlp, x = sparse_mlp(8, 4), tokens(30)
    probs = mlp.gate(x).softmax(-1).topk(4)
    pack_weights(mlp, torch.float32, "int8")
    alone = [mlp.experts(x[i : i + 1], probs.indices[i : i + 1], probs.values[i : i + 1]) for i in range(30)]
    assert torch.equal(mlp.experts(x, probs.indices, probs.values), torch.cat(alone))
