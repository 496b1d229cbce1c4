"""Calls in completions, whole and in pieces; and the grammars of such completions."""

import json
import random

import pytest
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer

from mmvllm.processors.chat.tool_calls import CallPiece, FunctionCall, ToolCallParser, read_tool_calls
from mmvllm.processors.chat.tool_grammar import calls_or_json_grammar, free_text_grammar, tool_call_grammar
from tests.helpers.models.tokenizers import NAMES, tokenizer_of

ARGUMENTS = '{"a": "x</tool_call>\\"{ ü", "b": [1, {"c": 2}]}'
CALL = f'<tool_call>\n{{"name": "f", "arguments": {ARGUMENTS}}}\n</tool_call>'
UNKNOWN = '<tool_call>\n{"name": "no", "arguments": {}}\n</tool_call>'
A_LIST = '<tool_call>{"name": "f", "arguments": []}</tool_call>'
OTHER_NAME = '<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>'
DAMAGED = '<tool_call>{"name": "f" oops}</tool_call>'
F = ("f", ARGUMENTS)
STRINGS = ('""', '"x"', r'"{\"a\"}"')
TEXTS = {
    "hello  \n": ("hello  \n", []),
    "": ("", []),
    CALL: ("", [F]),
    f"Sure.\n{CALL}\n{CALL}": ("Sure.", [F, F]),
    f"{CALL}\nall of \n you \n": ("all of \n you \n", [F]),
    f"{CALL}{CALL}": ("", [F, F]),
    UNKNOWN: (UNKNOWN, []),
    f"a\n{UNKNOWN} b": (f"a\n{UNKNOWN} b", []),
    f"{UNKNOWN}\n{CALL}": (UNKNOWN, [F]),
    "a\n<tool_call>oops": ("a\n<tool_call>oops", []),
    f"<tool_call>oops {CALL}": ("<tool_call>oops", [F]),
    "a <tool": ("a <tool", []),
    "<tool_call>{}</tool_call>\n\nb": ("<tool_call>{}</tool_call>\n\nb", []),
    CALL.removesuffix("\n</tool_call>"): ("", [F]),
    '<tool_call>{"name": "f", "arguments": {}}<tool_call>{"name": "f", "arguments": {}}': ("", [("f", "{}")] * 2),
    A_LIST: (A_LIST, []),
    DAMAGED: (DAMAGED, []),
    # In another order, with other members, or without arguments
    '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>': ("", [("f", '{"a": 1}')]),
    '<tool_call>{"arguments": {"a": "</tool_call>"}, "name": "f"}</tool_call> b': (
        "b",
        [("f", '{"a": "</tool_call>"}')],
    ),
    '<tool_call>{"id": 1, "name": "f", "arguments": {}}</tool_call>': ("", [("f", "{}")]),
    '<tool_call>{"name": "f", "arguments": {}, "id": "1"}</tool_call>': ("", [("f", "{}")]),
    '<tool_call>{"name": "f", "arguments": {}, he said': (", he said", [("f", "{}")]),
    '<tool_call>{"name": "f"}</tool_call>': ("", [("f", "{}")]),
    OTHER_NAME: (OTHER_NAME, []),
    # White space between texts stays, whatever is between them
    f"Hi {CALL} bye": ("Hi bye", [F]),
    f"Hi\n{CALL}\n{CALL}\n\nbye {CALL} now": ("Hi\nbye now", [F] * 3),
    f"Hi  {CALL}a{CALL}b{CALL}c": ("Hi  abc", [F] * 3),
    f"\n{CALL}Hi<tool_call>oops": ("Hi<tool_call>oops", [F]),
    f"Hi {CALL}\n<tool_call>oops": ("Hi <tool_call>oops", [F]),
    f"<tool_call>oops\n{CALL} b": ("<tool_call>oops\nb", [F]),
    # Arguments that are null, or JSON in a string
    '<tool_call>{"name": "f", "arguments": null}</tool_call>': ("", [("f", "{}")]),
    r'<tool_call>{"name": "f", "arguments": "{\"a\": \"\ud83d b\"}"}</tool_call>': ("", [("f", '{"a": "\ufffd b"}')]),
    **{text: (text, []) for text in (f'<tool_call>{{"name": "f", "arguments": {a}}}</tool_call>' for a in STRINGS)},
    '<tool_call>{"name": "f", "arguments": {}, "x": {"a": "<{}>"}}\n</tool_call>b': ("b", [("f", "{}")]),
    '<tool_call>{"name": "f", "arguments": {}, "x": 1<tool_call>{"name": "f"}': ("", [("f", "{}")] * 2),
    # Cut off
    f"{CALL[:-11]}": ("", [F]),
    CALL[:60]: ("", [("f", ARGUMENTS[: 60 - CALL.index(ARGUMENTS)])]),
    CALL[:30]: (CALL[:30], []),
}
ARGUMENT_TEXTS = {  # as models write them: as they are sent
    '{"a": 1e999, "b": -0.12345678901234567890123}': None,
    '{"c": 1, "c": 2}': None,
    r'{"a": "\ud83d"}': None,
    r'{"a": "\\", "b": "\"True, NaN"}': None,
    '{"a": {"b": [true, null, 1]}}': None,
    "{'a': 1,}": None,  # no JSON
    '{"a": NaN, "b": [Infinity,-Infinity]}': '{"a": null, "b": [null,null]}',
    '{"a": True, "b": [False, None]}': '{"a": true, "b": [false, null]}',
    '{"a": "x\n\ty\x00"}': r'{"a": "x\n\ty\u0000"}',
    '{"a": "x \\\ny"}': r'{"a": "x \\\ny"}',
}


def together(pieces: list[str | CallPiece]) -> tuple[str, list[FunctionCall]]:
    content, calls = "", []
    for piece in pieces:
        if isinstance(piece, str):
            content += piece
        else:
            assert (piece.name is not None) == (piece.index == len(calls)) and piece.index >= len(calls) - 1
            name, arguments = (piece.name, "") if piece.name is not None else calls.pop()
            calls.append((name, arguments + piece.arguments))
    return content, [FunctionCall(*call) for call in calls]


def fed(*texts: str) -> tuple[str, list[FunctionCall]]:
    """What a parser gives for a completion in pieces."""
    parser = ToolCallParser({"f"})
    content, calls = together([piece for text in texts for piece in parser.feed(text)] + parser.feed("", is_last=True))
    assert parser.num_calls == len(calls)
    return content, calls


@pytest.mark.parametrize("text", TEXTS)
def test_a_completion_is_taken_apart(text):
    content, calls = TEXTS[text]
    assert read_tool_calls(text, {"f"}) == (content, [FunctionCall(*call) for call in calls])


@pytest.mark.parametrize("arguments", ARGUMENT_TEXTS)
def test_arguments_are_the_models_own_text_where_it_is_json(arguments):
    want = ("", [FunctionCall("f", ARGUMENT_TEXTS[arguments] or arguments)])
    for call in (f'{{"name": "f", "arguments": {arguments}}}', f'{{"arguments": {arguments}, "name": "f"}}'):
        text = f"<tool_call>\n{call}\n</tool_call>"
        if arguments.startswith("{'") and call.endswith('"f"}'):
            want = (text, [])  # it cannot be read
        assert read_tool_calls(text, {"f"}) == fed(*text) == want


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_together_are_the_whole_wherever_a_completion_is_cut(text):
    for end in range(len(text) + 1):
        whole = read_tool_calls(text[:end], {"f"})
        assert fed(*text[:end]) == whole
        assert all(fed(text[:at], text[at:end]) == whole for at in range(0, end, 7))


def test_damaged_completions_are_the_same_in_pieces():
    draw = random.Random(0)
    for _ in range(400):
        text = list(
            draw.choice([*TEXTS, *(f'<tool_call>{{"name": "f", "arguments": {one}}}' for one in ARGUMENT_TEXTS)])
        )
        for _ in range(draw.randint(1, 4)):
            at = draw.randint(0, len(text))
            text[at : at + draw.randint(0, 3)] = draw.choice(["", "{", "}", '"', "\\", ",", "<", "\n", "<tool_call>"])
        text = "".join(text)
        assert fed(*text) == read_tool_calls(text, {"f"})


def test_arguments_come_before_the_call_is_complete():
    parser = ToolCallParser({"f"})
    assert parser.feed('Hi <tool_call>\n{"name": "f", "arguments": {"a"') == [
        "Hi",
        CallPiece(0, "f"),
        CallPiece(0, None, '{"a"'),
    ]
    assert parser.feed(': "x y') == [CallPiece(0, None, ': "x y')]


def tool(name: str, **properties) -> dict:
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


OPEN = {"type": "function", "function": {"name": "g", "parameters": {"additionalProperties": True}}}
NO_PARAMETERS = (None, {}, {"type": "object", "properties": {}, "required": [], "title": "N"}, {"properties": None})
TOOLS = [
    tool("f", a={"type": "string", "maxLength": 3}),
    OPEN,
    *({"function": {"name": f"n{i}", "parameters": parameters}} for i, parameters in enumerate(NO_PARAMETERS)),
    {"function": {"name": "n"}},
    {"function": {"name": "m", "parameters": {"type": "object", "required": ["a"]}}},
]


def call_of(name: str, arguments: dict) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


GOOD, ANY, WRONG = call_of("f", {"a": "abc"}), call_of("g", {"x": [1, {"y": None}]}), call_of("f", {"a": "abcd"})


@pytest.fixture(scope="module", params=[name for name in NAMES if name in ("bundled", "Qwen2.5-VL-7B-Instruct")])
def accepts(request):
    tokenizer = tokenizer_of(request.param)
    guide = from_tokenizer(tokenizer)

    def accepts(make, text: str, *rest) -> bool:
        matcher = LLMatcher(guide, LLMatcher.grammar_from_lark(make(TOOLS, tokenizer, *rest)))
        assert not matcher.is_error(), matcher.get_error()
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    return accepts


@pytest.mark.slow
def test_a_grammar_of_calls(accepts):
    assert accepts(tool_call_grammar, GOOD) and accepts(tool_call_grammar, ANY)
    assert accepts(tool_call_grammar, f"{GOOD}\n{ANY}") and not accepts(tool_call_grammar, f"{GOOD}\n{ANY}", False)
    for text in (WRONG, "", "Hi", f"Hi {GOOD}", call_of("h", {})):
        assert not accepts(tool_call_grammar, text)


@pytest.mark.slow
def test_functions_without_parameters_are_called_with_none(accepts):
    for name in ("n", *(f"n{i}" for i in range(len(NO_PARAMETERS)))):
        for make in (tool_call_grammar, free_text_grammar):
            assert accepts(make, call_of(name, {})) and not accepts(make, call_of(name, {"a": 1}))
    assert accepts(tool_call_grammar, call_of("m", {"a": 1})) and not accepts(tool_call_grammar, call_of("m", {}))


@pytest.mark.slow
def test_a_grammar_of_text_with_calls(accepts):
    for text in ("", "Hi", GOOD, f"Hi\n{GOOD}\n{ANY} and so on", "a <tool> b"):
        assert accepts(free_text_grammar, text)
    for text in (WRONG, f"Hi\n{WRONG}", "<tool_call>oops", call_of("h", {})):
        assert not accepts(free_text_grammar, text)


@pytest.mark.slow
def test_a_grammar_of_calls_or_json(accepts):
    schema = tool("", a={"type": "integer"})["function"]["parameters"]
    for text in ('{"a": 5}', GOOD, f"{GOOD}\n{ANY}"):
        assert accepts(calls_or_json_grammar, text, schema)
    for text in ('{"a": "5"}', "Hi", WRONG, f'{GOOD}\n{{"a": 5}}'):
        assert not accepts(calls_or_json_grammar, text, schema)
    assert not accepts(calls_or_json_grammar, f"{GOOD}\n{ANY}", schema, False)
