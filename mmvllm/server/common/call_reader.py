"""Parses tool calls in completions; a custom tool, whose input is a text, is called like a function."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from mmvllm.processors.chat.tool_calls import CallPiece, FunctionCall, ToolCallParser, collect_calls, read_arguments
from mmvllm.server.common.tools import ToolUse
from mmvllm.utils.text import with_whole_characters


@dataclass(frozen=True, slots=True)
class CustomCall:
    """A complete call of a custom tool; `index` is its position among the calls of the completion, from 0."""

    index: int
    name: str
    input: str


class CallReader:
    """Reads content and calls from the text of one completion, whole or in pieces.

    The pieces of a custom tool's call become one `CustomCall` once the call is complete.
    """

    def __init__(self, use: ToolUse):
        self._use = use
        self._parser = ToolCallParser(use.names)
        self._custom = _CustomCalls(use.custom)

    @property
    def ends_with_calls(self) -> bool:
        """Whether the completion has calls, all of them complete."""
        return self._parser.num_calls > 0 and not self._parser.is_within_arguments

    def feed(self, text: str, is_last: bool = False) -> list[str | CallPiece | CustomCall]:
        """Return the content and calls in new text; `is_last` means that no text follows."""
        if not self._use.names:
            return [text] if text else []
        return self._custom.feed(self._parser.feed(text, is_last), is_last)

    def read(self, text: str) -> tuple[str, list[FunctionCall | CustomCall]]:
        """Return the content and the calls of a whole completion."""
        content, calls = collect_calls(self._parser.feed(text, is_last=True)) if self._use.names else (text, [])
        return content, [self._converted(i, call) for i, call in enumerate(calls)]

    def _converted(self, index: int, call: FunctionCall) -> FunctionCall | CustomCall:
        is_custom = call.name in self._use.custom
        return CustomCall(index, call.name, _input_of(call.arguments)) if is_custom else call


class _CustomCalls:
    """Replaces the pieces of each custom tool's call by one `CustomCall`, and returns all others unchanged."""

    def __init__(self, names: Collection[str]):
        self._names = names
        self._begun: CallPiece | None = None
        self._arguments: list[str] = []  # of the call in progress

    def feed(self, pieces: Sequence[str | CallPiece], is_last: bool) -> list[str | CallPiece | CustomCall]:
        made = [one for piece in pieces for one in self._add(piece)]
        return [*made, *self._take_finished()] if is_last else made

    def _add(self, piece: str | CallPiece) -> Iterator[str | CallPiece | CustomCall]:
        if self._begun is not None and isinstance(piece, CallPiece) and piece.index == self._begun.index:
            self._arguments.append(piece.arguments)
            return
        yield from self._take_finished()
        if isinstance(piece, CallPiece) and piece.name in self._names:
            self._begun, self._arguments = piece, [piece.arguments]
        else:
            yield piece

    def _take_finished(self) -> list[CustomCall]:
        call, self._begun = self._begun, None
        return [] if call is None else [CustomCall(call.index, call.name, _input_of("".join(self._arguments)))]


def _input_of(arguments: str) -> str:
    """Return the string `input` of a call's arguments, or the whole text if they are malformed or lack it."""
    given = (read_arguments(arguments) or {}).get("input")
    return with_whole_characters(given) if isinstance(given, str) else arguments
