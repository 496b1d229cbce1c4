"""A tool choice that allows some of the tools, in chats and in the Responses API, whose input tokens can be counted."""

import pytest

from tests.helpers.serving.server import CHAT, RESPONSES, answered, chat
from tests.server.refusals import refusal


def function(name: str, **keys) -> dict:
    schema = {"type": "object", "properties": {"a": {"enum": [name]}}, "required": ["a"], "additionalProperties": False}
    return {"name": name, "parameters": schema, **keys}


FUNCTIONS = [function("first", strict=True), function("second"), function("third")]
COUNT = f"{RESPONSES}/input_tokens"


def allowed(mode: str, *names: str) -> dict:
    return {"mode": mode, "tools": [{"type": "function", "name": name} for name in names]}


def chat_keys(functions: list[dict], choice: dict | str) -> dict:
    """The arguments of a chat, for a choice in the form of the Responses API."""
    if isinstance(choice, dict):
        tools = [{"type": "function", "function": {"name": one["name"]}} for one in choice["tools"]]
        choice = {"type": "allowed_tools", "allowed_tools": choice | {"tools": tools}}
    return {"tools": [{"type": "function", "function": one} for one in functions], "tool_choice": choice}


def response_keys(functions: list[dict], choice: dict | str) -> dict:
    tools = [{"type": "function", **one} for one in functions]
    return {"tools": tools, "tool_choice": {"type": "allowed_tools", **choice} if isinstance(choice, dict) else choice}


def response(text: str, **keys) -> dict:
    return {"model": "bundled", "input": text, "temperature": 0, **keys}


def calls(app, **keys) -> list[str]:
    [choice] = answered(app, CHAT, chat("Hello", max_tokens=200, temperature=0, **keys))["choices"]
    return [one["function"]["name"] for one in choice["message"]["tool_calls"] or ()]


@pytest.mark.parametrize("names", [["second"], ["third"], ["third", "second"]])
def test_only_allowed_functions_are_called_and_shown(app, names):
    some = [one for one in FUNCTIONS if one["name"] in names]
    keys = {"parallel_tool_calls": False} | chat_keys(FUNCTIONS, allowed("required", *names))
    assert set(calls(app, **keys)) <= {*names}
    assert calls(app, **keys) == calls(app, parallel_tool_calls=False, **chat_keys(some, "required")) != []
    body = response("Hello", **response_keys(FUNCTIONS, allowed("auto", *names)))
    assert answered(app, COUNT, body) == answered(app, COUNT, response("Hello", **response_keys(some, "auto")))


def test_with_auto_the_model_decides(app):
    keys = chat_keys(FUNCTIONS, allowed("auto", "second"))
    body = chat("Hello", max_tokens=12, temperature=0)
    choices = answered(app, CHAT, body | keys)["choices"]
    assert choices == answered(app, CHAT, body | chat_keys(FUNCTIONS[1:2], "auto"))["choices"]
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": 7}}}
    assert answered(app, CHAT, body | keys | {"response_format": schema})["choices"][0]["message"]["content"] == "7"


def test_responses_repeat_the_choice_and_count_as_they_are_computed(app):
    keys = response_keys(FUNCTIONS, allowed("required", "third"))
    body = response("Hello", instructions="Be brief.", parallel_tool_calls=False, **keys)
    made = answered(app, RESPONSES, body)
    assert [item["name"] for item in made["output"]] == ["third"] and made["tool_choice"] == keys["tool_choice"]
    counted = answered(app, COUNT, body)
    assert counted == {"object": "response.input_tokens", "input_tokens": made["usage"]["input_tokens"]}
    continued = response("More", previous_response_id=made["id"], **keys)
    assert answered(app, COUNT, continued)["input_tokens"] > counted["input_tokens"]


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        (allowed("required", "first", "nosuch"), "tools[1].function.name"),
        (allowed("required"), "tools"),
        (allowed("any", "first"), "mode"),
        ({"mode": "auto"}, "tools"),
        (allowed("auto", "first") | {"name": "first"}, "name"),
    ],
)
def test_wrong_choices_are_named(app, choice, param):
    keys = chat_keys(FUNCTIONS, choice if "tools" in choice else choice | {"tools": []})
    if "tools" not in choice:
        del keys["tool_choice"]["allowed_tools"]["tools"]
    assert refusal(app, CHAT, chat("Hello", **keys))["param"] == f"tool_choice.allowed_tools.{param}"
    body = response("Hello", **response_keys(FUNCTIONS, choice))
    for path in (RESPONSES, COUNT):
        assert refusal(app, path, body)["param"] == f"tool_choice.{param.replace('.function', '')}"


def test_tools_are_needed(app):
    keys = {"tool_choice": chat_keys(FUNCTIONS, allowed("auto", "first"))["tool_choice"]}
    assert refusal(app, CHAT, chat("Hello", **keys))["param"] == "tool_choice"


@pytest.mark.parametrize("body", [{"input": []}, {"input": "Hello", "previous_response_id": "nosuch"}, {"inputs": "a"}])
def test_what_cannot_be_counted_has_the_error_of_a_response(app, body):
    assert refusal(app, RESPONSES, body) == refusal(app, COUNT, body)


def test_an_input_that_does_not_fit_is_counted(app):
    text = "a" * 20_000
    refusal(app, RESPONSES, response(text))
    assert answered(app, COUNT, response(text))["input_tokens"] > 20_000
