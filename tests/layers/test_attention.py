"""The accuracy of attention on a CPU."""

import pytest
import torch

from mmvllm.kernels import packed_attention
from mmvllm.kernels.packed_attention import attention_torch
from mmvllm.kernels.paged_attention import paged_attention_torch


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("H", "K", "n", "T", "D"), [(16, 16, 256, 256, 80), (4, 4, 1100, 1100, 16), (12, 2, 70, 300, 128)]
)
@pytest.mark.parametrize("scale", [1.0, 4.0])
@pytest.mark.parametrize("in_float32", [True, False])
def test_bfloat16_on_a_cpu_is_as_accurate_as_the_textbook_formula(H, K, n, T, D, scale, in_float32, monkeypatch):
    monkeypatch.setattr(packed_attention, "multiplies_float32_faster", lambda: in_float32)
    generator = torch.Generator().manual_seed(n)
    q, k, v = (torch.randn(heads, rows, D, generator=generator) for heads, rows in ((H, n), (K, T), (K, T)))
    q, k, v = (scale * q).bfloat16(), k.bfloat16(), v.bfloat16()
    causal = n != 256
    future = torch.ones(n, T, dtype=torch.bool).triu(T - n + 1) & causal

    def textbook(q, k, v):
        k, v = (x.repeat_interleave(H // K, dim=0) for x in (k, v))
        scores = (q @ k.transpose(1, 2) * D**-0.5).masked_fill(future, float("-inf"))
        return scores.softmax(dim=-1) @ v

    exact = textbook(q.double(), k.double(), v.double())
    got, plain = ((x.double() - exact) for x in (attention_torch(q, k, v, causal), textbook(q, k, v)))
    assert got.abs().max() <= 2 * plain.abs().max()
    assert got.square().mean().sqrt() <= 1.25 * plain.square().mean().sqrt()


def test_an_offset_common_to_all_keys_costs_no_accuracy_in_bfloat16():
    """Qwen2's keys have large biases, so scores of 50 to 90 differ little."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(heads, 200, 64, generator=generator) for heads in (6, 2, 2))
    offset = torch.randn(2, 1, 64, generator=generator) * 20
    q = q + offset.repeat_interleave(3, dim=0) / 16
    exact, got = (
        attention_torch(q.to(dtype), (k + offset).bfloat16().to(dtype), v.to(dtype), causal=True).double()
        for q, v, dtype in ((q.bfloat16(), v.bfloat16(), torch.float64), (q.bfloat16(), v.bfloat16(), torch.bfloat16))
    )
    assert (got - exact).square().mean().sqrt() < 0.01 * exact.square().mean().sqrt()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_paged_attention_on_a_cpu_equals_that_of_each_sequence_alone(dtype):
    """Decodes of different lengths mixed with chunks, and NaN in the unused slots of blocks."""
    generator = torch.Generator().manual_seed(1)
    H, K, D, block_size = 6, 2, 32, 16
    query_lens, kv_lens = [1, 9, 1, 40, 1], [1, 30, 75, 40, 70]
    caches = torch.full((2, 20, block_size, K, D), float("nan"), dtype=dtype)
    table, free = torch.zeros(5, 5, dtype=torch.int32), iter(torch.randperm(20, generator=generator).tolist())
    q = torch.randn(sum(query_lens), H, D, generator=generator).to(dtype)
    exact, start = [], 0
    for s, (n, T) in enumerate(zip(query_lens, kv_lens, strict=True)):
        k, v = (torch.randn(T, K, D, generator=generator).to(dtype) for _ in range(2))
        for i, (k_part, v_part) in enumerate(zip(k.split(block_size), v.split(block_size), strict=True)):
            table[s, i] = block = next(free)
            caches[0, block, : len(k_part)], caches[1, block, : len(v_part)] = k_part, v_part
        heads_first = (x.double().transpose(0, 1) for x in (q[start : start + n], k, v))
        exact.append(attention_torch(*heads_first, causal=True).transpose(0, 1))
        start += n
    cu_seqlens = torch.tensor([0, *query_lens]).cumsum(0).int()
    got = paged_attention_torch(q, *caches, cu_seqlens, torch.tensor(kv_lens).int(), table, max(query_lens))
    error = (got.double() - torch.cat(exact)).abs().max()
    assert error < 8 * torch.finfo(dtype).eps * torch.cat(exact).abs().max()
    decoding = [0, 10, 51]  # alone, they use the path of a step without prompts
    alone = paged_attention_torch(
        q[decoding], *caches, torch.arange(4).int(), torch.tensor(kv_lens)[[0, 2, 4]].int(), table[[0, 2, 4]], 1
    )
    assert torch.equal(alone, got[decoding])
