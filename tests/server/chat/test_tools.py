"""Tools of chats: the `openai` client, a real server, and completions that a script writes."""

import json

import pytest

from mmvllm.server.chat.protocol import ChatRequest
from mmvllm.server.chat.serving import chat_job
from tests.helpers.serving.server import CHAT, TOKENIZE, answered, chat, data_uri, image_part, make_app, served, user
from tests.helpers.serving.tools import CALL, COUNT, FIND, NAMED, tool
from tests.server.refusals import check_refusal

OTHER = '<tool_call>\n{"name": "find", "arguments": {"color": "red"}}\n</tool_call>'


def ask(client, *parts, **keys):
    keys = {"tools": [COUNT, FIND]} | keys
    return client.chat.completions.create(**chat(*(parts or ("How many stars?",)), **{"max_tokens": 200} | keys))


def streamed(stream) -> tuple[list[str], list[dict[int, dict]], list[str | None]]:
    """Content, calls by index, and finish reasons, of each choice."""
    contents, calls, reasons = {}, {}, {}
    for chunk in stream:
        for choice in chunk.choices:
            i, of_choice = choice.index, calls.setdefault(choice.index, {})
            contents[i] = contents.get(i, "") + (choice.delta.content or "")
            reasons[i] = choice.finish_reason or reasons.get(i)
            for one in choice.delta.tool_calls or ():
                if one.id is not None:
                    assert one.index == len(of_choice) and one.type == "function" and one.id.startswith("call_")
                    of_choice[one.index] = {"name": one.function.name, "arguments": ""}
                of_choice[one.index]["arguments"] += one.function.arguments
    return [[by_choice[i] for i in sorted(contents)] for by_choice in (contents, calls, reasons)]


TEXTS = {
    "A star.": ("A star.", [], "stop"),
    CALL: (None, ["count"], "tool_calls"),
    f"I look.\n{CALL}\n{OTHER}": ("I look.", ["count", "find"], "tool_calls"),
    CALL.replace("count", "unknown"): (CALL.replace("count", "unknown"), [], "stop"),
    "<tool_call>nonsense": ("<tool_call>nonsense", [], "stop"),
}
ARGUMENTS = {"count": '{"shape": "star", "most": 5}', "find": '{"color": "red"}'}


@pytest.mark.spawns
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("streams", [False, True])
def test_calls_are_found_in_completions(client, writes, text, streams):
    writes(text)
    content, names, reason = TEXTS[text]
    want = [{"name": name, "arguments": ARGUMENTS[name]} for name in names]
    if streams:
        assert streamed(ask(client, stream=True)) == [[content or ""], [dict(enumerate(want))], [reason]]
        return
    [choice] = ask(client).choices
    calls = choice.message.tool_calls or []
    assert [{"name": one.function.name, "arguments": one.function.arguments} for one in calls] == want
    assert len({one.id for one in calls}) == len(calls)
    assert (choice.message.content, choice.finish_reason) == (content, reason)


def test_every_choice_has_its_own_calls(client, writes):
    writes(CALL, "Hi", OTHER)
    contents, calls, reasons = streamed(ask(client, stream=True, n=3))
    assert contents == ["", "Hi", ""] and reasons == ["tool_calls", "stop", "tool_calls"]
    assert [[one["name"] for one in of_choice.values()] for of_choice in calls] == [["count"], [], ["find"]]


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        (CALL[:60], '{"shape": "star",'),
        (CALL[:-4], ARGUMENTS["count"]),
        (CALL.replace("star", r"\ud83d"), r'{"shape": "\ud83d", "most": 5}'),
        (CALL.replace("5", "1e999"), '{"shape": "star", "most": 1e999}'),
        (CALL.replace("5", "NaN"), '{"shape": "star", "most": null}'),
    ],
)
@pytest.mark.parametrize("reason", ["length", "stop"])
def test_a_call_is_the_same_whole_and_streamed_however_it_ends(client, writes, text, arguments, reason):
    writes(text, finish_reason=reason)
    if reason == "stop" and arguments.endswith("}"):  # a stop string cut off what follows the call
        reason = "tool_calls"
    [choice] = ask(client).choices
    [made] = choice.message.tool_calls
    assert (choice.message.content, made.function.name, choice.finish_reason) == (None, "count", reason)
    assert made.function.arguments == arguments
    [content], [calls], reasons = streamed(ask(client, stream=True))
    assert (content, calls, reasons) == ("", {0: {"name": "count", "arguments": arguments}}, [reason])


@pytest.mark.parametrize("choice", ["none", None])
def test_without_tools_or_with_none_text_is_text(client, writes, choice):
    writes(CALL)
    answer = ask(client, tool_choice=choice, tools=None) if choice is None else ask(client, tool_choice=choice)
    assert (answer.choices[0].message.content, answer.choices[0].message.tool_calls) == (CALL, None)


def calls_of(answer) -> list[tuple[str, dict]]:
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    return [(one.function.name, json.loads(one.function.arguments)) for one in choice.message.tool_calls]


@pytest.mark.spawns
def test_a_required_call_fits_its_function(client):
    [(name, arguments)] = calls_of(ask(client, tool_choice="required", parallel_tool_calls=False))
    assert arguments.keys() == {"count": {"shape", "most"}, "find": {"color"}}[name]
    part = image_part(data_uri())
    [(name, arguments)] = calls_of(ask(client, part, "Find it.", tool_choice=NAMED))
    assert name == "find" and arguments["color"] in ("red", "green")


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_streamed_call_is_the_same(client, choice):
    keys = {"tool_choice": choice, "parallel_tool_calls": False}
    [(name, arguments)] = calls_of(ask(client, **keys))
    _, [calls], reasons = streamed(ask(client, stream=True, **keys))
    assert reasons == ["tool_calls"] and calls[0]["name"] == name and json.loads(calls[0]["arguments"]) == arguments


def test_required_calls_of_random_completions_fit(client):
    """With temperature 2 a small model writes anything that it may."""
    for seed in range(4):
        keys = {"tool_choice": "required", "temperature": 2, "seed": seed, "parallel_tool_calls": False}
        [(name, arguments)] = calls_of(ask(client, tools=[COUNT], **keys))
        assert name == "count" and arguments["shape"] in ("star", "circle") and 1 <= arguments["most"] <= 9


def test_a_strict_function_restricts_free_text(client, engine):
    """Text remains free; what follows the mark of a call is a call."""
    params = make_params(engine, tools=[tool("count", True, a={"type": "integer"}), FIND])
    assert params.structured.kind == "grammar" and "[lazy]" in params.structured.grammar
    answer = ask(client, tools=[tool("count", True)], max_tokens=5)
    assert answer.choices[0].message.content and answer.choices[0].message.tool_calls is None


def make_params(engine, **keys):
    return chat_job(served(engine), ChatRequest(**chat("Hi", **keys)), reservation=None).params


def test_a_single_call_ends_the_completion(engine):
    assert make_params(engine, tools=[FIND], parallel_tool_calls=False, stop="x").stop == ("x", "</tool_call>")
    assert make_params(engine, tools=[FIND]).stop == ()


def test_json_is_an_alternative_to_calls(client):
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    [choice] = ask(client, tools=[tool("f", True)], response_format=form).choices
    assert choice.message.tool_calls or json.loads(choice.message.content)["n"] in (1, 2)


def test_a_conversation_goes_on_with_results(client, writes):
    writes(f"I look.\n{CALL}")
    message = ask(client).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3"}
    writes("Three.")
    answer = ask(client, messages=[user("How many stars?"), message, result])
    assert answer.choices[0].message.content == "Three."


def test_results_and_calls_are_in_the_prompt(engine):
    app, turn = make_app(engine), user("How many stars?")
    called = {"id": "a", "type": "function", "function": {"name": "count", "arguments": ARGUMENTS["count"]}}
    message = {"role": "assistant", "content": None, "tool_calls": [called]}
    result = {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "3"}]}
    body = {"messages": [turn, message, result], "tools": [COUNT]}
    text = engine.tokenizer.decode(answered(app, TOKENIZE, body)["tokens"])
    assert CALL in text and "<tool_response>\n3\n</tool_response>" in text and '"name": "count", "parameters"' in text
    assert "strict" not in text


def function(**fields) -> list[dict]:
    return [{"type": "function", "function": {"name": "f", **fields}}]


PARAMETERS = "tools[0].function.parameters"
CALLS = "messages[0].tool_calls"
LONG = {f"a{i}": {"const": "\n" * 400} for i in range(45)}


@pytest.mark.parametrize(
    ("keys", "param", "words"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function", "is missing"),
        ({"tools": [{"type": "web_search", "function": {"name": "f"}}]}, "tools[0]", "type 'function' or 'custom'"),
        ({"tools": function(name="a b")}, "tools[0].function.name", "match pattern"),
        ({"tools": function(input_schema={"a": 1})}, "tools[0].function.input_schema", "does not belong"),
        ({"tools": [COUNT | {"strict": True}]}, "tools[0].strict", "does not belong here"),
        ({"tools": [COUNT, COUNT]}, "tools[1].function.name", "the name of another tool"),
        ({"tools": [COUNT] * 129}, "tools", "at most 128 items"),
        ({"tools": function(parameters={"type": "array"})}, PARAMETERS, "must have the type 'object', got 'array'"),
        ({"tools": function(parameters={"not": {}}, strict=True)}, PARAMETERS, "'not'"),
        ({"tools": function(parameters={"not": {}}), "tool_choice": "required"}, PARAMETERS, "'not'"),
        ({"tools": function(parameters={"$ref": "#/x"}, strict=True)}, "tools", "cannot be enforced"),
        ({"tool_choice": NAMED, "tools": []}, "tool_choice", "needs tools"),
        ({"tools": [COUNT], "tool_choice": NAMED}, "tool_choice.function.name", "not the name of a tool"),
        ({"tools": [COUNT], "tool_choice": "any"}, "tool_choice", "'none', 'auto' or 'required'"),
        ({"tools": [COUNT], "tool_choice": "required", "guided_regex": "a"}, "tool_choice", "so does another field"),
        ({"tools": [COUNT], "guided_choice": ["a"]}, "tools", "exclude each other"),
        ({"tools": [COUNT], "tool_choice": "required", "beam_width": 2}, "tools", "cannot be used with beam search"),
        ({"tools": [COUNT], "parallel_tool_calls": False, "beam_width": 2}, "tools", "leave out strict, parallel_tool"),
        ({"tools": [COUNT], "tool_choice": "required", "ignore_eos": True}, "ignore_eos", "contradicts tools"),
        ({"tools": [tool("f", True, **LONG), tool("g", True, **LONG)]}, "tools", "at most 65536 characters, got"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, f"{CALLS}[0].function", "is missing"),
    ],
)  # fmt: skip
def test_an_error_names_the_field(app, keys, param, words):
    check_refusal(app, CHAT, chat("Hi", **keys), param, words)


def test_a_function_that_cannot_be_enforced_may_be_called_freely(client, writes):
    writes('<tool_call>\n{"name": "f", "arguments": {"a": [1]}}\n</tool_call>')
    [one] = ask(client, tools=function(parameters={"not": {}})).choices[0].message.tool_calls
    assert one.function.arguments == '{"a": [1]}'
