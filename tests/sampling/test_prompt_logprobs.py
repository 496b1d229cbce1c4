"""Log-probabilities and vectors of prompts equal transformers', in every family and in any batch."""

import json
import pickle

import numpy as np
import pytest
import torch

from mmvllm import SamplingParams
from mmvllm.pooling_params import PoolingParams
from mmvllm.sampling import prompt_logprobs
from tests.helpers.engine.prompt_reads import (
    GREEDY,
    ONLY_READING,
    REQUESTS,
    Expected,
    add_all,
    check_all,
    check_logprobs,
    finish,
)
from tests.helpers.engine.rank_threads import use_rank_threads
from tests.helpers.models.shapes import RICHEST

WAYS = [
    pytest.param({"async_scheduling": False}, id="plain"),
    pytest.param({"async_scheduling": True}, id="ahead"),
    pytest.param({"async_scheduling": True, "max_num_batched_tokens": 9, "kvcache_block_size": 4}, id="chunks"),
    pytest.param({"async_scheduling": False, "max_num_seqs": 1, "max_num_batched_tokens": 30}, id="one at a time"),
]


@pytest.fixture(scope="module")
def expected(reference):
    """Return what transformers says of a request in the checkpoint of a shape."""
    made = {}

    def get(shape: str, name: str) -> Expected:
        if (shape, name) not in made:
            made[shape, name] = Expected.of(reference(shape), REQUESTS[name])
        return made[shape, name]

    return get


@pytest.mark.thinned(1)
@pytest.mark.parametrize("options", WAYS)
@pytest.mark.parametrize("shape", RICHEST)
def test_what_is_read_equals_transformers(shape, options, checkpoints, make_llm, expected, monkeypatch):
    """Cold, and with all prompts in the prefix cache; logits of few rows at a time."""
    monkeypatch.setattr(prompt_logprobs, "CHUNK_TOKENS", 7)
    llm = make_llm(checkpoints(shape), **options)
    for _ in range(2):
        groups = {name: add_all(llm, name) for name in REQUESTS}
        finish(llm)
        for name, made in groups.items():
            check_all(made, expected(shape, name))


@pytest.mark.network
@pytest.mark.parametrize("shape", [RICHEST[0], *(pytest.param(name, marks=pytest.mark.slow) for name in RICHEST[1:])])
def test_ranks_that_share_a_model_read_the_same(shape, checkpoints, make_llm, expected, monkeypatch):
    use_rank_threads(monkeypatch)
    monkeypatch.setattr(prompt_logprobs, "CHUNK_TOKENS", 7)
    llm = make_llm(checkpoints(shape), tensor_parallel_size=2, max_num_batched_tokens=40, async_scheduling=True)
    groups = add_all(llm, "two")
    finish(llm)
    check_all(groups, expected(shape, "two"))


@pytest.mark.thinned(1)
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("ahead", [True, False])
def test_preemption_at_each_step(ahead, caching, checkpoints, make_llm, expected):
    """Rows are read once, and in order: a mean would count some twice."""
    options = {"async_scheduling": ahead, "enable_prefix_caching": caching}
    llm = make_llm(checkpoints(RICHEST[0]), kvcache_block_size=4, max_num_batched_tokens=50, **options)
    at, steps = 0, 1
    while at < steps:
        groups = add_all(llm, "text")
        steps = finish(llm, at)
        check_all(groups, expected(RICHEST[0], "text"))
        at += 1
    assert at > 5


def num_computed(llm) -> list[int]:
    """Tokens of each step from now on."""
    counts: list[int] = []
    llm.engine.on_step = lambda stats: counts.append(stats.num_prefill_tokens)
    return counts


def test_only_as_much_of_the_prefix_cache_is_used_as_leaves_the_rows(checkpoints, make_llm):
    llm = make_llm(checkpoints(RICHEST[0]), kvcache_block_size=4)
    prompt = llm.processor(REQUESTS["text"])
    length, counts = len(prompt.token_ids), num_computed(llm)
    options = {
        "cold": (GREEDY, {}),
        "last": (None, {"pooling": PoolingParams()}),
        "mean": (None, {"pooling": PoolingParams(pooling="mean")}),
        "all": (ONLY_READING, {}),
        "the end": (ONLY_READING, {"prompt_logprobs_from": length - 9}),
    }
    computed = {}
    for name, (params, keys) in options.items():
        group = llm.engine.add(prompt, params, **keys)
        finish(llm)
        computed[name] = sum(counts)
        counts.clear()
        assert group.output.num_cached_tokens == length - computed[name]
    cached = (length - 1) // 4 * 4
    assert computed["cold"] == computed["mean"] == computed["all"] == length
    assert computed["last"] == length - cached
    assert computed["the end"] == length - (length - 10) // 4 * 4
    assert group.output.prompt_logprobs[: length - 9] == [None] * (length - 9)
    assert all(group.output.prompt_logprobs[length - 9 :]) and len(group.output.prompt_logprobs) == length


def test_logits_of_a_prompt_never_exist_all_at_once(checkpoints, make_llm):
    llm = make_llm(checkpoints(RICHEST[0]))
    rows, model = [], llm.engine.model_runner.model
    model.lm_head.register_forward_hook(lambda module, args, output: rows.append(len(output)))
    output = llm.generate([5] * 500, ONLY_READING, use_tqdm=False)[0]
    assert max(rows) == prompt_logprobs.CHUNK_TOKENS and sum(rows) == 499 == len(output.prompt_logprobs) - 1


def test_logprobs_have_ranks_and_texts_and_are_numbers(checkpoints, make_llm, expected):
    llm = make_llm(checkpoints(RICHEST[0]))
    params = SamplingParams(max_tokens=4, ignore_eos=True, logprobs=2, prompt_logprobs=1, temperature=1.5, seed=1)
    output = llm.generate_multimodal(REQUESTS["two"], params)[0]
    check_logprobs(output, expected(RICHEST[0], "two"), 1)
    for entries in (output.prompt_logprobs[1:], output.logprobs):
        for token_id, logprob in ((key, value) for entry in entries for key, value in entry.items()):
            assert logprob == logprob.logprob and logprob.rank >= 1
            assert logprob.decoded_token == llm.tokenizer.decode([token_id])
    assert [next(iter(entry)) for entry in output.logprobs] == output.token_ids
    assert output.cumulative_logprob == pytest.approx(sum(next(iter(entry.values())) for entry in output.logprobs))
    copy = pickle.loads(pickle.dumps(output.logprobs))
    assert copy == output.logprobs
    assert [[value.rank for value in entry.values()] for entry in copy] == [
        [value.rank for value in entry.values()] for entry in output.logprobs
    ]
    assert json.loads(json.dumps(output.to_dict()))["prompt_logprobs"][0] is None


def test_a_cumulative_logprob_needs_no_likely_tokens(checkpoints, make_llm):
    llm = make_llm(checkpoints(RICHEST[0]))
    output = llm.generate([5, 6, 7], SamplingParams(max_tokens=3, ignore_eos=True, logprobs=0), use_tqdm=False)[0]
    assert [len(entry) for entry in output.logprobs] == [1, 1, 1]
    assert output.cumulative_logprob == pytest.approx(sum(next(iter(entry.values())) for entry in output.logprobs))
    assert llm.generate([5], SamplingParams(max_tokens=1), use_tqdm=False)[0].cumulative_logprob is None


@pytest.mark.parametrize("keys", [{"pooling": PoolingParams()}, {"sampling_params": ONLY_READING}])
def test_hidden_states_that_are_not_numbers_end_their_request(keys, checkpoints, make_llm):
    llm = make_llm(checkpoints(RICHEST[0]))
    with torch.inference_mode():
        llm.engine.model_runner.model.decoder.norm.weight.fill_(float("nan"))
    group = llm.engine.add(llm.processor(REQUESTS["text"]), **keys)
    finish(llm)
    assert "not numbers" in group.output.error


def test_a_prompt_of_one_token_has_nothing_to_read(checkpoints, make_llm):
    llm = make_llm(checkpoints(RICHEST[0]))
    output = llm.generate([5], SamplingParams(max_tokens=0, prompt_logprobs=1), use_tqdm=False)[0]
    assert output.prompt_logprobs == [None] and output.finish_reason == "length"
    vector = llm.embed([5], pooling="mean")[0].embedding
    np.testing.assert_allclose(vector, llm.embed([5])[0].embedding, atol=1e-6)


def test_several_completions_of_no_token(checkpoints, make_llm):
    llm = make_llm(checkpoints(RICHEST[0]), kvcache_block_size=4)
    params = SamplingParams(max_tokens=0, prompt_logprobs=0, n=3)
    output = llm.generate([[5] * 10], params, use_tqdm=False)[0]
    assert [(one.token_ids, one.finish_reason) for one in output.completions] == [([], "length")] * 3
    assert len(output.prompt_logprobs) == 10
    [delta] = llm.stream_multimodal({"prompt_token_ids": [5] * 4}, ONLY_READING, stream=True)
    assert len(delta.output.prompt_logprobs) == 4 and (delta.text, delta.finish_reason) == ("", "length")


def test_a_prompt_may_fill_the_context_if_nothing_is_generated(checkpoints, make_llm):
    llm = make_llm(checkpoints(RICHEST[0]), max_model_len=20)
    assert llm.embed([5] * 20)[0].num_prompt_tokens == 20
    assert len(llm.generate([5] * 20, ONLY_READING, use_tqdm=False)[0].prompt_logprobs) == 20
    with pytest.raises(ValueError, match=r"prompt has 21 tokens, the maximum context length is 20 tokens \(max_model"):
        llm.embed([5] * 21)
    with pytest.raises(ValueError, match="20 tokens and the completion at least one"):
        llm.generate([5] * 20, GREEDY)


def test_logprobs_of_a_part_must_begin_in_the_prompt(checkpoints, make_llm):
    llm = make_llm(checkpoints(RICHEST[0]))
    for first in (0, 4):
        with pytest.raises(
            ValueError, match=rf"prompt_logprobs_from must be in \[1, 3\], tokens of the prompt, got {first}"
        ):
            llm.engine.add(llm.engine.input_processor.engine_input([5, 6, 7]), ONLY_READING, prompt_logprobs_from=first)
