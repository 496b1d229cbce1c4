"""Pydantic models of /v1/completions."""

from typing import Annotated, Literal

from pydantic import BaseModel, Discriminator, Field, Tag

from mmvllm.server.common.messages import INT64, Unsupported
from mmvllm.server.common.protocol import (
    MAX_LOGPROBS,
    NO_LIMIT,
    TRUNCATION,
    TRUNCATION_SIDE,
    PromptTokenIds,
    SamplingRequest,
    TokenLimit,
    TruncationSide,
    prompt_tag,
)
from mmvllm.server.common.response_models import OMITTED, FinishReason, PromptLogprobs, RequestTimes, StopReason, Usage

MAX_PROMPTS = 64  # prompts per request


class CompletionRequest(SamplingRequest):
    """POST /v1/completions"""

    prompt: Annotated[
        Annotated[str, Tag("a string")]
        | Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS), Tag("strings")]
        | Annotated[PromptTokenIds, Tag("token ids")]
        | Annotated[
            list[PromptTokenIds], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS), Tag("lists of ids")
        ],
        Discriminator(prompt_tag),
    ]
    max_tokens: int | None = Field(
        None,
        ge=NO_LIMIT,
        lt=INT64,
        description="Default: 16. 0 needs echo or prompt_logprobs: nothing is generated. -1: as many as max_model_len "
        "leaves for the completion.",
    )
    truncate_prompt_tokens: TokenLimit | None = Field(None, description=TRUNCATION)
    truncation_side: TruncationSide | None = TRUNCATION_SIDE
    echo: bool | None = Field(None, description="The text and the logprobs begin with the prompt's.")
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    suffix: Unsupported = None


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]  # None for the first token of an echoed prompt
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: StopReason
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    service_tier: None
    system_fingerprint: None
    metrics: Annotated[RequestTimes | None, OMITTED]
