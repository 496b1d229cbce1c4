"""Finds completions that repeat themselves without end, at the cost of comparing two numbers for nearly every token.

A tail of tokens has the period p where each of them equals the one p tokens before it. vLLM's `repetition_detection`
ends a completion in the same way, with `min_count` repetitions of a pattern of at most `max_pattern_size` tokens; there
all patterns are compared again with every token. Here a search also says how many more tokens any repetition lacks at
the least: there is none to find before.
"""

MAX_PERIOD = 64  # tokens that are repeated as one
MIN_REPEATS = 4
MIN_TOKENS = 64  # of the repetition: what is shorter is often meant, such as a row of zeros or dashes


def length_of(period: int) -> int:
    """Tokens of this period, the first of them included, that are a repetition."""
    return max(MIN_TOKENS, MIN_REPEATS * period)


_LEAST = min(length_of(period) - period for period in range(1, MAX_PERIOD + 1))  # where nothing is repeated yet


def tokens_missing(token_ids: list[int], start: int) -> int:
    """How many more tokens could, at the earliest, make the end of `token_ids[start:]` a repetition; 0 if it is one."""
    recent = token_ids[max(start, len(token_ids) - MAX_PERIOD - 1) :]
    last, least = recent.pop() if recent else None, _LEAST
    for period, token_id in enumerate(reversed(recent), 1):
        if token_id == last:  # of other periods no token is repeated
            needed = length_of(period) - period
            least = min(least, needed - _num_repeated(token_ids, start, period, needed))
    return least


def _num_repeated(token_ids: list[int], start: int, period: int, enough: int) -> int:
    """How many of the last tokens equal the one a period before them; it counts up to `enough`."""
    end, first = len(token_ids) - 1, max(start + period, len(token_ids) - enough)
    at = end
    while at >= first and token_ids[at] == token_ids[at - period]:
        at -= 1
    return end - at
