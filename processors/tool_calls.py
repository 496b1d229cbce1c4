"""Reads calls of functions from a completion in the Hermes format that Qwen2.5 and Qwen3 write:

<tool_call>
{"name": "get_weather", "arguments": {"city": "Paris"}}
</tool_call>

Text around calls is content, as is a call of a function that there is not, or one that cannot be read.
"""

import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

START, END = "<tool_call>", "</tool_call>"
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"arguments"\s*:\s*(?=\{)')
_TAIL = re.compile(r"\s*(?:\}\s*)?(</tool_call>)?")


@dataclass(frozen=True, slots=True)
class CallPiece:
    """What is new of a call: first its function's name, then pieces of its arguments, which are JSON together."""

    index: int  # which call of the completion, from 0
    name: str | None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A call of a function; `arguments` is a JSON object."""

    name: str
    arguments: str


def read_tool_calls(text: str, names: Collection[str]) -> tuple[str, list[FunctionCall]]:
    """The content and the calls of a whole completion, given the names of the functions that may be called."""
    pieces = ToolCallParser(names, streams=False).feed(text, is_last=True)
    content = "".join(piece for piece in pieces if isinstance(piece, str))
    return content, [FunctionCall(piece.name, piece.arguments) for piece in pieces if isinstance(piece, CallPiece)]


class ToolCallParser:
    """Takes the text of one completion in pieces; returns pieces of its content and of its calls.

    Args:
        names: of the functions that may be called.
        streams: give the arguments of a call as they come, rather than the call once all of it has been checked.
    """

    def __init__(self, names: Collection[str], streams: bool = True):
        self._names, self._streams = names, streams
        self._rest = ""  # what has not been read
        self._gap = ""  # white space before a call, which is content if the call is not one
        self._is_after_call = False  # and white space
        self._read: Callable[[list, bool], bool] = self._content
        self._object = _ObjectScanner()
        self.num_calls = 0

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
            self._is_after_call = not self._rest
        text, start, after = self._rest.partition(START)
        if not start:
            size = len(text) if is_last else _num_settled(text)
            pieces.append(text[:size])
            self._rest = text[size:]
            return False
        pieces.append(text.rstrip())
        self._gap, self._rest, self._read = text[len(text.rstrip()) :], after, self._head
        return True

    def _head(self, pieces: list, is_last: bool) -> bool:
        """A call's name; or all of a call that is not written in the usual order."""
        match = _HEAD.match(self._rest) if self._streams else None
        if match and match[1] in self._names:
            self._begin(pieces, match[1], "", match.end())
            self._read = self._arguments
        elif END not in self._rest and not is_last:
            return False
        elif call := self._whole_call():
            self._begin(pieces, *call)
            self._read = self._tail
        else:
            body, end, after = self._rest.partition(END)
            pieces.append(self._gap + START + body + end)
            self._rest, self._read = after, self._content
        self._gap = ""
        return True

    def _begin(self, pieces: list, name: str, arguments: str, size: int) -> None:
        pieces.append(CallPiece(self.num_calls, name, arguments))
        self.num_calls += 1
        self._rest, self._object = self._rest[size:], _ObjectScanner()

    def _whole_call(self) -> tuple[str, str, int] | None:
        """The name and the arguments of the call that comes next, and where it ends."""
        start = len(self._rest) - len(self._rest.lstrip())
        try:
            call, end = json.JSONDecoder().raw_decode(self._rest, start)
        except (ValueError, RecursionError):
            return None
        name = call.get("name") if isinstance(call, dict) else None
        if not isinstance(name, str) or name not in self._names or not isinstance(call.get("arguments"), dict):
            return None
        return name, json.dumps(call["arguments"], ensure_ascii=False), end

    def _arguments(self, pieces: list, _: bool) -> bool:
        size = self._object.feed(self._rest)
        if size:
            pieces.append(CallPiece(self.num_calls - 1, None, self._rest[:size]))
        self._rest = self._rest[size:]
        if self._object.is_complete:
            self._read = self._tail
        return self._object.is_complete

    def _tail(self, _: list, is_last: bool) -> bool:
        """The end of a call, which some models leave out."""
        match = _TAIL.match(self._rest)
        rest = self._rest[match.end() :]
        if not match[1] and END.startswith(rest) and not is_last:
            return False
        self._rest, self._read, self._is_after_call = rest, self._content, True
        return True


class _ObjectScanner:
    """Finds the end of a JSON object that comes in pieces."""

    def __init__(self) -> None:
        self._depth, self._in_string, self._is_escaped = 0, False, False
        self.is_complete = False

    def feed(self, text: str) -> int:
        """How many of the characters belong to the object."""
        for i, char in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped, self._in_string = char == "\\", char != '"'
            elif char == '"':
                self._in_string = True
            else:
                self._depth += (char in "{[") - (char in "}]")
                if self._depth == 0:
                    self.is_complete = True
                    return i + 1
        return len(text)


def _num_settled(text: str) -> int:
    """Length of the text without what may be the beginning of a call, and white space before it."""
    sizes = range(min(len(START) - 1, len(text)), 0, -1)
    begun = next((size for size in sizes if START.startswith(text[-size:])), 0)
    return len(text[: len(text) - begun].rstrip())
