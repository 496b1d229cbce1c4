"""Grammars of completions that call functions, in llguidance's variant of Lark, for `SamplingParams.structured`."""

import json
from collections.abc import Sequence
from typing import Any

from mmvllm.processors.chat.tool_calls import END, START
from mmvllm.structured.params import UnambiguousGrammar
from mmvllm.structured.schema_keywords import enforceable

# As `json.dumps` writes JSON, which is how prompts show calls. A \u escape could spell the name of a property.
STYLE = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allowed_escapes": '"\\bfnrt',
}

# The keywords of a schema of a function without parameters: where these are not given, there are none, as in OpenAI's
# API, although to JSON schemas any would do.
_OF_NO_PARAMETERS = {"$schema", "title", "description", "type", "properties", "required"}


def tool_call_grammar(tools: Sequence[dict], tokenizer: Any, parallel: bool = True) -> str:
    """The grammar of one or, if `parallel`, several calls of `tools`, which are as in a request, and nothing else."""
    return _grammar([f"start: {_calls(tokenizer, parallel)}"], tools, tokenizer)


def free_text_grammar(tools: Sequence[dict], tokenizer: Any) -> str:
    """The grammar of any text in which whatever follows <tool_call> is a call of `tools`."""
    start, _ = _marks(tokenizer)
    if _is_token(START, tokenizer):
        return _grammar([f"start: (text {start} call)* text", _text_rules(tokenizer)], tools, tokenizer)
    # A lazy lexeme ends where it first matches: with the mark, text becomes a call.
    rules = ["start: (begun call)* TEXT", f"begun[lazy]: TEXT {start}", r"TEXT: /(.|\n)*/"]
    return _grammar(rules, tools, tokenizer)


def calls_or_json_grammar(tools: Sequence[dict], tokenizer: Any, schema: dict[str, Any], parallel: bool = True) -> str:
    """The grammar of calls of `tools`, or else of JSON that fits a schema."""
    rules = [
        f"start: answer | {_calls(tokenizer, parallel)}",
        f"answer: %json {json.dumps({**schema, 'x-guidance': STYLE})}",
    ]
    return _grammar(rules, tools, tokenizer)


def _grammar(rules: Sequence[str], tools: Sequence[dict], tokenizer: Any) -> str:
    functions = [tool["function"] for tool in tools]
    names = [f"function_{i}" for i in range(len(functions))]
    call = rf'call: "\n" ({" | ".join(names)}) "\n" {_marks(tokenizer)[1]}'
    return UnambiguousGrammar("\n".join(["%llguidance {}", *rules, call, *map(_rule, names, functions)]))


def _calls(tokenizer: Any, parallel: bool) -> str:
    start, _ = _marks(tokenizer)
    return f'{start} call ("\\n" {start} call)*' if parallel else f"{start} call"


def _rule(name: str, function: dict[str, Any]) -> str:
    head = json.dumps(f'{{"name": "{function["name"]}", "arguments": ')
    parameters = enforceable(function.get("parameters") or {})
    is_empty = not parameters.get("properties") and not parameters.get("required")
    if is_empty and parameters.keys() <= _OF_NO_PARAMETERS:
        parameters = {"additionalProperties": False}
    schema = {"type": "object", **parameters, "x-guidance": STYLE}
    return f'{name}: {head} %json {json.dumps(schema)} "}}"'


def _marks(tokenizer: Any) -> list[str]:
    """The marks around a call: tokens, where the tokenizer has them, or strings."""
    return [mark if _is_token(mark, tokenizer) else json.dumps(mark) for mark in (START, END)]


def _text_rules(tokenizer: Any) -> str:
    """Text without the mark, and other markup such as <think>, which is no text to llguidance where it is a token."""
    added = tokenizer.added_tokens_decoder.items()
    markup = sorted(i for i, token in added if not token.special and token.content not in (START, END))
    rules = ["text: TEXT? (markup TEXT?)*", f"markup: <[{','.join(map(str, markup))}]>"] if markup else ["text: TEXT?"]
    return "\n".join([*rules, rf"TEXT: /(.|\n)+/ & ~/(.|\n)*{START}(.|\n)*/"])


def _is_token(mark: str, tokenizer: Any) -> bool:
    return any(token.content == mark for token in tokenizer.added_tokens_decoder.values())
