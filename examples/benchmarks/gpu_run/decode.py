"""Random calls of paged attention with one query per sequence and split contexts, against float64 and the reference.

    python -m gpu_run.decode --calls 20000 --seconds 150

Each call has random lengths, blocks and queries, and is repeated: both results must be equal in every bit, although the
splits may finish in another order. The last line is the result as JSON.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict

import torch
from torch import Tensor

from mmvllm.kernels import paged_attention as file
from mmvllm.kernels.common.accuracy import LARGEST_FACTOR, compare, relative_errors
from mmvllm.kernels.paged_attention import paged_attention_torch, paged_attention_triton

SHAPES = ((12, 2, 128), (28, 4, 128), (32, 8, 80), (5, 1, 64))  # query heads, KV heads, head size
BLOCK_SIZE = 16
KEPT = 256  # random values of each call, which the rule for all calls compares


class RandomCache:
    """Random keys and values of one shape in shuffled blocks; block 0, to which unused entries point, is NaN."""

    def __init__(self, shape: tuple[int, int, int], num_blocks: int, dtype: torch.dtype, device: torch.device):
        self.heads, self.kv_heads, self.head_dim = shape
        size = (2, num_blocks, BLOCK_SIZE, self.kv_heads, self.head_dim)
        self.values = torch.randn(size, device=device).to(dtype)
        self.values[0].mul_(2)  # the keys: scores beyond +-10, so that few keys dominate
        self.values[:, 0] = torch.nan

    def call(self, kv_lens: list[int], generator: torch.Generator) -> tuple:
        """Return the arguments of a call for sequences of these lengths."""
        device, S = self.values.device, len(kv_lens)
        table = torch.zeros(S, -(-max(kv_lens) // BLOCK_SIZE) + 1, dtype=torch.int32)
        blocks = 1 + torch.randperm(self.values.shape[1] - 1, generator=generator)
        for row, kv_len in zip(table, kv_lens, strict=True):
            width = -(-kv_len // BLOCK_SIZE)
            row[:width], blocks = blocks[:width], blocks[width:]
        q = 2 * torch.randn(S, self.heads, self.head_dim, device=device)
        starts, lens = torch.arange(S + 1, dtype=torch.int32), torch.tensor(kv_lens, dtype=torch.int32)
        return q.to(self.values.dtype), *self.values, *(x.to(device) for x in (starts, lens, table)), 1


def exact_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, _, kv_lens: Tensor, table: Tensor, __) -> Tensor:
    """Compute attention by its definition, in float64, on padded contexts."""
    group = q.shape[1] // k_cache.shape[2]
    longest = int(kv_lens.max())
    unseen = torch.arange(longest, device=q.device) >= kv_lens[:, None]  # (S, T)
    k, v = (
        cache[table.long()].flatten(1, 2)[:, :longest].double().masked_fill(unseen[..., None, None], 0.0)
        for cache in (k_cache, v_cache)
    )
    grouped = q.double().unflatten(1, (-1, group))  # (S, K, group, D)
    scores = torch.einsum("skgd,stkd->skgt", grouped, k) / q.shape[-1] ** 0.5
    weights = scores.masked_fill(unseen[:, None, None], -torch.inf).softmax(-1)
    return torch.einsum("skgt,stkd->skgd", weights, v).flatten(1, 2)


def num_splits(cache: RandomCache, lens: list[int]) -> int:
    """Return the number of splits that the kernel makes of the longest context."""
    block_n = file.decode_block_n(cache.head_dim, cache.values.dtype)
    width = -(-max(lens) // BLOCK_SIZE) + 1
    return file.num_splits(len(lens) * cache.kv_heads, width * BLOCK_SIZE, block_n, cache.values.device)


class RandomCalls:
    """Runs random calls, and keeps their counts and errors."""

    def __init__(self, device: torch.device, dtype: torch.dtype, longest: int, num_blocks: int, seed: int):
        self.device, self.dtype, self.longest = device, dtype, longest
        self.generator = torch.Generator().manual_seed(seed)
        self.caches = [RandomCache(shape, num_blocks, dtype, device) for shape in SHAPES]
        self.kept: list[tuple[Tensor, Tensor]] = []
        self.calls = self.wrong = self.differing = 0
        self.splits: list[int] = []

    def once(self) -> None:
        cache = self.caches[self._between(0, len(self.caches) - 1)]
        room = (cache.values.shape[1] - 1) * BLOCK_SIZE
        number = self._between(1, 32)
        shortest = min(130, self.longest)
        lens = [self._between(shortest, self.longest) for _ in range(number)]
        while sum(-(-n // BLOCK_SIZE) * BLOCK_SIZE for n in lens) > room or num_splits(cache, lens) < 2:
            lens.pop()
        self.splits.append(num_splits(cache, lens))
        self._compare(cache.call(lens, self.generator))

    def _compare(self, args: tuple) -> None:
        got, again, reference = (
            paged_attention_triton(*args),
            paged_attention_triton(*args),
            paged_attention_torch(*args),
        )
        exact = exact_attention(*args)
        errors, allowed = relative_errors(got, exact), relative_errors(reference, exact)
        self.calls += 1
        self.differing += not torch.equal(got, again)
        rounding = torch.finfo(self.dtype).eps / 2
        self.wrong += not bool(errors.max() <= LARGEST_FACTOR * allowed.max() + rounding)
        chosen = torch.randint(len(errors), (KEPT,), generator=self.generator).to(self.device)
        self.kept.append((errors[chosen].float().cpu(), allowed[chosen].float().cpu()))

    def result(self, seconds: float) -> dict:
        comparison = compare(*map(torch.cat, zip(*self.kept, strict=True)), self.dtype)
        problem = comparison.problem
        if self.wrong or self.differing:
            problem = f"wrong calls: {self.wrong}; calls that differ when they are repeated: {self.differing}"
        counts = {"calls": self.calls, "wrong_calls": self.wrong, "differing_calls": self.differing}
        splits = {"least_splits": min(self.splits), "most_splits": max(self.splits)}
        return counts | splits | {"seconds": seconds, "problem": problem, "errors": asdict(comparison)}

    def _between(self, low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=self.generator))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=150, help="start no call after this time")
    parser.add_argument("--longest", type=int, default=4096, help="longest context in tokens")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    on_cuda = torch.cuda.is_available()
    device = torch.device("cuda" if on_cuda else "cpu")
    # Triton's interpreter, which runs kernels on a CPU, has wrong products in bfloat16.
    dtype, num_blocks = (torch.bfloat16, 8192) if on_cuda else (torch.float16, 200)
    torch.manual_seed(args.seed)
    run, start = RandomCalls(device, dtype, args.longest, num_blocks, args.seed), time.monotonic()
    while run.calls < args.calls and (not run.calls or time.monotonic() - start < args.seconds):
        run.once()
    result = run.result(time.monotonic() - start)
    print(json.dumps(result))
    return int(result["problem"] is not None)


if __name__ == "__main__":
    sys.exit(main())
