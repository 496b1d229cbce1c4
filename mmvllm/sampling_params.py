"""The sampling parameters of a request."""

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from itertools import islice
from numbers import Integral
from typing import TYPE_CHECKING, Any

from mmvllm.errors import ParameterError, RequestError
from mmvllm.structured.params import StructuredOutputsParams, as_structured
from mmvllm.utils.arguments import are_ints, is_number, with_checked_arguments
from mmvllm.utils.text import shown

if TYPE_CHECKING:
    from torch import Tensor


class RequestOutputKind(Enum):
    """vLLM's kinds of outputs; in mmvllm, `LLM` returns final outputs and `AsyncLLM` yields deltas."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


# Arguments of vLLM's SamplingParams that many programs pass, with the values that match what mmvllm does anyway.
ACCEPTED_VLLM_ARGUMENTS = {
    "use_beam_search": (False,),
    "output_kind": (RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (None,),
}
MAX_LOGPROB_TOKEN_IDS = 128
MAX_ITEMS = 1_000_000  # maximum length of a list; vocabularies have a few hundred thousand tokens
ALIASES = {"structured_outputs": "structured"}  # names in vLLM
UNLIMITED = sys.maxsize  # value of max_tokens without a limit
MAX_COMPLETIONS = 16_384  # per prompt; each completion takes memory before it starts


CHOSEN_AT_END = "but the completions of best_of and of beam search are known only at the end; leave it out"
# Parameters that beam search supports, with their meaning in transformers; all others must keep their default.
WITH_BEAM_SEARCH = frozenset(
    {
        *("beam_width", "length_penalty", "early_stopping", "n", "max_tokens", "min_tokens", "stop_token_ids"),
        *("ignore_eos", "seed", "repetition_penalty", "skip_special_tokens", "logprobs", "extra_args"),
    }
)


def with_defaults(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in the checkpoint's `defaults`; to beam search only those apply that it supports."""
    if given.get("beam_width") is not None:
        defaults = {name: value for name, value in defaults.items() if name in WITH_BEAM_SEARCH}
    return {**defaults, **given}


@with_checked_arguments(ACCEPTED_VLLM_ARGUMENTS, ALIASES)
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling and stop conditions of one request.

    Raises ValueError with the value and the range for a wrong value, and TypeError with a suggestion for an unknown
    argument. Arguments of vLLM that change nothing here, such as `use_beam_search=False`, are ignored.

    Args:
        temperature: 0 (and any value below 1e-5) is greedy decoding; higher values make sampling more random.
        top_p: keep the smallest set of tokens whose probabilities sum to at least this value, in (0, 1].
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        min_p: keep tokens at least this fraction as likely as the most likely one, in [0, 1]; after top_k and top_p, as
            in transformers.
        max_tokens: maximum number of generated tokens, also limited by max_new_tokens of the checkpoint's
            generation_config.json. It may be 0 with prompt_logprobs. None and -1 are `UNLIMITED`: until the context is
            full.
        min_tokens: minimum number of generated tokens before a stop condition applies.
        stop: strings that stop generation; the returned text ends before them.
        include_stop_str_in_output: end the text with the stop string, or the special token, that stopped it.
        stop_token_ids: token ids that stop generation, in addition to the checkpoint's end-of-sequence tokens.
        ignore_eos: continue after the end-of-sequence token and the checkpoint's max_new_tokens, until max_tokens.
        stop_on_repetition: end a completion with the finish reason "repetition" when its last tokens repeat one pattern
            of at most 64 tokens, at least 4 times in a row and for at least 64 tokens in all.
        skip_special_tokens: leave special tokens out of the text, such as those around the boxes of Qwen2-VL.
        detokenize: decode the tokens; if False, texts are empty and `stop`, which needs them, is refused.
        seed: seed of the request's random generator; the completion does not depend on the rest of the batch.
        structured: constraint on the text: `StructuredOutputsParams`, or a dict of its fields, such as {"json":
            SCHEMA}; may also be passed as `structured_outputs`, its name in vLLM.
        repetition_penalty: divides positive (multiplies negative) logits of tokens in prompt or completion, > 0.
        presence_penalty: subtracted from the logits of tokens in the completion, in [-2, 2].
        frequency_penalty: subtracted from the logits of tokens in the completion once per occurrence, in [-2, 2].
        logit_bias: {token id: number in [-100, 100]} added to the logits of these tokens, after penalties.
        allowed_token_ids: only these tokens are generated; None allows all.
        bad_words: texts that must not occur in the completion, tokenized as at the start of a text and after a space.
        no_repeat_ngram_size: no n-gram of this size occurs twice in prompt and completion; 0 allows all.
        logits_processors: functions of (completion's token ids, logits) or (prompt's token ids, completion's token ids,
            logits) that return the logits (V,) float32 of the next token; slow, since each is called for each token.
        logprobs: return log-probabilities of each chosen token and of this many most likely tokens, 0 to 20.
        logprob_token_ids: also return the log-probabilities of these tokens, at most 128, for each token of the
            completion, for example of "Yes" and "No". A token that is not among the most likely ones has no rank.
        prompt_logprobs: like logprobs, for each token of the prompt except the first; parts of the prompt that are
            cached are recomputed.
        n: number of completions of the prompt, at most 16384.
        best_of: generate this many completions, at least n, and return the n with the highest log-probability per
            token, best first.
        beam_width: decode by beam search with this many beams, at most max_num_seqs of the engine, and return the n
            best hypotheses, best first; None samples, or decodes greedily.
        length_penalty: for beam search: hypotheses are ranked by the sum of their log-probabilities / length **
            length_penalty; positive values prefer long hypotheses, negative values short ones; in [-10, 10].
        early_stopping: for beam search: True ends it when there are beam_width hypotheses, False when a better one is
            unlikely, "never" when a better one is impossible.
        extra_args: values for the caller's code; mmvllm does not use them.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = 256
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    stop_on_repetition: bool = False
    skip_special_tokens: bool = True
    seed: int | None = None
    structured: StructuredOutputsParams | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    no_repeat_ngram_size: int = 0
    logits_processors: tuple[Callable[..., "Tensor"], ...] = ()
    logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    best_of: int | None = None
    beam_width: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    detokenize: bool = True
    extra_args: Mapping[str, Any] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        self._number("temperature", "of at least 0", lambda v: 0 <= v < math.inf)
        self._number("top_p", "in (0, 1]", lambda v: 0 < v <= 1)
        self._number("min_p", "in [0, 1]", lambda v: 0 <= v <= 1)
        self._number("repetition_penalty", "above 0", lambda v: 0 < v < math.inf)
        self._number("presence_penalty", "in [-2, 2]", lambda v: -2 <= v <= 2)
        self._number("frequency_penalty", "in [-2, 2]", lambda v: -2 <= v <= 2)
        self._set_logit_bias()
        if self.allowed_token_ids is not None:
            self._token_ids("allowed_token_ids")
            if not self.allowed_token_ids:
                raise ParameterError("allowed_token_ids", [], "token ids, at least one, or None")
        self._tuple("bad_words", "strings that are not empty, without lone surrogates", _is_text)
        self._integer("no_repeat_ngram_size", "of at least 0", lambda v: v >= 0)
        self._tuple("logits_processors", "functions of token ids and logits", callable)
        self._integer("top_k", "of at least -1", lambda v: v >= -1)
        object.__setattr__(self, "top_k", max(0, self.top_k))
        self._integer("prompt_logprobs", "in [0, 20] or None", lambda v: 0 <= v <= 20, optional=True)
        if self.max_tokens is None or (_is_integer(self.max_tokens) and self.max_tokens == -1):
            object.__setattr__(self, "max_tokens", UNLIMITED)
        least = 0 if self.prompt_logprobs is not None and self.beam_width is None else 1
        self._integer("max_tokens", f"of at least {least}, -1 or None", lambda v: v >= least)
        most = "of at least 0" if self.max_tokens == UNLIMITED else f"in [0, max_tokens={shown(self.max_tokens)}]"
        self._integer("min_tokens", most, lambda v: 0 <= v <= self.max_tokens)
        self._integer("n", f"in [1, {MAX_COMPLETIONS}]", lambda v: 1 <= v <= MAX_COMPLETIONS)
        self._integer("seed", "or None", lambda v: True, optional=True)
        self._integer("logprobs", "in [0, 20] or None", lambda v: 0 <= v <= 20, optional=True)
        self._set_logprob_token_ids()
        self._tuple("stop", "strings that are not empty", lambda v: isinstance(v, str) and v)
        self._token_ids("stop_token_ids")
        self._flag("ignore_eos")
        self._flag("detokenize")
        if self.stop and not self.detokenize:
            raise RequestError(
                "stop needs the text, which detokenize=False leaves out; give one of them", param="detokenize"
            )
        if not isinstance(self.extra_args, Mapping | None):
            raise ParameterError("extra_args", self.extra_args, "a dict or None")
        self._flag("stop_on_repetition")
        self._flag("skip_special_tokens")
        self._flag("include_stop_str_in_output")
        object.__setattr__(self, "structured", as_structured(self.structured))
        self._check_structured()
        best_of = f"in [n={self.n}, {MAX_COMPLETIONS}], or None"
        self._integer("best_of", best_of, lambda v: self.n <= v <= MAX_COMPLETIONS, optional=True)
        self._check_beam_search()

    def clone(self) -> "SamplingParams":
        """Return a copy of these parameters, with the name of vLLM's method."""
        return replace(self)

    @property
    def num_logprobs(self) -> int | None:
        """Maximum number of log-probabilities returned per token; None if none are requested."""
        if self.logprob_token_ids is None:
            return self.logprobs
        return (self.logprobs or 0) + len(self.logprob_token_ids) + 1

    @property
    def num_seqs(self) -> int:
        """Number of completions that are generated; n of them are returned."""
        return self.beam_width or self.best_of or self.n

    @property
    def chooses_by_logprob(self) -> bool:
        """Whether `best_of` generates more completions than are returned."""
        return self.best_of is not None and self.best_of > self.n

    @property
    def chooses_at_end(self) -> bool:
        """Whether the returned completions are known only when all have finished."""
        return self.beam_width is not None or self.chooses_by_logprob

    def end_ids(self, eos_token_ids: Iterable[int]) -> set[int]:
        """Return the tokens that end a completion; `eos_token_ids` are the checkpoint's."""
        return {*self.stop_token_ids, *(() if self.ignore_eos else eos_token_ids)}

    def _check_beam_search(self) -> None:
        self._integer("beam_width", f"of at least n={self.n}, or None", lambda v: v >= self.n, optional=True)
        self._number("length_penalty", "in [-10, 10]", lambda v: -10 <= v <= 10)
        early = self.early_stopping
        if not isinstance(early, bool | str) or early not in (True, False, "never"):
            raise ParameterError("early_stopping", early, "True, False or 'never'")
        if self.beam_width is None:
            self._must_be_default({"length_penalty", "early_stopping"}, "needs beam search (beam_width)")
        else:
            names = {own.name for own in fields(self)} - WITH_BEAM_SEARCH
            self._must_be_default(names, f"cannot be used with beam search (beam_width={shown(self.beam_width)})")

    def _must_be_default(self, names: Iterable[str], reason: str) -> None:
        for own in fields(self):
            value = getattr(self, own.name)
            if own.name in names and value != own.default:
                text = shown(value)
                given = f" is {text}, but it" if len(text) <= 100 else ""  # a schema would hide the reason
                raise RequestError(f"{own.name}{given} {reason}; leave it out", param=own.name, value=value)

    def _check_structured(self) -> None:
        """Refuse parameters that contradict a grammar, because the grammar ends the completion."""
        for name in ("ignore_eos", "min_tokens"):
            if self.structured is not None and (value := getattr(self, name)):
                reason = f"{name} is {value}, which contradicts structured: a completion ends where its grammar ends"
                raise RequestError(reason, param=name, value=value)

    def _number(self, name: str, required: str, accept: Callable[[float], bool]) -> None:
        value = getattr(self, name)
        number = _as_float(value)
        if not accept(number):
            raise ParameterError(name, value, f"a number {required}")
        object.__setattr__(self, name, number)

    def _integer(self, name: str, required: str, accept: Callable[[int], bool], optional: bool = False) -> None:
        value = getattr(self, name)
        if optional and value is None:
            return
        if not _is_integer(value) or not accept(value):
            raise ParameterError(name, value, f"an integer {required}")
        object.__setattr__(self, name, int(value))

    def _flag(self, name: str) -> None:
        value = getattr(self, name)
        if not _is_flag(value):
            raise ParameterError(name, value, "True or False")
        object.__setattr__(self, name, bool(value))

    def _token_ids(self, name: str) -> None:
        given = getattr(self, name)
        is_plain = isinstance(given, list | tuple) and len(given) <= MAX_ITEMS and are_ints(given)
        if is_plain and min(given, default=0) >= 0:
            object.__setattr__(self, name, tuple(given))
            return
        self._tuple(name, "integers of at least 0", lambda v: _is_integer(v) and v >= 0)
        object.__setattr__(self, name, tuple(map(int, getattr(self, name))))

    def _set_logprob_token_ids(self) -> None:
        if self.logprob_token_ids is None:
            return
        self._token_ids("logprob_token_ids")
        token_ids = tuple(dict.fromkeys(self.logprob_token_ids))
        if not 1 <= len(token_ids) <= MAX_LOGPROB_TOKEN_IDS:
            required = f"1 to {MAX_LOGPROB_TOKEN_IDS} token ids, or None"
            raise ParameterError("logprob_token_ids", self.logprob_token_ids, required)
        object.__setattr__(self, "logprob_token_ids", token_ids)

    def _set_logit_bias(self) -> None:
        """Copy logit_bias and convert ids that are strings, as in JSON; an empty one becomes None."""
        given = self.logit_bias
        if given is not None and not isinstance(given, Mapping):
            raise ParameterError("logit_bias", given, "a mapping of token ids to numbers in [-100, 100]")
        biases = {}
        for token_id, bias in (given or {}).items():
            number = _as_float(bias)
            if not _is_token_id(token_id) or not -100 <= number <= 100:
                entry = f"{shown(token_id)}: {shown(bias)}"
                message = f"logit_bias must have token ids with numbers in [-100, 100], got {entry}"
                raise RequestError(message, param="logit_bias", value=bias)
            biases[int(token_id)] = number
        object.__setattr__(self, "logit_bias", biases or None)

    def _tuple(self, name: str, required: str, accept: Callable[[Any], bool]) -> None:
        """Convert any iterable to a tuple; a single string or integer becomes a tuple of one, None an empty tuple."""
        value = getattr(self, name)
        if value is None:
            items = ()
        else:
            is_several = isinstance(value, Iterable) and not isinstance(value, str)
            items = tuple(islice(value, MAX_ITEMS + 1)) if is_several else (value,)
        if len(items) > MAX_ITEMS:
            raise RequestError(f"{name} has more than {MAX_ITEMS} items", param=name, limit=MAX_ITEMS)
        for item in items:
            if not accept(item):
                raise RequestError(f"{name} must be {required}, got {shown(item)}", param=name, value=item)
        object.__setattr__(self, name, items)


@with_checked_arguments({"temperature": (0,), "include_stop_str_in_output": (False,)})
@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """The parameters of `LLM.beam_search`, with vLLM's names; `SamplingParams` explains them."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    length_penalty: float = 1.0

    def sampling_params(self) -> SamplingParams:
        """Return the equivalent `SamplingParams`, which return all beams; raise ValueError for an invalid value."""
        given = {own.name: getattr(self, own.name) for own in fields(self)}
        return SamplingParams(**given, n=max(1, self.beam_width) if _is_integer(self.beam_width) else 1)


def _as_float(value: Any) -> float:
    """Return the value as a float, or nan, which is outside every range, if it is not a number or too large."""
    try:
        return float(value) if is_number(value) else math.nan
    except OverflowError:
        return math.nan


def _is_flag(value: Any) -> bool:
    return not getattr(value, "ndim", 0) and value in (True, False)  # an array has no truth value


def _is_text(value: Any) -> bool:
    """Return whether a tokenizer can encode it: a non-empty string that is valid UTF-8."""
    return isinstance(value, str) and value != "" and not any("\ud800" <= character <= "\udfff" for character in value)


def _is_token_id(value: Any) -> bool:
    return (_is_integer(value) and value >= 0) or (isinstance(value, str) and value.isascii() and value.isdecimal())


def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
