"""`CompletionJob`: the work of the engine for one HTTP request, and the builder of the response."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import BaseModel

from mmvllm.entrypoints.async_llm import UNREAD, Request
from mmvllm.outputs import Delta
from mmvllm.pooling_params import PoolingParams
from mmvllm.sampling_params import SamplingParams
from mmvllm.server.common.prompts import PromptJob
from mmvllm.server.common.response_builder import ChoiceBuffer
from mmvllm.server.common.response_models import Usage
from mmvllm.server.common.sampling import PARAMS_OF_BOTH_APIS
from mmvllm.server.common.structured import StructuredField
from mmvllm.server.errors import ApiError


class Builder(Protocol):
    """Builds the response to one HTTP request, without streaming, from the deltas of its prompts."""

    model: str
    prompt_field: str  # the request field with the prompt
    num_values: int  # log-probabilities, or elements of vectors, in the response

    @property
    def id(self) -> str: ...

    def count(self, delta: Delta, is_streamed: bool, /) -> None:
        """Count a delta; raises ApiError for too many values."""

    def whole(self, choices: Sequence[ChoiceBuffer], usage: Usage) -> BaseModel:
        """Return the complete response."""


class StreamBuilder(Builder, Protocol):
    """Builds a response, whole or as the chunks of a stream."""

    end: str | None  # data that ends a stream, if any

    def first_chunks(self, num_choices: int, delta: Delta) -> list[dict]:
        """Return the chunks before those for the first delta."""

    def chunks(self, index: int, delta: Delta) -> list[dict]:
        """Return the chunks for a delta of a choice."""

    def last_chunks(self, usage: Usage, includes_usage: bool) -> list[dict]:
        """Return the chunks after those for all deltas."""

    def error_chunk(self, error: ApiError) -> dict:
        """Return the chunk that ends a failed stream."""


@dataclass(frozen=True, slots=True)
class CompletionJob:
    """The engine requests of one HTTP request, and how to respond."""

    requests: Sequence[Request | Callable[[], Awaitable[Request]]]  # one per prompt, as for `AsyncLLM.generate`
    params: SamplingParams
    builder: Builder | StreamBuilder  # the latter if the response is streamed
    described: Callable[[], Any]  # describes the prompts for the log
    prompt: PromptJob | None = None  # for a conversation only
    structured: StructuredField | None = None
    streams: bool = False
    includes_usage: bool = False  # in the last chunk
    repeats_usage: bool = False  # the usage so far in every chunk
    pooling: PoolingParams | None = None  # for embeddings only
    fields: Sequence[str] | None = None  # the request field of each prompt, if they differ

    @property
    def num_images(self) -> int:
        return len(self.prompt.images) if self.prompt else 0

    @property
    def num_videos(self) -> int:
        return len(self.prompt.videos) if self.prompt else 0

    @property
    def num_choices(self) -> int:
        return len(self.requests) * self.params.n

    def format_error(self, error: ValueError, index: int = 0) -> tuple[str, str | None]:
        """Return the message of an engine error about a prompt, and the request field to which it refers."""
        return (self.structured and self.structured.format_error(error)) or (str(error), self._param_of(error, index))

    def _param_of(self, error: ValueError, index: int) -> str | None:
        if self.prompt is not None and (param := self.prompt.param_of(error)) is not None:
            return param
        own = getattr(error, "param", None)
        if own == "lora_request":
            return "model"
        if own == UNREAD:
            return None
        if self.fields is not None:
            return self.fields[index]
        return own if own in PARAMS_OF_BOTH_APIS else self.builder.prompt_field
