"""Reads calls of functions from a completion in the Hermes format that Qwen2.5 and Qwen3 write:

<tool_call>
{"name": "get_weather", "arguments": {"city": "Paris"}}
</tool_call>

Text around calls is content, as is a call of a function that there is not, or one that cannot be read.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mmvllm.utils.text import parse_json, refuse_constant, with_whole_characters

START, END = "<tool_call>", "</tool_call>"
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"arguments"\s*:\s*(?=\{)')
_BEGINS_AN_OBJECT = re.compile(r"\s*(\{|$)")
_MEMBER = re.compile(r'\s*[{,]\s*("(?:[^"\\]|\\.)*")\s*:\s*')
# Other members may follow the arguments.
_TAIL = re.compile(r'\s*(?:,\s*(?:".*?(?=</?tool_call>)|".*$|$))?\}?\s*(</tool_call>)?', re.DOTALL)
MAX_REFUSED = 64
MAX_SCANNED = 1_000_000  # characters of arguments that are not JSON, which take half a second
_NOT_JSON = {"NaN": "null", "Infinity": "null", "-Infinity": "null", "None": "null", "True": "true", "False": "false"}
_LONGEST = max(map(len, _NOT_JSON))


@dataclass(frozen=True, slots=True)
class CallPiece:
    """What is new of a call: first its function's name, then pieces of its arguments, which are JSON together."""

    index: int  # which call of the completion, from 0
    name: str | None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A call of a function; `arguments` is a JSON object, cut off where the completion was."""

    name: str
    arguments: str


def read_tool_calls(text: str, names: Collection[str]) -> tuple[str, list[FunctionCall]]:
    """The content and the calls of a whole completion, given the names of the functions that may be called."""
    return collect_calls(ToolCallParser(names).feed(text, is_last=True))


def collect_calls(pieces: Iterable[str | CallPiece]) -> tuple[str, list[FunctionCall]]:
    """The content and the calls of a completion, whose pieces come from `ToolCallParser`."""
    content, calls = "", []
    for piece in pieces:
        if isinstance(piece, str):
            content += piece
        elif piece.name is not None:
            calls.append(FunctionCall(piece.name, piece.arguments))
        else:
            calls[-1] = FunctionCall(calls[-1].name, calls[-1].arguments + piece.arguments)
    return content, calls


def read_arguments(text: str) -> dict[str, Any] | None:
    """The arguments of a call; None if they are no object, or were cut off. Text may follow them."""
    text = text.strip()
    if not text.startswith("{"):
        return None
    with suppress(ValueError):
        return parse_json(text, parse_constant=refuse_constant)
    if len(text) > MAX_SCANNED:
        return None
    scanner = _ObjectScanner()
    arguments, _ = scanner.feed(text)
    with suppress(ValueError):
        return parse_json(arguments) if scanner.is_complete else None
    return None


class ToolCallParser:
    """Takes the text of one completion in pieces; returns pieces of its content and of its calls.

    However the text is cut into pieces, content and calls are the same together. The arguments are the model's own
    text, as far as it is JSON: see `_ObjectScanner`.

    Args:
        names: of the functions that may be called.
    """

    def __init__(self, names: Collection[str]):
        self._names = names
        self._rest = ""  # what has not been read
        self._gap = ""  # white space before calls, which is content if text follows them, or if the call is not one
        self._has_content = False  # before the last call
        self._is_after_call = False  # and white space
        self._read: Callable[[list, bool], bool] = self._content
        self._object = _ObjectScanner()
        self._scanned, self._num_scanned = "", 0  # of a call in another order: its JSON, and characters of `_rest`
        self._num_refused = 0  # marks that no call followed
        self.num_calls = 0

    @property
    def is_within_arguments(self) -> bool:
        """Whether the arguments of a call have begun and not ended."""
        return self._read == self._arguments

    def feed(self, text: str, is_last: bool = False) -> list[str | CallPiece]:
        """Add text; `is_last` says that no more follows."""
        self._rest += text
        pieces: list[str | CallPiece] = []
        while self._read(pieces, is_last):
            pass
        return [piece for piece in pieces if piece]

    def _content(self, pieces: list, is_last: bool) -> bool:
        """Text up to the next call. White space beside calls belongs to the format."""
        if self._is_after_call:
            self._rest = self._rest.lstrip()
            if START.startswith(self._rest) and self._rest != START:  # the mark of another call, which may be cut off
                return False
            self._is_after_call = False
            if not self._rest.startswith(START):
                self._rest, self._gap = (self._gap if self._has_content else "") + self._rest, ""
        text, start, after = self._rest.partition(START)
        if self._num_refused >= MAX_REFUSED:  # each is followed by all that could be its call
            text, start = self._rest, ""
        if not start:
            size = len(text) if is_last else _num_settled(text)
            pieces.append(text[:size])
            self._has_content = self._has_content or size > 0
            self._rest = text[size:]
            return False
        if text:
            settled = text.rstrip()
            pieces.append(settled)
            self._gap, self._has_content = text[len(settled) :], self._has_content or bool(settled)
        self._rest, self._read = after, self._head
        self._object, self._scanned, self._num_scanned = _ObjectScanner(), "", 0
        return True

    def _head(self, pieces: list, is_last: bool) -> bool:
        """A call's name; or all of a call that is not written in the usual order."""
        if (match := _HEAD.match(self._rest)) and match[1] in self._names:
            self._begin(pieces, match[1], match.end(), self._arguments)
            return True
        is_call = not match and _BEGINS_AN_OBJECT.match(self._rest) is not None
        if is_call and not self._object.is_complete:
            scanned, size = self._object.feed(self._rest[self._num_scanned :])
            self._scanned, self._num_scanned = self._scanned + scanned, self._num_scanned + size
            if not self._object.is_complete and not is_last:
                return False
        call = _read_call(self._scanned) if self._object.is_complete else None
        if call is not None and call.name in self._names:
            self._begin(pieces, call.name, self._num_scanned, self._tail, call.arguments)
        else:
            pieces.append(self._gap + START)
            self._gap, self._has_content = "", True
            self._read, self._num_refused = self._content, self._num_refused + 1
        return True

    def _begin(self, pieces: list, name: str, size: int, read: Callable, arguments: str = "") -> None:
        pieces.append(CallPiece(self.num_calls, name, arguments))
        self.num_calls += 1
        self._rest, self._read, self._object = self._rest[size:], read, _ObjectScanner()

    def _arguments(self, pieces: list, is_last: bool) -> bool:
        arguments, size = self._object.feed(self._rest, is_last)
        if arguments:
            pieces.append(CallPiece(self.num_calls - 1, None, arguments))
        self._rest = self._rest[size:]
        if self._object.is_complete:
            self._read = self._tail
        return self._object.is_complete

    def _tail(self, _: list, is_last: bool) -> bool:
        """The end of a call, which some models leave out, and which may be cut off."""
        match = _TAIL.match(self._rest)
        rest = self._rest[match.end() :]
        if not match[1] and END.startswith(rest):
            if not is_last:
                return False
            rest = ""
        self._rest, self._read, self._is_after_call = rest, self._content, True
        return True


class _ObjectScanner:
    """Finds the end of a JSON object that comes in pieces, and makes JSON of what models write in its place.

    Line breaks and other control characters in strings are escaped. Python's True, False and None are written as in
    JSON, and NaN and Infinity become null, as in JavaScript. All else stays as it is.
    """

    def __init__(self) -> None:
        self._depth, self._in_string, self._is_escaped = 0, False, False
        self._word = ""  # a number or a constant, as far as it has come, or its beginning that is made already
        self.is_complete = False

    def feed(self, text: str, is_last: bool = False) -> tuple[str, int]:
        """JSON, and how many of the characters belong to the object."""
        made = []
        for i, char in enumerate(text):
            if self._in_string:
                is_control = char < " "  # a backslash before it is escaped, too
                made.append("\\" * self._is_escaped + json.dumps(char)[1:-1] if is_control else char)
                self._in_string = char != '"' or self._is_escaped
                self._is_escaped = char == "\\" and not self._is_escaped
            elif char.isalnum() or char in "+-.":
                if len(self._word) > _LONGEST:  # no constant
                    made.append(char)
                    continue
                self._word += char
                if len(self._word) > _LONGEST:
                    made.append(self._word)
            else:
                made += self._take_word(), char
                self._in_string = char == '"'
                self._depth += (char in "{[") - (char in "}]")
                if char in "}]" and self._depth == 0:
                    self.is_complete = True
                    return "".join(made), i + 1
        if is_last:
            made.append(self._take_word())
        return "".join(made), len(text)

    def _take_word(self) -> str:
        word, self._word = self._word, ""
        return "" if len(word) > _LONGEST else _NOT_JSON.get(word, word)


def _read_call(text: str) -> FunctionCall | None:
    """The call that an object is; None if it is no call. A call without arguments may leave them out."""
    members, at = {}, 0
    try:
        while match := _MEMBER.match(text, at):
            _, at = json.JSONDecoder().raw_decode(text, match.end())
            members[json.loads(match[1])] = text[match.end() : at]
        name = json.loads(members.get("name", "null"))
    except (ValueError, RecursionError):
        return None
    has_others = any(value[0] in "{[" for value in members.values())  # which may be arguments under another name
    arguments = members.get("arguments", "" if has_others else "{}")
    if arguments == "null":
        arguments = "{}"
    elif arguments.startswith('"'):
        arguments = _object_within(arguments)
    is_call = isinstance(name, str) and arguments.startswith("{") and text[at:].strip() == "}"
    return FunctionCall(name, arguments) if is_call else None


def _object_within(string: str) -> str:
    """The JSON object that a JSON string has, as models write arguments now and then; else the string as it is."""
    text = with_whole_characters(json.loads(string)).strip()
    made, size = _ObjectScanner().feed(text)
    with suppress(ValueError):
        if size == len(text) and isinstance(parse_json(made), dict):
            return made
    return string


def _num_settled(text: str) -> int:
    """Length of the text without what may be the beginning of a call, and white space before it."""
    sizes = range(min(len(START) - 1, len(text)), 0, -1)
    begun = next((size for size in sizes if START.startswith(text[-size:])), 0)
    return len(text[: len(text) - begun].rstrip())
