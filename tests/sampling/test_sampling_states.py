"""Rows of running sequences: sequences that come and go, counts that the sampler keeps, tokens that are ignored."""

import numpy as np
import pytest
import torch

from mmvllm import SamplingParams
from mmvllm.sampling.sampler import AsyncSamplerOutput, Sampler
from mmvllm.scheduler.sequence import Sequence

V = 50
EOS = 3
CPU = torch.device("cpu")
PENALTIES = SamplingParams(temperature=1.0, repetition_penalty=1.4, frequency_penalty=0.7, presence_penalty=0.2)
ALL = [
    SamplingParams(),
    PENALTIES,
    SamplingParams(temperature=1.0, top_p=0.7, logprobs=3),
    SamplingParams(temperature=1.5, min_tokens=4, stop_token_ids=[8]),
    SamplingParams(presence_penalty=2.0, logprobs=0),
]


def sequence(params: SamplingParams, seed: int = 1) -> Sequence:
    return Sequence([5, 6, 6, 7], params, request_id="r", block_size=4, seed=seed)


def make_sampler(max_num_seqs: int) -> Sampler:
    return Sampler(frozenset([EOS]), max_num_seqs, V, CPU)


def step(sampler: Sampler, x: torch.Tensor, running: dict[int, Sequence], ahead: int = 0) -> AsyncSamplerOutput:
    """Sample for sequences by row; `ahead` tokens of each are not appended yet."""
    rows, ends = [*running], [len(seq) + ahead for seq in running.values()]
    return sampler(x, np.array(rows, np.int32), np.array(ends, np.int32))


def logits(rows: int, seed: int) -> torch.Tensor:
    return 3 * torch.randn(rows, V, generator=torch.Generator().manual_seed(seed))


def alone(params: SamplingParams, seed: int, steps: list[torch.Tensor]) -> list[int]:
    """The tokens of a sequence whose sampler is new at every token, for logits (1, V) of each step."""
    seq = sequence(params, seed)
    for x in steps:
        sampler = make_sampler(1)
        sampler.add_sequence(0, seq)
        seq.append_token(step(sampler, x, {0: seq}).tokens().token_ids[0])
    return seq.completion_token_ids


@pytest.mark.parametrize("ahead", [False, True])
def test_rows_are_reused_by_other_sequences(ahead):
    """Sequences come and go at 3 indices; each has the tokens that it has alone, also if steps are known late."""
    rng = np.random.default_rng(0)
    sampler = make_sampler(3)
    running: dict[int, Sequence] = {}
    seen: dict[int, tuple[Sequence, list[torch.Tensor]]] = {}
    for number in range(60):
        for row in range(3):
            if row in running and rng.random() < 0.1:
                del running[row]
            if row not in running and rng.random() < 0.5:
                seq = running[row] = sequence(ALL[rng.integers(len(ALL))], seed=number)
                seen[seq.seq_id] = seq, []
                sampler.add_sequence(row, seq)
        order = [int(row) for row in rng.permutation([*running])]
        running = {row: running[row] for row in order}
        x = logits(2 * len(running), number)
        steps = [step(sampler, x[: len(running)], running)]
        if ahead:
            steps += [step(sampler, x[len(running) :], running, ahead=1)]
        for i, launched in enumerate(steps):
            for place, (seq, token_id) in enumerate(zip(running.values(), launched.tokens().token_ids, strict=True)):
                seq.append_token(token_id)
                seen[seq.seq_id][1].append(x[i * len(running) + place][None])
    assert len(seen) > 10
    for seq, steps in seen.values():
        assert seq.completion_token_ids == alone(seq.sampling_params, seq.seed, steps)


@pytest.mark.parametrize("params", ALL, ids=str)
def test_an_ignored_token_does_no_harm(params):
    """A step is launched for a sequence that is preempted meanwhile: it starts again, in another row or the same."""
    steps = list(logits(6, seed=2)[:, None])
    want = alone(params, 1, steps)
    for new_row in (0, 1):
        sampler, seq = make_sampler(2), sequence(params)
        sampler.add_sequence(0, seq)
        for x in steps[:3]:
            seq.append_token(step(sampler, x, {0: seq}).tokens().token_ids[0])
        other = sequence(PENALTIES, seed=9)
        sampler.add_sequence(1, other)
        ignored = step(sampler, logits(2, seed=3), {0: seq, 1: other})
        sampler.add_sequence(new_row, seq)
        ignored.tokens()
        for x in steps[3:]:
            seq.append_token(step(sampler, x, {new_row: seq}).tokens().token_ids[0])
        assert seq.completion_token_ids == want


def test_rows_without_a_token():
    """A row of NaN, and one of which every token is forbidden; the ids that the next step computes exist."""
    x = logits(4, 0)
    x[1] = float("nan")
    x[2] = float("-inf")
    x[2, EOS] = 1.0
    sampler = make_sampler(4)
    for row, params in enumerate([ALL[2], PENALTIES, SamplingParams(min_tokens=1, logprobs=1), SamplingParams()]):
        sampler.add_sequence(row, sequence(params))
    rows = np.arange(4, dtype=np.int32)
    launched = sampler(x, rows, np.full(4, 4, np.int32))
    tokens = launched.tokens()
    assert tokens.token_ids[1:3] == [-1, -1] and min(tokens.token_ids[0], tokens.token_ids[3]) >= 0
    assert [*tokens.logprobs] == [0]
    assert launched.input_ids.dtype == torch.int64 and 0 <= launched.input_ids.min() <= launched.input_ids.max() < V


def test_rows_may_be_given_on_the_device():
    sampler = make_sampler(2)
    for row in range(2):
        sampler.add_sequence(row, sequence(PENALTIES, seed=row))
    rows, ends = np.array([1, 0], np.int32), np.array([4, 4], np.int32)
    want = sampler(logits(2, 1), rows, ends).tokens()
    for row in range(2):
        sampler.add_sequence(row, sequence(PENALTIES, seed=row))
    on_device = torch.from_numpy(np.stack([rows, ends]))
    assert sampler(logits(2, 1), rows, ends, indices_on_device=on_device).tokens() == want


def test_logits_of_bfloat16_are_used_as_in_float32():
    x, found = logits(len(ALL), 7).bfloat16(), []
    for given in (x, x.float()):
        sampler = make_sampler(len(ALL))
        running = {row: sequence(params, seed=row) for row, params in enumerate(ALL)}
        for row, seq in running.items():
            sampler.add_sequence(row, seq)
        found.append(step(sampler, given, running).tokens())
    assert found[0] == found[1]


def test_no_rows():
    empty = np.empty(0, np.int32)
    assert make_sampler(2)(torch.empty(0, V), empty, empty).tokens().token_ids == []


def test_logits_are_not_written_and_logprobs_are_computed_at_once():
    """A CUDA graph overwrites the logits while the copies are on their way."""
    x = logits(2, 5)
    before = x.clone()
    sampler = make_sampler(2)
    for row, params in enumerate([SamplingParams(logprobs=3, min_tokens=1, repetition_penalty=1.5), ALL[2]]):
        sampler.add_sequence(row, sequence(params))
    launched = sampler(x, np.arange(2, dtype=np.int32), np.full(2, 4, np.int32))
    assert torch.equal(x, before)
    x.zero_()
    tokens = launched.tokens()
    for row, token_id in enumerate(tokens.token_ids):
        want = before[row].log_softmax(-1)
        assert tokens.logprobs[row].logprob == pytest.approx(want[token_id].item())


def test_counts_are_kept_only_for_rows_with_penalties():
    sampler = make_sampler(64)
    for row in range(64):
        sampler.add_sequence(row, sequence(SamplingParams(temperature=1.0, logprobs=2)))
    assert len(sampler._states.counts.tensor) == 1
    for row in (9, 60, 9):
        sampler.add_sequence(row, sequence(PENALTIES))
    assert len(sampler._states.counts.tensor) == 4


def test_counts_after_memory_for_more_of_them_was_not_there(monkeypatch):
    """The request that ran out of memory ends; another starts in another row."""
    sampler = make_sampler(2)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "cat", lambda tensors: (_ for _ in ()).throw(torch.OutOfMemoryError("out of memory")))
        with pytest.raises(torch.OutOfMemoryError):
            sampler.add_sequence(0, sequence(PENALTIES))
    sampler.add_sequence(1, sequence(PENALTIES))
    assert sampler._states.counts.tensor[1, 6] == -(2**15)
