"""Fields that clients send beyond what this server needs: which are ignored, and which are other names of others."""

import json
import logging

import pytest

from mmvllm.server.chat.protocol import ChatRequest
from mmvllm.server.common.protocol import ProcessorKwargs
from mmvllm.server.http import body as body_module
from tests.helpers.serving.server import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    RESPONSES,
    TOKENIZE,
    answered,
    call,
    chat,
    chunks_of,
    completion,
    data_uri,
    image_part,
    make_app,
    user,
)
from tests.server.refusals import refusal

TOOL = {"type": "function", "function": {"name": "count", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.spawns
def test_keys_that_clients_add_to_messages_parts_and_tools_are_ignored(app):
    message = user(image_part(data_uri()), {"type": "text", "text": "What is this?"})
    plain = chat(messages=[message], tools=[TOOL], max_tokens=4)
    added = json.loads(json.dumps(plain))
    function, [image, text] = added["tools"][0]["function"], added["messages"][0]["content"]
    added["messages"][0] |= {"id": "msg_1", "createdAt": "today", "experimental_attachments": []}
    image |= {"uuid": "a", "index": 0, "cache_control": {"type": "ephemeral"}}
    image["image_url"] |= {"media_type": "image/png", "format": "png"}
    text |= {"state": "done", "cache_control": {"type": "ephemeral"}}
    added["tools"][0] |= {"cache_control": {"type": "ephemeral"}}
    function |= {"returns": {"type": "string"}}
    assert answered(app, CHAT, added)["choices"] == answered(app, CHAT, plain)["choices"]
    assert answered(app, TOKENIZE, {"messages": added["messages"]}) == answered(app, TOKENIZE, {"messages": [message]})


def test_no_key_of_an_earlier_answer_ends_the_conversation(app):
    """A client may be unable to change it."""
    call = {
        "id": "a",
        "type": "function",
        "Type": "function",
        "function": {"name": "f", "arguments": "{}", "args": "x"},
    }
    answer = {"role": "assistant", "content": "Yes.", "images": ["x"], "Content": "x", "toolCalls": [1], "text": "x"}
    answer |= {"provider_specific_fields": {"a": 1}, "reasoning_content": "x", "annotations": [{}]}
    empty = dict.fromkeys(("tool_calls", "function_call", "refusal", "audio"))
    for keys in (answer, answer | empty, answer | {"tool_calls": [call | {"text": "x"}]}):
        plain = {name: keys[name] for name in ("role", "content", "tool_calls") if keys.get(name)}
        made, want = (answered(app, TOKENIZE, {"messages": [user("Hi"), one, user("And?")]}) for one in (keys, plain))
        assert made == want


def test_keys_of_items_of_responses_are_ignored(app):
    items = [{"type": "message", "role": "user", "id": "a", "status": "completed", "note": 1}]
    items[0]["content"] = [{"type": "input_text", "text": "Hi", "note": 1}]
    answered(app, RESPONSES, {"input": items, "max_output_tokens": 1})


@pytest.mark.parametrize("name", [None, ""])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat("Hi", max_tokens=1)),
        (COMPLETIONS, completion(max_tokens=1)),
        (RESPONSES, {"input": "Hi", "max_output_tokens": 1}),
        (EMBEDDINGS, {"input": "Hi"}),
    ],
)
def test_a_request_without_a_model_is_for_the_one_that_is_served(app, path, body, name):
    assert answered(app, path, body | {"model": name})["model"] == "bundled"
    answered(app, path, {key: value for key, value in body.items() if key != "model"})


@pytest.mark.parametrize("keys", [{"add_special_tokens": True}, {"truncate_prompt_tokens": -1}])
@pytest.mark.parametrize(
    ("path", "body"),
    [(COMPLETIONS, completion(max_tokens=1, temperature=0)), (EMBEDDINGS, {"input": ["Hi", "there"]})],
)
def test_values_that_change_nothing_of_a_text_are_accepted(app, path, body, keys):
    made, plain = answered(app, path, body | keys), answered(app, path, body)
    assert made["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    assert made.get("choices") == plain.get("choices")


def test_what_a_model_without_reasoning_cannot_follow_is_accepted(app):
    plain = answered(app, CHAT, chat("Hello", max_tokens=4))
    for effort in ("none", "minimal", "low", "medium", "high", "xhigh", "max"):
        keys = {"reasoning_effort": effort, "verbosity": "low"}
        assert answered(app, CHAT, chat("Hello", max_tokens=4, **keys))["choices"] == plain["choices"]
    keys = {"reasoning": {"effort": "low", "summary": "auto"}, "text": {"verbosity": "high"}, "truncation": "auto"}
    made = answered(app, RESPONSES, {"input": "Hello", "max_output_tokens": 4, "temperature": 0, **keys})
    assert made["reasoning"] == {"effort": "low", "summary": None} and made["truncation"] == "auto"
    assert made["output"][0]["content"][0]["text"] == plain["choices"][0]["message"]["content"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "count"}}])
def test_a_call_that_is_demanded_wins_over_the_format_of_messages(app, choice):
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    plain = chat("Hi", tools=[TOOL], tool_choice=choice, temperature=0, max_tokens=40)
    bodies = plain, plain | {"response_format": form}
    calls = [answered(app, CHAT, body)["choices"][0]["message"]["tool_calls"] for body in bodies]
    assert [call["function"] for call in calls[0]] == [call["function"] for call in calls[1]]
    tool = {"type": "function", **TOOL["function"]}
    choice = choice if choice == "required" else {"type": "function", "name": "count"}
    text = {"format": {"type": "json_schema", "name": "a", "schema": schema}}
    made = answered(app, RESPONSES, {"input": "Hi", "tools": [tool], "tool_choice": choice, "text": text})
    assert made["output"][0]["type"] == "function_call"


@pytest.mark.parametrize(
    ("video", "kwargs"),
    [
        ({"num_frames": 8}, {"num_frames": 8}),
        ({"fps": 2}, {"fps": 2.0}),
        ({"num_frames": -1}, {"do_sample_frames": False}),
        ({"num_frames": -1, "fps": 2}, {"fps": 2.0}),
    ],
)
def test_arguments_for_reading_media_are_those_of_processors(video, kwargs):
    body = ChatRequest(**chat("Hi", media_io_kwargs={"video": video, "image": {"image_mode": "RGB"}}))
    assert body.mm_processor_kwargs == ProcessorKwargs(**kwargs)
    for own in ({"num_frames": 4}, {"fps": 1.0}, {"do_sample_frames": True}):
        body = ChatRequest(**chat("Hi", media_io_kwargs={"video": video}, mm_processor_kwargs=own))
        assert body.mm_processor_kwargs == ProcessorKwargs(**own)
    body = ChatRequest(**chat("Hi", media_io_kwargs={"video": video}, mm_processor_kwargs={"max_pixels": 4}))
    assert body.mm_processor_kwargs == ProcessorKwargs(max_pixels=4, **kwargs)


def test_fields_that_have_nothing_to_say_are_null(app):
    """Clients with classes of their own expect them."""
    stopped = completion(max_tokens=4, temperature=0, stop_token_ids=[*range(768)])
    for path, body in (
        (CHAT, chat("Hi", max_tokens=1)),
        (COMPLETIONS, completion(max_tokens=1)),
        (COMPLETIONS, stopped),
    ):
        made = answered(app, path, body)
        [choice] = made["choices"]
        assert {made[name] for name in ("service_tier", "system_fingerprint")} == {None}
        token_id = answered(app, path, body | {"return_token_ids": True})["choices"][0]["token_ids"][-1]
        assert choice["stop_reason"] == (token_id if body is stopped else None)
        assert choice["token_ids"] is None and choice.get("message", {}).get("refusal") is None
        prompt = made if path == CHAT else choice
        assert prompt["prompt_token_ids"] is None and prompt["prompt_logprobs"] is None
        last = chunks_of(app, path, body)[-1]
        assert last["choices"][0]["stop_reason"] == choice["stop_reason"] and last["system_fingerprint"] is None
    [model] = call(app, "GET", "/v1/models").json()["data"]
    assert model["root"] == model["id"] == "bundled" and model["permission"] == []


def test_a_path_may_end_with_a_slash(app, engine):
    assert answered(app, f"{CHAT}/", chat("Hi", max_tokens=1))["object"] == "chat.completion"
    for path in ("/version/", "/health//", "/ping/", "/v1/models/bundled/"):
        assert call(app, "GET", path).status_code == 200
    assert call(app, "GET", "//").status_code == call(app, "GET", "/no/such/path/").status_code == 404
    locked = make_app(engine, api_keys=("secret",))
    assert call(locked, "POST", f"{CHAT}/", json={}).status_code == 401


def test_load_balancers_find_what_they_ask_for(app):
    assert call(app, "GET", "/load").json() == {"server_load": 0}
    assert [call(app, method, "/ping").json()["status"] for method in ("GET", "POST")] == ["ok", "ok"]


def test_the_prefix_cache_is_forgotten_on_request(app):
    def cached(question: str) -> int:
        usage = answered(app, CHAT, chat(question, max_tokens=1, cache_salt="own"))["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    question = "How many stars are there, and of which colors are they?"
    cached(question)
    assert cached(question) > 0
    assert call(app, "POST", "/reset_prefix_cache").status_code == 200
    assert cached(question) == 0 < cached(question)


def test_a_server_may_ignore_unknown_fields(engine, caplog, monkeypatch):
    monkeypatch.setattr(body_module, "_LOGGED", set())
    app, unknown = make_app(engine, ignore_unknown_fields=True), {"num_ctx": 5, "keep_alive": "5m"}
    plain = answered(app, CHAT, chat("Hello", max_tokens=4))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            made = answered(app, CHAT, chat("Hello", max_tokens=4, **unknown))
            assert made["choices"] == plain["choices"]
        answered(app, TOKENIZE, {"messages": [user("Hi")], "num_ctx": 5})
        many = {f"field{i}": 1 for i in range(900)} | {"x" * 2**20: 1}
        answered(app, TOKENIZE, {"prompt": "Hi", **many})
    told = [record.getMessage() for record in caplog.records]
    assert sorted(told[:2]) == [
        "requests have the field 'keep_alive', which is ignored; logged once",
        "requests have the field 'num_ctx', which is ignored; logged once",
    ]
    assert len(told) == 100 and max(map(len, told)) < 200
    error = refusal(app, CHAT, chat("Hi", stream=True, stream_options={"every": 1}))
    assert error["param"] == "stream_options.every"


@pytest.mark.parametrize(
    ("given", "is_kept"), [("a-1", True), ("x" * 128, True), ("x" * 129, False), ("a b", False), ("\xe9", False)]
)
def test_the_request_id_of_a_client_is_kept(app, given, is_kept):
    headers = {"X-Request-Id": given.encode("latin-1")}
    for path in ("/version", "/no/such/path"):
        made = call(app, "GET", path, headers=headers).headers["x-request-id"]
        assert made == given if is_kept else made.startswith("req_")
