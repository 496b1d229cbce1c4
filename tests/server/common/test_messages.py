"""Requests as clients send them: histories that they cannot change, and numbers and texts in other spellings."""

import base64
import codecs
import json
import logging

import pytest

from mmvllm.processors.chat import tools
from tests.helpers.serving.server import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    RESPONSES,
    TOKENIZE,
    answered,
    call,
    chat,
    completion,
    data_uri,
    image_part,
    png,
    user,
)
from tests.server.refusals import refusal


def called(arguments: object = "{}", **keys) -> list[dict]:
    """A conversation in which a function was called."""
    function = {"name": "f"} | ({} if arguments is ... else {"arguments": arguments})
    calls = [{"id": "a", "type": "function", "function": function}]
    answer = {"role": "assistant", "content": None, "tool_calls": calls}
    return [user("Hi"), answer, {"role": "tool", "tool_call_id": "a", "content": "It failed."} | keys]


def tokens_of(app, messages: list[dict]) -> list[int]:
    return answered(app, TOKENIZE, {"messages": messages})["tokens"]


READ_AS = {'{"a": "x\ny"}': r'{"a": "x\ny"}', r'{"a": "\ud83d"}': '{"a": "\ufffd"}'}


@pytest.mark.parametrize("arguments", [..., None, "{", "5", [1], '{"a": ' * 50])
def test_an_earlier_call_whose_arguments_are_no_object_does_not_end_the_conversation(app, arguments):
    assert tokens_of(app, called(arguments)) == tokens_of(app, called("{}"))
    given = {} if arguments is ... else {"arguments": arguments}
    item = {"type": "function_call", "name": "f", "call_id": "a", **given}
    items = [user("Hi"), item, {"type": "function_call_output", "call_id": "a", "output": "It failed."}]
    answered(app, RESPONSES, {"model": "bundled", "input": items, "max_output_tokens": 1})


@pytest.mark.parametrize("arguments", [*READ_AS, {"a": 1}])
def test_arguments_that_can_be_read_are_shown_to_the_model(app, arguments):
    want = READ_AS[arguments] if isinstance(arguments, str) else json.dumps(arguments)
    assert tokens_of(app, called(arguments)) == tokens_of(app, called(want)) != tokens_of(app, called("{}"))


def test_arguments_that_are_replaced_are_told_once(app, caplog):
    tools._warn.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            tokens_of(app, called("{"))
    assert [record.getMessage() for record in caplog.records] == [
        "a request has arguments of an earlier call that are not a JSON object; the model is shown {}; told once"
    ]


@pytest.mark.parametrize("content", [[], None, ""])
def test_earlier_answers_and_results_may_be_empty(app, content):
    assert tokens_of(app, called(content=content)) == tokens_of(app, called(content=""))
    plain = [user("Hi"), {"role": "assistant", "content": content}, user("Go on")]
    assert tokens_of(app, plain) == tokens_of(app, [user("Hi"), {"role": "assistant", "content": ""}, user("Go on")])
    items = [
        *(user("Hi"), {"role": "assistant", "content": content}),
        {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "a"},
        {"type": "function_call_output", "call_id": "a", "output": content},
    ]
    answered(app, RESPONSES, {"model": "bundled", "input": items, "max_output_tokens": 1})


def test_a_refusal_is_the_text_of_an_earlier_answer(app):
    want = tokens_of(app, [user("Hi"), {"role": "assistant", "content": "I cannot"}])
    part = {"type": "refusal", "refusal": "I cannot"}
    for answer in ({"content": None, "refusal": "I cannot"}, {"refusal": "I cannot"}, {"content": [part]}):
        assert tokens_of(app, [user("Hi"), {"role": "assistant", **answer}]) == want
    for answer in (
        {"content": [part]},
        {"content": None, "refusal": "I cannot"},
        {"content": [], "refusal": "I cannot"},
    ):
        items = [user("Hi"), {"type": "message", "role": "assistant", **answer}]
        body = {"model": "bundled", "input": items, "max_output_tokens": 1}
        assert answered(app, RESPONSES, body)["usage"]["input_tokens"] == len(want)


@pytest.mark.spawns
def test_parts_may_have_the_forms_of_other_apis(app):
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "x"}
    text, url = {"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": data_uri()}}
    others = [{"type": "input_image", "image_url": data_uri()}, {"image_url": data_uri()}, {"image": data_uri()}]
    texts = ["a", {"text": "a"}, {"type": "input_text", "text": "a"}]
    texts += [{"type": "output_text", "text": "a", "annotations": []}]
    want = tokens_of(app, [user(url, text), {"role": "assistant", "content": "a"}])
    for part in texts:
        for image in others:
            answer = {"role": "assistant", "content": [thought, part, {"type": "redacted_thinking", "data": "x"}]}
            assert tokens_of(app, [{"role": "user", "content": [image, part]}, answer]) == want
    for role, parts, place in (("user", [thought], 0), ("assistant", [thought, text, {"type": "bogus"}], 2)):
        error = refusal(app, CHAT, chat(messages=[{"role": role, "content": parts}]))
        assert error["param"] == f"messages[0].content[{place}]"
    assert tokens_of(app, [{"role": "assistant", "content": [thought]}]) == tokens_of(
        app, [{"role": "assistant", "content": ""}]
    )


CUT = "cut \ud83d here \udc00"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat(CUT, max_tokens=1, cache_salt=CUT, stop=[CUT], chat_template_kwargs={"x": CUT})),
        (COMPLETIONS, completion(prompt=CUT, max_tokens=1)),
        (RESPONSES, {"model": "bundled", "input": CUT, "max_output_tokens": 1}),
        (EMBEDDINGS, {"model": "bundled", "input": [CUT]}),
        (TOKENIZE, {"prompt": CUT}),
    ],
)
def test_half_of_a_surrogate_pair_is_a_replacement_character(app, path, body):
    answered(app, path, body)
    assert tokens_of(app, [user(CUT)]) == tokens_of(app, [user("cut \ufffd here \ufffd")])
    assert tokens_of(app, [user("a 🦊")]) == tokens_of(app, [user("a \ud83e\udd8a")])


def test_a_body_may_begin_with_a_byte_order_mark(app):
    for path, body in ((CHAT, chat("Hi", max_tokens=1)), (TOKENIZE, {"prompt": "Hi"})):
        data = codecs.BOM_UTF8 + json.dumps(body).encode()
        assert call(app, "POST", path, content=data, headers={"Content-Type": "application/json"}).is_success


def test_bytes_that_are_not_utf_8_are_refused(app):
    data = json.dumps(chat("x")).encode().replace(b'"x"', b'"\xed\xa0\xbd"')
    assert "not valid Unicode" in refusal(app, CHAT, data)["message"]


NULLS = {"type": "object", "properties": None, "required": None}
DEEP = {
    "type": "object",
    "properties": {"a": {"type": "object", "properties": {"b": {"enum": [None, 1], "description": None}, "c": None}}},
    "required": None,
    "$defs": None,
}
PLAIN = {
    "type": "object",
    "properties": {"a": {"type": "object", "properties": {"b": {"enum": [None, 1]}}}},
}
GENERATED = {  # as pydantic, zod and others write schemas
    "type": "object",
    "properties": {
        "total": {"anyOf": [{"type": "number"}, {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}]},
        "file": {"type": "string", "format": "path"},
        "counts": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}},
    },
    "required": ["total"],
    "strict": True,
}


def function(schema: dict, name: str = "now") -> dict:
    return {"type": "function", "function": {"name": name, "parameters": schema}}


@pytest.mark.parametrize(
    ("schema", "plain"), [(NULLS, {"type": "object"}), (DEEP, PLAIN), (GENERATED, GENERATED)], ids=["nulls", "deep", ""]
)
@pytest.mark.parametrize("choice", [None, "required", {"type": "function", "function": {"name": "now"}}])
def test_schemas_as_generators_write_them(app, schema, plain, choice):
    """Null means that a keyword is not given."""
    bodies = [chat("Hi", tools=[function(one)], tool_choice=choice, max_tokens=4) for one in (schema, plain)]
    given, want = (answered(app, CHAT, body) for body in bodies)
    assert given["usage"]["prompt_tokens"] == want["usage"]["prompt_tokens"]
    named = {"name": "a", "schema": schema}
    form = {"type": "json_schema", "json_schema": named}
    for fields in ({"response_format": form}, {"structured_outputs": {"json": schema}}):
        answered(app, CHAT, chat("Hi", max_tokens=4, **fields))
    tool = {"type": "function", "name": "now", "parameters": schema}
    for fields in ({"tools": [tool]}, {"text": {"format": {"type": "json_schema", **named}}}):
        answered(app, RESPONSES, {"input": "Hi", "max_output_tokens": 4, **fields})


def test_what_cannot_be_enforced_names_the_tool_and_the_property(app):
    schema = {"type": "object", "properties": {"total": {"type": "string", "pattern": "(?=a)b"}}}
    tools = [function({"type": "object"}), function(schema, "pay")]
    message = "tools[1].function.parameters has the keyword 'pattern' at /properties/total, which has a look-around"
    assert message in refusal(app, CHAT, chat("Hi", tools=tools, tool_choice="required"))["message"]


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        ({"max_tokens": -1}, {}),
        ({"max_completion_tokens": -1}, {}),
        ({"max_tokens": 4.0}, {"max_tokens": 4}),
        ({"max_tokens": 4, "seed": 7.0, "n": 2.0, "top_k": 5.0}, {"max_tokens": 4, "seed": 7, "n": 2, "top_k": 5}),
    ],
)
def test_numbers_as_other_servers_take_them(app, given, plain):
    answers = [answered(app, CHAT, chat("Hi", temperature=1, **{"seed": 3} | keys)) for keys in (given, plain)]
    assert answers[0]["choices"] == answers[1]["choices"]


@pytest.mark.parametrize(
    ("name", "ids"),
    [
        ("prompt", [5, 6, 7]),
        ("prompt", [[5, 6], [7]]),
        ("stop_token_ids", [7, 8]),
        ("allowed_token_ids", [5, 6]),
        ("logprob_token_ids", [5, 6]),
    ],
)
def test_ids_in_lists_may_be_written_as_other_numbers(app, name, ids):
    """5.0 is an integer in JSON, also beside 5; 5.5 is none."""

    def body(convert) -> dict:
        given = [[*map(convert, one)] if isinstance(one, list) else convert(one) for one in ids]
        return {"model": "bundled", "prompt": "Hi", "max_tokens": 2, "temperature": 0, "logprobs": 0} | {name: given}

    def written(convert) -> list[tuple]:
        choices = answered(app, COMPLETIONS, body(convert))["choices"]
        return [(one["text"], [[*likely] for likely in one["logprobs"]["top_logprobs"]]) for one in choices]

    assert written(float) == written(lambda one: float(one) if one % 2 else one) == written(int)
    assert refusal(app, COMPLETIONS, body(lambda one: one + 0.5))["param"].startswith(name)


def test_a_completion_and_a_response_without_a_limit(app):
    answered(app, COMPLETIONS, completion(max_tokens=-1))
    answered(app, RESPONSES, {"model": "bundled", "input": "Hi", "max_output_tokens": -1})


@pytest.mark.parametrize("seed", [2**64 - 1, 2**63, -(2**63), 10**30])
def test_every_integer_is_a_seed(app, seed):
    body = chat("Hi", max_tokens=4, temperature=2, seed=seed)
    assert answered(app, CHAT, body)["choices"] == answered(app, CHAT, body)["choices"]


def test_strict_may_be_a_text(app):
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}, "strict": "true"}}
    answered(app, CHAT, chat("Hi", response_format=form, max_tokens=1))
    tool = function({"type": "object"})
    tool["function"]["strict"] = "false"
    answered(app, CHAT, chat("Hi", tools=[tool], max_tokens=1))
    tool["function"]["strict"] = "maybe"
    assert refusal(app, CHAT, chat("Hi", tools=[tool]))["param"] == "tools[0].function.strict"


IMAGE = png(61, 40)
SPELLINGS = {
    "without padding": base64.b64encode(IMAGE).rstrip(b"="),
    "for URLs": base64.urlsafe_b64encode(IMAGE),
    "for URLs without padding": base64.urlsafe_b64encode(IMAGE).rstrip(b"="),
}


@pytest.mark.spawns
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_base64_as_other_encoders_write_it(app, spelling):
    given = image_part(f"data:image/png;base64,{SPELLINGS[spelling].decode()}")
    assert tokens_of(app, [user(given)]) == tokens_of(app, [user(image_part(data_uri(IMAGE)))])
