"""`truncate_prompt_tokens` cuts prompts from the left, as in vLLM, before or after they are tokenized."""

import random

import numpy as np
import pytest

from mmvllm.errors import RequestError
from mmvllm.processors.chat.length_limit import LengthLimit, Truncation
from tests.helpers.engine.requests import ask
from tests.helpers.serving.server import COMPLETIONS, EMBEDDINGS, SCENES, answered, call, completion
from tests.server.refusals import refusal

WORDS = ["a", "red", "circle ", "\n", "ünï", "😺", "  ", "0123456789", "<|im_end|>", "countable"]


def text_of(num_words: int) -> str:
    choose = random.Random(num_words)
    return " ".join(choose.choice(WORDS) for _ in range(num_words))


def prompts_kept(app, prompt, **keys) -> list[list[int]]:
    made = answered(app, COMPLETIONS, completion(prompt=prompt, return_token_ids=True, max_tokens=1) | keys)
    kept = [choice["prompt_token_ids"] for choice in made["choices"]]
    assert made["usage"]["prompt_tokens"] == sum(map(len, kept))
    return kept


@pytest.mark.parametrize("number", [1, 2, 7, 100, 2048, -1])
@pytest.mark.parametrize("as_ids", [False, True])
def test_the_last_tokens_of_each_prompt_are_kept(number, as_ids, app, engine):
    texts = [text_of(num_words) for num_words in (3, 30)]
    tokens = [engine.tokenizer.encode(text) for text in texts]
    want = [ids if number < 0 else ids[-number:] for ids in tokens]
    first = [ids if number < 0 else ids[:number] for ids in tokens]
    given = tokens if as_ids else texts
    assert prompts_kept(app, given, truncate_prompt_tokens=number) == want
    assert prompts_kept(app, given, truncate_prompt_tokens=number, truncation_side="left") == want
    assert prompts_kept(app, given, truncate_prompt_tokens=number, truncation_side="right") == first
    assert prompts_kept(app, tokens[1] if as_ids else texts[1], truncate_prompt_tokens=number) == want[1:]


@pytest.mark.parametrize(("max_tokens", "room"), [(5, 5), (2047, 2047), (-1, 1), (2048, 1), (10**6, 1)])
@pytest.mark.parametrize("num_words", [3000, 200_000])
def test_a_prompt_of_any_length_is_cut_to_what_fits_beside_the_completion(max_tokens, room, num_words, app, engine):
    text = text_of(num_words)
    (kept,) = prompts_kept(app, text, truncate_prompt_tokens=-1, max_tokens=max_tokens, stop=["e", "a", " "])
    assert kept == engine.tokenizer.encode(text)[-(engine.max_model_len - room) :]


def test_a_prompt_that_is_still_too_long_is_refused(app):
    body = completion(prompt=text_of(200_000), truncate_prompt_tokens=2048)
    assert "maximum context length is 2048 tokens" in refusal(app, COMPLETIONS, body)["message"]


@pytest.mark.parametrize(
    ("path", "body"), [(COMPLETIONS, completion()), (EMBEDDINGS, {"model": "bundled", "input": "a"})]
)
def test_more_tokens_than_the_context_has_are_refused_and_a_side_alone(path, body, app):
    error = refusal(app, path, body | {"truncate_prompt_tokens": 2049})
    assert "must be at most max_model_len, 2048, got 2049" in error["message"]
    error = refusal(app, path, body | {"truncation_side": "right"})
    assert "truncation_side needs truncate_prompt_tokens; give both" in error["message"]


@pytest.mark.parametrize(("number", "num_words"), [(1, 30), (7, 20_000), (2048, 30), (-1, 30), (-1, 20_000)])
def test_an_input_of_embeddings_is_cut(number, num_words, app, engine):
    text = text_of(num_words)
    tokens = engine.tokenizer.encode(text)[-(2048 if number < 0 else number) :]
    cut = answered(app, EMBEDDINGS, {"input": [text], "truncate_prompt_tokens": number})
    want = answered(app, EMBEDDINGS, {"input": [tokens]})
    assert cut["usage"]["prompt_tokens"] == want["usage"]["prompt_tokens"] == len(tokens)
    np.testing.assert_allclose(cut["data"][0]["embedding"], want["data"][0]["embedding"], atol=1e-5)


@pytest.mark.parametrize("path", [EMBEDDINGS, COMPLETIONS])
def test_without_a_completion_a_prompt_may_fill_the_context(path, app):
    for num_tokens, status in ((2048, 200), (2049, 400)):
        body = {"input": [5] * num_tokens} if path == EMBEDDINGS else completion(max_tokens=0, echo=True)
        body |= {"prompt": [5] * num_tokens} if path == COMPLETIONS else {}
        assert call(app, "POST", path, json=body).status_code == status


@pytest.mark.parametrize("num_tokens", [1, 3, 50])
def test_a_cut_text_has_the_tokens_of_the_side_that_is_kept(num_tokens, engine):
    limit = LengthLimit.of(engine.tokenizer, 2048)
    for num_words in range(40, 400, 7):
        text = text_of(num_words)
        tokens, tail = (engine.tokenizer.encode(one) for one in (text, limit.cut(text, Truncation(num_tokens))))
        assert tail[-num_tokens:] == tokens[-num_tokens:]
        assert (
            engine.tokenizer.encode(limit.cut(text, Truncation(num_tokens, "right")))[:num_tokens]
            == tokens[:num_tokens]
        )


@pytest.mark.parametrize("value", [0, -1, True, 1.5])
def test_another_value_is_refused_in_python(value, shared_llm):
    with pytest.raises(RequestError, match=r"truncate_prompt_tokens must be an integer of at least 1, got .*"):
        shared_llm.processor({"text": "a", "truncate_prompt_tokens": value})


def test_what_has_no_beginning_to_cut_off_is_refused(shared_llm):
    with pytest.raises(RequestError, match="the beginning of a conversation cannot be cut off"):
        shared_llm.processor(ask("a") | {"truncate_prompt_tokens": 5})
    text = "<|vision_start|><|image_pad|><|vision_end|>"
    with pytest.raises(RequestError, match="cannot be used with images and videos"):
        shared_llm.processor({"text": text, "images": [SCENES[0]], "truncate_prompt_tokens": 5})
