"""Calls in completions, whole and in pieces; and the grammars of such completions."""

import json
import random

import pytest
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer

from mmvllm.processors.tool_calls import CallPiece, FunctionCall, ToolCallParser, read_tool_calls
from mmvllm.processors.tool_grammar import calls_or_json_grammar, free_text_grammar, tool_call_grammar
from tests.helpers.tokenizers import NAMES, tokenizer_of

ARGUMENTS = '{"a": "x</tool_call>\\"{ ü", "b": [1, {"c": 2}]}'
CALL = f'<tool_call>\n{{"name": "f", "arguments": {ARGUMENTS}}}\n</tool_call>'
UNKNOWN = '<tool_call>\n{"name": "no", "arguments": {}}\n</tool_call>'
F = ("f", ARGUMENTS)
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
    "a <tool": ("a <tool", []),
    "<tool_call>{}</tool_call>\n\nb": ("<tool_call>{}</tool_call>\n\nb", []),
    CALL.removesuffix("\n</tool_call>"): ("", [F]),
    '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>': ("", [("f", '{"a": 1}')]),
    '<tool_call>{"name": "f", "arguments": {}}<tool_call>{"name": "f", "arguments": {}}': ("", [("f", "{}")] * 2),
    '<tool_call>{"name": "f", "arguments": []}</tool_call>': (
        '<tool_call>{"name": "f", "arguments": []}</tool_call>',
        [],
    ),
}


@pytest.mark.parametrize("text", TEXTS)
def test_a_completion_is_taken_apart(text):
    content, calls = TEXTS[text]
    assert read_tool_calls(text, {"f"}) == (content, [FunctionCall(*call) for call in calls])


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_together_are_the_whole(text):
    for seed in range(40):
        draw, parser, pieces, at = random.Random(seed), ToolCallParser({"f"}), [], 0
        while at < len(text):
            size = draw.choice([1, 2, 5, 30])
            pieces += parser.feed(text[at : at + size])
            at += size
        pieces += parser.feed("", is_last=True)
        content, calls = TEXTS[text]
        assert "".join(piece for piece in pieces if isinstance(piece, str)) == content
        of_calls = [piece for piece in pieces if isinstance(piece, CallPiece)]
        for i, call in enumerate(calls):
            first, *rest = (piece for piece in of_calls if piece.index == i)
            assert first.name == call[0] and not any(piece.name for piece in rest)
            assert first.arguments + "".join(piece.arguments for piece in rest) == call[1]
        assert parser.num_calls == len(calls)


def test_arguments_come_before_the_call_is_complete():
    parser = ToolCallParser({"f"})
    assert parser.feed('Hi <tool_call>\n{"name": "f", "arguments": {"a"') == [
        "Hi",
        CallPiece(0, "f"),
        CallPiece(0, None, '{"a"'),
    ]
    assert parser.feed(": 1") == [CallPiece(0, None, ": 1")]


def test_a_call_that_is_cut_off_is_content_only_where_nothing_was_sent():
    cut = CALL[:60]
    assert read_tool_calls(cut, {"f"}) == (cut, [])
    pieces = ToolCallParser({"f"}).feed(cut, is_last=True)
    assert "".join(piece.arguments for piece in pieces) == cut[cut.index("arguments") + len('arguments": ') :]


def tool(name: str, **properties) -> dict:
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [tool("f", a={"type": "string", "maxLength": 3}), {"type": "function", "function": {"name": "g"}}]


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
