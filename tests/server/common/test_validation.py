"""Validation of requests: which are refused, with which error, and which fields are ignored."""

import json

import pytest

from tests.helpers.serving.server import (
    CHAT,
    COMPLETIONS,
    answered,
    call,
    chat,
    chunks_of,
    completion,
    data_uri,
    error_of,
    image_part,
    user,
)
from tests.server.refusals import check_refusal, refusal

ASSISTANT = {"role": "assistant", "content": "A star."}
TEMPLATE = "chat_template_kwargs"
TOOL = {"role": "tool", "tool_call_id": "a"}
IMAGE_URL = "messages[0].content[0].image_url"
CONTINUOUS_USAGE = "stream_options.continuous_usage_stats"


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"model": "bundled"}, "messages", "is missing"),
        (chat(messages=[]), "messages", "at least 1"),
        (chat(messages="Hi"), "messages", "must be a list"),
        (chat(messages=[{"role": "user"}]), "messages[0].content", "is missing"),
        (chat(messages=[{"role": "user", "content": None}]), "messages[0].content", "must be a string"),
        (chat(messages=[user("Hi"), {"role": "a robot", "content": "x"}]), "messages[1].role", "should match"),
        (chat(messages=[{"role": "user", "content": []}]), "messages[0].content", "at least 1"),
        (chat({"type": ["text"]}), "messages[0].content[0]", "must have a type: 'text', 'image_url' or 'video_url'"),
        (chat("Hi", {"type": "text", "text": 5}), "messages[0].content[1].text", "must be a string"),
        (
            chat("Hi", {"type": "input_audio"}),
            "messages[0].content[1]",
            "must have the type 'text', 'image_url' or 'video_url', got 'input_audio'",
        ),
        (chat("Hi", {"type": "image_url", "image_url": 5}), "messages[0].content[1].image_url", "must be an object"),
        (chat(image_part("data:,", detail="huge")), "messages[0].content[0].image_url.detail", "'low'"),
        (
            chat(image_part("data:,", maxPixel=1)),
            f"{IMAGE_URL}.maxPixel",
            "does not belong here; did you mean max_pixels?",
        ),
        (chat(image_part("data:,", nframes=1)), f"{IMAGE_URL}.nframes", "does not belong here"),
        (chat(image_part("ftp://x/y.png")), "messages[0].content[0].image_url.url", "URL"),
        (chat("Hi", temperature=-1), "temperature", "greater than or equal to 0"),
        (chat("Hi", temperature=10**400), "temperature", ""),
        (chat("Hi", top_p=0), "top_p", "greater than 0"),
        (chat("Hi", n=17), "n", "less than or equal to 16"),
        (chat("Hi", n=True), "n", "valid integer"),
        (chat("Hi", max_tokens=0), "max_tokens", "must be at least 1, or -1 for no limit"),
        (chat("Hi", max_completion_tokens=-2), "max_completion_tokens", "must be at least 1, or -1 for no limit"),
        (chat("Hi", max_tokens=2.5), "max_tokens", "valid integer"),
        (chat("Hi", max_tokens=5, max_completion_tokens=6), "max_tokens", "two names"),
        (chat("Hi", min_tokens=6, max_tokens=5), "min_tokens", "max_tokens=5"),
        (chat("Hi", stop=5), "stop", "must be a string"),
        (chat("Hi", stop=["a", ""]), "stop[1]", "at least 1 character"),
        (chat("Hi", stop="a" * 1001), "stop", "at most 1000 character"),
        (chat("Hi", top_logprobs=2), "top_logprobs", "logprobs: true"),
        (chat("Hi", logprobs=True, top_logprobs=21), "top_logprobs", "20"),
        (chat("Hi", stream_options={"include_usage": True}), "stream_options", "stream: true"),
        (chat("Hi", stream_options={"include_usage": None}), "stream_options", "stream: true"),
        (chat("Hi", logit_bias={"5": 200}), "logit_bias.5", "less than or equal to 100"),
        (
            chat("Hi", logit_bias={"five": 1, "5": 1, "six": 1}),
            "logit_bias",
            "must have token ids as keys, got five, six; POST",
        ),
        (chat("Hi", logit_bias={"99999": 1}), "logit_bias", "99999"),
        (chat("Hi", allowed_token_ids=[]), "allowed_token_ids", "at least 1"),
        (chat("Hi", modalities=["text", "audio"]), "modalities", ""),
        (chat("Hi", reasoning_effort="little"), "reasoning_effort", "'low'"),
        (chat("Hi", temprature=1), "temprature", "is not a field of this request; did you mean temperature?"),
        (completion(max_new_tokens=1), "max_new_tokens", "did you mean max_tokens?"),
        (chat("Hi", media_io_kwargs={"video": {"num_frames": -2}}), "media_io_kwargs.video.num_frames", "equal to 1"),
        (chat("Hi", max_pixels=10**9), "max_pixels", "at most"),
        (chat("Hi", min_pixels=10**9), "min_pixels", "at most"),
        (chat(image_part(data_uri()), min_pixels=30000, max_pixels=20000), "min_pixels", "above"),
        (chat("Hi " * 30000), "messages", "maximum context length is 2048 tokens"),
        (chat(messages=[{"role": "user", "content": ""}] * 2048), "messages", "at least 2048 tokens"),
        (chat("Hi", cache_salt="x" * 1025), "cache_salt", "at most 1024 characters"),
        (chat("Hi", stop_token_ids=[1] * 1025), "stop_token_ids", "at most 1024 items"),
        (chat("Hi", allow_special_tokens=True), "allow_special_tokens", "not allowed by this server"),
        (chat(*[image_part(data_uri())] * 17), "messages", "(max_images)"),
        (completion(prompt=[]), "prompt", "at least 1"),
        (completion(prompt=""), "prompt", "empty"),
        (completion(prompt=[[1], ["a"]]), "prompt[1][0]", "valid integer"),
        (completion(prompt=[1, -1]), "prompt[1]", "greater than or equal to 0"),
        (completion(prompt=["a"] * 65), "prompt", "at most 64"),
        (completion(prompt=[10**6]), "prompt", "token ids of a prompt must be integers in [0, 768), got 1000000"),
        (completion(prompt=[1] * 3000), "prompt", "maximum context length is 2048 tokens"),
        (completion(max_tokens=0), "max_tokens", "needs echo: true or prompt_logprobs"),
        (completion(max_tokens=-2), "max_tokens", "greater than or equal to -1"),
        (completion(suffix="x"), "suffix", "not supported"),
        (completion(best_of=2, n=3), "best_of", "integer in [n=3, 16384]"),
        (completion(best_of=2, stream=True), "stream", "known only at the end"),
        (completion(beam_width=2, use_beam_search=False), "beam_width", "use_beam_search is false"),
        (completion(beam_width=1000), "beam_width", "beam_width is 1000, max_num_seqs is"),
        (completion(beam_width=2, length_penalty=11), "length_penalty", "10"),
        (completion(beam_width=2, echo=True, logprobs=1), "echo", "echo with logprobs cannot be used with beam search"),
        (completion(beam_width=2, echo=True, max_tokens=0), "max_tokens", "of at least 1"),
        (chat({"type": "text", "text": "a"} | image_part("b")), "messages[0].content[0].text", "does not belong here"),
        (chat({"type": "text", "text": "a", "images": ["b"]}), "messages[0].content[0].images", "does not belong here"),
        (chat(messages=[user("Hi") | {"images": ["b"]}]), "messages[0].images", "does not belong here"),
        (chat(messages=[user("Hi") | {"max_pixels": 5}]), "messages[0].max_pixels", "does not belong here"),
        (chat(messages=[user("Hi"), TOOL | {"output": "b"}]), "messages[1].output", "does not belong here"),
        (
            chat(messages=[user("Hi") | {"function_call": {"a": 1}}]),
            "messages[0].function_call",
            "not supported",
        ),
        (chat(messages=[ASSISTANT | {"content": 5}, user("Hi")]), "messages[0].content", "must be a string"),
        (chat("Hi", stream=True, stream_options={"continuous_usage_stats": 2}), CONTINUOUS_USAGE, "valid boolean"),
        (chat("Hi", skip_special_tokens="no"), "skip_special_tokens", "valid boolean"),
        (
            chat("Hi", add_generation_prompt=True, continue_final_message=True),
            *("add_generation_prompt", "exclude each other"),
        ),
        (chat("Hi", chat_template="{{ messages }}"), "chat_template", "--trust-request-chat-template"),
        (chat("Hi", echo=True), "echo", "needs continue_final_message"),
        (chat("Hi", chat_template_kwargs=[1]), TEMPLATE, "valid dictionary"),
        (chat("Hi", chat_template_kwargs={"tools": []}), TEMPLATE, "chat_template_kwargs: may not have 'tools'"),
        (chat("Hi", chat_template_kwargs={"{x}": 1, "return_{}": 1}), TEMPLATE, "may not have 'return_{}'"),
        (
            chat("Hi", chat_template_kwargs={"a": [[1]] * 9000}),
            TEMPLATE,
            "must have at most 16384 characters as JSON, got",
        ),
        (chat("Hi", chat_template_kwargs={"namespace": 1}), "messages", "the chat template cannot render"),
        (chat("Hi", use_beam_search=True, stream=True), "stream", "known only at the end"),
        (chat("Hi", use_beam_search=True, temperature=0.5), "temperature", "cannot be used with beam search"),
        (chat("Hi", prompt_logprobs=21), "prompt_logprobs", "less than or equal to 20"),
        (chat("Hi", guided_json={"type": "object"}, beam_width=2), "guided_json", "cannot be used with beam search"),
        (completion(prompt_logprobs=0, stream=True), "prompt_logprobs", "not supported with stream"),
        ([], None, "must be an object"),
        ("Hi", None, "must be an object"),
    ],
    ids=lambda value: "" if isinstance(value, dict | list) else None,
)
def test_an_error_names_the_invalid_field_and_the_reason(app, body, param, words):
    path = COMPLETIONS if isinstance(body, dict) and "prompt" in body else CHAT
    check_refusal(app, path, body, param, words)


NEUTRAL = {
    "best_of": 1,
    "n": None,
    "user": "x",
    "response_format": {"type": "text"},
    "echo": False,
    "prompt_logprobs": None,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False,
    "use_beam_search": False,
    "length_penalty": 1.0,
    "early_stopping": False,
    "priority": 0,
    "logit_bias": {},
    "stop": [],
    "stop_token_ids": [],
    "bad_words": [],
    "truncate_prompt_tokens": None,
    "guided_json": None,
    "mm_processor_kwargs": {},
    "add_special_tokens": False,
    "return_tokens_as_token_ids": False,
    "stream_options": None,
    "request_id": "abc",
    "a_field_of_another_server": None,
}
NEUTRAL_CHAT = NEUTRAL | {
    "add_generation_prompt": True,
    "continue_final_message": False,
    "chat_template": None,
    "chat_template_kwargs": {},
    "documents": None,
    "include_reasoning": True,
    "parallel_tool_calls": False,
    "tools": [],
    "tool_choice": "none",
    "functions": None,
    "top_logprobs": 0,
    "modalities": ["text"],
    "audio": None,
    "metadata": {"a": "b"},
    "store": False,
    **dict.fromkeys(("service_tier", "safety_identifier", "prompt_cache_key"), "x"),
}


@pytest.mark.parametrize(
    ("path", "body", "neutral"),
    [
        (CHAT, chat("Hello", max_tokens=4), NEUTRAL_CHAT),
        (COMPLETIONS, completion(temperature=0), NEUTRAL | {"suffix": None}),
    ],
)
def test_fields_that_do_not_change_the_completion_are_accepted(app, path, body, neutral):
    """Load generators and evaluation tools send vLLM's parameters with their default values."""
    assert answered(app, path, body | neutral)["choices"] == answered(app, path, body)["choices"]


@pytest.mark.parametrize("value", [None, False])
def test_continuous_usage_stats_may_be_off(app, value):
    options = {"include_usage": True, "continuous_usage_stats": value}
    assert call(app, "POST", CHAT, json=chat("Hi", max_tokens=1, stream=True, stream_options=options)).is_success


def test_continuous_usage_stats_count_tokens_in_every_chunk(app):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = chat("Hi", max_tokens=5, n=2, ignore_eos=True, stream_options=options)
    usages = [chunk["usage"] for chunk in chunks_of(app, CHAT, body)]
    assert {usage["prompt_tokens"] for usage in usages} == {usages[-1]["prompt_tokens"]} != {0}
    counts = [usage["completion_tokens"] for usage in usages]
    assert counts == sorted(counts) and counts[-1] == 10 and len(set(counts)) > 2
    assert counts[:3] == [0, 0, 1]  # the roles of both choices, and the first text
    assert all(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] for usage in usages)


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"null",
        b"[" * 100_000,
        b'{"model": NaN}',
        b'{"n": ' + b"9" * 10_000 + b"}",
        b'{"temperature": 1e999}',
        b'{"model": "bundled", "model": "other"}',
        b'{"\\ud800": 1}',
        b'{"model": "\\udfff\\ud800"}',
        b'{"model": "\xff"}',
        '{"model": "bundled"}'.encode("utf-16"),
        b"\xef\xbb\xbf{}",
        b'{"messages": [' + b"1," * 100_000 + b"1]}",
        b'{"messages": [' + b"[]," * 2_100_000 + b"[]]}",
        b"{" + b",".join(b'"%d": 1' % i for i in range(50_000)) + b"}",
        b'{"messages": [' + b"{}," * 100_000 + b"{}]}",
        json.dumps(chat("Hi", metadata=[[]] * 100_000, max_tokens=1)).encode(),
        json.dumps(completion(user=[{}] * 100_000, max_tokens=1)).encode(),
        b'{"model": "bundled", "prompt": [' + b"[-1]," * 60 + b"[-1]]}",
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_malformed_json_is_a_400(app, path, content):
    assert len(refusal(app, path, content)["message"]) < 1000


def test_an_empty_body_is_reported(app):
    check_refusal(app, CHAT, b"", None, "the body is empty; send the request as JSON")


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", None])
def test_another_content_type_than_json_is_a_415(app, kind):
    """A page from elsewhere may send the others without asking."""
    answer = call(app, "POST", CHAT, content=b'{"model": "bundled"}', headers={"Content-Type": kind} if kind else {})
    assert answer.status_code == 415 and "Content-Type: application/json" in error_of(answer)["message"]


def test_unknown_paths_and_methods_return_openai_errors(app):
    words = "/v1/moderations does not exist; /openapi.json describes the routes"
    assert refusal(app, "/v1/moderations", {}, 404)["message"] == words
    answer = call(app, "GET", CHAT)
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    error_of(answer)
