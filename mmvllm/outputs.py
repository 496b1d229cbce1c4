"""Outputs of the engine: completions, finished requests, and the deltas of a stream."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np

from mmvllm.errors import RequestError
from mmvllm.grounding import Box, Point


class Logprob(float):
    """A token's log-probability with its text and its rank, which is 1 if no token is more likely."""

    __slots__ = ("decoded_token", "rank")

    def __new__(cls, logprob: float, rank: int | None = None, decoded_token: str | None = None) -> "Logprob":
        made = super().__new__(cls, logprob)
        made.rank, made.decoded_token = rank, decoded_token
        return made

    @property
    def logprob(self) -> float:
        """The value as a plain float, with vLLM's name."""
        return float(self)


LogprobsById = dict[int, Logprob]  # by token id: the token of the sequence first, then the most likely ones


def num_logprobs(entries: Iterable[LogprobsById | None] | None) -> int:
    """Return the total number of log-probabilities of several tokens."""
    return sum(map(len, filter(None, entries or ())))


@dataclass(slots=True)
class CompletionOutput:
    """One completion.

    For each token, `logprobs` has {token id: log-probability}: the chosen token, then the most likely ones. `boxes` are
    the boxes and points that the model wrote, in pixels of the request's images.

    `score` is the value that completions are ranked by. With `beam_width`, it is cumulative_logprob / length **
    length_penalty, transformers' `sequences_scores`; with `best_of`, the log-probability per token; otherwise None.

    `stop_reason` is the stop string or stop token that ended the completion, None if it ended for another reason.
    `index` counts the completions of the request from 0.
    """

    text: str
    token_ids: list[int]
    finish_reason: str  # "eos", "stop", "length", "repetition", "aborted" or "error"
    cumulative_logprob: float | None = None
    logprobs: list[LogprobsById] | None = None
    boxes: tuple[Box | Point, ...] = ()
    score: float | None = None
    stop_reason: str | int | None = None
    index: int = 0


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """The timing of a request: the first four fields are seconds since the epoch, all others are durations in seconds.

    A field is None if the request never reached that point. Its arrival is its admission, or when the engine got it.
    """

    arrival_time: float | None
    first_scheduled_time: float | None
    first_token_time: float | None
    finished_time: float | None
    preparation_time: float | None  # chat template, decoding, resizing
    time_in_queue: float | None  # from arrival or the end of preparation, whichever is later, until first scheduled
    encoding_time: float | None  # of the ViT in the steps that encoded its images, which other requests may share
    prefill_time: float | None  # from first scheduled until the first token, including the ViT
    decode_time: float | None  # from the first token until the end
    inference_time: float | None  # from first scheduled until the end
    time_to_first_token: float | None  # from its arrival
    time_per_output_token: float | None  # mean over the tokens after the first, in its longest completion
    e2e_time: float | None  # from its arrival


@dataclass(slots=True)
class RequestOutput:
    """The output of a finished request; it also has the fields of the first completion: `out.text` or `out["text"]`.

    `prompt` is the tokenized text, with one placeholder per image or video; None if the request has token ids. Times
    are in seconds since the epoch; None if the request never reached that point. For each prompt token,
    `prompt_logprobs` has an entry like `CompletionOutput.logprobs`, or None for the first token.
    """

    request_id: str
    completions: list[CompletionOutput] = field(default_factory=list)  # SamplingParams.n of them
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens whose KV came from the prefix cache
    num_image_tokens: int = 0
    num_video_tokens: int = 0
    error: str | None = None
    arrival_time: float | None = None
    first_token_time: float | None = None
    finish_time: float | None = None
    prompt_token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[LogprobsById | None] | None = None
    embedding: np.ndarray | None = field(default=None, repr=False, compare=False)  # (dimensions,) float32
    exception: RequestError | None = field(default=None, repr=False, compare=False)  # `error` with its facts
    preparation_start_time: float | None = None
    preparation_end_time: float | None = None
    first_scheduled_time: float | None = None
    encoding_start_time: float | None = None  # start of the first step that encoded images of the request
    encoding_time: float | None = None  # duration of the ViT in seconds
    prompt: str | None = None
    num_preemptions: int = 0  # of its completions; each one recomputes the KV

    @property
    def outputs(self) -> list[CompletionOutput]:
        """The completions, with vLLM's name."""
        return self.completions

    @property
    def finished(self) -> bool:
        """Always True, since an output is created when its request has finished or failed; vLLM has partial ones."""
        return True

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
    def logprobs(self) -> list[LogprobsById] | None:
        return self.completions[0].logprobs if self.completions else None

    @property
    def cumulative_logprob(self) -> float | None:
        return self.completions[0].cumulative_logprob if self.completions else None

    @property
    def boxes(self) -> tuple[Box | Point, ...]:
        return self.completions[0].boxes if self.completions else ()

    @property
    def queue_start_time(self) -> float | None:
        """When the request had arrived and was prepared."""
        return max(filter(None, (self.arrival_time, self.preparation_end_time)), default=None)

    @property
    def metrics(self) -> RequestMetrics:
        """Times and durations of the request's stages."""
        return RequestMetrics(
            arrival_time=self.arrival_time,
            first_scheduled_time=self.first_scheduled_time,
            first_token_time=self.first_token_time,
            finished_time=self.finish_time,
            preparation_time=_between(self.preparation_start_time, self.preparation_end_time),
            time_in_queue=_between(self.queue_start_time, self.first_scheduled_time),
            encoding_time=self.encoding_time,
            prefill_time=_between(self.first_scheduled_time, self.first_token_time),
            decode_time=_between(self.first_token_time, self.finish_time),
            inference_time=_between(self.first_scheduled_time, self.finish_time),
            time_to_first_token=_between(self.arrival_time, self.first_token_time),
            time_per_output_token=self._time_per_output_token(),
            e2e_time=_between(self.arrival_time, self.finish_time),
        )

    def _time_per_output_token(self) -> float | None:
        seconds = _between(self.first_token_time, self.finish_time)
        num_tokens = max((len(completion.token_ids) for completion in self.completions), default=0)
        return None if seconds is None or num_tokens < 2 else seconds / (num_tokens - 1)

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise KeyError(name)
        return getattr(self, name)

    def __contains__(self, name: object) -> bool:
        return name in _NAMES

    def __iter__(self) -> Iterator[str]:
        return iter(_NAMES)

    def keys(self) -> tuple[str, ...]:
        """Return the names of all fields, for `dict(output)`."""
        return _NAMES

    def get(self, name: str, default: Any = None) -> Any:
        """Return the field, or `default` if there is none with this name, like `dict.get`."""
        return getattr(self, name) if name in self else default

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, and the fields of the first completion, in types that `json.dumps` accepts."""
        others = ("completions", "outputs", "exception", "metrics", "boxes", "embedding")
        made = {name: getattr(self, name) for name in _NAMES if name not in others}
        made |= {"embedding": None if self.embedding is None else self.embedding.tolist()}
        completions = [*map(_completion_dict, self.completions)]
        return made | {"boxes": _as_dicts(self.boxes), "completions": completions, "metrics": asdict(self.metrics)}


def _completion_dict(completion: CompletionOutput) -> dict[str, Any]:
    return asdict(replace(completion, boxes=())) | {"boxes": _as_dicts(completion.boxes)}


def _as_dicts(boxes: tuple[Box | Point, ...]) -> list[dict[str, Any]]:
    return [box.to_dict() for box in boxes]


_NAMES = (
    *(field.name for field in fields(RequestOutput)),
    *("outputs", "text", "token_ids", "finish_reason", "logprobs", "cumulative_logprob", "boxes", "metrics"),
)


def _between(start: float | None, end: float | None) -> float | None:
    """Return the seconds between the times, at least 0, since the clock may have been set back."""
    return None if start is None or end is None else max(0.0, end - start)


@dataclass(slots=True)
class EmbeddingOutput:
    """The vector of one request, or its `error`."""

    request_id: str
    embedding: np.ndarray | None  # (dimensions,) float32
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens whose KV came from the prefix cache
    num_image_tokens: int = 0
    num_video_tokens: int = 0
    error: str | None = None
    exception: RequestError | None = field(default=None, repr=False, compare=False)  # `error` with its facts

    @classmethod
    def of(cls, output: RequestOutput) -> "EmbeddingOutput":
        """Build the output from a finished request with `pooling`."""
        return cls(*(getattr(output, own.name) for own in fields(cls)))

    @property
    def outputs(self) -> "EmbeddingOutput":
        """This object, since vLLM's outputs have the vector as `outputs.embedding` or `outputs.data`."""
        return self

    @property
    def data(self) -> np.ndarray | None:
        """The vector, with its name in the outputs of vLLM's `LLM.encode`."""
        return self.embedding


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """A hypothesis of `LLM.beam_search`: `tokens` and `text` begin with the prompt, special tokens included."""

    tokens: list[int]
    text: str
    cum_logprob: float  # sum over the tokens after the prompt
    finish_reason: str


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The hypotheses of one prompt, best first."""

    sequences: list[BeamSearchSequence]


@dataclass(frozen=True, slots=True)
class ContinuationScore:
    """The score of one continuation of a prompt.

    Args:
        logprob: log-probability of the continuation given the prompt, the sum of `logprobs`.
        is_greedy: whether no other token is more likely at any position, so greedy decoding would generate it.
    """

    token_ids: list[int]
    logprobs: list[float]
    logprob: float
    is_greedy: bool


@dataclass(frozen=True, slots=True)
class ScoreOutput:
    """The scores of one request's continuations, in the caller's order; the numbers of tokens refer to the prompt."""

    scores: list[ContinuationScore]
    num_prompt_tokens: int
    num_image_tokens: int
    num_video_tokens: int

    @property
    def best(self) -> int:
        """The index of the most likely continuation."""
        return max(range(len(self.scores)), key=lambda index: self.scores[index].logprob)


@dataclass(slots=True)  # not frozen: creating a frozen one for every token takes four times as long
class Delta:
    """The new output of one completion; the texts of all its deltas, joined, are the final text.

    The text has whole characters and no part of a stop string; without `keeps_logprobs`, it may be empty before the
    last delta of a completion. For each of `token_ids`, `logprobs` has an entry like `CompletionOutput.logprobs`. The
    first delta of a completion has the prompt, like `RequestOutput`, if its log-probabilities were requested.
    """

    request_id: str
    index: int  # index of the completion, below SamplingParams.n
    text: str
    token_ids: list[int]
    logprobs: list[LogprobsById] | None = None
    finish_reason: str | None = None  # in the last delta of the completion
    output: RequestOutput | None = None  # in the last delta of the request
    num_prompt_tokens: int = 0
    # Set by `AsyncLLM`, and in the first delta if prompt log-probabilities are requested; must not be modified.
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[LogprobsById | None] | None = None
    boxes: tuple[Box | Point, ...] = ()  # in the last delta of the completion
    stop_reason: str | int | None = None  # in the last delta of the completion

    @property
    def num_bytes(self) -> int:
        """Approximate memory that the delta takes, in bytes."""
        num_values = num_logprobs(self.logprobs) + num_logprobs(self.prompt_logprobs)
        num_tokens, num_others = len(self.token_ids), 0
        if self.output is not None:
            num_tokens += sum(len(one.token_ids) for one in self.output.completions)
            num_others = 0 if self.output.embedding is None else self.output.embedding.nbytes
        return 500 + 2 * len(self.text) + 50 * num_tokens + 160 * num_values + num_others
