"""Requests whose completions are chosen at the end: `best_of` and beam search, as `LLM` and `AsyncLLM` return them."""

import pytest
import torch

from mmvllm import AsyncLLM, SamplingParams
from mmvllm.errors import RequestError
from tests.helpers.engine.async_engines import async_test, collect
from tests.helpers.engine.engines import assert_idle
from tests.helpers.engine.requests import ask, noise_image

REQUEST = ask(noise_image(91, 64, 1), "Describe this image.")
SAMPLED = {"temperature": 1.0, "seed": 3, "max_tokens": 8}
BEAMS = SamplingParams(beam_width=3, n=2, max_tokens=8)


@pytest.fixture
def llm(checkpoint, make_llm):
    made = make_llm(checkpoint, max_num_seqs=4, kvcache_block_size=4)
    yield made
    assert_idle(made)


def test_best_of_returns_the_most_likely_completions(llm):
    stops = tuple(range(0, 768, 6))  # completions of several lengths
    all_six = llm.generate_multimodal([REQUEST], SamplingParams(**SAMPLED, n=6, logprobs=0, stop_token_ids=stops))[0]
    best = llm.generate_multimodal([REQUEST], SamplingParams(**SAMPLED, n=2, best_of=6, stop_token_ids=stops))[0]
    scores = {tuple(one.token_ids): one.cumulative_logprob / len(one.token_ids) for one in all_six.completions}
    assert len({len(token_ids) for token_ids in scores}) > 1
    ranked = sorted(scores, key=scores.get, reverse=True)[:2]
    assert [tuple(one.token_ids) for one in best.completions] == ranked
    assert [one.score for one in best.completions] == pytest.approx([scores[token_ids] for token_ids in ranked])
    assert all(one.logprobs is None and one.cumulative_logprob < 0 for one in best.completions)
    assert best.num_prompt_tokens == all_six.num_prompt_tokens and best.first_token_time is not None


def test_the_stages_of_best_of_are_those_of_the_completion_that_computed_the_prompt(llm):
    for seed in range(8):  # the prompt is computed once, and its completion is seldom the best
        params = SamplingParams(temperature=1.5, seed=seed, max_tokens=4, best_of=4)
        output = llm.generate_multimodal([{**REQUEST, "cache_salt": str(seed)}], params)[0]
        assert output.first_scheduled_time <= output.first_token_time
        assert seed > 0 or output.encoding_time > 0


def test_best_of_as_many_as_are_returned_is_n(llm):
    plain, same = (
        llm.generate_multimodal([REQUEST], SamplingParams(**SAMPLED, n=3, best_of=best_of))[0] for best_of in (None, 3)
    )
    assert [one.token_ids for one in plain.completions] == [one.token_ids for one in same.completions]
    assert same.completions[0].score is None


def test_the_sum_and_the_score_of_a_hypothesis(llm):
    params = SamplingParams(beam_width=3, n=3, max_tokens=8, length_penalty=0.5, stop_token_ids=tuple(range(0, 768, 5)))
    output = llm.generate_multimodal([REQUEST], params)[0]
    for one in output.completions:
        assert one.score == pytest.approx(one.cumulative_logprob / len(one.token_ids) ** 0.5)
        assert one.finish_reason == ("stop" if one.token_ids[-1] % 5 == 0 else "length")
        assert one.text == llm.tokenizer.decode(one.token_ids, skip_special_tokens=True) and one.logprobs is None
    scores = [one.score for one in output.completions]
    assert scores == sorted(scores, reverse=True)
    assert output.to_dict()["completions"][0]["score"] == scores[0]


def test_one_beam_is_greedy_decoding(llm):
    greedy, beam = (
        llm.generate_multimodal([REQUEST], SamplingParams(max_tokens=8, beam_width=width))[0] for width in (None, 1)
    )
    assert greedy.token_ids == beam.token_ids and beam.finish_reason == "length"


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
@pytest.mark.parametrize("params", [BEAMS, SamplingParams(**SAMPLED, n=2, best_of=4)])
def test_an_abort_returns_the_best_so_far(params, steps, llm):
    engine = llm.engine
    request_id = llm.add_request(REQUEST, params)
    for _ in range(steps):
        engine.step()
    output = engine.abort_request(request_id)
    assert [one.finish_reason for one in output.completions] == ["aborted"] * 2
    assert all(len(one.token_ids) <= steps for one in output.completions)
    assert output.token_ids or steps == 0
    assert output.num_prompt_tokens == len(output.prompt_token_ids) > 0


def test_a_search_of_more_beams_than_sequences_is_refused(llm):
    with pytest.raises(RequestError, match="beam_width is 5, max_num_seqs is 4; lower it or raise") as caught:
        llm.generate_multimodal([REQUEST], SamplingParams(beam_width=5))
    assert (caught.value.param, caught.value.value, caught.value.limit) == ("beam_width", 5, 4)


def test_a_search_of_more_beams_than_tokens_is_refused(checkpoint, make_llm):
    llm = make_llm(checkpoint, max_num_seqs=800)
    with pytest.raises(RequestError, match="beam_width is 768, but only 767 tokens can follow"):
        llm.generate_multimodal([REQUEST], SamplingParams(beam_width=768))


@pytest.mark.parametrize("params", [BEAMS, SamplingParams(**SAMPLED, best_of=2)])
def test_a_stream_is_refused_and_nothing_is_lost(params, llm):
    with pytest.raises(
        RequestError, match="stream is True, but the completions of best_of and of beam search"
    ) as caught:
        list(llm.stream_multimodal([REQUEST], params, stream=True))
    assert caught.value.param == "stream"


def test_logits_that_are_not_numbers_end_a_search_alone(llm, monkeypatch):
    run = llm.engine.model_runner.run
    monkeypatch.setattr(llm.engine.model_runner, "run", lambda *given: torch.full_like(run(*given), torch.nan))
    outputs = [*llm.stream_multimodal([REQUEST], BEAMS, on_error="return")]
    assert "no token can follow" in outputs[0].error
    monkeypatch.undo()
    assert llm.generate_multimodal([REQUEST], BEAMS)[0].error is None


def test_a_warm_prompt_is_cached(llm):
    prompts = [llm.generate_multimodal([REQUEST], BEAMS)[0] for _ in range(2)]
    number = prompts[0].num_prompt_tokens
    assert [output.num_cached_tokens for output in prompts] == [0, (number - 1) // 4 * 4]


@async_test
@pytest.mark.parametrize("params", [BEAMS, SamplingParams(**SAMPLED, n=2, best_of=4)])
async def test_an_async_request_has_one_delta_for_each_completion(params, checkpoint):
    options = {"dtype": "float32", "device": "cpu", "num_kvcache_blocks": 256, "skip_warmup": True}
    async with AsyncLLM(checkpoint, **options) as engine:
        deltas, texts = await collect(engine, REQUEST, params)
        output = deltas[-1].output
        assert [delta.index for delta in deltas] == [0, 1] and deltas[0].output is None
        assert texts == [one.text for one in output.completions]
        assert [delta.token_ids for delta in deltas] == [one.token_ids for one in output.completions]
        assert [delta.finish_reason for delta in deltas] == ["length"] * 2


@async_test
async def test_best_of_and_the_log_probabilities_of_the_prompt(checkpoint):
    """Whichever completions are returned, the prompt is that of the sequence that computed it."""
    options = {"dtype": "float32", "device": "cpu", "num_kvcache_blocks": 256, "skip_warmup": True}
    async with AsyncLLM(checkpoint, **options) as engine:
        alone = (await collect(engine, REQUEST, SamplingParams(max_tokens=0, prompt_logprobs=2)))[0][-1].output
        for seed in range(4):
            params = SamplingParams(temperature=1.0, seed=seed, max_tokens=4, n=1, best_of=3, prompt_logprobs=2)
            (delta,), _ = await collect(engine, REQUEST, params)
            assert delta.prompt_token_ids == alone.prompt_token_ids == delta.output.prompt_token_ids
            for found in (delta, delta.output):
                assert found.prompt_logprobs[0] is None
                for own, want in zip(found.prompt_logprobs[1:], alone.prompt_logprobs[1:], strict=True):
                    assert own == pytest.approx(want, abs=1e-4)


def test_beams_beside_requests_with_log_probabilities_have_the_same_answers(llm):
    """In steps that have candidates of beams, log-probabilities of tokens and of a prompt."""
    many = [
        SamplingParams(max_tokens=8, logprobs=2),
        SamplingParams(beam_width=2, n=2, max_tokens=8),
        SamplingParams(max_tokens=8, logprobs=0, prompt_logprobs=1),
    ]
    together = llm.generate_multimodal([REQUEST] * 3, many)
    for params, output in zip(many, together, strict=True):
        alone = llm.generate_multimodal([REQUEST], params)[0]
        for one, want in zip(output.completions, alone.completions, strict=True):
            assert one.token_ids == want.token_ids
            assert one.cumulative_logprob == pytest.approx(want.cumulative_logprob, abs=1e-4)
            assert [[*found] for found in one.logprobs or ()] == [[*found] for found in want.logprobs or ()]
    assert len(together[2].prompt_logprobs) == together[2].num_prompt_tokens


def test_best_of_completions_without_a_token(llm):
    params = SamplingParams(max_tokens=0, n=2, best_of=3, prompt_logprobs=0)
    output = llm.generate_multimodal([REQUEST], params)[0]
    assert [(one.token_ids, one.score, one.finish_reason) for one in output.completions] == [([], None, "length")] * 2
    assert len(output.prompt_logprobs) == output.num_prompt_tokens


def test_the_checkpoint_s_sampling_does_not_apply_to_beam_search(llm, monkeypatch):
    own = {"temperature": 0.7, "top_p": 0.8, "repetition_penalty": 1.05}
    monkeypatch.setattr(type(llm.engine.model_config), "sampling_defaults", tuple(own.items()), raising=False)
    params = llm.default_sampling_params(beam_width=2)
    assert (params.temperature, params.top_p, params.repetition_penalty) == (0.0, 1.0, 1.05)
    assert llm.default_sampling_params().temperature == 0.7


@pytest.mark.parametrize(
    ("given", "param", "words"),
    [
        ({"beam_width": 0}, "beam_width", "of at least n=1, or None"),
        ({"beam_width": 2, "n": 3}, "beam_width", "beam_width must be an integer of at least n=3, or None, got 2"),
        ({"beam_width": True}, "beam_width", "integer"),
        ({"best_of": 2, "n": 3}, "best_of", "best_of must be an integer in [n=3, 16384], or None, got 2"),
        ({"beam_width": 2, "best_of": 4}, "best_of", "cannot be used with beam search (beam_width=2); leave it out"),
        ({"beam_width": 2, "temperature": 0.5}, "temperature", "temperature is 0.5, but it cannot be used with beam"),
        ({"beam_width": 2, "top_p": 0.5}, "top_p", "cannot be used with beam search"),
        ({"beam_width": 2, "stop": "x"}, "stop", "cannot be used with beam search"),
        ({"beam_width": 2, "logprob_token_ids": [5]}, "logprob_token_ids", "cannot be used with beam search"),
        ({"beam_width": 2, "prompt_logprobs": 0}, "prompt_logprobs", "cannot be used with beam search"),
        ({"beam_width": 2, "max_tokens": 0}, "max_tokens", "an integer of at least 1"),
        ({"beam_width": 2, "max_tokens": 0, "prompt_logprobs": 0}, "max_tokens", "an integer of at least 1"),
        ({"beam_width": 2, "presence_penalty": 1}, "presence_penalty", "cannot be used with beam search"),
        (
            {"length_penalty": 2},
            "length_penalty",
            "length_penalty is 2.0, but it needs beam search (beam_width)",
        ),
        ({"early_stopping": "never"}, "early_stopping", "needs beam search (beam_width); leave it out"),
        ({"beam_width": 2, "early_stopping": "x"}, "early_stopping", "must be True, False or 'never'"),
        ({"beam_width": 2, "early_stopping": 1}, "early_stopping", "must be True, False or 'never'"),
        ({"beam_width": 2, "length_penalty": 11}, "length_penalty", "in [-10, 10]"),
    ],
)
def test_parameters_that_contradict_each_other_are_refused_by_name(given, param, words):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**given)
    assert caught.value.param == param and words in str(caught.value)
