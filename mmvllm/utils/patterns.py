"""Regular expressions that come from files, of adapters and checkpoints, compiled and matched within limits.

Some expressions of few characters match for longer than anybody waits, and Python's own engine cannot be stopped then.
RE2, whose time is linear, lacks the lookaheads with which trainers leave out the vision tower.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import NamedTuple

import regex

from mmvllm.utils.text import counted

MAX_SIZE = 1_000_000  # characters, times the numbers of repetitions in braces: these are compiled one by one
MATCH_SECONDS = 1.0  # of one match
_COUNTS = regex.compile(r"\{\s*(\d*)\s*,?\s*(\d*)\s*\}")
_REPEATED_GROUP = regex.compile(r"\)\s*[*+{]")
_CHOICE = regex.compile(r"[*+{|]|(?<!\()\?")
# An escape, a class, the start of a group, a number of repetitions, or any other character.
_TOKENS = regex.compile(
    r"\\[pPux]\{[^}]*\}|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\((?:\?(?:<?[=!>]|[\w-]*:|P?<\w+>))?|\{[\d, ]*\}|.", regex.DOTALL
)
MAX_QUICK_CHOICES = 5  # none of them a repeated group: the time is at most the fifth power of a name's length
MAX_QUICK_NAME = 100  # characters
_REFERENCE = regex.compile(r"\\[1-9gk]|\(\?P=")  # to what a group has matched
_CALL = regex.compile(
    r"(?<!\\)(?:\\\\)*\(\?(R|&|P>|[+-]?\d)"
)  # of a group, or of the whole; Python's own engine has none


class PatternError(ValueError):
    """An expression that is not valid, or that would take too long."""

    def __init__(self, pattern: str, reason: str):
        super().__init__(f"the expression {pattern!r:.100} {reason}")


class Expression(NamedTuple):
    """A compiled expression; a quick one matches short names without a limit of time, in a tenth of the time."""

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
    """Raise PatternError for an expression that an engine without a limit of time may match for ever.

    These repeat a group that can match in several ways, as in `(a+)+` and `(a|aa)*`.
    """
    groups, closed = [False], False  # whether each open group, and one that ends here, can match in several ways
    for token in _TOKENS.findall(pattern):
        if closed and token[0] in "*+{":
            raise PatternError(pattern, "repeats a group with choices, which may take longer than anybody waits")
        closed = token == ")" and groups.pop()
        groups = groups or [False]
        if token[0] == "(":
            groups.append(False)
        elif closed or token in ("*", "+", "?", "|") or (token[0] == "{" and "," in token):
            groups[-1] = True


class Matching:
    """The expressions of one file: compiling and matching all of them takes at most about `seconds`."""

    def __init__(self, seconds: float):
        self._seconds_left = seconds

    def compiled(self, pattern: str) -> Expression:
        """Compile an expression; raises PatternError."""
        with self._counted(pattern):
            return compiled(pattern)

    def is_match(self, expression: Expression, text: str) -> bool:
        """Whether the whole text matches; raises PatternError if that takes too long."""
        pattern, is_quick = expression
        with self._counted(pattern.pattern):
            if is_quick and len(text) <= MAX_QUICK_NAME:
                return pattern.fullmatch(text) is not None
            try:
                seconds = min(MATCH_SECONDS, self._seconds_left)
                return pattern.fullmatch(text, timeout=seconds, concurrent=True) is not None
            except TimeoutError:
                reason = f"takes too long to match {text!r:.200}; write it simpler"
                raise PatternError(pattern.pattern, reason) from None

    @contextmanager
    def _counted(self, pattern: str) -> Iterator[None]:
        if self._seconds_left <= 0:
            raise PatternError(pattern, "is one of too many, or others take too long; write fewer, and simpler ones")
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._seconds_left -= time.perf_counter() - begin


def _is_quick(pattern: str) -> bool:
    is_simple = _REPEATED_GROUP.search(pattern) is None and _REFERENCE.search(pattern) is None
    return is_simple and len(_CHOICE.findall(pattern)) <= MAX_QUICK_CHOICES
