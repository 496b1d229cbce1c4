"""Options and routes that programs for vLLM's server use."""

import pytest

from tests.helpers.serving.server import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    TOKENIZE,
    answered,
    call,
    chat,
    chunks_of,
    make_app,
)
from tests.server.refusals import refusal

TEXT = {"prompt": "Hello", "max_tokens": 3, "ignore_eos": True}
TALK = chat("Hello", max_tokens=3, ignore_eos=True)
TIMES = {"queue_time_ms", "time_to_first_token_ms", "generation_time_ms", "mean_itl_ms", "tokens_per_second"}


@pytest.mark.parametrize(("path", "body"), [(CHAT, TALK), (COMPLETIONS, TEXT)])
def test_each_chunk_has_the_usage_if_the_server_says_so(path, body, engine):
    options = {"include_usage": False}
    for given in (body, body | {"stream_options": options}):
        chunks = chunks_of(make_app(engine, enable_force_include_usage=True), path, given)
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts) and counts[-1] == 3 and not chunks[-1]["choices"]
    assert "usage" not in chunks_of(make_app(engine), path, body)[0]


@pytest.mark.parametrize(("path", "body"), [(CHAT, TALK), (COMPLETIONS, TEXT)])
def test_times_are_in_the_response_with_one_choice_if_the_server_says_so(path, body, engine):
    app = make_app(engine, enable_per_request_metrics=True)
    times = answered(app, path, body)["metrics"]
    assert times.keys() == TIMES and all(value > 0 for value in times.values())
    assert times["generation_time_ms"] == pytest.approx(2 * times["mean_itl_ms"])
    assert times["tokens_per_second"] == pytest.approx(1000 / times["mean_itl_ms"])
    last = chunks_of(app, path, body | {"stream_options": {"include_usage": True}})[-1]
    assert last["metrics"].keys() == TIMES and last["usage"]["completion_tokens"] == 3
    assert not any("metrics" in chunk for chunk in chunks_of(app, path, body))
    assert "metrics" not in answered(app, path, body | {"n": 2})
    assert "metrics" not in answered(make_app(engine), path, body)


def test_times_that_a_request_does_not_have_are_null(engine):
    app = make_app(engine, enable_per_request_metrics=True)
    assert answered(app, COMPLETIONS, TEXT | {"max_tokens": 1})["metrics"]["mean_itl_ms"] is None
    scored = answered(app, COMPLETIONS, {"prompt": "Hello", "max_tokens": 0, "echo": True, "logprobs": 0})
    assert scored["metrics"]["time_to_first_token_ms"] is None
    assert "metrics" not in answered(app, COMPLETIONS, TEXT | {"prompt": ["Hello", "Hi"]})


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, TALK | {"temperature": 0}),
        (COMPLETIONS, TEXT | {"temperature": 0}),
        (EMBEDDINGS, {"input": "Hello"}),
        (EMBEDDINGS, {"input": ["Hello"], "dimensions": 4}),
    ],
)
def test_an_invocation_is_what_its_fields_say(path, body, app):
    own, invoked = answered(app, path, body), answered(app, "/invocations", body)
    assert own.keys() == invoked.keys() and own["object"] == invoked["object"]
    for field in ("choices", "data", "usage"):
        assert own.get(field) == invoked.get(field)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ([], None),
        ({"prompt": "Hi", "messages": []}, "messages"),
        ({"input": "Hi", "max_tokens": 3}, "max_tokens"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        (TALK | {"no_such_field": 1}, "no_such_field"),
    ],
)
def test_an_invocation_that_is_nothing_of_these_is_refused(body, param, app):
    assert refusal(app, "/invocations", body)["param"] == param


def test_an_invocation_is_told_by_what_is_given(engine, app):
    assert answered(app, "/invocations", TALK | {"prompt": None, "input": None})["object"] == "chat.completion"
    lenient = make_app(engine, ignore_unknown_fields=True)
    body = TALK | {"suffix": "a", "dimensions": 3, "no_such_field": 1}
    for path in (CHAT, "/invocations"):
        assert answered(lenient, path, body)["object"] == "chat.completion"
    assert answered(lenient, TOKENIZE, {"prompt": "Hi", "tools": []})["count"] > 0


def test_an_invocation_is_streamed(app):
    assert chunks_of(app, "/invocations", TALK)[0]["object"] == "chat.completion.chunk"


def test_pooling_gives_the_vectors_of_embeddings_in_the_form_of_vllm(app):
    body = {"input": "Hello", "encoding_format": "base64", "dimensions": 8}
    pooled, embedded = answered(app, "/pooling", body | {"task": "embed"}), answered(app, EMBEDDINGS, body)
    assert [one["data"] for one in pooled["data"]] == [one["embedding"] for one in embedded["data"]]
    assert {one["object"] for one in pooled["data"]} == {"pooling"} and pooled["usage"] == embedded["usage"]
    assert refusal(app, "/pooling", body | {"task": "classify"})["param"] == "task"


def test_the_tokenizer_is_described_if_the_server_says_so(engine, app):
    info = call(make_app(engine, enable_tokenizer_info_endpoint=True), "GET", "/tokenizer_info").json()
    assert info["tokenizer_class"] == type(engine.tokenizer).__name__
    assert info["chat_template"] == engine.tokenizer.chat_template
    assert info["eos_token"] == "<|im_end|>" and info["added_tokens_decoder"]["459"]["content"] == "<|endoftext|>"
    assert not any(name.endswith(("_path", "_file")) for name in info)
    assert call(app, "GET", "/tokenizer_info").status_code == 404
