"""Sampling equals the logits processors of transformers and follows the expected probabilities."""

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as hf

from mmvllm import SamplingParams
from mmvllm.kernels.penalties import penalize
from mmvllm.kernels.sampling import sample_torch
from mmvllm.sampling.sampler import Sampler
from mmvllm.sampling.sampling_states import SamplingStates
from mmvllm.scheduler.sampler_output import SamplerOutput
from mmvllm.scheduler.sequence import Sequence
from tests.helpers.models.sampling import every_row, with_uniforms

V = 97
EOS = 3


def sequence(params: SamplingParams, prompt=(5, 6, 6, 7), completion=(), seed=1) -> Sequence:
    seq = Sequence(list(prompt), params, request_id="r", block_size=4, seed=seed)
    for token_id in completion:
        seq.append_token(token_id)
    return seq


def logits(rows: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * scale


def make_sampler(seqs: list[Sequence]) -> Sampler:
    """With the sequences in rows 0, 1, ..."""
    sampler = Sampler(frozenset([EOS]), len(seqs), V, torch.device("cpu"))
    for row, seq in enumerate(seqs):
        sampler.add_sequence(row, seq)
    return sampler


def places(seqs: list[Sequence]) -> tuple[np.ndarray, np.ndarray]:
    """`rows` and `ends` of sequences in rows 0, 1, ..."""
    return np.arange(len(seqs), dtype=np.int32), np.array([len(seq) for seq in seqs], np.int32)


def sampled(x: torch.Tensor, seqs: list[Sequence]) -> SamplerOutput:
    return make_sampler(seqs)(x, *places(seqs)).tokens()


def sample(x: torch.Tensor, seqs: list[Sequence]) -> list[int]:
    return sampled(x, seqs).token_ids


def draw(x: torch.Tensor, params: SamplingParams, uniforms: list[float]) -> torch.Tensor:
    """A token of one row of logits (1, V) for each random number."""
    rows = SamplingStates(1, V, x.device)
    rows.add_sequence(0, sequence(params, prompt=()), frozenset())
    packed = with_uniforms(rows.on_device(), uniforms)
    return sample_torch(x.expand(len(uniforms), V), packed, *every_row(len(uniforms)))


def penalized(x: torch.Tensor, seqs: list[Sequence]) -> torch.Tensor:
    rows = SamplingStates(len(seqs), V, x.device)
    for row, seq in enumerate(seqs):
        rows.add_sequence(row, seq, frozenset())
    return penalize(x, rows.counts.tensor, rows.on_device(), every_row(len(seqs))[0])


def reachable(x: torch.Tensor, params: SamplingParams, draws: int = 3000) -> torch.Tensor:
    """Share of draws per token, with evenly spread uniforms: (V,)."""
    tokens = draw(x, params, [(i + 0.5) / draws for i in range(draws)])
    return torch.bincount(tokens, minlength=V) / draws


def test_zero_temperature_is_argmax():
    x = logits(5)
    assert sample(x, [sequence(SamplingParams()) for _ in range(5)]) == x.argmax(-1).tolist()


@pytest.mark.parametrize(
    "params, warpers",
    [
        (SamplingParams(temperature=0.7), [hf.TemperatureLogitsWarper(0.7)]),
        (SamplingParams(temperature=1.0, top_k=5), [hf.TopKLogitsWarper(5)]),
        (SamplingParams(temperature=1.5, top_k=1), [hf.TemperatureLogitsWarper(1.5), hf.TopKLogitsWarper(1)]),
        (SamplingParams(temperature=1.0, top_p=0.8), [hf.TopPLogitsWarper(0.8)]),
        (SamplingParams(temperature=1.0, top_p=0.01), [hf.TopPLogitsWarper(0.01)]),
        (SamplingParams(temperature=1.0, min_p=0.1), [hf.MinPLogitsWarper(0.1)]),
        (
            SamplingParams(temperature=2.0, top_k=20, top_p=0.9, min_p=0.05),
            [
                hf.TemperatureLogitsWarper(2.0),
                hf.TopKLogitsWarper(20),
                hf.TopPLogitsWarper(0.9),
                hf.MinPLogitsWarper(0.05),
            ],
        ),
    ],
)
def test_draws_follow_the_distribution_of_transformers(params, warpers):
    x = logits(1)
    want = x
    for warper in warpers:
        want = warper(torch.zeros(1, 1, dtype=torch.long), want)
    probs = want.softmax(-1)[0]
    got = reachable(x, params)
    assert (got - probs).abs().max() < 1 / 1000  # 3000 evenly spread draws are off by one draw at each end of a token
    assert not got[probs == 0].any()


@pytest.mark.parametrize("temperature", [1e-6, 1e-3])
def test_tiny_temperatures_are_nearly_greedy(temperature):
    x = logits(4, scale=50.0)
    params = SamplingParams(temperature=temperature)
    assert sample(x, [sequence(params) for _ in range(4)]) == x.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [1e-6, 9e-6, 5e-324])
def test_temperatures_below_the_limit_are_greedy_among_equal_logits(temperature):
    """Logits of bfloat16 are often equal; a seed must not choose among them."""
    x = logits(3).clamp(max=2.0)
    assert ((x == 2.0).sum(-1) > 1).all()
    for seed in range(5):
        seqs = [sequence(SamplingParams(temperature=temperature), seed=seed) for _ in range(3)]
        assert sample(x, seqs) == x.argmax(-1).tolist()


def test_rows_with_different_parameters_are_independent():
    params = [
        SamplingParams(),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.5, top_k=3),
        SamplingParams(temperature=1.2, top_p=0.6),
        SamplingParams(temperature=1.0, min_p=0.2, repetition_penalty=1.5),
        SamplingParams(temperature=1.0, frequency_penalty=1.0, logprobs=2),
    ]
    x = logits(len(params), seed=4)
    for trial in range(50):
        seqs = [sequence(p, completion=[1, 1, 2], seed=trial * 10 + i) for i, p in enumerate(params)]
        alone = [sample(x[i : i + 1], [seq])[0] for i, seq in enumerate(seqs)]
        assert sample(x, seqs) == alone


def test_repetition_penalty_equals_transformers():
    x = logits(1)
    params = SamplingParams(repetition_penalty=1.7)
    ids = torch.tensor([[5, 6, 6, 7, 9, 10]])
    want = hf.RepetitionPenaltyLogitsProcessor(1.7)(ids, x.clone())
    seq = sequence(params, completion=(9, 10))
    assert torch.allclose(penalized(x, [seq]), want, rtol=1e-6, atol=0)


def test_presence_and_frequency_penalties_count_only_the_completion():
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    x = logits(2)
    got = penalized(x, [sequence(params, completion=(9, 9, 11)), sequence(SamplingParams())])
    want = x.clone()
    want[0, 9] -= 0.5 + 2 * 0.25
    want[0, 11] -= 0.5 + 0.25
    assert torch.allclose(got, want, rtol=1e-6, atol=1e-6)


def test_min_tokens_forbids_every_end():
    x = torch.zeros(1, V)
    x[0, EOS], x[0, 8], x[0, 20] = 9.0, 8.0, 7.0
    params = SamplingParams(min_tokens=2, stop_token_ids=[8])
    assert sample(x, [sequence(params)]) == [20]
    assert sample(x, [sequence(params, completion=(20,))]) == [20]
    assert sample(x, [sequence(params, completion=(20, 20))]) == [EOS]


def test_logprobs_of_the_tokens_that_each_row_asks_for():
    x = logits(4)
    asked = [(4, 9), None, (96,), tuple(range(V))]
    params = [SamplingParams(logprob_token_ids=ids, repetition_penalty=1.3) for ids in asked]
    params[1] = SamplingParams(logprobs=2)
    seqs = [sequence(SamplingParams()), *map(sequence, params)]
    tokens = sampled(torch.cat([x[:1], x]), seqs)
    assert [*tokens.logprobs] == [1, 2, 3, 4]
    for row, ids in enumerate(asked):
        want, token = x[row].log_softmax(-1), tokens.logprobs[row + 1]
        chosen = tokens.token_ids[row + 1]
        assert next(iter(token.logprobs)) == chosen
        assert set(token.logprobs) == {chosen, *(ids or want.topk(2).indices.tolist())}
        assert all(value == pytest.approx(want[i].item(), abs=1e-5) for i, value in token.logprobs.items())


@pytest.mark.parametrize("count", [0, 1, 5])
def test_logprobs_are_those_of_the_logits_before_penalties(count):
    x = logits(2)
    params = SamplingParams(logprobs=count, repetition_penalty=1.3)
    tokens = sampled(x, [sequence(SamplingParams()), sequence(params)])
    want, token_id = x[1].log_softmax(-1), tokens.token_ids[1]
    assert [*tokens.logprobs] == [1]
    token = tokens.logprobs[1]
    assert token.logprob == pytest.approx(want[token_id].item())
    assert set(token.logprobs) == {token_id, *want.topk(count).indices.tolist()}
    assert all(value == pytest.approx(want[i].item()) for i, value in token.logprobs.items())


def test_the_largest_uniform_draws_a_possible_token():
    x = torch.full((1, V), -50.0)
    x[0, 40] = 0.0
    params = SamplingParams(temperature=1.0, top_k=1)
    for uniform in (0.0, 0.5, 1 - 2**-32):
        assert draw(x, params, [uniform]).tolist() == [40]


@pytest.mark.parametrize(
    "extreme",
    [
        {"temperature": 1e-50},
        {"temperature": 1e300, "min_tokens": 1},
        {"temperature": 1.0, "top_p": 1e-50},
        {"temperature": 1.0, "min_p": 1e-50},
        {"temperature": 1.0, "repetition_penalty": 1e-300},
        {"temperature": 1.0, "repetition_penalty": 1e300, "frequency_penalty": 2.0},
        {"temperature": 1.0, "min_tokens": 1, "stop_token_ids": [V, 10**9]},
    ],
)
def test_extreme_parameters_draw_a_token_and_do_not_affect_other_rows(extreme):
    x = logits(2, scale=10.0)
    mild = sequence(SamplingParams(temperature=1.0))
    tokens = sample(x, [sequence(SamplingParams(**extreme), completion=() if "min_tokens" in extreme else (5,)), mild])
    assert 0 <= tokens[0] < V and tokens[1] == sample(x[1:], [mild])[0]
    if extreme.get("temperature") == 1e-50 or extreme.get("top_p") == 1e-50:
        assert tokens[0] == x[0].argmax()


def test_candidates_are_those_of_transformers_whose_processors_get_log_probabilities():
    """In a batch with other sequences, whose tokens do not depend on it."""
    beam = SamplingParams(beam_width=3, repetition_penalty=1.7, min_tokens=2, stop_token_ids=(11,))
    wide, plain = SamplingParams(beam_width=5, ignore_eos=True), SamplingParams(repetition_penalty=1.7, logprobs=2)
    seqs = [sequence(plain), sequence(beam, completion=(9,)), sequence(wide), sequence(plain)]
    x = logits(4)
    x[1, [EOS, 11]] = 20.0  # forbidden by min_tokens
    got = sampled(x, seqs)
    assert got.token_ids[::3] == sample(x[::3], seqs[::3]) and [*got.logprobs] == [0, 3]
    assert {at: len(found) for at, found in got.candidates.items()} == {1: 3 + 2, 2: 5}
    history = torch.tensor([seqs[1].token_ids])
    scores = hf.RepetitionPenaltyLogitsProcessor(1.7)(history, x[1:2].log_softmax(-1))
    scores = hf.MinNewTokensLengthLogitsProcessor(4, 2, [EOS, 11], device="cpu")(history, scores)
    for found, want in ((got.candidates[1], scores[0]), (got.candidates[2], x[2].log_softmax(-1))):
        best = want.topk(len(found))
        assert [token_id for token_id, _ in found] == best.indices.tolist()
        assert [logprob for _, logprob in found] == pytest.approx(best.values.tolist(), rel=1e-6)


def test_tokens_that_cannot_follow_are_no_candidates():
    x = logits(2)
    x[0] = torch.nan
    x[1, 2:] = float("-inf")
    found = sampled(x, [sequence(SamplingParams(beam_width=4)) for _ in range(2)]).candidates
    assert found[0] == [] and sorted(token_id for token_id, _ in found[1]) == [0, 1]
