import pytest
import torch

from mmvllm.kernels.splice import splice, splice_torch, splice_triton


@pytest.mark.parametrize("put", [splice, splice_triton])
@pytest.mark.parametrize("N,M,C", [(9, 4, 1536), (7, 7, 67), (40, 33, 16), (3, 1, 3584)])
def test_replaces_the_given_rows_only(put, N, M, C, device, dtype):
    torch.manual_seed(0)
    got = torch.randn(N, C, device=device, dtype=dtype)
    rows, at = torch.randn(M, C, device=device, dtype=dtype), torch.randperm(N, device=device)[:M]
    reference = got.clone()
    put(got, rows, at)
    splice_torch(reference, rows, at)
    assert torch.equal(got, reference)
    assert torch.equal(got[at], rows)


def test_nothing_to_replace(device, dtype):
    """A step without images has no rows, and their dtype does not matter."""
    x = torch.randn(3, 8, device=device, dtype=dtype)
    before = x.clone()
    splice(x, torch.empty(0, 8, device=device), torch.empty(0, dtype=torch.int64, device=device))
    assert torch.equal(x, before)
