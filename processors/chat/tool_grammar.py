"""Grammars of completions with function calls, in llguidance's variant of Lark, for `SamplingParams.structured`."""

import json
from collections.abc import Sequence
from typing import Any

from mmvllm.processors.chat.tool_calls import END, START
from mmvllm.structured.params import UnambiguousGrammar
from mmvllm.structured.schema_keywords import enforceable

# The format of `json.dumps`, in which prompts show calls. \u escapes are excluded: one could spell a property's name.
STYLE = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allowed_escapes": '"\\bfnrt',
}

# A schema with only these keywords, and without properties and required names, allows no parameters, as in OpenAI's
# API. In JSON Schema it would allow any parameters.
_OF_NO_PARAMETERS = {"$schema", "title", "description", "type", "properties", "required"}


def tool_call_grammar(tools: Sequence[dict], tokenizer: Any, parallel: bool = True) -> str:
    """Return the grammar of one call of `tools` (in a request's format), or several if `parallel`, and nothing else."""
    return _grammar([f"start: {_calls(tokenizer, parallel)}"], tools, tokenizer)


def free_text_grammar(tools: Sequence[dict], tokenizer: Any) -> str:
    """Return the grammar of any text in which every <tool_call> is followed by a call of `tools`."""
    start, _ = _marks(tokenizer)
    if _is_token(START, tokenizer):
        return _grammar([f"start: (text {start} call)* text", _text_rules(tokenizer)], tools, tokenizer)
    # A lazy lexeme ends at its first match, so the mark ends the text and begins a call.
    rules = ["start: (begun call)* TEXT", f"begun[lazy]: TEXT {start}", r"TEXT: /(.|\n)*/"]
    return _grammar(rules, tools, tokenizer)


def calls_or_json_grammar(tools: Sequence[dict], tokenizer: Any, schema: dict[str, Any], parallel: bool = True) -> str:
    """Return the grammar of either calls of `tools` or JSON that fits a schema."""
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
    """Return the marks around a call: tokens if the tokenizer has them, otherwise strings."""
    return [mark if _is_token(mark, tokenizer) else json.dumps(mark) for mark in (START, END)]


def _text_rules(tokenizer: Any) -> str:
    """Return rules for text without the mark; they list markup such as <think>, since llguidance text has no tokens."""
    added = tokenizer.added_tokens_decoder.items()
    markup = sorted(i for i, token in added if not token.special and token.content not in (START, END))
    rules = ["text: TEXT? (markup TEXT?)*", f"markup: <[{','.join(map(str, markup))}]>"] if markup else ["text: TEXT?"]
    return "\n".join([*rules, rf"TEXT: /(.|\n)+/ & ~/(.|\n)*{START}(.|\n)*/"])


def _is_token(mark: str, tokenizer: Any) -> bool:
    return any(token.content == mark for token in tokenizer.added_tokens_decoder.values())
