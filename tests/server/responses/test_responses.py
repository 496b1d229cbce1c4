"""OpenAI's Responses API with the `openai` client."""

from enum import StrEnum

import openai
import pytest
from pydantic import BaseModel

from tests.helpers.serving.server import CHAT, RESPONSES, answered, call, chat, data_uri, image_part, serving, user
from tests.server.refusals import check_refusal

QUESTION = "Describe this image."
COUNT = {
    "type": "function",
    "name": "count",
    "parameters": {
        "type": "object",
        "properties": {"most": {"enum": [1, 2]}},
        "required": ["most"],
        "additionalProperties": False,
    },
    "strict": True,
}


@pytest.fixture(scope="module")
def engine(engine_without_limit):
    return engine_without_limit


def image_input(**fields) -> dict:
    return {"type": "input_image", "image_url": data_uri(), **fields}


def create(client, given="Hello", **keys):
    return client.responses.create(
        **{"model": "bundled", "input": given, "temperature": 0, "max_output_tokens": 60} | keys
    )


def answer_of(client, *messages: dict, **keys) -> str:
    answer = client.chat.completions.create(**chat(messages=[*messages], **{"max_tokens": 60} | keys))
    return answer.choices[0].message.content


ASSISTANT = {"role": "assistant", "content": "A star."}
PARTS = [image_input(), {"type": "input_text", "text": QUESTION}]
PART = image_part(data_uri())
OUTPUT = {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant"}
OUTPUT |= {"content": [{"type": "output_text", "text": "A star.", "annotations": [], "logprobs": []}]}


@pytest.mark.spawns
@pytest.mark.parametrize(
    ("given", "instructions", "messages"),
    [
        ("Hello", None, [user("Hello")]),
        ("Hello", "Be brief.", [{"role": "system", "content": "Be brief."}, user("Hello")]),
        ([{"role": "user", "content": PARTS}], None, [user(PART, QUESTION)]),
        (
            [{"role": "user", "content": PARTS}, OUTPUT, user("How")],
            None,
            [user(PART, QUESTION), ASSISTANT, user("How")],
        ),
        (
            [{"role": "developer", "content": "In German."}, {"type": "message", "role": "user", "content": "Hi"}],
            "Be brief.",
            [{"role": "system", "content": "Be brief.\n\nIn German."}, user("Hi")],
        ),
    ],
    ids=["string", "instructions", "image", "history", "two instructions"],
)
def test_a_response_is_that_of_a_chat(client, given, instructions, messages):
    response = create(client, given, instructions=instructions)
    assert response.output_text == answer_of(client, *messages)
    assert (response.status, response.object, response.model) == ("completed", "response", "bundled")
    assert response.id.startswith("resp_") and response.instructions == instructions and response.store is True
    [item] = response.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
    usage = response.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.output_tokens_details.reasoning_tokens == 0
    assert (usage.input_tokens_details.image_tokens > 0) == ("input_image" in str(given))


def test_a_response_that_is_cut_off_is_incomplete(client):
    response = create(client, max_output_tokens=1)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.output[0].status == "incomplete" and response.usage.output_tokens == 1
    [*_, last] = create(client, max_output_tokens=1, stream=True)
    assert last.type == "response.incomplete" and last.response.status == "incomplete"


@pytest.mark.spawns
def test_the_events_of_a_message(client):
    whole = create(client, [{"role": "user", "content": PARTS}])
    events = [*create(client, [{"role": "user", "content": PARTS}], stream=True)]
    kinds = list(dict.fromkeys(event.type.removeprefix("response.") for event in events))
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == events[-4].text == events[-1].response.output_text == whole.output_text
    assert events[0].response.status == "in_progress" and events[0].response.output == []
    assert events[-1].response.usage.output_tokens == whole.usage.output_tokens
    ids = {event.item_id for event in events if hasattr(event, "item_id")}
    assert ids == {events[-1].response.output[0].id}


def test_the_client_gathers_the_events(client):
    with client.responses.stream(model="bundled", input="Hello", temperature=0, max_output_tokens=20) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == create(client, max_output_tokens=20).output_text


@pytest.mark.parametrize("streams", [False, True])
def test_a_function_is_called(client, streams):
    keys = {"tools": [COUNT], "tool_choice": {"type": "function", "name": "count"}, "max_output_tokens": 100}
    answer = create(client, stream=streams, **keys)
    events = [*answer] if streams else []
    [one] = (events[-1].response if streams else answer).output
    assert (one.type, one.name, one.status) == ("function_call", "count", "completed")
    assert one.arguments in ('{"most": 1}', '{"most": 2}') and one.call_id.startswith("call_")
    if streams:
        assert [event.sequence_number for event in events] == list(range(len(events)))
        kinds = list(dict.fromkeys(event.type.removeprefix("response.") for event in events))
        assert kinds == [
            *("created", "in_progress", "output_item.added", "function_call_arguments.delta"),
            *("function_call_arguments.done", "output_item.done", "completed"),
        ]
        assert "".join(e.delta for e in events if e.type == "response.function_call_arguments.delta") == one.arguments


def test_a_conversation_goes_on_with_the_result_of_a_call(client):
    tool = {"type": "function", "function": {name: COUNT[name] for name in ("name", "parameters")}}
    given = [
        {"role": "user", "content": "How many?"},
        {"type": "function_call", "call_id": "a", "id": "fc_1", "name": "count", "arguments": '{"most": 1}'},
        {"type": "function_call_output", "call_id": "a", "output": "3"},
    ]
    called = {"id": "a", "type": "function", "function": {"name": "count", "arguments": '{"most": 1}'}}
    messages = [
        user("How many?"),
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "a", "content": "3"},
    ]
    loose = COUNT | {"strict": False}
    assert create(client, given, tools=[loose]).output_text == answer_of(client, *messages, tools=[tool])


class Shape(StrEnum):
    star = "star"
    circle = "circle"


class Scene(BaseModel):
    shape: Shape
    is_red: bool


def test_the_client_parses_structured_output(client):
    keys = {"temperature": 0, "max_output_tokens": 200}
    response = client.responses.parse(model="bundled", input="What?", text_format=Scene, **keys)
    assert isinstance(response.output_parsed, Scene)
    assert response.text.format.type == "json_schema" and response.text.format.name == "Scene"


SCHEMA = {"type": "json_schema", "name": "n"}
RESULT = {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "a"}] * 2000}
LOGPROBS = ["message.output_text.logprobs", "reasoning.encrypted_content"]


def items(*parts: dict) -> list[dict]:
    return [{"role": "user", "content": [*parts]}]


@pytest.mark.parametrize(
    ("keys", "param", "words"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "'resp_1' is unknown: it was not stored"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id", "the item 'msg_1' is unknown"),
        ({"conversation": "c"}, "conversation", "not supported"),
        ({"include": LOGPROBS, "tools": [COUNT]}, "include", "leave out top_logprobs and include, or the tools"),
        ({"top_logprobs": 2, "tools": [COUNT]}, "top_logprobs", "log-probabilities cannot be used with tools"),
        ({"response_format": {"type": "text"}}, "response_format", "not supported"),
        ({"n": 2}, "n", "must be 1"),
        ({"best_of": 2, "stream": True}, "stream", "known only at the end"),
        ({"beam_width": 2, "tools": [COUNT]}, "tools", "cannot be used with beam search"),
        ({"beam_width": 2, "text": {"format": {"type": "json_object"}}}, "text.format", "cannot be used with beam"),
        ({"input": None}, "input", "must be a string"),
        ({"input": []}, "input", "at least 1 item"),
        ({"input": [RESULT | {"content": "b"}]}, "input[0].content", "does not belong here"),
        ({"input": [{"type": "computer_call"}]}, "input[0]", "'function_call'"),
        ({"input": [{"role": "robot", "content": "Hi"}]}, "input[0].role", "'developer'"),
        ({"input": [{"role": "user"}]}, "input[0]", "content must be a string, or a list of at least 1 part"),
        ({"input": [{"role": "user", "content": []}]}, "input[0].content", "at least 1 part"),
        ({"input": items({"type": "input_file"})}, "input[0].content[0]", "'input_image'"),
        ({"input": items({"type": "input_image", "file_id": "f"})}, "input[0].content[0].image_url", "is missing"),
        ({"input": "Hi " * 30000}, "input", "maximum context length is 2048 tokens"),
        ({"min_tokens": 9, "max_output_tokens": 5}, "min_tokens", "max_output_tokens=5"),
        ({"text": {"format": {"type": "xml"}}}, "text.format", "'json_schema'"),
        ({"text": {"format": SCHEMA | {"schema": {"not": {}}}}}, "text.format.schema", "'not'"),
        ({"input": [RESULT] * 3}, "input", "at most 2048 are accepted"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "is missing"),
        ({"tools": [COUNT, COUNT]}, "tools[1].name", "another tool"),
        ({"tools": [COUNT], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name", "not the name"),
        ({"model": "other"}, "model", "does not exist"),
    ],
)  # fmt: skip
def test_an_error_names_the_field(app, keys, param, words):
    check_refusal(app, RESPONSES, {"model": "bundled", "input": "Hi"} | keys, param, words)


def test_fields_that_change_nothing_are_accepted(app):
    fields = {"store": False, "truncation": "disabled", "service_tier": "auto", "user": "x", "top_logprobs": 0}
    fields |= {"metadata": {"a": "b"}, "prompt_cache_key": "x", "include": [], "text": {"format": {"type": "text"}}}
    body = {"model": "bundled", "input": "Hi", "max_output_tokens": 2}
    answer = answered(app, RESPONSES, body | fields)
    assert answer["metadata"] == {"a": "b"} and answer["text"] == {"format": {"type": "text"}}


@pytest.mark.parametrize("fields", [{"use_beam_search": True, "beam_width": 3}, {"best_of": 3, "seed": 1}])
def test_the_best_of_several_completions_is_that_of_a_chat(app, fields):
    asked = {"model": "bundled", "input": "Hi", "max_output_tokens": 4, "echo": False, "prompt_logprobs": None}
    answer = answered(app, RESPONSES, asked | fields)
    want = answered(app, CHAT, chat("Hi", max_tokens=4, **fields))["choices"][0]["message"]
    assert answer["output"][0]["content"][0]["text"] == want["content"]


@pytest.mark.network
@pytest.mark.spawns
def test_an_error_in_a_stream_is_an_event(make_engine):
    with serving(make_engine(), request_timeout=0.5) as running, running.client() as client:
        keys = {"stream": True, "max_output_tokens": 1900, "extra_body": {"ignore_eos": True}}
        [*_, last] = create(client, **keys)
    assert (last.type, last.code) == ("error", "deadline_exceeded") and "0.5 seconds" in last.message


def test_an_error_before_a_stream_is_a_status(client):
    with pytest.raises(openai.BadRequestError, match="max_model_len"):
        create(client, "Hi " * 2100, stream=True)


def test_a_chat_has_no_name_of_an_event(app):
    body = chat("Hi", max_tokens=1, stream=True)
    assert "event:" not in call(app, "POST", CHAT, json=body).text
    assert "[DONE]" not in call(app, "POST", RESPONSES, json={"model": "bundled", "input": "Hi", "stream": True}).text
