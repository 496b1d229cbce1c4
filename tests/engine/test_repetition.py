"""Completions that repeat themselves: the search against brute force, and engines that end them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmvllm import SamplingParams
from mmvllm.engine.output_processor import (
    MAX_REPEATED_PERIOD,
    MIN_REPEATED_TOKENS,
    MIN_REPEATS,
    OutputProcessor,
    repetition_length,
    tokens_until_repetition,
)
from mmvllm.scheduler.sequence import FinishReason, Sequence
from tests.helpers.engine.ahead import PROMPTS
from tests.helpers.engine.engines import assert_idle, begin_together

LONG = {"max_tokens": 300, "ignore_eos": True, "frequency_penalty": -2.0}  # the penalty makes loops


def repeats(token_ids: list[int]) -> bool:
    """Whether the end is a pattern of at most MAX_REPEATED_PERIOD tokens that is repeated often enough."""
    for period in range(1, MAX_REPEATED_PERIOD + 1):
        length = max(MIN_REPEATED_TOKENS, MIN_REPEATS * period)
        tail = token_ids[-length:]
        if len(tail) == length and all(tail[i] == tail[i - period] for i in range(period, length)):
            return True
    return False


def first_end(token_ids: list[int]) -> int | None:
    """The number of tokens after which a completion is ended, by brute force."""
    return next((n for n in range(1, len(token_ids) + 1) if repeats(token_ids[:n])), None)


def guarded(token_ids: list[int], prompt: list[int], **params) -> tuple[int, FinishReason | None]:
    """The number of tokens after which the engine ends this completion, and why."""
    seq = Sequence(prompt, SamplingParams(max_tokens=2000, **params), request_id="a", block_size=4)
    processor, reason = OutputProcessor(None, frozenset()), None
    for token_id in token_ids:
        seq.append_token(token_id)
        if reason := processor.finish_reason(seq):
            break
    return seq.num_completion_tokens, reason


@st.composite
def completions(draw) -> list[int]:
    """Noise, and patterns that are repeated a number of times and a part, sometimes with one wrong token."""
    token_ids: list[int] = []
    for _ in range(draw(st.integers(1, 4))):
        size = draw(st.integers(1, MAX_REPEATED_PERIOD + 6) | st.integers(1, 4))
        pattern = draw(st.lists(st.integers(0, draw(st.sampled_from([1, 3, 500]))), min_size=size, max_size=size))
        run = (pattern * 130)[: draw(st.integers(1, MIN_REPEATS * max(size, 16) + 8))]
        if draw(st.booleans()):
            run[draw(st.integers(0, len(run) - 1))] = 777
        token_ids += run
    return token_ids


@pytest.mark.slow
@settings(max_examples=150)
@given(completions(), st.lists(st.integers(0, 1), max_size=80))
def test_a_completion_ends_where_brute_force_says(token_ids, prompt):
    want = first_end(token_ids)
    expected = (len(token_ids), None) if want is None else (want, FinishReason.REPETITION)
    assert guarded(token_ids, prompt, stop_on_repetition=True) == expected
    assert guarded(token_ids, prompt) == (len(token_ids), None)


@pytest.mark.parametrize(("period", "tokens"), [(1, 64), (2, 64), (16, 64), (17, 68), (64, 256)])
def test_the_thresholds(period, tokens):
    assert repetition_length(period) == tokens
    token_ids = [*range(period)] * 300
    assert guarded(token_ids, [5] * 100, stop_on_repetition=True) == (tokens, FinishReason.REPETITION)
    assert guarded([*range(MAX_REPEATED_PERIOD + 1)] * 9, [], stop_on_repetition=True)[1] is None


def test_what_is_repeated_a_few_times_is_meant():
    zeros = [1, 2] * (MIN_REPEATED_TOKENS // 2 - 1) + [1]
    assert guarded([*zeros, 3] * 3, [], stop_on_repetition=True)[1] is None
    assert guarded([*range(20)] * 3 + [99], [], stop_on_repetition=True)[1] is None


def test_min_tokens_and_stop_conditions_come_first():
    assert guarded([3] * 300, [], stop_on_repetition=True, min_tokens=100) == (100, FinishReason.REPETITION)
    assert guarded([3] * 300, [], stop_on_repetition=True, stop_token_ids=[3]) == (1, FinishReason.STOP)


def test_few_tokens_are_searched():
    """Each search says how many tokens need none; texts of few different tokens, such as coordinates, are the worst."""
    rng = np.random.default_rng(0)
    for token_ids in (rng.integers(0, 50_000, 4000).tolist(), rng.integers(0, 3, 4000).tolist()):
        at = num_searches = 0
        while at <= len(token_ids):
            at += tokens_until_repetition(token_ids[:at], 0)
            num_searches += 1
        assert num_searches <= len(token_ids) / 20


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", ["gqa3-untied"], indirect=True)
@pytest.mark.parametrize("which", range(len(PROMPTS)))
def test_engines_end_loops_in_every_way(which, checkpoint, make_llm, monkeypatch):
    """Chunked, preempted and launched ahead, alone and among others, a completion ends at the same token."""
    plain = make_llm(checkpoint, async_scheduling=False)
    whole = plain.generate_multimodal([PROMPTS[which]], SamplingParams(**LONG))[0]
    end = first_end(whole.token_ids)
    assert end is not None and whole.finish_reason == "length"
    text = plain.tokenizer.decode(whole.token_ids[:end], skip_special_tokens=True)
    want = (whole.token_ids[:end], "repetition", text)
    num_blocks = 3 * (-(-(whole.num_prompt_tokens + end) // 4))  # of three requests
    tight = {"kvcache_block_size": 4, "num_kvcache_blocks": num_blocks, "enable_prefix_caching": False}
    for options in ({}, {"max_num_batched_tokens": 7}, tight):
        for is_ahead in (False, True):
            llm = make_llm(checkpoint, async_scheduling=is_ahead, **options)
            params = SamplingParams(**LONG, stop_on_repetition=True)
            begin_together(monkeypatch, llm, 4)
            outputs = llm.generate_multimodal([PROMPTS[which]] * 4, params)
            assert [(one.token_ids, one.finish_reason, one.text) for one in outputs] == [want] * 4
            assert_idle(llm)
            assert options is not tight or llm.engine.scheduler.num_preemptions > 0
