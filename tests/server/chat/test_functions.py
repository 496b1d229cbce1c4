"""`functions` and `function_call`, the form that tools had before in OpenAI's chats."""

import pytest

from mmvllm import SamplingParams
from tests.helpers.serving.server import CHAT, TOKENIZE, answered, chat, user
from tests.helpers.serving.tools import CALL, COUNT, FIND
from tests.server.refusals import check_refusal

FUNCTIONS = [COUNT["function"], FIND["function"]]
STRICT = [COUNT | {"function": COUNT["function"] | {"strict": True}}]
CALLED = {"name": "count", "arguments": '{"shape": "star", "most": 5}'}
NOT_ENFORCED = {"name": "f", "parameters": {"type": "object", "not": {}}, "strict": True}


@pytest.mark.parametrize("choice", [None, "auto"])
def test_the_call_is_in_the_field_of_this_form(choice, client, writes):
    writes(f"I look.\n{CALL}")
    asked = chat("Go", functions=FUNCTIONS) | ({} if choice is None else {"function_call": choice})
    [made] = client.chat.completions.create(**asked).choices
    assert made.message.function_call.model_dump() == CALLED
    assert (made.message.content, made.message.tool_calls, made.finish_reason) == ("I look.", None, "function_call")
    chunks = [*client.chat.completions.create(**asked, stream=True)]
    deltas = [one.delta for chunk in chunks for one in chunk.choices]
    called = [delta.function_call for delta in deltas if delta.function_call]
    assert [one.name for one in called] == ["count"] + [None] * (len(called) - 1)
    assert "".join(one.arguments or "" for one in called) == CALLED["arguments"]
    assert not any(delta.tool_calls for delta in deltas)
    assert [one.finish_reason for one in chunks[-1].choices] == ["function_call"]


def test_a_named_function_is_called_once(app):
    asked = chat("Go", functions=FUNCTIONS, function_call={"name": "count"}, max_tokens=200, temperature=0)
    [made] = answered(app, CHAT, asked)["choices"]
    assert made["message"]["function_call"]["name"] == "count" and "tool_calls" not in made["message"]
    assert made["finish_reason"] in ("function_call", "length")


@pytest.fixture
def seen(engine, monkeypatch) -> list[SamplingParams]:
    """The parameters of the requests that the engine is given."""
    seen, generate = [], engine.generate
    monkeypatch.setattr(
        engine, "generate", lambda made, params, **keys: seen.append(params) or generate(made, params, **keys)
    )
    return seen


def test_at_most_one_function_is_called(app, seen):
    """The completion ends with the first call, as with `parallel_tool_calls: false`."""
    answered(app, CHAT, chat("Go", functions=FUNCTIONS))
    answered(app, CHAT, chat("Go", tools=[COUNT, FIND], parallel_tool_calls=False))
    answered(app, CHAT, chat("Go", tools=[COUNT, FIND]))
    assert seen[0] == seen[1] != seen[2]


@pytest.mark.parametrize("finish_reason", ["eos", "length"])
def test_of_several_calls_the_first_one_is_shown_whole_and_streamed(finish_reason, client, writes):
    """A model may write several before `min_tokens`."""
    text = f"{CALL}\n{CALL.replace('star', 'circle')}"
    writes(text, "Hi", finish_reason=finish_reason)
    asked = chat("Go", functions=FUNCTIONS, n=2)
    first, second = client.chat.completions.create(**asked).choices
    assert first.message.function_call.model_dump() == CALLED and second.message.function_call is None
    reason = {"eos": "function_call"}.get(finish_reason, finish_reason)
    assert (first.finish_reason, second.message.content) == (reason, "Hi")
    deltas = [one.delta for chunk in client.chat.completions.create(**asked, stream=True) for one in chunk.choices]
    assert "".join(delta.function_call.arguments for delta in deltas if delta.function_call) == CALLED["arguments"]


@pytest.mark.parametrize("form", [{"functions": [FUNCTIONS[0] | {"strict": True}]}, {"tools": STRICT}])
def test_a_single_call_ends_a_completion_whose_calls_are_enforced(form, app, seen):
    single = {} if "functions" in form else {"parallel_tool_calls": False}
    answered(app, CHAT, chat("Go", max_tokens=2, **form, **single))
    assert seen[0].structured is not None and seen[0].stop[-1:] == ("</tool_call>",)


def test_no_function_is_called_with_none(client, writes):
    writes(CALL)
    [made] = client.chat.completions.create(**chat("Go", functions=FUNCTIONS, function_call="none")).choices
    assert (made.message.content, made.message.function_call, made.finish_reason) == (CALL, None, "stop")


def test_no_functions_are_no_form(client, writes):
    writes(CALL)
    [made] = client.chat.completions.create(**chat("Go", functions=[], tools=[COUNT])).choices
    assert [one.function.name for one in made.message.tool_calls] == ["count"]


def test_a_history_of_this_form_is_that_of_tools(app):
    head = [user("Go"), {"role": "assistant", "content": None}]
    older = [head[0], head[1] | {"function_call": CALLED}, {"role": "function", "name": "count", "content": "5"}]
    newer = [
        head[0],
        head[1] | {"tool_calls": [{"id": "a", "type": "function", "function": CALLED}]},
        {"role": "tool", "tool_call_id": "a", "content": "5"},
    ]
    first, second = (answered(app, TOKENIZE, {"messages": one, "tools": [COUNT]})["tokens"] for one in (older, newer))
    assert first == second
    counts = [
        answered(app, CHAT, {"messages": one, "max_tokens": 1, **keys})["usage"]["prompt_tokens"]
        for one, keys in ((older, {"functions": [COUNT["function"]]}), (newer, {"tools": [COUNT]}))
    ]
    assert counts == [len(first)] * 2


@pytest.mark.parametrize(
    ("keys", "param", "words"),
    [
        ({"functions": [{"name": "f", "args": {"a": 1}}]}, "functions[0].args", "does not belong here"),
        ({"functions": [{"name": "f"}] * 129}, "functions", "at most 128 items"),
        ({"functions": FUNCTIONS, "tools": [COUNT]}, "functions", "newer fields"),
        ({"functions": FUNCTIONS, "tool_choice": "auto"}, "functions", "newer fields"),
        ({"function_call": "none", "tools": [COUNT]}, "function_call", "newer fields"),
        ({"function_call": {"name": "f"}}, "function_call", "needs functions"),
        ({"function_call": {"name": "x"}, "functions": FUNCTIONS}, "function_call.name", "'x', which is not the name"),
        ({"function_call": {"name": "tools"}, "functions": FUNCTIONS}, "function_call.name", "is 'tools', which"),
        ({"function_call": {"name": "it's tools"}, "functions": FUNCTIONS}, "function_call.name", "it's tools"),
        ({"functions": FUNCTIONS, "function_call": "required"}, "function_call", "must be 'none' or 'auto'"),
        ({"functions": [FUNCTIONS[0]] * 2}, "functions[1].name", "the name of another"),
        ({"functions": [{"name": "my_tools"}] * 2}, "functions[1].name", "is 'my_tools', the name of another"),
        ({"functions": [NOT_ENFORCED]}, "functions[0].parameters", "'not'"),
        ({"functions": FUNCTIONS, "guided_regex": "a"}, "functions", "unless function_call is none"),
        ({"messages": [{"role": "assistant", "function_call": {}}]}, "messages[0].function_call.name", "is missing"),
    ],
)
def test_an_error_names_the_field(app, keys, param, words):
    check_refusal(app, CHAT, chat("Hi", **keys), param, words)
