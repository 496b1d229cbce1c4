"""Keys and values in 8 bits: what is stored, and attention over it against float64 of what is stored."""

import pytest
import torch

from mmvllm.kernels.common.kv_cache import DTYPE_LIMITS, QuantizedKVCache
from mmvllm.kernels.paged_attention import paged_attention, paged_attention_torch, paged_attention_triton
from mmvllm.kernels.rotary import rotary_triton, rotary_write_kv_triton
from mmvllm.kernels.write_kv import write_kv_torch
from tests.helpers.models.kernels import assert_no_worse, round_to_e4m3_exactly

CODES = pytest.mark.parametrize("code_dtype", DTYPE_LIMITS, ids=str)


@pytest.fixture(autouse=True)
def exact_conversions(monkeypatch, device):
    if device.type == "cpu":
        round_to_e4m3_exactly(monkeypatch)


def values(cache: QuantizedKVCache) -> torch.Tensor:
    return cache.values.double() * cache.scales[..., None].double()


def same(a: QuantizedKVCache, b: QuantizedKVCache) -> bool:
    return torch.equal(a.values.view(torch.int8), b.values.view(torch.int8)) and torch.equal(a.scales, b.scales)


@CODES
def test_each_head_of_each_token_has_half_a_step_of_error(code_dtype, device, dtype):
    """Heads of very different sizes, one of zeros; other slots keep what they have."""
    x = torch.randn(7, 3, 80, device=device) * torch.tensor([1e-3, 1.0, 0.0], device=device)[:, None]
    x[3] *= 1000
    x = x.to(dtype)
    cache = QuantizedKVCache(
        torch.zeros(3, 4, 3, 80, device=device).to(code_dtype), torch.zeros(3, 4, 3, device=device)
    )
    slots = torch.tensor([11, 0, 5, 2, 9, 3, 4], device=device)
    write_kv_torch(x, x, cache, QuantizedKVCache.of(torch.zeros(3, 4, 3, 80, device=device), code_dtype), slots)
    got, largest = values(cache).view(12, 3, 80)[slots], x.double().abs().amax(-1, keepdim=True)
    step = 1 / 127 if code_dtype == torch.int8 else 32 / 448  # e4m3 has steps of 32 from 256 to 448
    assert ((got - x.double()).abs() <= (0.5 + 1e-5) * step * largest).all()
    others = [slot for slot in range(12) if slot not in slots.tolist()]
    assert not values(cache).view(12, 3, 80)[others].any()


@CODES
def test_a_token_has_the_same_codes_whatever_is_written_around_it(code_dtype, device, dtype):
    x = torch.randn(8, 2, 16, device=device, dtype=dtype)
    x[5:] *= 100
    whole = QuantizedKVCache.of(x.view(2, 4, 2, 16), code_dtype)
    parts = QuantizedKVCache.of(torch.zeros(2, 4, 2, 16, device=device), code_dtype)
    for slots in torch.tensor([7, 0, 4, 1, 6, 2, 3, 5], device=device).split([1, 3, 2, 2]):
        parts.write(slots, x[slots])
    assert same(whole, parts)


@CODES
def test_blocks_are_copied_with_their_scales(code_dtype):
    cache = QuantizedKVCache.of(torch.randn(6, 4, 2, 16), code_dtype)
    want, first = values(cache)[[5, 1]], values(cache)[[0]]
    cache[torch.tensor([3, 2])] = cache[torch.tensor([5, 1])]
    assert torch.equal(values(cache)[[3, 2]], want) and torch.equal(values(cache)[[0]], first)
    assert [part.shape for part in cache] == [cache.shape[1:]] * 6


@CODES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_code_is_read_exactly(code_dtype, dtype):
    """With a scale that is a power of two; NaN is no code that is written for a number."""
    codes = torch.arange(-128, 128, dtype=torch.int8).view(code_dtype).view(1, 2, 2, 64)
    cache = QuantizedKVCache(codes, torch.full((1, 2, 2), 2.0**-3))
    got, want = cache.blocks(torch.tensor([0]), dtype), codes.double() / 8
    assert got.dtype == dtype and torch.equal(got.double()[~want.isnan()], want[~want.isnan()])


@CODES
def test_small_heads_are_read_in_float16(code_dtype):
    """Their scales are below the smallest number that float16 has with all its bits, 6.1e-5."""
    x = torch.linspace(-1e-5, 1e-5, 64).view(1, 1, 1, 64)
    cache = QuantizedKVCache.of(x, code_dtype)
    got = cache.blocks(torch.tensor([0]), torch.float16)
    assert (got.double() - values(cache)).abs().max() <= 3e-8  # half of float16's smallest step


@CODES
def test_what_is_not_a_number_is_read_as_such(code_dtype):
    x = torch.randn(1, 1, 2, 16)
    x[0, 0, 1, 3] = torch.nan
    got = QuantizedKVCache.of(x, code_dtype).blocks(torch.tensor([0]), torch.float32)
    assert got[0, 0, 1].isnan().all() and not got[0, 0, 0].isnan().any()


@pytest.mark.thinned(6)
@CODES
@pytest.mark.parametrize("H,K,D", [(4, 2, 80), (3, 1, 24), (12, 2, 128)])
def test_the_kernel_stores_what_the_reference_stores(H, K, D, code_dtype, device, dtype):
    """Keys are the rotary kernel's, before they are rounded to the dtype."""
    q, k, v = torch.randn(5, H + 2 * K, D, device=device, dtype=torch.float32).split([H, K, K], dim=1)
    angles = torch.randn(5, D // 2, device=device)
    slots = torch.tensor([7, 0, 3, 4, 1], device=device)
    got, want = (
        [QuantizedKVCache.of(torch.zeros(2, 4, K, D, device=device), code_dtype) for _ in "kv"] for _ in range(2)
    )
    rotated, rotated_k = rotary_triton(q, k, angles.cos(), angles.sin())
    assert torch.equal(rotary_write_kv_triton(q, k, v, angles.cos(), angles.sin(), *got, slots), rotated)
    write_kv_torch(rotated_k, v, *want, slots)
    assert same(got[0], want[0]) and same(got[1], want[1])


def step_over_codes(query_lens, kv_lens, code_dtype, device, dtype, H=4, K=2, D=80, block_size=4) -> tuple:
    """Arguments of attention, and its result in float64 of the codes; slots without a token hold any bits."""
    torch.manual_seed(sum(kv_lens) + D)
    S, width = len(kv_lens), -(-max(kv_lens) // block_size)
    caches = []
    for _ in range(2):
        cache = QuantizedKVCache.of(torch.randn(S * width, block_size, K, D), code_dtype)
        cache.scales[(torch.arange(width * block_size) >= torch.tensor(kv_lens)[:, None]).view(-1, block_size)] = (
            torch.nan
        )
        caches.append(QuantizedKVCache(cache.values.to(device), cache.scales.to(device)))
    q = (2 * torch.randn(sum(query_lens), H, D)).to(device, dtype)
    exact = []
    for s, (own, n, kv_len) in enumerate(zip(q.split(query_lens), query_lens, kv_lens, strict=True)):
        k, v = (values(cache)[s * width : (s + 1) * width].flatten(0, 1)[:kv_len].transpose(0, 1) for cache in caches)
        k, v = (x.repeat_interleave(H // K, dim=0) for x in (k, v))
        scores = own.double().transpose(0, 1) @ k.transpose(1, 2) / D**0.5
        unseen = torch.arange(kv_len, device=device) > torch.arange(kv_len - n, kv_len, device=device)[:, None]
        exact.append((scores.masked_fill(unseen, -torch.inf).softmax(-1) @ v).transpose(0, 1))
    bounds = torch.tensor([0, *query_lens], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
    table = torch.arange(S * width, dtype=torch.int32, device=device).view(S, width)
    lens = torch.tensor(kv_lens, dtype=torch.int32, device=device)
    return (q, *caches, bounds, lens, table, max(query_lens)), torch.cat(exact)


@CODES
@pytest.mark.thinned(1)
@pytest.mark.parametrize("D", [80, 16])
@pytest.mark.parametrize(
    ("query_lens", "kv_lens"), [([1, 1, 1], [1, 300, 65]), ([1, 25, 1], [70, 25, 9]), ([33], [70])], ids=str
)
def test_attention_reads_codes(query_lens, kv_lens, D, code_dtype, device, dtype):
    """No worse than the reference over the same values, which is given them in float64's rounding to the dtype."""
    args, exact = step_over_codes(query_lens, kv_lens, code_dtype, device, dtype, D=D)
    plain = [torch.nan_to_num(values(cache)).to(dtype) for cache in args[1:3]]
    reference = paged_attention_torch(args[0], *plain, *args[3:])
    for attention in (paged_attention_torch, paged_attention_triton, paged_attention):
        assert_no_worse(attention(*args), reference, exact)
