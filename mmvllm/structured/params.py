"""Parameters of structured outputs: a JSON schema, a regular expression, a choice of texts, or a grammar.

The names are vLLM's. `mmvllm/sampling/grammar.py` enforces the parameters.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from mmvllm.errors import RequestError
from mmvllm.structured.gbnf import as_lark
from mmvllm.structured.grammar_cost import check_grammar, check_regex, has_complement
from mmvllm.structured.schema_keywords import (
    MAX_SCHEMAS,
    check_cost,
    check_keywords,
    enforceable,
    num_schemas,
    without_nulls,
)
from mmvllm.utils.arguments import with_checked_arguments
from mmvllm.utils.text import shown

KINDS = ("json", "json_object", "regex", "choice", "grammar")
NAMES = (*KINDS, "whitespace_pattern")  # of all fields
MAX_CHARACTERS = 65536  # of a schema, expression, grammar, or all choices; compiles within a second
_EMBEDDED = re.compile(r"%json(?:\s|//[^\n]*|#[^\n]*)*")  # precedes a schema in a grammar
MAX_DEPTH = 32  # of objects and lists in a schema


class UnambiguousGrammar(str):
    """A Lark grammar whose creator guarantees that every text has only one parse."""


# Arguments of vLLM's class, with the values that match what mmvllm does anyway.
ACCEPTED_VLLM_ARGUMENTS = {
    "disable_any_whitespace": (False, None),  # whitespace_pattern="" allows none
    "disable_additional_properties": (False, None),
    "disable_fallback": None,
    "structural_tag": (None,),
}


@with_checked_arguments(ACCEPTED_VLLM_ARGUMENTS)
@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """A constraint on the text of a completion; exactly one of the first five fields is set.

    Raises RequestError whose `param` is "structured", or for example "structured.json" for a wrong value of `json`.

    Args:
        json: a JSON schema, as a dict, as text, or as a pydantic model class; kept as text.
        json_object: True for a JSON object with any content.
        regex: a regular expression that the whole text matches, in the syntax of Rust's regex crate, without
            look-around and back-references.
        choice: a list of texts; the completion is one of them.
        grammar: a context-free grammar in llguidance's variant of Lark, whose first rule is `start`; or in GBNF, the
            notation of llama.cpp, whose first rule is `root`. Kept as Lark.
        whitespace_pattern: a regular expression for the whitespace between the tokens of JSON. The default allows one
            space or one line break, "" allows none, and "[ \\n\\t]*" allows any.
    """

    json: str | dict[str, Any] | type | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        self._set("json_object", _flag(self.json_object))
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            came = f"has {' and '.join(given)}" if given else "is empty"
            raise RequestError(f"structured {came}; give exactly one of {', '.join(KINDS)}", param="structured")
        if self.json is not None:
            self._set("json", _schema_text(self.json))
        if self.choice is not None:
            self._set("choice", _choices(self.choice))
        for name in ("regex", "grammar"):
            _check_text(name, getattr(self, name))
        if self.regex is not None:
            check_regex(self.regex, "structured.regex")
        if self.grammar is not None:
            self._set("grammar", as_lark(self.grammar, "structured.grammar"))
            check_grammar(self.grammar, "structured.grammar")
            if "<[" in self.grammar and has_complement(self.grammar):
                raise _wrong("grammar", "has a complement (~) and control tokens (<[ID]>), which exclude each other")
            _check_embedded_schemas(self.grammar)
        if self.whitespace_pattern is not None:
            self._check_whitespace()

    @property
    def kind(self) -> str:
        """The name in `KINDS` of the field that is set."""
        return next(name for name in KINDS if getattr(self, name) is not None)

    @property
    def is_json(self) -> bool:
        """Whether the text must be JSON."""
        return self.kind in ("json", "json_object")

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check_whitespace(self) -> None:
        _check_text("whitespace_pattern", self.whitespace_pattern, may_be_empty=True)
        check_regex(self.whitespace_pattern, "structured.whitespace_pattern")
        if not self.is_json:
            raise _wrong("whitespace_pattern", f"is for json and json_object, got {self.kind}")


def as_structured(value: Any) -> StructuredOutputsParams | None:
    """Convert a dict of fields to parameters; return parameters and None unchanged."""
    if value is None or isinstance(value, StructuredOutputsParams):
        return value
    if not isinstance(value, dict):
        required = f"StructuredOutputsParams, a dict with one of {', '.join(KINDS)}, or None"
        raise RequestError(f"structured must be {required}, got {shown(value)}", param="structured", value=value)
    if unknown := [name for name in value if name not in NAMES]:
        raise RequestError(
            f"structured has no field {unknown[0]!r:.100}; known: {', '.join(NAMES)}", param="structured"
        )
    return StructuredOutputsParams(**value)


def _wrong(name: str, problem: str) -> RequestError:
    return RequestError(f"structured.{name} {problem}", param=f"structured.{name}")


def _flag(value: Any) -> bool | None:
    if value not in (True, False, None):
        raise _wrong("json_object", f"must be True, got {value!r:.200}")
    return True if value else None


def _check_text(name: str, value: Any, may_be_empty: bool = False) -> None:
    if value is None:
        return
    if not isinstance(value, str):
        raise _wrong(name, f"must be a string, got {value!r:.200}")
    if not value and not may_be_empty:
        raise _wrong(name, "is empty")
    _check_size(name, value)


def _check_embedded_schemas(grammar: str) -> None:
    number = 0
    for match in _EMBEDDED.finditer(grammar):
        try:
            schema, _ = json.JSONDecoder().raw_decode(grammar, match.end())
        except (ValueError, RecursionError):  # within a string, or refused when the grammar is compiled
            continue
        if _depth(schema) > MAX_DEPTH:
            raise _wrong("grammar", f"has a schema that is nested more than {MAX_DEPTH} deep")
        number += num_schemas(schema)
        if number > MAX_SCHEMAS:
            raise _wrong("grammar", f"has schemas with more than {MAX_SCHEMAS} schemas within them")
        try:
            check_cost(schema)
        except RequestError as error:
            raise _wrong("grammar", f"has a schema that is refused: {error}") from None


def _check_size(name: str, text: str) -> None:
    if len(text) > MAX_CHARACTERS:
        raise _wrong(name, f"must have at most {MAX_CHARACTERS} characters, got {len(text)}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _wrong(name, "has a lone surrogate, which is no text") from None


def _choices(value: Any) -> tuple[str, ...]:
    choices = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else None
    if not choices or not all(isinstance(choice, str) and choice for choice in choices):
        raise _wrong("choice", f"must be a list of strings that are not empty, got {value!r:.200}")
    _check_size("choice", "".join(choices))
    return tuple(dict.fromkeys(choices))


def _schema_text(given: Any) -> str:
    """Return a schema as compact JSON in its key order; raises RequestError if it is invalid or has no effect."""
    schema = _parsed(given)
    if not isinstance(schema, dict):
        raise _wrong("json", f"must be a JSON schema that is an object, got {schema!r:.200}")
    if _depth(schema) > MAX_DEPTH:
        raise _too_deep()
    if num_schemas(schema) > MAX_SCHEMAS:
        raise _wrong("json", f"has more than {MAX_SCHEMAS} schemas within it")
    schema = without_nulls(schema)
    try:
        text = _compact(schema)
    except (TypeError, ValueError) as error:
        raise _wrong("json", f"is not JSON: {error}") from None
    _check_size("json", text)
    if not (schema := enforceable(schema)):
        raise _wrong("json", "is an empty schema; give one with a type, or json_object for any object")
    check_keywords(schema)
    return _compact(schema)


def _compact(schema: dict[str, Any]) -> str:
    return json.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _too_deep() -> RequestError:
    return _wrong("json", f"is nested more than {MAX_DEPTH} deep")


def _parsed(given: Any) -> Any:
    if hasattr(given, "model_json_schema"):  # of pydantic
        return given.model_json_schema()
    if not isinstance(given, str):
        return given
    _check_size("json", given)
    try:
        return json.loads(given)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise _wrong("json", f"is not JSON: {error}") from None


def _depth(value: Any) -> int:
    """Return the nesting depth of objects and lists, counted up to `MAX_DEPTH` + 1."""
    level, depth = [value], 0
    while depth <= MAX_DEPTH and (level := [one for one in level if isinstance(one, dict | list)]):
        level = [each for one in level for each in (one.values() if isinstance(one, dict) else one)]
        depth += 1
    return depth
