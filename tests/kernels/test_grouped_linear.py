import pytest
import torch

from mmvllm.kernels import grouped_linear as file
from mmvllm.kernels.common.dispatch import ExpertShapes, KernelShapes
from mmvllm.kernels.grouped_linear import grouped_linear, grouped_linear_torch, grouped_linear_triton
from tests.helpers.models.kernels import assert_no_worse

pytestmark = pytest.mark.thinned

COUNTS = pytest.mark.parametrize(
    "counts",
    [
        [5, 0, 17, 16, 1],  # no rows, more than a tile, exactly one tile, one row
        [0, 0, 40],
        [33, 0, 0, 0, 0, 0],
        [0, 1, 0],
        [1] * 16,
        [7],
        [70, 3],
    ],
    ids=str,
)


def arguments(counts, out_size, in_size, device, dtype):
    torch.manual_seed(0)
    x = torch.randn(sum(counts), in_size, device=device).to(dtype)
    weight = (torch.randn(len(counts), out_size, in_size, device=device) / in_size**0.5).to(dtype)
    return x, weight, torch.tensor(counts, device=device).cumsum(0, dtype=torch.int32)


def exact_products(counts, x, weight):
    """The definition, in float64."""
    return torch.cat([rows @ w.T for rows, w in zip(x.double().split(counts), weight.double(), strict=True)])


@pytest.mark.thinned(3)
@pytest.mark.parametrize("out_size,in_size", [(48, 64), (131, 67), (64, 200)])
@COUNTS
def test_error_is_bounded_by_the_reference(counts, out_size, in_size, device, dtype):
    x, weight, offsets = arguments(counts, out_size, in_size, device, dtype)
    got = grouped_linear_triton(x, weight, offsets)
    assert_no_worse(got, grouped_linear_torch(x, weight, offsets), exact_products(counts, x, weight))


@pytest.mark.slow
@pytest.mark.parametrize("rows", [80, 700])
def test_larger_tiles(rows, device):
    """Groups of many rows on average have tiles of 64 and 128 rows."""
    dtype, counts = torch.float16, [rows, 3, rows // 3]
    x, weight, offsets = arguments(counts, 40, 48, device, dtype)
    got = grouped_linear_triton(x, weight, offsets)
    assert_no_worse(got, grouped_linear_torch(x, weight, offsets), exact_products(counts, x, weight))


@COUNTS
def test_public_function_works_on_any_device(counts, device, dtype):
    x, weight, offsets = arguments(counts, 56, 64, device, dtype)
    got = grouped_linear(x, weight, offsets)
    assert_no_worse(got, grouped_linear_torch(x, weight, offsets), exact_products(counts, x, weight))


@COUNTS
def test_grouped_mm_takes_the_same_arguments(counts, monkeypatch):
    """Torch's own grouped product, which has a CPU implementation too, counts rows and lays out weights as we do."""
    monkeypatch.setattr(file, "runs_triton", lambda x: True)
    monkeypatch.setattr(file, "runs_grouped_mm", lambda x, weight: True)
    x, weight, offsets = arguments(counts, 48, 64, torch.device("cpu"), torch.bfloat16)
    got = grouped_linear(x, weight, offsets)
    assert got.is_contiguous()
    assert_no_worse(got, grouped_linear_torch(x, weight, offsets), exact_products(counts, x, weight))


def test_no_rows(device, dtype):
    for product in (grouped_linear, grouped_linear_triton):
        assert product(*arguments([0, 0], 8, 16, device, dtype)).shape == (0, 8)


def test_rows_do_not_depend_on_other_groups(device, dtype):
    x, weight, offsets = arguments([9, 20, 4], 48, 64, device, dtype)
    want = grouped_linear_triton(x, weight, offsets)[9:29]
    alone = torch.tensor([0, 20, 20], dtype=torch.int32, device=device)
    assert torch.equal(grouped_linear_triton(x[9:29].contiguous(), weight, alone), want)


def test_cases_are_valid_and_only_for_mixtures_of_experts():
    def cases(experts):
        shapes = KernelShapes(2, 1, 8, hidden_size=16, intermediate_size=8, vocab_size=9, vision=None, experts=experts)
        return list(file.cases(shapes, torch.device("cpu"), torch.float32))

    assert cases(None) == []
    found = cases(ExpertShapes(num_experts=8, num_experts_per_tok=2, intermediate_size=12))
    assert [case.label for case in found][::4] == ["N=2 E=8 16->24", "N=2 E=8 12->16"]
    assert all(len(grouped_linear_torch(*case.args)) == case.args[2][-1] for case in found)


@pytest.mark.gpu
def test_replays_of_a_cuda_graph_follow_the_offsets():
    device, dtype = torch.device("cuda"), torch.bfloat16
    x, weight, offsets = arguments([8, 8, 8], 64, 64, device, dtype)
    grouped_linear(x, weight, offsets)  # compile outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = grouped_linear(x, weight, offsets)
    for ends in ([0, 0, 24], [24, 24, 24], [1, 20, 24]):
        offsets.copy_(torch.tensor(ends, dtype=torch.int32))
        graph.replay()
        assert torch.equal(out, grouped_linear(x, weight, offsets))
