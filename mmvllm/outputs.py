"""What a caller gets back."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class CompletionOutput:
    """One answer. `logprobs` has, per token, {token id: log-probability}: the chosen token, then the most likely."""

    text: str
    token_ids: list[int]
    finish_reason: str  # "eos", "stop", "length", "aborted" or "error"
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, float]] | None = None


@dataclass(slots=True)
class RequestOutput:
    """One finished request. The fields of its first answer are its own too; `out["text"]` reads like `out.text`.

    Times are in seconds since the epoch; None where the request never got that far.
    """

    request_id: str
    completions: list[CompletionOutput] = field(default_factory=list)  # SamplingParams.n of them
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens whose KV came from the prefix cache
    num_image_tokens: int = 0
    error: str | None = None
    arrival_time: float | None = None
    first_token_time: float | None = None
    finish_time: float | None = None

    @property
    def text(self) -> str:
        return self.completions[0].text if self.completions else ""

    @property
    def token_ids(self) -> list[int]:
        return self.completions[0].token_ids if self.completions else []

    @property
    def finish_reason(self) -> str:
        return self.completions[0].finish_reason if self.completions else "error"

    @property
    def logprobs(self) -> list[dict[int, float]] | None:
        return self.completions[0].logprobs if self.completions else None

    @property
    def cumulative_logprob(self) -> float | None:
        return self.completions[0].cumulative_logprob if self.completions else None

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self, name)
        except AttributeError:
            raise KeyError(name) from None


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new of one answer, while it is generated. All texts of an answer, joined, are its final text.

    The text is of whole characters, and never part of a stop string. There is always some, except in the answer's last
    delta. `logprobs` has, per token of `token_ids`, what `CompletionOutput.logprobs` has.
    """

    request_id: str
    index: int  # which of SamplingParams.n answers
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, float]] | None = None
    finish_reason: str | None = None  # "eos", "stop", "length" or "aborted", in the answer's last delta
    output: RequestOutput | None = None  # in the last delta of all: the whole request
