"""Pydantic models that the responses of several routes share."""

from typing import Literal

from pydantic import BaseModel, Field


class PromptTokensDetails(BaseModel):
    cached_tokens: int
    image_tokens: int
    video_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class RequestTimes(BaseModel):
    """The times of a request with one choice, under vLLM's names.

    A time is null if the request lacks the first or second token that it depends on.
    """

    queue_time_ms: float | None
    time_to_first_token_ms: float | None
    generation_time_ms: float | None  # from the first token until the last
    mean_itl_ms: float | None  # mean time between two tokens
    tokens_per_second: float | None  # tokens after the first


OMITTED = Field(None, exclude_if=lambda value: value is None)  # the field is omitted if it is None
FinishReason = Literal["stop", "length", "tool_calls", "function_call", "repetition"]  # the last as in vLLM, on request
StopReason = str | int | None  # the stop string or token that ended a choice, as in vLLM


class PromptLogprob(BaseModel):
    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs = list[dict[str, PromptLogprob] | None]  # for each token of the prompt, keyed by token id


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    error: ErrorDetail


# Arguments `responses` of routes, for the OpenAPI schema.
ERRORS = {"default": {"model": ErrorResponse, "description": "An OpenAI error object"}}
STREAMS = {200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}} | ERRORS
