"""Regular expressions that come from files, of adapters and checkpoints, compiled and matched within limits.

Some expressions of few characters match for longer than anybody waits, and Python's own engine cannot be stopped then.
RE2, whose time is linear, lacks the lookaheads with which trainers leave out the vision tower.
"""

import time
from math import prod

import regex

from mmvllm.text import counted

MAX_SIZE = 1_000_000  # characters, times the numbers of repetitions in braces: these are compiled one by one
MATCH_SECONDS = 1.0  # of one match
_COUNTS = regex.compile(r"\{(\d*),?(\d*)\}")


class PatternError(ValueError):
    """An expression that is not valid, or that would take too long."""

    def __init__(self, pattern: str, reason: str):
        super().__init__(f"the expression {pattern!r:.100} {reason}")


def compiled(pattern: str) -> regex.Pattern:
    """Compile an expression; raises PatternError."""
    counts = [int(number[:9]) for match in _COUNTS.finditer(pattern) for number in match.groups() if number]
    if (size := len(pattern) * prod(max(1, count) for count in counts)) > MAX_SIZE:
        raise PatternError(pattern, f"has, with its repetitions, {counted(size, 'character')}; {MAX_SIZE} are accepted")
    try:
        return regex.compile(pattern)
    except (regex.error, RecursionError) as error:
        raise PatternError(pattern, f"is not valid: {error}") from None


class Matching:
    """Matches of the expressions of one file, which take at most `seconds` together."""

    def __init__(self, seconds: float):
        self._seconds_left = seconds

    def is_match(self, pattern: regex.Pattern, text: str) -> bool:
        """Whether the whole text matches; raises PatternError if that takes too long."""
        begin = time.perf_counter()
        try:
            seconds = min(MATCH_SECONDS, max(0.001, self._seconds_left))
            return pattern.fullmatch(text, timeout=seconds, concurrent=True) is not None
        except TimeoutError:
            raise PatternError(pattern.pattern, f"takes too long to match {text!r:.200}; write it simpler") from None
        finally:
            self._seconds_left -= time.perf_counter() - begin
