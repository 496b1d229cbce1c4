"""Pydantic models of the responses."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_serializer


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
    """The times of a request with one choice, by vLLM's names.

    Null where the request has no first token, or no second one.
    """

    queue_time_ms: float | None
    time_to_first_token_ms: float | None
    generation_time_ms: float | None  # from the first token until the last
    mean_itl_ms: float | None  # between two tokens
    tokens_per_second: float | None  # after the first


OMITTED = Field(None, exclude_if=lambda value: value is None)  # where there is none
FinishReason = Literal["stop", "length", "tool_calls", "function_call", "repetition"]  # the last as in vLLM, on request
StopReason = str | int | None  # the stop string or token that ended a choice, as in vLLM


class PromptLogprob(BaseModel):
    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs = list[dict[str, PromptLogprob] | None]  # of each token of the prompt, by token id


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


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]  # None of the first token of an echoed prompt
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


class OutputText(BaseModel):
    type: Literal["output_text"]
    text: str
    annotations: list[dict]
    logprobs: list[dict]


ItemStatus = Literal["completed", "incomplete", "in_progress"]


class OutputMessage(BaseModel):
    type: Literal["message"]
    id: str
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class OutputCall(BaseModel):
    type: Literal["function_call"]
    id: str
    call_id: str
    status: ItemStatus
    name: str
    arguments: str


class OutputCustomCall(BaseModel):
    type: Literal["custom_tool_call"]
    id: str
    call_id: str
    status: ItemStatus
    name: str
    input: str


class OutputTokensDetails(BaseModel):
    reasoning_tokens: int


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: PromptTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseObject(BaseModel):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    model: str
    error: None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    output: list[OutputMessage | OutputCall | OutputCustomCall]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, str | None]
    store: bool
    temperature: float
    text: dict
    tool_choice: str | dict
    tools: list[dict]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled", "auto"]
    usage: ResponseUsage


class DeletedResponse(BaseModel):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class InputItems(BaseModel):
    object: Literal["list"] = "list"
    data: list[dict]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(BaseModel):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class TokenizeResponse(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeResponse(BaseModel):
    prompt: str


class _VectorList(BaseModel):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    usage: Usage


class Embedding(BaseModel):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str  # base64


class EmbeddingList(_VectorList):
    data: list[Embedding]


class PooledVector(BaseModel):
    object: Literal["pooling"] = "pooling"
    index: int
    data: list[float] | str  # base64


class PooledList(_VectorList):
    data: list[PooledVector]


class TokenizerInfo(BaseModel):
    model_config = ConfigDict(extra="allow")

    tokenizer_class: str
    chat_template: str | dict[str, str] | None


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "mmvllm"
    root: str  # the same, which other servers tell from the id
    parent: str | None = None  # of an adapter, the model that it adapts
    max_model_len: int
    permission: list[dict] = []  # there are none


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


class LoadResponse(BaseModel):
    server_load: int


class VersionResponse(BaseModel):
    version: str


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    error: ErrorDetail
