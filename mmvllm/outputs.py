"""What the engine returns: completions, finished requests, and the deltas of a stream."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np

from mmvllm.errors import RequestError
from mmvllm.grounding import Box, Point


class Logprob(float):
    """A token's log-probability, with its rank, 1 where no token is more likely, and its text."""

    __slots__ = ("decoded_token", "rank")

    def __new__(cls, logprob: float, rank: int | None = None, decoded_token: str | None = None) -> "Logprob":
        made = super().__new__(cls, logprob)
        made.rank, made.decoded_token = rank, decoded_token
        return made

    @property
    def logprob(self) -> float:
        """The number itself, by the name that vLLM gives it."""
        return float(self)


LogprobsById = dict[int, Logprob]  # by token id: the token that is there, then the most likely ones


def num_logprobs(entries: Iterable[LogprobsById | None] | None) -> int:
    """The number of log-probabilities of several tokens."""
    return sum(map(len, filter(None, entries or ())))


@dataclass(slots=True)
class CompletionOutput:
    """One completion.

    `logprobs` has, per token, {token id: log-probability}: the chosen one, then the most likely. `boxes` are the boxes
    and points that the model wrote, in pixels of the request's images.

    `score` is what completions were ranked by: with `beam_width`, cumulative_logprob / length ** length_penalty, which
    is transformers' `sequences_scores`; with `best_of`, the log-probability per token; else None.

    `stop_reason` is the stop string or the stop token that ended it; None where another reason did. `index` counts the
    completions of the request from 0.
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
    """The stages of a request: the times ending in `_time` that vLLM has are since the epoch, all others are seconds.

    None where the request never reached that point. `arrival_time` is when it was admitted, or given to the engine.
    """

    arrival_time: float | None
    first_scheduled_time: float | None
    first_token_time: float | None
    finished_time: float | None
    preparation_time: float | None  # chat template, decoding, resizing
    time_in_queue: float | None  # from when it was prepared and had arrived until it was first scheduled
    encoding_time: float | None  # of the ViT in the steps that encoded its images; other requests may share them
    prefill_time: float | None  # from when it was first scheduled until the first token, with the ViT
    decode_time: float | None  # from the first token until the end
    inference_time: float | None  # from when it was first scheduled until the end
    time_to_first_token: float | None  # from its arrival
    time_per_output_token: float | None  # mean of the tokens after the first, of its longest completion
    e2e_time: float | None  # from its arrival


@dataclass(slots=True)
class RequestOutput:
    """One finished request. The fields of its first completion are its own too: `out.text`, or `out["text"]`.

    `prompt` is the text that was tokenized, with one placeholder per image or video; None if token ids were given.
    Times are in seconds since the epoch; None where the request never reached that point. `prompt_logprobs` has, per
    token of the prompt, what `CompletionOutput.logprobs` has, or None where there is nothing: at the first token.
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
    encoding_start_time: float | None = None  # of the first step that encoded images of the request
    encoding_time: float | None = None  # seconds of the ViT
    prompt: str | None = None
    num_preemptions: int = 0  # of its completions, whose KV was computed again

    @property
    def outputs(self) -> list[CompletionOutput]:
        """The completions, by the name that vLLM gives them."""
        return self.completions

    @property
    def finished(self) -> bool:
        """Always True, since outputs are made once a request has finished or failed; vLLM has partial ones."""
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
        """When the request was prepared and had arrived."""
        return max(filter(None, (self.arrival_time, self.preparation_end_time)), default=None)

    @property
    def metrics(self) -> RequestMetrics:
        """The times of its stages."""
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
        """The names of all fields, for `dict(output)`."""
        return _NAMES

    def get(self, name: str, default: Any = None) -> Any:
        """`dict.get`, for fields."""
        return getattr(self, name) if name in self else default

    def to_dict(self) -> dict[str, Any]:
        """All fields, and the fields of the first completion, in types that `json.dumps` takes."""
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
    """Seconds; the clock may have been set back."""
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
        """Build it from the output of a finished request with `pooling`."""
        return cls(*(getattr(output, own.name) for own in fields(cls)))

    @property
    def outputs(self) -> "EmbeddingOutput":
        """The output itself, since vLLM's outputs have the vector as `outputs.embedding` or `outputs.data`."""
        return self

    @property
    def data(self) -> np.ndarray | None:
        """The vector, by the name that it has in the outputs of vLLM's `LLM.encode`."""
        return self.embedding


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """A hypothesis of `LLM.beam_search`: `tokens` and `text` begin with the prompt, special tokens included."""

    tokens: list[int]
    text: str
    cum_logprob: float  # of the tokens after the prompt
    finish_reason: str


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The hypotheses of one prompt, best first."""

    sequences: list[BeamSearchSequence]


@dataclass(frozen=True, slots=True)
class ContinuationScore:
    """One continuation of a prompt.

    Args:
        logprob: of all its tokens, given the prompt and those before them: the sum of `logprobs`.
        is_greedy: whether no other token is more likely at any place, so that greedy decoding would give it.
    """

    token_ids: list[int]
    logprobs: list[float]
    logprob: float
    is_greedy: bool


@dataclass(frozen=True, slots=True)
class ScoreOutput:
    """The continuations of one request, in the caller's order. The numbers of tokens refer to the prompt."""

    scores: list[ContinuationScore]
    num_prompt_tokens: int
    num_image_tokens: int
    num_video_tokens: int

    @property
    def best(self) -> int:
        """The index of the most likely continuation."""
        return max(range(len(self.scores)), key=lambda index: self.scores[index].logprob)


@dataclass(slots=True)  # not frozen, which would make one of them for every token four times as slow
class Delta:
    """What is new of one completion. All texts of a completion, joined, are its final text.

    The text is of whole characters, and never part of a stop string. There is always some, except in the last delta of
    a completion. `logprobs` has, per token of `token_ids`, what `CompletionOutput.logprobs` has. The first delta of
    each completion has the prompt, if its log-probabilities were asked for, as `RequestOutput` has it.
    """

    request_id: str
    index: int  # which of SamplingParams.n completions
    text: str
    token_ids: list[int]
    logprobs: list[LogprobsById] | None = None
    finish_reason: str | None = None  # of `CompletionOutput`, in the last delta of the completion
    output: RequestOutput | None = None  # in the last delta of the request: all of it
    num_prompt_tokens: int = 0
    # Of `AsyncLLM`, and of the first delta where log-probabilities of the prompt are asked for: must not be changed.
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[LogprobsById | None] | None = None
    boxes: tuple[Box | Point, ...] = ()  # of `CompletionOutput`, in the last delta of the completion
    stop_reason: str | int | None = None  # the same

    @property
    def num_bytes(self) -> int:
        """About as much memory as it takes."""
        num_values = num_logprobs(self.logprobs) + num_logprobs(self.prompt_logprobs)
        num_tokens, num_others = len(self.token_ids), 0
        if self.output is not None:
            num_tokens += sum(len(one.token_ids) for one in self.output.completions)
            num_others = 0 if self.output.embedding is None else self.output.embedding.nbytes
        return 500 + 2 * len(self.text) + 50 * num_tokens + 160 * num_values + num_others
