"""What may follow: constraints alone against the definition, and in the engine whatever else is in the batch."""

import tracemalloc

import numpy as np
import pytest
import torch
from transformers import NoRepeatNGramLogitsProcessor

from mmvllm import LLM, SamplingParams
from mmvllm.errors import RequestError
from mmvllm.sampling.constraints import (
    AllowedTokens,
    BadWords,
    ConstraintFactory,
    NoRepeatNgrams,
    clear_bits,
    empty_mask,
    set_bits,
)
from mmvllm.scheduler.sequence import Sequence
from tests.helpers.engine.requests import ask, noise_image

V, FULL = 100, 0xFFFFFFFF
GREEDY = {"max_tokens": 12, "ignore_eos": True}


def sequence(token_ids: list[int], num_prompt_tokens: int) -> Sequence:
    seq = Sequence(token_ids[:num_prompt_tokens], SamplingParams(), request_id="", block_size=4)
    for token_id in token_ids[num_prompt_tokens:]:
        seq.append_token(token_id)
    return seq


def followers(constraint, seq: Sequence) -> set[int]:
    mask = np.full(len(empty_mask(V)), FULL, np.uint32)
    constraint.restrict(seq, mask)
    return {token for token in range(V) if mask[token // 32] >> (token % 32) & 1}


def test_bits_are_set_and_cleared_one_by_one():
    mask = empty_mask(V)
    set_bits(mask, [0, 31, 32, 99, 99])
    assert mask.tolist() == [1 | 1 << 31, 1, 0, 8]
    clear_bits(mask, [31, 31, 50, 99])
    assert mask.tolist() == [1, 1, 0, 0]


def test_only_allowed_tokens_follow():
    assert followers(AllowedTokens((0, 31, 32, 99), V), sequence([1], 1)) == {0, 31, 32, 99}


@pytest.mark.parametrize("size", [1, 2, 3, 5, 30, 59, 60, 61])
def test_repeated_ngrams_are_those_of_transformers(size):
    token_ids = np.random.default_rng(size).integers(0, 4, 60).tolist()
    token_ids = token_ids if size < 30 else [0] * 55 + token_ids[:10]
    constraint, reference = NoRepeatNgrams(size), NoRepeatNGramLogitsProcessor(size)
    seq = sequence(token_ids[:3], 3)
    for token_id in token_ids[3:]:
        scores = reference(torch.tensor([seq.token_ids]), torch.zeros(1, V))[0]
        assert followers(constraint, seq) == {*torch.isfinite(scores).nonzero().flatten().tolist()}
        seq.append_token(token_id)


def test_the_memory_for_ngrams_does_not_grow_with_their_size():
    def peak(size: int) -> int:
        seq = sequence(np.random.default_rng(0).integers(0, 9**9, 4000).tolist(), 3)
        tracemalloc.start()
        NoRepeatNgrams(size).restrict(seq, empty_mask(V))
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    assert peak(2000) < 1.2 * peak(2)


class Words:
    """A tokenizer of letters, with single tokens for two pairs of letters."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [ord(letter) % V for letter in text.replace(" ab", "\x01").replace("ab", "\x02")]


def test_a_bad_word_ends_nowhere_in_the_completion():
    a, b, c, space, joined, spaced = 97, 98, 99, 32, 2, 1
    constraint = BadWords(("abc", "b"), Words())
    every = {*range(V)}
    assert followers(constraint, sequence([joined, a], 2)) == every - {b}  # the prompt does not count
    assert followers(constraint, sequence([a, joined], 1)) == every - {b, c}
    assert followers(constraint, sequence([a, a, spaced], 1)) == every - {b, c}
    assert followers(constraint, sequence([a, space, a], 1)) == every - {b}
    assert followers(constraint, sequence([a], 1)) == followers(constraint, sequence([joined], 1)) == every - {b}
    assert constraint.depends_on_text and not BadWords(("b",), Words()).depends_on_text


def test_what_all_sequences_may_share_is_made_once():
    """A request may have 1,024 completions, and words and tokens that take 50 ms each time."""
    factory = ConstraintFactory(Words(), V)
    given = {"bad_words": ["abc"], "allowed_token_ids": [97, 98], "no_repeat_ngram_size": 2}
    one, other = (factory.constraints_of(SamplingParams(**given, seed=seed)) for seed in (1, 2))
    assert [first is second for first, second in zip(one, other, strict=True)] == [True, True, False]
    different = factory.constraints_of(SamplingParams(bad_words=["b"], allowed_token_ids=[97]))
    assert followers(different[0], sequence([1], 1)) == {97} and different[1] is not one[1]
    with pytest.raises(RequestError, match=r"allowed_token_ids must have token ids of this model, .*, got 100"):
        factory.constraints_of(SamplingParams(allowed_token_ids=[5, 100]))


def shout(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    logits[100 + len(token_ids)] += 50
    return logits


def of_both(prompt: list[int], completion: list[int], logits: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.arange(len(logits)) == len(prompt) + len(completion), logits + 50, logits)


CONSTRAINED = [
    {"allowed_token_ids": [5, 6, 7]},
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 2, "repetition_penalty": 1.2},
    {"bad_words": ["star", "There is", "left"]},
    {"logit_bias": {"7": 3.5, 9: -100}, "temperature": 1.0, "seed": 3},
    {"logits_processors": [shout, of_both], "min_tokens": 3},
    {"no_repeat_ngram_size": 1, "temperature": 0.9, "seed": 5, "n": 2, "logprobs": 2},
    {},
]
REQUESTS = [ask(noise_image(60, 50, 1), "What is this?"), {"prompt": "Where is the star?"}]


def run(llm: LLM, chosen: list[int]) -> list:
    requests = [REQUESTS[i % 2] for i in chosen]
    outputs = llm.generate_multimodal(requests, [SamplingParams(**GREEDY | CONSTRAINED[i]) for i in chosen])
    return [[(c.token_ids, c.logprobs) for c in output.completions] for output in outputs]


@pytest.fixture(scope="module")
def alone() -> list:
    """The output of each request, computed alone."""
    llm = LLM(dtype="float32", device="cpu", enable_prefix_caching=False)
    return [run(llm, [i])[0] for i in range(len(CONSTRAINED))]


@pytest.mark.thinned(1)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"async_scheduling": True},
        {"max_num_batched_tokens": 7, "async_scheduling": True},
        {"num_kvcache_blocks": 30, "kvcache_block_size": 4, "max_model_len": 80},
        {"num_kvcache_blocks": 30, "kvcache_block_size": 4, "max_model_len": 80, "async_scheduling": True},
    ],
    ids=str,
)
def test_constraints_hold_in_any_batch(alone, options):
    llm = LLM(dtype="float32", device="cpu", **options)
    for _ in range(2):
        results = run(llm, [*range(len(CONSTRAINED))])
        assert [[ids for ids, _ in result] for result in results] == [[ids for ids, _ in one] for one in alone]
    if "num_kvcache_blocks" in options:
        assert llm.engine.scheduler.num_preemptions


def test_constraints_are_kept(alone):
    assert {*alone[0][0][0]} <= {5, 6, 7}
    assert len({*alone[1][0][0]}) == GREEDY["max_tokens"]
    assert {102, 103} < {*alone[5][0][0]}
    assert all(len({*ids}) == len(ids) for ids, _ in alone[6]) and alone[6][0] != alone[6][1]


def fails(token_ids, logits):
    raise KeyError("colour")


@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"logits_processors": [fails]}, "logits_processors: fails raised KeyError('colour')"),
        (
            {"logits_processors": [lambda ids, logits: logits[1:]]},
            r"<lambda> must return a tensor \[768\], .*, got \[767\]",
        ),
        (
            {"logits_processors": [lambda ids, logits: logits.to("meta")]},
            "dense and of real numbers",
        ),
        (
            {"logits_processors": [lambda ids, logits: logits.to_sparse()]},
            "dense and of real numbers",
        ),
        ({"allowed_token_ids": [5], "no_repeat_ngram_size": 1}, "no token can follow"),
    ],
)
@pytest.mark.parametrize("ahead", [False, True])
def test_a_request_without_a_token_fails_alone(alone, params, message, ahead):
    llm = LLM(dtype="float32", device="cpu", async_scheduling=ahead)
    both = [SamplingParams(**GREEDY), SamplingParams(**GREEDY, **params)]
    good, bad = llm.generate_multimodal([REQUESTS[1]] * 2, both, on_error="return")
    assert good.token_ids == alone[7][0][0]
    assert bad.finish_reason == "error"
    assert isinstance(bad.exception, RequestError) and bad.exception.param in (None, *params)
    with pytest.raises(RequestError, match=message if "(" not in message else None):
        llm.generate_multimodal([REQUESTS[1]], both[1])


@pytest.mark.parametrize("name, value", [("logit_bias", {768: 1.0}), ("allowed_token_ids", [0, 768])])
def test_tokens_that_do_not_exist_are_refused(name, value):
    llm = LLM(dtype="float32", device="cpu", skip_warmup=True)
    with pytest.raises(RequestError, match=rf"{name} must have .* in \[0, 768\), got 768") as caught:
        llm.generate(["Hi"], SamplingParams(**{name: value}))
    assert caught.value.param == name
