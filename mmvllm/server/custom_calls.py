"""Calls of custom tools, whose input is a text: in a completion they are calls of functions that take `input`."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from mmvllm.processors.tool_calls import CallPiece, read_arguments

Piece = str | CallPiece


@dataclass(frozen=True, slots=True)
class CustomCall:
    """A whole call; `index` is which call of the completion it is, from 0."""

    index: int
    name: str
    input: str


class CustomCalls:
    """Takes the pieces of one completion, and returns each call of a custom tool once it is whole.

    Args:
        names: of the custom tools.
    """

    def __init__(self, names: Collection[str]):
        self._names = names
        self._begun: CallPiece | None = None
        self._arguments: list[str] = []  # of that, so far

    def feed(self, pieces: Sequence[Piece], is_last: bool = False) -> list[Piece | CustomCall]:
        """Add pieces; `is_last` says that no more follow."""
        made: list[Piece | CustomCall] = []
        for piece in pieces:
            if self._begun is not None and isinstance(piece, CallPiece) and piece.index == self._begun.index:
                self._arguments.append(piece.arguments)
                continue
            made += self._ended()
            if isinstance(piece, CallPiece) and piece.name in self._names:
                self._begun, self._arguments = piece, [piece.arguments]
            else:
                made.append(piece)
        return made + self._ended() if is_last else made

    def _ended(self) -> list[CustomCall]:
        call, self._begun = self._begun, None
        return [] if call is None else [CustomCall(call.index, call.name, input_of("".join(self._arguments)))]


def input_of(arguments: str) -> str:
    """The input in a call's arguments; where a model has written others, or was cut off, all of their text."""
    given = (read_arguments(arguments) or {}).get("input")
    return given if isinstance(given, str) else arguments
