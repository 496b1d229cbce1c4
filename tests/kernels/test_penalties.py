"""Penalties compared with their reference and with the definition; counts of tokens."""

import pytest
import torch
from torch import Tensor

from mmvllm.kernels.penalties import (
    count_tokens,
    count_tokens_torch,
    count_tokens_triton,
    penalize,
    penalize_torch,
    penalize_triton,
)
from tests.helpers.models.sampling import every_row, row_params

INF = float("inf")
SETTINGS = [  # repetition, presence, frequency
    (1.0, 0.0, 0.0),
    (1.7, 0.0, 0.0),
    (0.5, 0.0, 0.0),
    (1.0, 1.5, 0.0),
    (1.0, 0.0, -0.7),
    (1.3, -0.4, 0.9),
]
R = len(SETTINGS)


def make_params(V: int, device) -> Tensor:
    """Rows of `SETTINGS` with their own counts, but for the first, which has no penalties."""
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    setting = {name: torch.tensor(values) for name, values in zip(names, zip(*SETTINGS, strict=True), strict=True)}
    return row_params(R, V, counts_row=torch.tensor([0, 3, 1, 2, 5, 4]), **setting, device=device)


def make_counts(V: int, device) -> Tensor:
    """(R, V): tokens in neither, in the prompt, in the completion, and in both."""
    generator = torch.Generator().manual_seed(V)
    counts = torch.randint(-2, 3, (R, V), generator=generator).clamp(min=0)
    counts[:, ::7] = 300
    counts -= 2**15 * (torch.rand(R, V, generator=generator) < 0.3).long()
    return counts.to(device, torch.int16)


def define(logits: Tensor, counts: Tensor, repetition: float, presence: float, frequency: float) -> Tensor:
    """One row in float64."""
    logits, number = logits.double(), counts.long() & 0x7FFF
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    return torch.where(counts != 0, repeated, logits) - presence * (number > 0) - frequency * number


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("V, block", [(1, 16), (100, 16), (1000, 1024)])
def test_equal_to_the_reference_and_the_definition(V, block, dtype, device):
    wide = torch.full((R, V + 3), INF, dtype=dtype, device=device)
    logits = wide[:, :V]
    logits.copy_(3 * torch.randn(R, V, generator=torch.Generator().manual_seed(0)))
    params, counts = make_params(V, device), make_counts(V, device)
    order = torch.tensor([4, 0, 2, 3, 5, 1])
    rows, before = order.to(device, torch.int32), logits.clone()
    counts_rows = [0, 3, 1, 2, 5, 4]
    settings = [(logits[r].cpu(), counts[counts_rows[row]].cpu(), *SETTINGS[row]) for r, row in enumerate(order)]
    want = torch.stack([define(*setting) for setting in settings])
    results = [
        penalize(logits, counts, params, rows),
        penalize_torch(logits, counts, params, rows),
        penalize_triton(logits, counts, params, rows, block=block),
    ]
    for got in results:
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.cpu().double(), want, rtol=3e-7, atol=3e-5)  # of 300 * 0.9
        assert torch.equal(got[1].cpu(), before[1].cpu().float())  # without penalties
    assert torch.equal(logits, before)


def test_infinite_logits_stay_infinite(device):
    V = 10
    logits = torch.full((R, V), -INF, device=device)
    logits[:, 3], logits[:, 4] = INF, 0.0
    args = (logits, make_counts(V, device), make_params(V, device), every_row(R, device)[0])
    for got in (penalize_torch(*args), penalize_triton(*args, block=16)):
        assert (got[:, 3] == INF).all() and got[:, 4].isfinite().all()
        assert (got[:, [0, 1, 2, *range(5, V)]] == -INF).all()


@pytest.mark.parametrize("count", [count_tokens, count_tokens_torch, count_tokens_triton])
def test_counts_saturate_and_keep_the_mark_of_the_prompt(count, device):
    V, in_prompt = 8, -(2**15)
    counts = torch.zeros(R, V, dtype=torch.int16, device=device)
    counts[3], counts[1], counts[2] = in_prompt, 2**15 - 2, -2
    rows = every_row(R, device)[0]
    token_ids = torch.tensor([5, 1, 0, 7, 2, 3], device=device)
    for _ in range(3):
        count(counts, make_params(V, device), rows, token_ids)
    want = torch.zeros(R, V, dtype=torch.int16)
    want[3], want[1], want[2] = in_prompt, 2**15 - 2, -2
    want[3, 1], want[1, 0], want[2, 7], want[5, 2], want[4, 3] = in_prompt + 3, 2**15 - 1, -1, 3, 3
    assert torch.equal(counts[1:].cpu(), want[1:])  # row 0 is of sequences without penalties
