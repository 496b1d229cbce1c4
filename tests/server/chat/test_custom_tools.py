"""Custom tools, whose input is a text, in chats and in responses."""

import json
import re

import pytest

from mmvllm.sampling_params import SamplingParams
from mmvllm.server.common.call_reader import CallReader, CustomCall
from mmvllm.server.common.tools import ToolUse
from tests.helpers.serving.server import CHAT, RESPONSES, TOKENIZE, answered, chat, user
from tests.helpers.serving.tools import CALL as COUNT_CALL
from tests.helpers.serving.tools import COUNT, NAMED_COUNT
from tests.server.refusals import check_refusal

CODE = {"type": "custom", "custom": {"name": "code", "description": "Runs Python."}}
AS_FUNCTION = {
    "name": "code",
    "description": "Runs Python.",
    "parameters": {
        "type": "object",
        "properties": {"input": {"type": "string"}},
        "required": ["input"],
        "additionalProperties": False,
    },
}
NAMED = {"type": "custom", "custom": {"name": "code"}}
INPUT = 'print("a\n\u00e4")'
CODE_CALL = "<tool_call>\n" + json.dumps({"name": "code", "arguments": {"input": INPUT}}) + "\n</tool_call>"
TEXT = f"I run it.\n{CODE_CALL}\n{COUNT_CALL}\n{CODE_CALL}"


def flat(body: dict) -> dict:
    """A tool, or a choice of one, as the Responses API has it."""
    return {"type": body["type"], **body[body["type"]]}


USE = ToolUse(SamplingParams(), names=frozenset(("code", "count")), custom=frozenset(("code",)))


def test_however_a_completion_is_cut_its_custom_calls_are_the_same():
    def read(*texts: str) -> list[CustomCall]:
        reader, made = CallReader(USE), []
        for i, text in enumerate(texts):
            made += reader.feed(text, is_last=i == len(texts) - 1)
        return [one for one in made if isinstance(one, CustomCall)]

    want = [CustomCall(0, "code", INPUT), CustomCall(2, "code", INPUT)]
    assert read(TEXT) == read(*TEXT) == want
    assert [one for one in CallReader(USE).read(TEXT)[1] if isinstance(one, CustomCall)] == want
    ends = [match.end() for match in re.finditer("</tool_call>", TEXT)]
    for at in range(1, len(TEXT)):
        assert read(TEXT[:at], TEXT[at:]) == want
        num_complete = (at >= ends[0]) + (at >= ends[2])
        assert read(TEXT[:at])[:num_complete] == want[:num_complete]
    cut = TEXT[: TEXT.index("print") + 3]
    assert read(cut) == read(*cut) == [CustomCall(0, "code", '{"input": "pri')]  # which is no JSON


@pytest.mark.parametrize("arguments", ["{}", '{"code": "x"}', '{"input": 5}'])
def test_other_arguments_are_the_input_as_they_are(arguments):
    text = CODE_CALL.replace(json.dumps({"input": INPUT}), arguments)
    assert CallReader(USE).feed(text, is_last=True) == [CustomCall(0, "code", arguments)]
    assert CallReader(USE).read(text) == ("", [CustomCall(0, "code", arguments)])


def test_half_a_character_in_an_input_is_replaced():
    text = CODE_CALL.replace(json.dumps({"input": INPUT}), r'{"input": "a\ud83d"}')
    assert CallReader(USE).feed(text, is_last=True) == [CustomCall(0, "code", "a\ufffd")]


def test_a_chat_has_calls_of_both_kinds(client, writes):
    writes(TEXT)
    asked = chat("Go", tools=[CODE, COUNT])
    [choice] = client.chat.completions.create(**asked).choices
    first, second, third = choice.message.tool_calls
    assert (choice.message.content, choice.finish_reason) == ("I run it.", "tool_calls")
    assert (first.type, first.custom.name, first.custom.input) == ("custom", "code", INPUT)
    assert (second.type, second.function.name, third.custom.input) == ("function", "count", INPUT)
    parts = [
        part
        for chunk in client.chat.completions.create(**asked, stream=True)
        for one in chunk.choices
        for part in one.delta.tool_calls or ()
    ]
    customs = [part for part in parts if part.index != 1]
    assert [(one.index, one.type, one.custom) for one in customs] == [
        (i, "custom", {"name": "code", "input": INPUT}) for i in (0, 2)
    ]
    assert "".join(one.function.arguments for one in parts if one.index == 1) == '{"shape": "star", "most": 5}'


def test_a_response_has_items_of_both_kinds(client, writes):
    writes(TEXT)
    asked = {"model": "bundled", "input": "Go", "tools": [flat(CODE), flat(COUNT)]}
    message, first, second, third = client.responses.create(**asked).output
    assert (message.content[0].text, first.name, first.input, first.status) == ("I run it.", "code", INPUT, "completed")
    assert (second.type, third.type, third.input) == ("function_call", "custom_tool_call", INPUT)
    events = [*client.responses.create(**asked, stream=True)]
    about = [event for event in events if event.type.startswith("response.custom_tool_call_input")]
    assert [event.type.rpartition(".")[2] for event in about] == ["delta", "done"] * 2
    assert [event.output_index for event in about] == [1, 1, 3, 3]
    assert about[0].delta == about[1].input == INPUT and about[0].item_id == about[1].item_id
    made = events[-1].response.output
    assert [one.type for one in made] == [one.type for one in (message, first, second, third)]
    assert made[1].input == made[3].input == INPUT


@pytest.mark.parametrize("choice", ["required", NAMED, {"type": "allowed_tools", "allowed_tools": None}], ids=str)
def test_a_call_that_is_demanded_has_an_input(app, engine, choice):
    if isinstance(choice, dict) and "allowed_tools" in choice:
        choice = choice | {"allowed_tools": {"mode": "required", "tools": [NAMED]}}
    [quote] = engine.tokenizer.encode('"')  # which the model writes wherever it may, so that the call ends
    keys = {"tools": [CODE], "tool_choice": choice, "parallel_tool_calls": False, "logit_bias": {str(quote): 100}}
    asked = chat("Go", max_tokens=200, temperature=0, **keys)
    [choice] = answered(app, CHAT, asked)["choices"]
    [made] = choice["message"]["tool_calls"]
    assert made["type"] == "custom" and made["custom"]["name"] == "code" and made["id"].startswith("call_")
    assert choice["finish_reason"] == "tool_calls" and made["custom"]["input"] == ""


@pytest.mark.parametrize("choice", ["required", flat(NAMED), {"type": "allowed_tools", "mode": "required"}], ids=str)
def test_a_response_has_the_call_that_is_demanded(app, choice):
    if isinstance(choice, dict) and choice["type"] == "allowed_tools":
        choice = choice | {"tools": [flat(NAMED)]}
    asked = {"input": "Go", "tools": [flat(CODE)], "tool_choice": choice, "max_output_tokens": 200, "temperature": 0}
    [made] = answered(app, RESPONSES, asked)["output"]
    assert (made["type"], made["name"]) == ("custom_tool_call", "code")


HISTORY = [
    user("Go"),
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "a", **NAMED, "custom": {"name": "code", "input": INPUT}}],
    },
    {"role": "tool", "tool_call_id": "a", "content": "ä"},
]


def test_prompts_and_histories_are_those_of_the_function_that_takes_the_input(app):
    function = {"name": "code", "arguments": json.dumps({"input": INPUT})}
    history = [
        HISTORY[0],
        HISTORY[1] | {"tool_calls": [{"id": "a", "type": "function", "function": function}]},
        HISTORY[2],
    ]
    asked = {"messages": history, "tools": [{"type": "function", "function": AS_FUNCTION}]}
    want = answered(app, TOKENIZE, asked)["tokens"]
    assert answered(app, TOKENIZE, {"messages": HISTORY, "tools": [CODE]})["tokens"] == want
    items = [
        {"role": "user", "content": "Go"},
        {"type": "custom_tool_call", "call_id": "a", "name": "code", "input": INPUT},
        {"type": "custom_tool_call_output", "call_id": "a", "output": "ä"},
    ]
    counted = answered(app, f"{RESPONSES}/input_tokens", {"input": items, "tools": [flat(CODE)]})
    assert counted["input_tokens"] == len(want)


@pytest.mark.network
def test_a_stored_call_is_continued_and_read_again(client, writes):
    writes(CODE_CALL)
    keys = {"model": "bundled", "tools": [flat(CODE)]}
    first = client.responses.create(input="Go", **keys)
    result = {"type": "custom_tool_call_output", "call_id": first.output[0].call_id, "output": "ä"}
    second = client.responses.create(input=[result], previous_response_id=first.id, **keys)
    whole = client.responses.create(input=[user("Go"), first.output[0].model_dump(), result], **keys)
    assert second.status == whole.status == "completed"
    [answer] = client.responses.input_items.list(second.id).data
    items = client.responses.input_items.list(whole.id, order="asc").data
    assert [one.type for one in items] == ["message", "custom_tool_call", answer.type]
    assert (items[1].name, items[1].input) == ("code", INPUT) and answer.type == result["type"]


@pytest.mark.parametrize(
    ("keys", "param", "words"),
    [
        (
            {"tools": [{"type": "custom", "custom": {"name": "a", "format": {"type": "grammar"}}}]},
            "tools[0].custom.format.type",
            "must be 'text'",
        ),
        ({"tools": [CODE | {"parameters": {"a": 1}}]}, "tools[0].parameters", "does not belong here"),
        ({"tools": [CODE, CODE]}, "tools[1].custom.name", "the name of another tool"),
        ({"tools": [CODE, {"type": "function", "function": AS_FUNCTION}]}, "tools[1].function.name", "another tool"),
        ({"tools": [COUNT], "tool_choice": NAMED}, "tool_choice.custom.name", "not the name of a tool"),
        ({"tools": [CODE], "tool_choice": NAMED_COUNT}, "tool_choice.function.name", "not the name of a tool"),
    ],
)
def test_an_error_names_the_field(app, keys, param, words):
    check_refusal(app, CHAT, chat("Hi", **keys), param, words)
