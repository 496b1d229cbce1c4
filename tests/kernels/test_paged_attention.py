"""Attention over the paged KV cache, against float64, with NaN in every slot without a key or value."""

from itertools import accumulate

import pytest
import torch

from mmvllm.kernels.common.accuracy import NUM_VALUES
from mmvllm.kernels.paged_attention import paged_attention, paged_attention_torch, paged_attention_triton
from tests.helpers.models.kernels import assert_no_worse

pytestmark = pytest.mark.thinned


class Step:
    """Random sequences in a shuffled cache of NaN: the arguments of a call, and the exact result in float64."""

    def __init__(self, query_lens, kv_lens, device, dtype, heads=(4, 2), D=16, block_size=16, seed=0):
        self.generator = torch.Generator().manual_seed(1000 * seed + sum(kv_lens) + D)
        (H, K), S = heads, len(kv_lens)
        widths = [-(-n // block_size) for n in kv_lens]
        shuffled = torch.randperm(sum(widths) + 3, generator=self.generator)  # three blocks stay unused
        self.block_table = torch.zeros(S, max(widths) + 2, dtype=torch.int32)
        self.caches = [torch.full((len(shuffled), block_size, K, D), torch.nan, dtype=dtype) for _ in range(2)]
        self.q = (2 * self.normal(sum(query_lens), H, D)).to(dtype)  # scores beyond +-10: few keys dominate
        exact = []
        for s, (queries, kv_len) in enumerate(zip(self.q.split(query_lens), kv_lens, strict=True)):
            blocks, shuffled = shuffled.split([widths[s], len(shuffled) - widths[s]])
            self.block_table[s, : widths[s]] = blocks
            slots = (blocks[:, None] * block_size + torch.arange(block_size)).flatten()[:kv_len]
            k, v = 2 * self.normal(kv_len, K, D), self.normal(kv_len, K, D)
            for cache, x in zip(self.caches, (k, v), strict=True):
                cache.view(-1, K, D)[slots] = x.to(dtype)
            exact.append(exact_attention(queries, k.to(dtype), v.to(dtype)))
        self.exact = torch.cat(exact)
        self.cu_seqlens_q = torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32)
        self.kv_lens = torch.tensor(kv_lens, dtype=torch.int32)
        self.max_query_len = max(query_lens)
        self.device = device

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def args(self) -> list:
        tensors = (self.q, *self.caches, self.cu_seqlens_q, self.kv_lens, self.block_table)
        return [*(x.to(self.device) for x in tensors), self.max_query_len]


def check(query_lens, kv_lens, device, dtype, num_decodes: int = 0, **shape) -> None:
    """The kernel's errors on enough draws for the rule on a GPU, where they vary with its arithmetic; else on one."""
    results, num_values = [], 0
    while not results or (device.type == "cuda" and num_values < NUM_VALUES):
        step = Step(query_lens, kv_lens, device, dtype, **shape, seed=len(results))
        got = paged_attention_triton(*step.args(), num_decodes)
        assert got.is_contiguous()
        results.append((got, paged_attention_torch(*step.args()), step.exact))
        num_values += got.numel()
    assert_no_worse(*map(torch.cat, zip(*results, strict=True)))


def exact_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The definition, in float64: q (n, H, D), for the last n of the tokens of k and v (T, K, D)."""
    n, T, group = len(q), len(k), q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) / q.shape[-1] ** 0.5
    unseen = torch.arange(T) > torch.arange(T - n, T)[:, None]  # (n, T)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(unseen, -torch.inf).softmax(-1), v)


SHAPES = [
    {"heads": (4, 4), "D": 16, "block_size": 4},
    {"heads": (4, 2), "D": 80, "block_size": 16},
    {"heads": (5, 1), "D": 112, "block_size": 16},
    {"heads": (6, 1), "D": 128, "block_size": 256},
    {"heads": (14, 2), "D": 64, "block_size": 5},
    {"heads": (40, 1), "D": 32, "block_size": 16},  # more query heads per KV head than a tile has rows by default
    {"heads": (2, 1), "D": 256, "block_size": 32},
]


@pytest.mark.thinned(1)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decode(shape, device, dtype):
    """One key, the edges of tiles and blocks, and a short context batched with one of many splits."""
    check([1] * 5, [1, 64, 65, 17, 777], device, dtype, **shape)


@pytest.mark.thinned(1)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prefill(shape, device, dtype):
    """Whole prompts, the last chunk of one, and decodes, mixed."""
    check([1, 25, 1, 3, 1, 45], [70, 25, 1, 66, 16, 50], device, dtype, **shape)


@pytest.mark.slow
@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    ("shape", "chunks"),
    [(SHAPES[1], [25]), (SHAPES[3], [45, 1]), (SHAPES[4], [1, 33, 3]), (SHAPES[5], [9, 2])],
    ids=str,
)
def test_decodes_before_chunks(shape, chunks, device, dtype):
    """One long enough for several splits; `num_decodes` may leave out single queries."""
    for num_decodes in (3, 2):
        kv_lens = [70, 1, 300, *(n + 30 for n in chunks)]
        check([1, 1, 1, *chunks], kv_lens, device, dtype, num_decodes, **shape)


@pytest.mark.slow
def test_decodes_take_the_kernel_that_splits_contexts(device, dtype):
    """Rows of a mixed step have the bits that they have in a step of decodes alone, and in one of chunks alone."""
    step = Step([1, 1, 1, 20, 7], [70, 1, 300, 25, 66], device, dtype)
    q, *caches, cu_seqlens_q, kv_lens, block_table, _ = step.args()
    got = paged_attention_triton(*step.args(), 3)
    decodes = paged_attention_triton(q[:3], *caches, cu_seqlens_q[:4], kv_lens[:3], block_table[:3], 1)
    chunks = paged_attention_triton(q[3:], *caches, cu_seqlens_q[3:] - 3, kv_lens[3:], block_table[3:], 20)
    assert torch.equal(got[:3], decodes) and torch.equal(got[3:], chunks)
    assert not torch.equal(paged_attention_triton(*step.args())[:3], decodes)  # the other kernel sums in another order


@pytest.mark.thinned(1)
@pytest.mark.parametrize("chunks", [[32, 32, 6], [1, 50, 19], [35, 35]])
def test_chunks_of_a_prompt(chunks, device, dtype):
    whole = Step([70], [70], device, dtype, heads=(6, 2), D=80)
    q, *caches, _, _, block_table, _ = whole.args()
    got, end = [], 0
    for chunk in chunks:
        end += chunk
        bounds = torch.tensor([0, chunk, end], dtype=torch.int32, device=device)
        chunk_of_q = q[end - chunk : end]
        got.append(paged_attention_triton(chunk_of_q, *caches, bounds[:2], bounds[2:], block_table, chunk))
    assert_no_worse(torch.cat(got), paged_attention_torch(*whole.args()), whole.exact)


@pytest.mark.slow
@pytest.mark.parametrize("query_lens", [[1, 1, 1], [5, 1, 30]])
def test_strided_queries(query_lens, device, dtype):
    """Views of the merged projection's output, and heads first."""
    step = Step(query_lens, [140, 1, 33], device, dtype, D=80)
    q, *others = step.args()
    want = paged_attention_triton(q, *others)
    inside = torch.full((len(q), 4 + 2 * 2, 80), torch.nan, dtype=dtype, device=device)
    inside[:, :4] = q
    for strided in (inside[:, :4], q.transpose(0, 1).contiguous().transpose(0, 1)):
        assert torch.equal(paged_attention_triton(strided, *others), want)


@pytest.mark.slow
def test_split_counts_are_reset(device, dtype):
    """Every call finds the counts of finished splits at zero."""
    steps = [Step([1] * len(kv_lens), kv_lens, device, dtype) for kv_lens in ([300], [1, 200, 9])]
    first = [paged_attention_triton(*step.args()) for step in steps]
    for step, want in zip(steps, first, strict=True):
        assert torch.equal(paged_attention_triton(*step.args()), want)


@pytest.mark.slow
def test_padding_rows_change_nothing(device, dtype):
    """Padding rows of a CUDA graph's batch have at most one key, and a block table of zeros."""
    step = Step([1, 1, 1], [300, 1, 40], device, dtype)
    q, *caches, _, kv_lens, block_table, _ = step.args()
    q = torch.cat([q, q[:2]])
    cu_seqlens_q = torch.arange(6, dtype=torch.int32, device=device)
    kv_lens = torch.cat([kv_lens, torch.tensor([1, 0], dtype=torch.int32, device=device)])
    block_table = torch.cat([block_table, torch.zeros_like(block_table[:2])])
    got = paged_attention_triton(q, *caches, cu_seqlens_q, kv_lens, block_table, 1)
    assert_no_worse(got[:3], paged_attention_torch(*step.args()), step.exact)
    assert not got[4].any()


@pytest.mark.slow
def test_sequences_without_queries_change_nothing(device, dtype):
    """A CUDA graph of mixed steps has a fixed number of sequences."""
    check([1, 1, 40, 0, 0, 20, 0], [70, 1, 90, 0, 0, 20, 0], device, dtype, num_decodes=2)
    check([0, 33, 0], [0, 33, 0], device, dtype)


@pytest.mark.parametrize("query_lens", [[1, 1], [1, 20]])
def test_public_function_works_on_any_device(query_lens, device, dtype):
    step = Step(query_lens, [50, 20], device, dtype)
    assert_no_worse(paged_attention(*step.args()), paged_attention_torch(*step.args()), step.exact)


@pytest.mark.gpu
def test_replays_of_a_cuda_graph_follow_the_lengths():
    device, dtype = torch.device("cuda"), torch.bfloat16
    q, *caches, cu_seqlens_q, kv_lens, block_table, _ = Step([1] * 3, [900, 900, 900], device, dtype).args()
    args = (q, *caches, cu_seqlens_q, kv_lens, block_table, 1)
    paged_attention_triton(*args)  # compile and allocate the counts outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_attention_triton(*args)
    for lens in ([900, 1, 65], [1, 1, 1], [128, 900, 129]):
        kv_lens.copy_(torch.tensor(lens, dtype=torch.int32))
        graph.replay()
        assert torch.equal(out, paged_attention_triton(*args))


@pytest.mark.thinned(1)
@pytest.mark.parametrize("queries", [1, 7])
def test_cache_with_more_than_two_to_the_31_values(queries, device):
    """Memory of a CPU is taken only where it is written."""
    dtype = torch.float16
    step = Step([queries], [40], device, dtype, heads=(8, 8), D=128, block_size=256)
    q, k_cache, v_cache, *lens, block_table, max_query_len = step.args()
    large = torch.empty(2**31 // k_cache[0].numel() + 2, *k_cache.shape[1:], device=device, dtype=dtype)
    large[-2:] = torch.cat([x[block_table[0, :1]] for x in (k_cache, v_cache)])
    # The second to last block holds the keys; in the view offset by one block, the last holds the values.
    block_table = torch.full_like(block_table, len(large) - 2)
    got = paged_attention_triton(q, large, large[1:], *lens, block_table, max_query_len)
    assert_no_worse(got, paged_attention_torch(*step.args()), step.exact)
