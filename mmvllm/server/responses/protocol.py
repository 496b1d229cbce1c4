"""Pydantic models of OpenAI's Responses API."""

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    TypeAdapter,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

from mmvllm.processors.chat.parts import refusal_as_text
from mmvllm.processors.chat.tools import MAX_TOOLS
from mmvllm.server.common.messages import (
    CONTENT,
    OPTIONS,
    CalledFunction,
    Ignored,
    ImageSizes,
    OpenModel,
    OpenPart,
    StrictModel,
    Unsupported,
    tag_by,
)
from mmvllm.server.common.protocol import (
    MAX_LOGPROBS,
    ReasoningEffort,
    SamplingRequest,
    TemplateKwargs,
    TokenLimit,
    check_number_of_parts,
)
from mmvllm.server.common.response_models import PromptTokensDetails
from mmvllm.server.common.structured import NamedSchema
from mmvllm.server.common.tools import (
    BY_TOOL_TYPE,
    CustomDefinition,
    FunctionDefinition,
    FunctionReference,
    by_form,
    check_size,
)


class InputText(OpenPart):
    type: Literal["input_text", "output_text", "text"]
    text: str


class InputImage(ImageSizes):
    type: Literal["input_image"]
    image_url: str = Field(description="A data: URI, or an http(s): or file: URL that the media policy allows.")
    detail: Literal["auto", "low", "high"] | None = None
    file_id: Unsupported = None


PART_TAGS = {"input_text": "text part", "output_text": "text part", "text": "text part", "input_image": "image part"}
InputPart = Annotated[
    Annotated[InputText, Tag("text part")] | Annotated[InputImage, Tag("image part")],
    Discriminator(
        tag_by("type", PART_TAGS),
        custom_error_type="input_part",
        custom_error_message="must be a part of the type 'input_text', 'output_text' or 'input_image'",
    ),
    BeforeValidator(refusal_as_text),
]
InputParts = Annotated[list[InputPart], Field(fail_fast=True)]


class InputItem(OpenModel):
    """A message in the input."""

    misplaced = (*CONTENT, *OPTIONS, "output")

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: str | InputParts | None = Field(
        None, validate_default=True, description="Only an earlier answer may have no content."
    )

    refusal: str | None = Field(None, description="For an earlier answer: used as the content if that is empty.")

    @field_validator("content")
    @classmethod
    def _require_content(cls, content: Any, info: ValidationInfo) -> Any:
        if content in (None, []) and info.data.get("role") != "assistant":
            raise PydanticCustomError("content", "content must be a string, or a list of at least 1 part")
        return content


class FunctionCallItem(CalledFunction):
    """A call of a function in an earlier response."""

    type: Literal["function_call"]
    call_id: str


class CustomCallItem(OpenModel):
    """A call of a custom tool in an earlier response."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str


class CallOutputItem(OpenModel):
    """The result of a call."""

    misplaced = (*CONTENT, "content", "result")

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: str | InputParts | None = None


class ReasoningItem(OpenModel):
    """The reasoning of another server's model, which is left out of the prompt."""

    type: Literal["reasoning"]


class ItemReference(OpenModel):
    """A reference to an output item of a stored response."""

    type: Literal["item_reference"]
    id: str


ITEM_TAGS = {
    **dict.fromkeys((None, "message"), "a message"),
    "function_call": "a call",
    "custom_tool_call": "a custom call",
    **dict.fromkeys(("function_call_output", "custom_tool_call_output"), "a result"),
    "reasoning": "reasoning",
    "item_reference": "a reference",
}
Item = Annotated[
    Annotated[InputItem, Tag("a message")]
    | Annotated[FunctionCallItem, Tag("a call")]
    | Annotated[CustomCallItem, Tag("a custom call")]
    | Annotated[CallOutputItem, Tag("a result")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[ItemReference, Tag("a reference")],
    Discriminator(
        tag_by("type", ITEM_TAGS, "unknown"),
        custom_error_type="input_item",
        custom_error_message="must be an item of the type 'message', 'function_call', 'function_call_output', "
        "'custom_tool_call', 'custom_tool_call_output', 'item_reference' or 'reasoning'",
    ),
]


ITEMS = TypeAdapter(list[Item])


def _input_tag(given: Any) -> str:
    return "items" if isinstance(given, list) else "a string"


class FunctionTool(FunctionDefinition):
    """A function in the form of the Responses API, whose fields are not nested."""

    type: Literal["function"]


class CustomTool(CustomDefinition):
    """A custom tool in the form of the Responses API."""

    type: Literal["custom"]


class ToolName(FunctionReference):
    """A choice of one tool in the form of the Responses API."""

    type: Literal["function", "custom"]


class AllowedToolNames(StrictModel):
    """A choice among several tools in the form of the Responses API, without a nested object."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ToolName], Field(fail_fast=True, min_length=1, max_length=MAX_TOOLS)]


Tool = Annotated[Annotated[FunctionTool, Tag("a function")] | Annotated[CustomTool, Tag("a custom tool")], BY_TOOL_TYPE]


class PlainTextFormat(StrictModel):
    type: Literal["text"]


class JsonObjectFormat(StrictModel):
    type: Literal["json_object"]


class JsonSchemaFormat(NamedSchema):
    """A schema in the form of the Responses API, whose fields are not nested."""

    type: Literal["json_schema"]


FORMAT_TAGS = {"text": "plain text", "json_object": "json object", "json_schema": "json schema"}


class TextOptions(StrictModel):
    format: (
        Annotated[
            Annotated[PlainTextFormat, Tag("plain text")]
            | Annotated[JsonObjectFormat, Tag("json object")]
            | Annotated[JsonSchemaFormat, Tag("json schema")],
            Discriminator(
                tag_by("type", FORMAT_TAGS),
                custom_error_type="text_format",
                custom_error_message="must be a format of the type 'text', 'json_object' or 'json_schema'",
            ),
        ]
        | None
    ) = None
    verbosity: Ignored = None


LOGPROBS = "message.output_text.logprobs"
MAX_INCLUDED = 64


class Reasoning(StrictModel):
    effort: ReasoningEffort | None = Field(None, description="Equivalent to reasoning_effort of chats.")
    summary: Ignored = None
    generate_summary: Ignored = None
    context: Ignored = None


# OpenAI's limits. Metadata is kept with a stored response, and repeated in each event with the response.
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]


class EventOptions(StrictModel):
    include_obfuscation: Ignored = None


class ResponsesRequest(SamplingRequest):
    """POST /v1/responses"""

    input: Annotated[
        Annotated[str, Tag("a string")]
        | Annotated[
            list[Item], Field(fail_fast=True, min_length=1), BeforeValidator(check_number_of_parts), Tag("items")
        ],
        Discriminator(_input_tag),
    ]
    instructions: str | None = Field(None, description="A system message before the input.")
    max_output_tokens: TokenLimit | None = Field(
        None, description="Default, and -1: as many tokens as max_model_len leaves for the completion."
    )
    text: TextOptions | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS), BeforeValidator(check_size)] | None = None
    tool_choice: (
        Annotated[
            Annotated[Literal["none", "auto", "required"], Tag("a word")]
            | Annotated[ToolName, Tag("a function")]
            | Annotated[AllowedToolNames, Tag("allowed tools")],
            by_form({"allowed_tools": "allowed tools"}),
        ]
        | None
    ) = Field(None, description="Default: auto.")
    parallel_tool_calls: bool | None = Field(None, description="Allow several calls in a completion. Default: true.")
    metadata: Metadata | None = None
    store: bool | None = Field(
        None, description="Whether the response is stored in memory for previous_response_id. Default: true."
    )
    previous_response_id: str | None = Field(None, description="The stored response whose conversation continues.")
    conversation: Unsupported = None
    background: Unsupported = None
    include: Annotated[list[str], Field(fail_fast=True, max_length=MAX_INCLUDED)] | None = Field(
        None, description=f"{LOGPROBS} is supported; other values, for built-in tools, are ignored."
    )
    prompt: Unsupported = None
    reasoning: Reasoning | None = None
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description=f"Most likely tokens beside each token; 0 needs {LOGPROBS} in include."
    )
    truncation: Literal["disabled", "auto"] | None = Field(
        None, description="The input is never truncated: one that is too long is refused."
    )
    max_tool_calls: Ignored = None  # for built-in tools, which this server lacks
    safety_identifier: Ignored = None
    service_tier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    chat_template_kwargs: TemplateKwargs | None = Field(None, description="Arguments of the chat template.")
    n: Literal[1] | None = None
    stream_options: EventOptions | None = None
    return_token_ids: Unsupported = None
    prompt_logprobs: Unsupported = None
    echo: Unsupported = None
    return_tokens_as_token_ids: Unsupported = None
    response_format: Unsupported = None  # text.format in this API

    @property
    def items(self) -> list[Item]:
        """The input as a list of items."""
        return [InputItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input

    @property
    def num_logprobs(self) -> int | None:
        """How many likely tokens are shown beside each token; None shows no log-probabilities."""
        is_shown = self.top_logprobs or LOGPROBS in (self.include or ())
        return self.top_logprobs or 0 if is_shown else None


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
