"""Attention within segments, against float64."""

import pytest
import torch

from mmvllm.kernels.packed_attention import packed_attention, packed_attention_torch, packed_attention_triton
from tests.helpers.models.kernels import assert_no_worse

pytestmark = pytest.mark.thinned


def exact_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lens: list[int]) -> torch.Tensor:
    """The definition, in float64."""
    parts = []
    for q_part, k_part, v_part in zip(*(x.double().split(lens) for x in (q, k, v)), strict=True):
        scores = torch.einsum("qhd,khd->hqk", q_part, k_part) / q.shape[-1] ** 0.5
        parts.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v_part))
    return torch.cat(parts)


def packed_rows(lens: list[int], H: int, D: int, device, dtype) -> tuple[torch.Tensor, ...]:
    """q, k and v, strided as one linear layer leaves them; scores range over +-10, so that few keys dominate."""
    qkv = torch.randn(sum(lens), 3, H, D, generator=torch.Generator().manual_seed(D + sum(lens)))
    qkv[:, :2] *= 2
    return qkv.to(device, dtype).unbind(1)


def cumulative(lens: list[int], device) -> torch.Tensor:
    return torch.tensor([0, *lens], device=device).cumsum(0, dtype=torch.int32)


@pytest.mark.thinned(1)
@pytest.mark.parametrize(
    ("D", "H", "lens"),
    [
        (80, 3, [150, 1, 64, 37]),  # more than one tile of keys, one row, exactly one tile, less
        (72, 3, [65, 64, 2]),  # the heads of the larger Qwen3-VL ViTs
        (64, 2, [64, 64, 48]),  # windows
        (16, 2, [129, 128, 4]),
        (64, 4, [96]),
        (16, 2, [40, 0, 0, 25, 0]),  # a CUDA graph has a fixed number of segments
        (24, 4, [33, 31]),  # not a multiple of 16
        (112, 4, [65, 20]),  # the second piece, 48, is not a power of two
        (128, 2, [70, 130]),
        (256, 4, [70, 9]),
    ],
)
def test_segments(D, H, lens, device, dtype):
    q, k, v = packed_rows(lens, H, D, device, dtype)
    cu_seqlens = cumulative(lens, device)
    got = packed_attention_triton(q, k, v, cu_seqlens, max(lens))
    reference = packed_attention_torch(q, k, v, cu_seqlens, max(lens))
    assert got.is_contiguous()
    assert_no_worse(got, reference, exact_attention(q, k, v, lens))


def test_operands_may_have_different_strides(device, dtype):
    lens = [40, 25]
    q, k, v = packed_rows(lens, 2, 80, device, dtype)
    cu_seqlens = cumulative(lens, device)
    want = packed_attention_triton(q, k, v, cu_seqlens, max(lens))
    got = packed_attention_triton(q.contiguous(), k.transpose(0, 1).contiguous().transpose(0, 1), v, cu_seqlens, 40)
    assert torch.equal(got, want)


@pytest.mark.slow
def test_segments_do_not_attend_to_each_other(device, dtype):
    lens = [50, 70, 30]
    q, k, v = (x.clone() for x in packed_rows(lens, 2, 80, device, dtype))
    cu_seqlens = cumulative(lens, device)
    want = packed_attention_triton(q, k, v, cu_seqlens, max(lens))[50:120]
    for x in (q, k, v):
        x[:50] = x[120:] = 1000.0
    assert torch.equal(packed_attention_triton(q, k, v, cu_seqlens, max(lens))[50:120], want)


def test_public_function_works_on_any_device(device, dtype):
    lens = [20, 12]
    q, k, v = packed_rows(lens, 2, 32, device, dtype)
    got = packed_attention(q, k, v, cumulative(lens, device), max(lens))
    reference = packed_attention_torch(q, k, v, cumulative(lens, device), max(lens))
    assert_no_worse(got, reference, exact_attention(q, k, v, lens))
