"""How one request is sampled."""

import math
from dataclasses import dataclass
from numbers import Real


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when to stop; wrong values raise ValueError with the value and the range.

    Args:
        temperature: 0 takes the most likely token, exactly; higher is more random.
        top_p: keep the smallest set of tokens whose probabilities reach this sum, in (0, 1].
        top_k: keep this many most likely tokens; 0 or -1 keeps all.
        min_p: keep tokens at least this fraction as likely as the most likely one, in [0, 1].
        max_tokens: generate at most this many tokens.
        min_tokens: do not stop before this many.
        stop: strings that end the answer; the text ends before them.
        stop_token_ids: token ids that end the answer, beside the checkpoint's own.
        ignore_eos: go on after the end-of-sequence token, until max_tokens.
        seed: makes the request's random stream its own: the same text whatever else is in the batch.
        repetition_penalty: divides positive (multiplies negative) logits of tokens in prompt or answer, > 0.
        presence_penalty: subtracted from the logits of tokens in the answer, in [-2, 2].
        frequency_penalty: the same, times how often they occur, in [-2, 2].
        logprobs: return log-probabilities of each chosen token and of this many most likely ones, 0 to 20.
        n: number of answers to the same prompt.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 256
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int | None = None
    n: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop or ()))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        _check_real("temperature", self.temperature, "at least 0", lambda v: v >= 0)
        _check_real("top_p", self.top_p, "in (0, 1]", lambda v: 0 < v <= 1)
        _check_real("min_p", self.min_p, "in [0, 1]", lambda v: 0 <= v <= 1)
        _check_real("repetition_penalty", self.repetition_penalty, "above 0", lambda v: v > 0)
        _check_real("presence_penalty", self.presence_penalty, "in [-2, 2]", lambda v: -2 <= v <= 2)
        _check_real("frequency_penalty", self.frequency_penalty, "in [-2, 2]", lambda v: -2 <= v <= 2)
        _check_int("top_k", self.top_k, "at least -1", lambda v: v >= -1)
        _check_int("max_tokens", self.max_tokens, "at least 1", lambda v: v >= 1)
        _check_int("min_tokens", self.min_tokens, f"in [0, max_tokens={self.max_tokens}]", self._min_tokens_ok)
        _check_int("n", self.n, "at least 1", lambda v: v >= 1)
        if self.seed is not None:
            _check_int("seed", self.seed, "None or an integer", lambda v: True)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, "None or in [0, 20]", lambda v: 0 <= v <= 20)
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop has {text!r}, must be strings that are not empty")
        for token_id in self.stop_token_ids:
            _check_int("stop_token_ids", token_id, "at least 0", lambda v: v >= 0)

    def _min_tokens_ok(self, value: int) -> bool:
        return 0 <= value <= self.max_tokens


def _check_real(name: str, value, wanted: str, accept) -> None:
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value) or not accept(value):
        raise ValueError(f"{name} is {value!r}, must be a number {wanted}")


def _check_int(name: str, value, wanted: str, accept) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not accept(value):
        raise ValueError(f"{name} is {value!r}, must be an integer {wanted}")
