"""Parse function calls in a completion, in the Hermes format that Qwen2.5 and Qwen3 write:

<tool_call>
{"name": "get_weather", "arguments": {"city": "Paris"}}
</tool_call>

Text around calls is content, as are calls of unknown functions and calls that cannot be parsed.
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
    """A piece of a streamed call: first the function's name, then pieces of the arguments, which join to JSON."""

    index: int  # of the call in the completion, from 0
    name: str | None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A function call; `arguments` is a JSON object as text, cut off if the completion was."""

    name: str
    arguments: str


def read_tool_calls(text: str, names: Collection[str]) -> tuple[str, list[FunctionCall]]:
    """Return the content and the calls of a whole completion; only functions in `names` may be called."""
    return collect_calls(ToolCallParser(names).feed(text, is_last=True))


def collect_calls(pieces: Iterable[str | CallPiece]) -> tuple[str, list[FunctionCall]]:
    """Join the pieces of a `ToolCallParser`; return the content and the calls of the completion."""
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
    """Parse the arguments of a call; return None if they are not an object, or were cut off. Text may follow them."""
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
    """Parses the text of one completion piece by piece; returns pieces of its content and of its calls.

    The joined content and calls do not depend on how the text is split. Arguments are the model's text, with deviations
    from JSON repaired by `_ObjectScanner`.

    Args:
        names: the names of the functions that may be called.
    """

    def __init__(self, names: Collection[str]):
        self._names = names
        self._rest = ""  # unread text
        self._gap = ""  # white space before calls, which is content if text follows them, or if the call is invalid
        self._has_content = False  # before the last call
        self._is_after_call = False  # or after white space that follows a call
        self._read: Callable[[list, bool], bool] = self._content
        self._object = _ObjectScanner()
        self._scanned, self._num_scanned = "", 0  # of a call in another order: its JSON, and characters of `_rest`
        self._num_refused = 0  # number of marks without a call
        self.num_calls = 0

    @property
    def is_within_arguments(self) -> bool:
        """Whether the arguments of a call have begun and not ended."""
        return self._read == self._arguments

    def feed(self, text: str, is_last: bool = False) -> list[str | CallPiece]:
        """Parse more text; `is_last` says that no more text follows."""
        self._rest += text
        pieces: list[str | CallPiece] = []
        while self._read(pieces, is_last):
            pass
        return [piece for piece in pieces if piece]

    def _content(self, pieces: list, is_last: bool) -> bool:
        """Read the text up to the next call. White space beside calls belongs to the format."""
        if self._is_after_call:
            self._rest = self._rest.lstrip()
            if START.startswith(self._rest) and self._rest != START:  # the mark of another call, which may be cut off
                return False
            self._is_after_call = False
            if not self._rest.startswith(START):
                self._rest, self._gap = (self._gap if self._has_content else "") + self._rest, ""
        text, start, after = self._rest.partition(START)
        if self._num_refused >= MAX_REFUSED:  # each refused mark scans the text after it
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
        """Read the name of a call, or the whole call if its members are not in the usual order."""
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
        """Read the end of a call, which some models omit, and which may be cut off."""
        match = _TAIL.match(self._rest)
        rest = self._rest[match.end() :]
        if not match[1] and END.startswith(rest):
            if not is_last:
                return False
            rest = ""
        self._rest, self._read, self._is_after_call = rest, self._content, True
        return True


class _ObjectScanner:
    """Finds the end of a JSON object that arrives in pieces, and repairs models' deviations from JSON.

    Line breaks and other control characters in strings are escaped. Python's True, False and None are converted to
    JSON; NaN and Infinity become null, as in JavaScript. All other text is unchanged.
    """

    def __init__(self) -> None:
        self._depth, self._in_string, self._is_escaped = 0, False, False
        self._word = ""  # the start of a number or a constant; already output if too long for a constant
        self.is_complete = False

    def feed(self, text: str, is_last: bool = False) -> tuple[str, int]:
        """Return JSON, and how many of the characters belong to the object."""
        made = []
        for i, char in enumerate(text):
            if self._in_string:
                is_control = char < " "  # a backslash before it is escaped, too
                made.append("\\" * self._is_escaped + json.dumps(char)[1:-1] if is_control else char)
                self._in_string = char != '"' or self._is_escaped
                self._is_escaped = char == "\\" and not self._is_escaped
            elif char.isalnum() or char in "+-.":
                if len(self._word) > _LONGEST:  # too long for a constant
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
    """Parse an object as a call; return None if it is not a call. A call may omit empty arguments."""
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
    """Return the JSON object in a JSON string, as models sometimes write arguments; else the string unchanged."""
    text = with_whole_characters(json.loads(string)).strip()
    made, size = _ObjectScanner().feed(text)
    with suppress(ValueError):
        if size == len(text) and isinstance(parse_json(made), dict):
            return made
    return string


def _num_settled(text: str) -> int:
    """Return the length of the text before a possible beginning of a call and the white space before it."""
    sizes = range(min(len(START) - 1, len(text)), 0, -1)
    begun = next((size for size in sizes if START.startswith(text[-size:])), 0)
    return len(text[: len(text) - begun].rstrip())
