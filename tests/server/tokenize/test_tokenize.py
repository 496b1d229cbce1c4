"""Tokens of prompts and texts, by vLLM's names: /tokenize, /detokenize and `return_token_ids`."""

import pytest

from tests.helpers.serving.server import (
    CHAT,
    COMPLETIONS,
    TOKENIZE,
    answered,
    chat,
    chunks_of,
    completion,
    data_uri,
    image_part,
    is_idle,
    png,
    user,
    wait_for,
)
from tests.server.refusals import check_refusal, refusal

DETOKENIZE = "/detokenize"


def tokens_of(app, **body) -> dict:
    return answered(app, TOKENIZE, body)


def test_the_tokens_of_a_text(app, engine):
    got = tokens_of(app, model="bundled", prompt="How many<|im_end|>", return_token_strs=True)
    want = engine.tokenizer("How many<|im_end|>", add_special_tokens=False)["input_ids"]
    assert (got["tokens"], got["count"], got["max_model_len"]) == (want, len(want), 2048)
    assert got["token_strs"] == engine.tokenizer.convert_ids_to_tokens(want)
    assert tokens_of(app, prompt="Hi", add_special_tokens=True)["token_strs"] is None


@pytest.mark.spawns
@pytest.mark.parametrize("keys", [{}, {"max_pixels": 3136}, {"chat_template_kwargs": {"add_vision_id": True}}])
def test_the_tokens_of_a_conversation_are_those_that_it_is_charged_for(app, keys):
    messages = [user(image_part(data_uri()), "Compare", image_part(data_uri(png(100, 60)), detail="low"))]
    count = tokens_of(app, messages=messages, **keys)["count"]
    usage = answered(app, CHAT, chat(messages=messages, max_tokens=1, **keys))["usage"]
    assert count == usage["prompt_tokens"] > usage["prompt_tokens_details"]["image_tokens"] > 0


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_log_probabilities_name_tokens_by_their_ids(app, path):
    keys = {"max_tokens": 3, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    keys |= {"logprobs": True, "top_logprobs": 2} if path == CHAT else {"logprobs": 2, "echo": True}
    body = chat("Hello", **keys) if path == CHAT else completion(**keys)
    plain, named = (
        answered(app, path, body | {"return_tokens_as_token_ids": own})["choices"][0] for own in (False, True)
    )
    ids = named["token_ids"] if path == CHAT else [*named["prompt_token_ids"], *named["token_ids"]]
    if path == CHAT:
        shown, texts = named["logprobs"]["content"], plain["logprobs"]["content"]
        assert [entry["token"] for entry in shown] == [f"token_id:{i}" for i in ids]
        assert [entry["bytes"] for entry in shown] == [entry["bytes"] for entry in texts]
        assert all(len(entry["top_logprobs"]) == 2 for entry in shown)
        assert all(top["token"].startswith("token_id:") for entry in shown for top in entry["top_logprobs"])
    else:
        assert named["logprobs"]["tokens"] == [f"token_id:{i}" for i in ids]
        assert all(name.startswith("token_id:") for one in named["logprobs"]["top_logprobs"] if one for name in one)
        assert named["logprobs"]["text_offset"] == plain["logprobs"]["text_offset"]
    last = chunks_of(app, path, body | {"return_tokens_as_token_ids": True})[-1]
    assert f"token_id:{ids[-1]}" in str(last)


def test_text_and_tokens_are_inverse(app):
    text = "How many 🦊<|im_end|>\n are  there?"
    tokens = tokens_of(app, prompt=text)["tokens"]
    assert answered(app, DETOKENIZE, {"model": "bundled", "tokens": tokens}) == {"prompt": text}


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        (TOKENIZE, {}, "prompt", "is missing"),
        (TOKENIZE, {"prompt": ""}, "prompt", "at least 1 character"),
        (TOKENIZE, {"prompt": "Hi", "model": "other"}, "model", "does not exist"),
        (TOKENIZE, {"prompt": "Hi " * 30000}, "prompt", "maximum context length is 2048 tokens"),
        (TOKENIZE, {"prompt": "<|image_pad|>"}, "prompt", "image"),
        (TOKENIZE, {"messages": [user("Hi")], "prompt": "Hi"}, "prompt", "is not a field"),
        (TOKENIZE, {"messages": [user("Hi")], "chat_template": "{{ messages }}"}, "chat_template", "is not allowed"),
        (DETOKENIZE, {"tokens": []}, "tokens", "at least 1 item"),
        (DETOKENIZE, {"tokens": [5, 10**6]}, "tokens[1]", "the tokenizer has 473 tokens"),
        (DETOKENIZE, {"tokens": [5] * 2049}, "tokens", "at most 2048"),
    ],
)
def test_an_error_names_the_field(app, path, body, param, words):
    check_refusal(app, path, body, param, words)


@pytest.mark.spawns
def test_nothing_is_left_of_a_request_for_tokens(app, engine):
    tokens_of(app, messages=[user(image_part(data_uri()), "Hi")])
    refusal(app, TOKENIZE, {"messages": [user(image_part("data:image/png;base64,AAAA"))]})
    wait_for(lambda: is_idle(engine))


IDS = {"return_token_ids": True, "max_tokens": 5}


@pytest.mark.spawns
def test_a_chat_returns_token_ids(app, engine):
    body = chat("Hi", image_part(data_uri()), n=2, temperature=1, seed=1, **IDS)
    whole = answered(app, CHAT, body)
    assert whole["prompt_token_ids"] == tokens_of(app, messages=body["messages"])["tokens"]
    for choice in whole["choices"]:
        assert engine.tokenizer.decode(choice["token_ids"], skip_special_tokens=True) == choice["message"]["content"]
    chunks = chunks_of(app, CHAT, body)
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    for choice in whole["choices"]:
        own = [one for chunk in chunks for one in chunk["choices"] if one["index"] == choice["index"]]
        assert [i for one in own for i in one.get("token_ids", ())] == choice["token_ids"]


def test_a_completion_returns_token_ids(app):
    body = completion(prompt=["How many", "What"], temperature=0, **IDS)
    whole = answered(app, COMPLETIONS, body)["choices"]
    want = [tokens_of(app, prompt=prompt)["tokens"] for prompt in body["prompt"]]
    assert [choice["prompt_token_ids"] for choice in whole] == want
    choices = [choice for chunk in chunks_of(app, COMPLETIONS, body) for choice in chunk["choices"]]
    for want in whole:
        own = [choice for choice in choices if choice["index"] == want["index"]]
        assert [own[0]["prompt_token_ids"]] == [one["prompt_token_ids"] for one in own if "prompt_token_ids" in one]
        assert own[0]["prompt_token_ids"] == want["prompt_token_ids"]
        assert [i for choice in own for i in choice["token_ids"]] == want["token_ids"]


def test_token_ids_are_returned_beside_an_echo(app):
    body = completion(prompt="How many", temperature=0, echo=True, logprobs=1, n=2, **IDS)
    [first, _] = whole = answered(app, COMPLETIONS, body | {"prompt_logprobs": 1})["choices"]
    assert len(first["prompt_logprobs"]) == len(first["prompt_token_ids"]) > 0
    assert len(first["logprobs"]["tokens"]) == len(first["prompt_token_ids"]) + len(first["token_ids"])
    choices = [choice for chunk in chunks_of(app, COMPLETIONS, body) for choice in chunk["choices"]]
    for choice in whole:
        begun, *others = [one for one in choices if one["index"] == choice["index"]]
        assert begun["text"].startswith("How many") and begun["prompt_token_ids"] == choice["prompt_token_ids"]
        assert begun["text"] + "".join(one["text"] for one in others) == choice["text"]
        assert not any("prompt_token_ids" in one for one in others)
