"""Pydantic models of /v1/chat/completions."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field, field_serializer

from mmvllm.server.common.messages import Ignored, StrictModel, Unsupported
from mmvllm.server.common.protocol import MAX_LOGPROBS, ChatPrompt, SamplingRequest, TokenLimit
from mmvllm.server.common.response_models import OMITTED, FinishReason, PromptLogprobs, RequestTimes, StopReason, Usage
from mmvllm.server.common.tools import FunctionChoice, Functions, ToolChoice


class Extras(StrictModel):
    """Extensions of mmvllm that a request asks for."""

    boxes: bool | Literal["stored"] | None = Field(
        None,
        description="Return boxes and points as mmvllm.boxes of each choice: true in pixels of the upright image, "
        '"stored" in pixels of the image before its EXIF rotation.',
    )


class ChatRequest(ChatPrompt, SamplingRequest):
    """POST /v1/chat/completions"""

    max_completion_tokens: TokenLimit | None = Field(
        None, description="Default, and -1: as many tokens as max_model_len leaves for the completion."
    )
    max_tokens: TokenLimit | None = Field(None, description="The older name of max_completion_tokens.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    mmvllm: Extras | None = Field(None, description="Adds a field of this name to each choice.")
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None
    tool_choice: ToolChoice | None = Field(None, description="Default: auto.")
    parallel_tool_calls: bool | None = Field(None, description="Allow several calls in a completion. Default: true.")
    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    prediction: Ignored = None
    echo: bool | None = Field(None, description="With continue_final_message: begin the content with that message.")
    functions: Functions | None = Field(None, description="The older form of tools, for one call at most.")
    function_call: FunctionChoice | None = Field(None, description="The older form of tool_choice, with functions.")
    audio: Unsupported = None
    web_search_options: Unsupported = None
    verbosity: Ignored = None
    documents: Unsupported = None
    include_reasoning: Ignored = None  # the models do not separate reasoning from the completion


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]


class CallOfFunction(BaseModel):
    name: str
    arguments: str


class ToolCall(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: CallOfFunction


class CallOfCustomTool(BaseModel):
    name: str
    input: str


class CustomToolCall(BaseModel):
    id: str
    type: Literal["custom"] = "custom"
    custom: CallOfCustomTool


class ResponseMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    tool_calls: Annotated[list[ToolCall | CustomToolCall] | None, OMITTED]
    function_call: Annotated[CallOfFunction | None, OMITTED]


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
    stop_reason: StopReason
    token_ids: list[int] | None = None
    mmvllm: Annotated[ChoiceExtras | None, OMITTED]


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    service_tier: None
    system_fingerprint: None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    metrics: Annotated[RequestTimes | None, OMITTED]
