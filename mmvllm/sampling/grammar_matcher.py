"""Compiles grammars with llguidance. Without torch, so that a process for grammars starts quickly and stays small."""

import json
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mmvllm.errors import RequestError
from mmvllm.structured.params import StructuredOutputsParams, UnambiguousGrammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_ALTERNATIVES = 1000  # of a rule, in which the parser may follow as many at a time; others are one terminal
# What untrusted senders may take: about 0.1 s and 100 MB for a grammar, 0.02 s for a token.
LIMITS = {
    "initial_lexer_fuel": 100_000,
    "max_lexer_states": 30_000,  # which take up to 30 MB
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
# Rules of a grammar that the parser may follow at a time: where a text can be read in several ways, a token takes the
# cube of their number, and llguidance stops only after the one that exceeds it. 200 take up to 0.4 s.
MAX_FOLLOWED = 200
# A \u escape could spell the name of a property, and an escaped slash a name with one, past what is said of it.
ESCAPES = '"\\bfnrt'
# Between tokens of JSON by default: small models fill a completion with white space where more may follow.
WHITESPACE = r"[ \n]"
AVOID_AMBIGUITY = "simplify what can be read in several ways"


class TakesLonger(Exception):
    """A grammar takes longer to compile than one that others wait for may."""


def compile_grammar(
    tokenizer: "LLTokenizer",
    eos_token_ids: Sequence[int],
    params: StructuredOutputsParams,
    max_seconds: float = math.inf,
) -> "LLMatcher":
    """A matcher at the beginning of a text; raises RequestError with the keyword or place that cannot be enforced.

    Args:
        max_seconds: CPU time that the first two masks of a text may take, once the lexer has its states.
    """
    from llguidance import LLMatcher, LLParserLimits

    try:
        grammar = _grammar(LLMatcher, params)
    except ValueError as error:
        raise refused(params, str(error)) from None
    may_be_ambiguous = params.grammar is not None and not isinstance(params.grammar, UnambiguousGrammar)
    limits = LLParserLimits(**LIMITS, max_items_in_row=MAX_FOLLOWED if may_be_ambiguous else None)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    for _ in range(2):  # what the first takes is kept for all sequences, and may leave too little for others
        first = matcher.deep_copy()
        seconds = _try(first, tokenizer.vocab_size, eos_token_ids)
        for one in (matcher, first):  # the copy fails where no text can be the beginning
            if one.is_error():
                raise refused(params, one.get_error())
    if seconds > max_seconds:
        raise refused(params, f"finding its first tokens takes more than {max_seconds:g} s; {AVOID_AMBIGUITY}")
    return matcher


def _try(matcher: "LLMatcher", vocab_size: int, eos_token_ids: Sequence[int]) -> float:
    """Find out what may be first, which takes longest, and what may follow one of these tokens; return the CPU time."""
    start = time.thread_time()
    mask = np.empty(-(-vocab_size // 32), np.uint32)
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")
    allowed[eos_token_ids] = 0
    if allowed.any() and matcher.consume_token(int(allowed.argmax())):
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    return time.thread_time() - start


def _grammar(matcher: type["LLMatcher"], params: StructuredOutputsParams) -> str:
    """In llguidance's own form."""
    if params.regex is not None:
        return matcher.grammar_from_regex(params.regex)
    if params.choice is not None:
        texts = " | ".join(map(_literal, params.choice))
        is_rule = len(params.choice) <= MAX_ALTERNATIVES
        return matcher.grammar_from_lark(f"start: {texts}" if is_rule else f"start: CHOICE\nCHOICE: {texts}")
    if params.grammar is not None:
        return matcher.grammar_from_lark(params.grammar)
    whitespace = WHITESPACE if params.whitespace_pattern is None else params.whitespace_pattern
    separators = {"whitespace_pattern": whitespace} if whitespace else {"whitespace_flexible": False}
    options = {"json_allowed_escapes": ESCAPES, **separators}
    return matcher.grammar_from_json_schema(params.json or '{"type":"object"}', overrides=options)


def _literal(text: str) -> str:
    """Quote a text for Lark, which has the escapes of JSON."""
    return json.dumps(text, ensure_ascii=False)


def refused(params: StructuredOutputsParams, message: str) -> RequestError:
    """The error for a grammar that cannot be enforced, with the reason that llguidance gives."""
    param = f"structured.{params.kind}"
    return RequestError(f"{param} cannot be enforced: {reason_of(message)}", param=param)


def reason_of(message: str) -> str:
    """What an error of llguidance means, and what to do about it where that is known."""
    reason = _first_line(message)
    if reason.startswith("oneOf constraints are not supported"):
        return "the alternatives of a oneOf may overlap; write anyOf, or give each another type or constant"
    if reason.startswith("NoExtensionBias"):
        return "no text fits it: it refers to itself without end, or demands a control character in JSON"
    if "items; max is" in reason:
        what, _, _ = reason.partition("; consider")  # a hint that is wrong for most grammars
        remedy = "write alternatives that are texts as a terminal, whose name is in capitals, and avoid ambiguous rules"
        return f"too many rules and alternatives would be followed at a time ({what}); {remedy}"
    if "initial_lexer_fuel" in reason:
        return "its expressions take too much to compile; simplify them"
    return reason


def _first_line(message: str) -> str:
    """What is wrong, without the drawing of where."""
    lines = [line.strip() for line in message.splitlines()]
    errors = [line for line in lines if line.startswith("error: ")]
    return f"{lines[0]} {errors[0].removeprefix('error: ') if errors else ''}".strip()[:500] if lines else "no reason"
