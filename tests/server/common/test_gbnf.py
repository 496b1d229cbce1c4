"""Grammars in GBNF, as llama.cpp's users and vLLM's examples write them, are enforced."""

import re
import time
from contextlib import suppress

import pytest

from mmvllm import SamplingParams
from mmvllm.errors import RequestError
from mmvllm.structured.gbnf import MAX_CHARACTERS, as_lark
from tests.helpers.serving.server import CHAT, chat
from tests.server.refusals import refusal

pytest.importorskip("llguidance")

# The example of vLLM's documentation.
SQL = """
root ::= select_statement

select_statement ::= "SELECT " column " from " table " where " condition

column ::= "col_1 " | "col_2 "

table ::= "table_1 " | "table_2 "

condition ::= column "= " number

number ::= "1 " | "2 "
"""
# As llama.cpp has it for JSON: comments, groups over several lines, classes, repetitions, names with hyphens.
JSON = r"""root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws-part

object ::=
  "{" ws-part (
            string ":" ws-part value
    ("," ws-part string ":" ws-part value)*
  )? "}" ws-part

array  ::= "[" ws-part ( value ("," ws-part value)* )? "]" ws-part

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  ){0,8} "\"" ws-part

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ws-part

# Optional space
ws-part ::= | " "
"""
GRAMMARS = {
    "sql": (SQL, r"SELECT col_[12]  from table_[12]  where col_[12] = [12] "),
    "json": (JSON, r"\{.*"),
    "one line": ('root ::= "yes" | "no"', "yes|no"),
    "escapes": (r'root ::= "\u00e4\U0001f600\x41\u0042\n\\u0043" [\u00e4-\u00e6]', r"ä😀AB\n\\u0043[äåæ]"),
    "any character": ('root ::= "a" . "b"', "a.b"),
    "Windows": ('root ::= a\r\na ::= "x"\r\n', "x"),
    "names in capitals": ('root ::= fooBar-baz\nfooBar-baz ::= "x"{2}', "xx"),
}


@pytest.mark.parametrize(("grammar", "wanted"), GRAMMARS.values(), ids=GRAMMARS)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_completion_is_what_the_grammar_describes(grammar, wanted, seed, shared_llm):
    params = SamplingParams(structured={"grammar": grammar}, temperature=1.0, seed=seed, max_tokens=60)
    (output,) = shared_llm.generate("Answer:", params, use_tqdm=False)
    assert re.fullmatch(wanted, output.text, re.DOTALL)
    assert output.finish_reason == "eos" or grammar is JSON


@pytest.mark.parametrize(
    "grammar", ['start: "::="', 'start: a\na: "root ::= b"', '%llguidance {}\nstart: "x"', "start: /::=/"]
)
def test_a_grammar_in_lark_is_left_as_it_is(grammar):
    assert as_lark(grammar, "grammar") == grammar


BAD = {
    "no root": ('a ::= "b"', "No 'root' rule found"),
    "no such rule": ("root ::= b", "Rule 'b' not found"),
    "no end of a text": ('root ::= "a', "Unexpected end of input"),
    "no end of a class": ("root ::= [a", "Unexpected end of input"),
    "a backslash at the end": ('root ::= "\\', "it ends with a backslash"),
    "no rule": ('root ::= "a"\nfoo', "Expected ::= at line 2"),
    "deep": ("root ::= " + "(" * 4000 + '"a"' + ")" * 4000, "it is nested too deeply"),
    "long": (f'root ::= "{"a" * MAX_CHARACTERS}"', f"must have at most {MAX_CHARACTERS} characters in GBNF"),
    "costly": ("root ::= a\na ::= " + '"a"* ' * 2000, "repetitions"),
    "half a pair": (r'root ::= "\ud83d"', "cannot be enforced"),
}


@pytest.mark.parametrize(("grammar", "reason"), BAD.values(), ids=BAD)
def test_a_grammar_that_cannot_be_read_is_refused_in_a_sentence(grammar, reason, app):
    error = refusal(app, CHAT, chat("x", structured_outputs={"grammar": grammar}, max_tokens=2))
    assert error["param"] == "structured_outputs.grammar" and reason in error["message"]
    assert len(error["message"]) < 500


@pytest.mark.parametrize(
    "grammar",
    [
        "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(1000)) + 'r1000 ::= "a"',
        "root ::= " + " ".join(["(a|b)"] * 2600) + '\na ::= "a"\nb ::= "b"',
        "root ::= " + "#" * 16_000,
        "\n" * 16_000 + 'root ::= "a"',
    ],
    ids=["chain", "alternatives", "comment", "lines"],
)
def test_reading_takes_little_time(grammar):
    start = time.process_time()
    with suppress(RequestError):
        SamplingParams(structured={"grammar": grammar[:MAX_CHARACTERS]})
    assert time.process_time() - start < 2


@pytest.mark.parametrize("kinds", [("number", "integer"), ("string", "string")])
def test_alternatives_of_one_of_that_overlap_are_refused_with_what_to_do(kinds, app):
    schema = {"oneOf": [{"type": kinds[0]}, {"type": kinds[1]}]}
    error = refusal(app, CHAT, chat("x", structured_outputs={"json": schema}, max_tokens=2))
    assert "the alternatives of a oneOf may overlap; write anyOf" in error["message"]
