import pytest
import torch

from mmvllm.kernels.splice import splice, splice_add, splice_add_torch, splice_add_triton, splice_torch, splice_triton

SIZES = pytest.mark.parametrize("N,M,C", [(9, 4, 1536), (7, 7, 67), (40, 33, 16), (3, 1, 3584)])


@pytest.fixture(params=["whole rows", "columns of wider rows"])
def make_rows(request, device, dtype):
    """M random rows (M, C), as a tensor of their own or as the second slice of rows with four."""

    def make(M: int, C: int) -> torch.Tensor:
        if request.param == "whole rows":
            return torch.randn(M, C, device=device, dtype=dtype)
        return torch.randn(M, 4 * C, device=device, dtype=dtype)[:, C : 2 * C]

    return make


@pytest.mark.parametrize("put", [splice, splice_triton])
@SIZES
def test_replaces_the_given_rows_only(put, make_rows, N, M, C, device, dtype):
    torch.manual_seed(0)
    got = torch.randn(N, C, device=device, dtype=dtype)
    rows, at = make_rows(M, C), torch.randperm(N, device=device)[:M]
    reference = got.clone()
    put(got, rows, at)
    splice_torch(reference, rows, at)
    assert torch.equal(got, reference)
    assert torch.equal(got[at], rows)


@pytest.mark.parametrize("add", [splice_add, splice_add_triton])
@SIZES
def test_adds_to_the_given_rows_only(add, make_rows, N, M, C, device, dtype):
    torch.manual_seed(0)
    x = torch.randn(N, C, device=device, dtype=dtype)
    rows, at = make_rows(M, C), torch.randperm(N, device=device)[:M]
    got, reference, expected = x.clone(), x.clone(), x.clone()
    add(got, rows, at)
    splice_add_torch(reference, rows, at)
    expected.index_add_(0, at, rows)
    assert torch.equal(got, reference)  # one rounded sum per value
    assert torch.equal(got, expected)


@pytest.mark.parametrize("put", [splice, splice_add])
def test_nothing_to_splice(put, device, dtype):
    """A step without images has no rows, and their dtype does not matter."""
    x = torch.randn(3, 8, device=device, dtype=dtype)
    before = x.clone()
    put(x, torch.empty(0, 8, device=device), torch.empty(0, dtype=torch.int64, device=device))
    assert torch.equal(x, before)
