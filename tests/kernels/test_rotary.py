import pytest
import torch
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRMSNorm

from mmvllm.kernels.rotary import (
    rotary,
    rotary_torch,
    rotary_triton,
    rotary_write_kv,
    rotary_write_kv_torch,
    rotary_write_kv_triton,
)
from tests.helpers.models.kernels import assert_no_worse

# N, H, K, D: heads of the 2B and 7B decoders, of the ViT, and unusual ones.
SHAPES = [(3, 12, 2, 128), (2, 28, 4, 128), (3, 16, 16, 80), (5, 5, 1, 16), (2, 3, 3, 256)]


def qkv_and_angles(N, H, K, D, device, dtype, angle_dtype):
    """q, k and v as views into one row, and the cos and sin of random angles."""
    torch.manual_seed(0)
    q, k, v = torch.randn(N, H + 2 * K, D, device=device, dtype=dtype).split([H, K, K], dim=1)
    angles = 100 * torch.randn(N, D // 2, device=device)
    return q, k, v, angles.cos().to(angle_dtype), angles.sin().to(angle_dtype)


@pytest.mark.parametrize("angles", ["model dtype", "float32"])
@pytest.mark.parametrize("N,H,K,D", SHAPES)
def test_error_is_bounded_by_the_reference(N, H, K, D, angles, device, dtype):
    angle_dtype = torch.float32 if angles == "float32" else dtype
    q, k, _, cos, sin = qkv_and_angles(N, H, K, D, device, dtype, angle_dtype)
    exact = rotary_torch(q.double(), k.double(), cos.double(), sin.double())
    references = rotary_torch(q, k, cos, sin)
    for got, reference, right in zip(rotary_triton(q, k, cos, sin), references, exact, strict=True):
        assert_no_worse(got, reference, right)
        assert got.is_contiguous()


def test_pair_j_is_j_and_j_plus_half(device):
    """A rotation by 90 degrees moves the first half to the second, and the negated second half to the first."""
    q = torch.arange(2 * 3 * 32, dtype=torch.float32, device=device).view(2, 3, 32)
    cos, sin = torch.zeros(2, 16, device=device), torch.ones(2, 16, device=device)
    rotated = torch.cat([-q[..., 16:], q[..., :16]], dim=-1)
    for rotate in (rotary, rotary_triton):
        got_q, got_k = rotate(q, q[:, 1:], cos, sin)
        assert torch.equal(got_q, rotated) and torch.equal(got_k, rotated[:, 1:])


def norm_of_heads(D, device, dtype):
    """Weights of queries and keys, and eps."""
    return (*(1 + torch.randn(2, D, device=device) / 4).to(dtype), 1e-6)


def normalized_in_float64(x, weight, eps):
    x = x.double()
    return weight.double() * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


@pytest.mark.thinned(8)
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("N,H,K,D", [*SHAPES, (3, 4, 2, 48), (2, 32, 8, 128)])
def test_writes_rotated_keys_and_values_to_their_slots(N, H, K, D, qk_norm, device, dtype):
    q, k, v, cos, sin = qkv_and_angles(N, H, K, D, device, dtype, dtype)
    norm = norm_of_heads(D, device, dtype) if qk_norm else None
    slots = torch.randperm(12, device=device)[:N]
    caches, reference_caches = torch.randn(2, 3, 4, K, D, device=device, dtype=dtype).repeat(2, 1, 1, 1, 1, 1)
    before = caches.clone()
    got = rotary_write_kv_triton(q, k, v, cos, sin, *caches, slots, norm)
    reference = rotary_write_kv_torch(q, k, v, cos, sin, *reference_caches, slots, norm)
    if norm is not None:
        q, k = normalized_in_float64(q, norm[0], norm[2]), normalized_in_float64(k, norm[1], norm[2])
    exact_q, exact_k = rotary_torch(q.double(), k.double(), cos.double(), sin.double())
    assert_no_worse(got, reference, exact_q)

    k_cache, v_cache = caches.view(2, 12, K, D)
    assert_no_worse(k_cache[slots], reference_caches[0].view(12, K, D)[slots], exact_k)
    assert torch.equal(v_cache[slots], v)
    others = [slot for slot in range(12) if slot not in slots.tolist()]
    assert torch.equal(caches.view(2, 12, K, D)[:, others], before.view(2, 12, K, D)[:, others])


@pytest.mark.parametrize("write", [rotary_write_kv_torch, rotary_write_kv_triton])
def test_heads_are_normalized_as_transformers_does(write, device):
    """Without a rotation, equal to a unit in the last place; eps matters for the small heads of the second token."""
    dtype = torch.float16
    q, k, v, _, _ = qkv_and_angles(3, 4, 2, 64, device, dtype, dtype)
    q[1] *= 1e-3
    norm = norm_of_heads(64, device, dtype)
    cos, sin = torch.ones(3, 32, device=device, dtype=dtype), torch.zeros(3, 32, device=device, dtype=dtype)
    k_cache, v_cache = torch.zeros(2, 1, 3, 2, 64, device=device, dtype=dtype)
    got = write(q, k, v, cos, sin, k_cache, v_cache, torch.arange(3, device=device), norm)
    for x, y, weight in ((q, got, norm[0]), (k, k_cache[0], norm[1])):
        reference = Qwen3VLTextRMSNorm(64, norm[2]).to(device, dtype)
        reference.weight.data.copy_(weight)
        torch.testing.assert_close(y, reference(x), rtol=2**-10, atol=0)
    assert torch.equal(v_cache[0], v)


def test_fused_kernel_equals_separate_ones(device, dtype):
    q, k, v, cos, sin = qkv_and_angles(4, 6, 2, 48, device, dtype, dtype)
    q, k, v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v))  # heads first in memory
    k_cache, v_cache = torch.zeros(2, 2, 4, 2, 48, device=device, dtype=dtype)
    slots = torch.tensor([6, 1, 2, 5], device=device)
    for fused, rotate in ((rotary_write_kv, rotary), (rotary_write_kv_triton, rotary_triton)):
        got = fused(q, k, v, cos, sin, k_cache.zero_(), v_cache.zero_(), slots)
        rotated_q, rotated_k = rotate(*(x.contiguous() for x in (q, k)), cos, sin)
        assert torch.equal(got, rotated_q)
        assert torch.equal(k_cache.view(8, 2, 48)[slots], rotated_k) and torch.equal(v_cache.view(8, 2, 48)[slots], v)


def test_slots_beyond_two_to_the_31_values(device):
    """Memory of a CPU is taken only where it is written."""
    H, K, D, dtype = 2, 1, 64, torch.float16
    q, k, v, cos, sin = qkv_and_angles(3, H, K, D, device, dtype, dtype)
    slots = torch.tensor([3, 2**31 // (K * D), 2**31 // (K * D) + 5], device=device)
    k_cache, v_cache = (torch.empty(2**31 // (K * D) + 6, 1, K, D, device=device, dtype=dtype) for _ in range(2))
    rotary_write_kv_triton(q, k, v, cos, sin, k_cache, v_cache, slots)
    assert torch.equal(k_cache[slots, 0], rotary_triton(q, k, cos, sin)[1]) and torch.equal(v_cache[slots, 0], v)
