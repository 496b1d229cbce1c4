"""Pydantic models of the responses."""

from typing import Any, Literal

from pydantic import BaseModel, SerializerFunctionWrapHandler, field_serializer, model_serializer


class PromptTokensDetails(BaseModel):
    cached_tokens: int
    image_tokens: int
    video_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


FinishReason = Literal["stop", "length", "repetition"]  # the last one is vLLM's, for completions that ask for it


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]


class ResponseMessage(BaseModel):
    role: Literal["assistant"]
    content: str


class BoxEntry(BaseModel):
    """A box with corners x1, y1, x2 and y2, or a point x and y, in pixels of an image of the request."""

    label: str | None
    image: int
    box: list[float] | None = None
    point: list[float] | None = None
    quad: list[list[float]] | None = None


class ChoiceExtras(BaseModel):
    boxes: list[BoxEntry]

    @field_serializer("boxes")
    def _given(self, boxes: list[BoxEntry]) -> list[dict]:
        return [box.model_dump(exclude_unset=True) for box in boxes]


class ChatChoice(BaseModel):
    index: int
    message: ResponseMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    mmvllm: ChoiceExtras | None = None  # for requests that ask for it

    @model_serializer(mode="wrap")
    def _without_extras(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        made = serialize(self)
        if self.mmvllm is None:
            made.pop("mmvllm", None)
        return made


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "mmvllm"
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class EngineStatus(BaseModel):
    engine: str
    status: Literal["ok", "failing", "starting"]
    reason: str | None


class HealthResponse(BaseModel):
    status: Literal["ok", "failing", "starting", "draining", "stopped", "failed"]
    reason: str | None
    engines: list[EngineStatus] | None = None  # of a server that has several


class VersionResponse(BaseModel):
    version: str


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    error: ErrorDetail
