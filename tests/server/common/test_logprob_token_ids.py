"""`logprob_token_ids` shows the log-probabilities of chosen tokens, such as "yes" and "no", as in vLLM."""

from math import exp

import pytest

from mmvllm import SamplingParams
from mmvllm.errors import RequestError
from tests.helpers.serving.server import CHAT, COMPLETIONS, answered, chat, chunks_of, completion
from tests.server.refusals import check_refusal

IDS = [70, 5, 700, 5, 71]


def test_all_of_the_vocabulary_sums_to_one(shared_llm):
    size, found = shared_llm.engine.model_config.vocab_size, {}
    for start in range(0, size, 128):
        ids = [*range(start, min(start + 128, size))]
        (output,) = shared_llm.generate("A red", SamplingParams(max_tokens=1, logprob_token_ids=ids), use_tqdm=False)
        (entry,) = output.outputs[0].logprobs
        assert entry.keys() == {*ids, *output.token_ids} and output.cumulative_logprob == entry[output.token_ids[0]]
        found |= entry
    assert sum(map(exp, found.values())) == pytest.approx(1)
    (top,) = shared_llm.generate("A red", SamplingParams(max_tokens=1, logprobs=20), use_tqdm=False)
    assert all(found[token_id] == pytest.approx(value) for token_id, value in top.logprobs[0].items())
    assert all(value.decoded_token is not None for value in found.values())


@pytest.mark.parametrize(
    "keys", [{}, {"n": 2, "temperature": 1.0}, {"logprobs": 3}, {"best_of": 2, "temperature": 1.0}]
)
def test_each_token_of_each_completion_has_them_in_any_batch(keys, shared_llm):
    params = SamplingParams(max_tokens=4, ignore_eos=True, seed=1, logprob_token_ids=IDS, **keys)
    other = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=1)
    (alone,) = shared_llm.generate("A red", params, use_tqdm=False)
    together, _ = shared_llm.generate(["A red", "Which?"], [params, other], use_tqdm=False)
    for completion_, same in zip(alone.outputs, together.outputs, strict=True):
        assert completion_.token_ids == same.token_ids
        for token_id, entry, other_entry in zip(same.token_ids, completion_.logprobs, same.logprobs, strict=True):
            assert next(iter(entry)) == token_id and {*IDS, token_id} <= entry.keys() == other_entry.keys()
            assert all(other_entry[key] == pytest.approx(value, abs=1e-4) for key, value in entry.items())


@pytest.mark.parametrize("ids", [[], [*range(129)], [-1], ["a"], [1.5], "ab"])
def test_other_values_are_refused(ids):
    with pytest.raises(RequestError, match=r"^logprob_token_ids (must be|must have|has) "):
        SamplingParams(logprob_token_ids=ids)


def test_a_token_that_the_vocabulary_does_not_have_is_refused(shared_llm):
    with pytest.raises(RequestError, match=r"logprob_token_ids must have token ids of this model, .*, got 5000"):
        shared_llm.generate("a", SamplingParams(logprob_token_ids=[5000]), use_tqdm=False)


@pytest.mark.parametrize("keys", [{}, {"top_logprobs": 5}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_shows_them_in_place_of_the_most_likely_tokens(stream, keys, app, engine):
    body = chat("Is it red?", max_tokens=3, ignore_eos=True, temperature=0, return_tokens_as_token_ids=True)
    body |= {"logprobs": True, "logprob_token_ids": IDS} | keys
    answers = chunks_of(app, CHAT, body) if stream else [answered(app, CHAT, body)]
    shown = [one["choices"][0]["logprobs"] for one in answers]
    content = [entry for one in shown if one for entry in one["content"]]
    assert len(content) == 3
    for entry in content:
        shown = {one["token"]: one["logprob"] for one in entry["top_logprobs"]}
        assert shown.keys() == {entry["token"], *(f"token_id:{token_id}" for token_id in IDS)}
        assert shown[entry["token"]] == entry["logprob"] == max(shown.values())


@pytest.mark.parametrize("logprobs", [0, 5])
def test_a_completion_shows_them_by_their_texts(logprobs, app, engine):
    body = completion(max_tokens=2, ignore_eos=True, temperature=0, logprobs=logprobs, logprob_token_ids=IDS)
    shown = answered(app, COMPLETIONS, body | {"return_tokens_as_token_ids": True})["choices"][0]["logprobs"]
    for token, top in zip(shown["tokens"], shown["top_logprobs"], strict=True):
        assert top.keys() == {token, *(f"token_id:{token_id}" for token_id in IDS)}


@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, chat("x", logprob_token_ids=IDS)), (COMPLETIONS, completion(logprob_token_ids=IDS))]
)
def test_they_need_logprobs(path, body, app):
    check_refusal(app, path, body, "logprob_token_ids", "needs logprobs")
