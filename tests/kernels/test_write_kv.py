import pytest
import torch

from mmvllm.kernels.write_kv import write_kv, write_kv_torch, write_kv_triton


@pytest.mark.parametrize("write", [write_kv, write_kv_triton])
@pytest.mark.parametrize("N,K,D,block_size", [(1, 2, 128, 16), (5, 3, 80, 4), (33, 1, 24, 16)])
def test_writes_the_given_slots_only(write, N, K, D, block_size, device, dtype):
    torch.manual_seed(0)
    _, k, v = torch.randn(N, (2 + 2 * K) * D, device=device, dtype=dtype).split([2 * D, K * D, K * D], dim=1)
    k, v = k.view(N, K, D), v.view(N, K, D)  # views of the merged projection's output
    shape = (N // block_size + 2, block_size, K, D)
    slots = torch.randperm(shape[0] * block_size, device=device)[:N]
    got, reference = torch.randn(2, *shape, device=device, dtype=dtype).repeat(2, 1, 1, 1, 1, 1)
    write(k, v, *got, slots)
    write_kv_torch(k, v, *reference, slots)
    assert torch.equal(got, reference)
    assert torch.equal(got[0].view(-1, K, D)[slots[-1]], k[-1])


def test_keys_and_values_of_different_strides(device, dtype):
    N, K, D = 6, 2, 16
    k = torch.randn(K, N, D, device=device, dtype=dtype).transpose(0, 1)
    v = torch.randn(N, K, 3, D, device=device, dtype=dtype)[:, :, 1]
    got, reference = torch.zeros(2, 2, 2, 4, K, D, device=device, dtype=dtype)
    slots = torch.tensor([7, 0, 3, 4, 1, 6], device=device)
    write_kv_triton(k, v, *got, slots)
    write_kv_torch(k, v, *reference, slots)
    assert torch.equal(got, reference)


def test_slots_beyond_two_to_the_31_values(device):
    """The operating system commits only the pages of the three rows that are written, not all 2 GiB."""
    K, D, block_size = 2, 64, 16
    num_blocks = 2**31 // (block_size * K * D) + 1
    cache = torch.empty(num_blocks, block_size, K, D, dtype=torch.uint8, device=device)
    k, v = torch.arange(2 * 3 * K * D, device=device).to(torch.uint8).view(2, 3, K, D)
    slots = torch.tensor([3, 2**31 // (K * D), num_blocks * block_size - 1], device=device)
    write_kv_triton(k, v, cache, torch.empty_like(cache), slots)
    assert torch.equal(cache.view(-1, K, D)[slots], k)
