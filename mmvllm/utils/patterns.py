"""Compile and match regular expressions from the files of adapters and checkpoints, within limits.

Even a short expression can take practically forever to match, and Python's `re` cannot be interrupted. RE2 runs in
linear time, but lacks the lookaheads with which trainers exclude the vision tower.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import NamedTuple

import regex

from mmvllm.utils.text import counted

MAX_SIZE = 1_000_000  # characters times repetition counts in braces, since every repetition is compiled
MATCH_SECONDS = 1.0  # per match
_COUNTS = regex.compile(r"\{\s*(\d*)\s*,?\s*(\d*)\s*\}")
_REPEATED_GROUP = regex.compile(r"\)\s*[*+{]")
_CHOICE = regex.compile(r"[*+{|]|(?<!\()\?")
# An escape, a class, the start of a group, a number of repetitions, or any other character.
_TOKENS = regex.compile(
    r"\\[pPux]\{[^}]*\}|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\((?:\?(?:<?[=!>]|[\w-]*:|P?<\w+>))?|\{[\d, ]*\}|.", regex.DOTALL
)
MAX_QUICK_CHOICES = 5  # without repeated groups, the time is at most the fifth power of a name's length
MAX_QUICK_NAME = 100  # characters
_REFERENCE = regex.compile(r"\\[1-9gk]|\(\?P=")  # to the text that a group has matched
# A recursive call of a group or of the whole expression, which Python's `re` does not have.
_CALL = regex.compile(r"(?<!\\)(?:\\\\)*\(\?(R|&|P>|[+-]?\d)")


class PatternError(ValueError):
    """An expression that is not valid, or that would take too long."""

    def __init__(self, pattern: str, reason: str):
        super().__init__(f"the expression {pattern!r:.100} {reason}")


class Expression(NamedTuple):
    """A compiled expression; a quick one matches short names without a time limit, ten times as fast."""

    pattern: regex.Pattern
    is_quick: bool


def compiled(pattern: str) -> Expression:
    """Compile an expression; raises PatternError."""
    texts = [text.lstrip("0") for match in _COUNTS.finditer(pattern) for text in match.groups()]
    counts = [int(text[:9]) for text in texts if text]
    repeated = prod(counts) if _REPEATED_GROUP.search(pattern) else max(counts, default=1)
    if (size := len(pattern) * repeated) > MAX_SIZE:
        raise PatternError(pattern, f"has, with its repetitions, {counted(size, 'character')}; {MAX_SIZE} are accepted")
    if _CALL.search(pattern):
        raise PatternError(pattern, "calls itself or one of its groups, which is not supported")
    try:
        return Expression(regex.compile(pattern), _is_quick(pattern))
    except (regex.error, ValueError, RecursionError) as error:
        raise PatternError(pattern, f"is not valid: {error}") from None


def check_repeats_no_choice(pattern: str) -> None:
    """Raise PatternError for an expression that could run forever in an engine without a time limit.

    Such an expression repeats a group that can match in several ways, as in `(a+)+` and `(a|aa)*`.
    """
    groups, closed = [False], False  # whether each open group, and the one just closed, can match in several ways
    for token in _TOKENS.findall(pattern):
        if closed and token[0] in "*+{":
            raise PatternError(pattern, "repeats a group with choices, which may take forever to match")
        closed = token == ")" and groups.pop()
        groups = groups or [False]
        if token[0] == "(":
            groups.append(False)
        elif closed or token in ("*", "+", "?", "|") or (token[0] == "{" and "," in token):
            groups[-1] = True


class Matching:
    """The time budget of one file: compiling and matching all its expressions takes at most about `seconds`."""

    def __init__(self, seconds: float):
        self._seconds_left = seconds

    def compiled(self, pattern: str) -> Expression:
        """Compile an expression; raises PatternError."""
        with self._counted(pattern):
            return compiled(pattern)

    def is_match(self, expression: Expression, text: str) -> bool:
        """Return whether the whole text matches; raises PatternError if matching takes too long."""
        pattern, is_quick = expression
        with self._counted(pattern.pattern):
            if is_quick and len(text) <= MAX_QUICK_NAME:
                return pattern.fullmatch(text) is not None
            try:
                seconds = min(MATCH_SECONDS, self._seconds_left)
                return pattern.fullmatch(text, timeout=seconds, concurrent=True) is not None
            except TimeoutError:
                reason = f"takes too long to match {text!r:.200}; simplify it"
                raise PatternError(pattern.pattern, reason) from None

    @contextmanager
    def _counted(self, pattern: str) -> Iterator[None]:
        if self._seconds_left <= 0:
            raise PatternError(pattern, "exceeds the time limit of its file; write fewer or simpler expressions")
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._seconds_left -= time.perf_counter() - begin


def _is_quick(pattern: str) -> bool:
    is_simple = _REPEATED_GROUP.search(pattern) is None and _REFERENCE.search(pattern) is None
    return is_simple and len(_CHOICE.findall(pattern)) <= MAX_QUICK_CHOICES
