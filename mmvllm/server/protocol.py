"""The requests: what clients may send. Only what has an effect is taken, beside what cannot change an answer."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, WithJsonSchema
from pydantic_core import PydanticCustomError

MAX_ANSWERS = 16  # of one prompt
MAX_PROMPTS = 64  # of one completion
MAX_LOGPROBS = 20
MAX_STOPS, MAX_STOP_LENGTH = 64, 1000  # characters: each token is compared with all of them
MAX_STOP_IDS = 1024
MAX_SALT = 1024  # characters; the cache keeps it
INT64 = 2**63


def _empty(value: Any) -> Any:
    if value is None or value is False or (isinstance(value, str | list | dict) and not value):
        return value
    raise PydanticCustomError("unsupported", "is not supported by this server; leave it out")


# fail_fast: a long list that is wrong all over would otherwise make an error of every item.
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
Stops = Annotated[list[Stop], Field(fail_fast=True, max_length=MAX_STOPS)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=INT64)]], Field(fail_fast=True, min_length=1)]
Ignored = Annotated[Any, BeforeValidator(lambda _: None), Field(description="Accepted and ignored.")]
Unsupported = Annotated[
    Any,
    AfterValidator(_empty),
    WithJsonSchema({"description": "Not supported: must be left out, null or empty.", "enum": [None, False, "", []]}),
]


class Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class TextPart(Model):
    type: Literal["text"]
    text: str


class ImageUrl(Model):
    url: str = Field(description="http(s), data: or file: URL, as far as the server allows them.")
    detail: Literal["auto", "low", "high"] | None = Field(
        None, description="low: at most 256 image tokens; auto: the server's bound; high: the checkpoint's own."
    )


class ImagePart(Model):
    type: Literal["image_url"]
    image_url: ImageUrl


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]


class Message(Model):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[Part], Field(fail_fast=True, min_length=1)]
    name: Ignored = None
    # What an answer carries that is sent back as history.
    refusal: Unsupported = None
    annotations: Unsupported = None
    audio: Unsupported = None
    tool_calls: Unsupported = None
    function_call: Unsupported = None


class StreamOptions(Model):
    include_usage: bool | None = None
    include_obfuscation: Ignored = None


class TextFormat(Model):
    type: Literal["text"]


class SamplingRequest(Model):
    """What both endpoints take."""

    model: str
    temperature: float | None = Field(None, ge=0, le=2, description="Default: 1.")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=INT64)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    n: int | None = Field(None, ge=1, le=MAX_ANSWERS)
    seed: int | None = Field(None, ge=-INT64, lt=INT64)
    stop: Stop | Stops | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=MAX_STOP_IDS)] | None = None
    min_tokens: int | None = Field(None, ge=0, lt=INT64)
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Ignored = None
    logit_bias: Unsupported = None


class ChatRequest(SamplingRequest):
    """POST /v1/chat/completions"""

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1)]
    max_completion_tokens: int | None = Field(None, ge=1, lt=INT64, description="Default: what max_model_len leaves.")
    max_tokens: int | None = Field(None, ge=1, lt=INT64, description="The same, by its older name.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    cache_salt: str | None = Field(
        None, max_length=MAX_SALT, description="Cached prompts are shared only among requests with the same."
    )
    min_pixels: int | None = Field(None, ge=1, lt=INT64)
    max_pixels: int | None = Field(None, ge=1, lt=INT64, description="Instead of the bound of detail auto or high.")
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None
    response_format: TextFormat | None = None
    tool_choice: Literal["none", "auto"] | None = None
    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    prediction: Ignored = None
    parallel_tool_calls: Ignored = None
    tools: Unsupported = None
    functions: Unsupported = None
    function_call: Unsupported = None
    audio: Unsupported = None
    web_search_options: Unsupported = None
    reasoning_effort: Unsupported = None
    verbosity: Unsupported = None


def _prompt_shape(prompt: Any) -> str:
    """Which of the shapes is meant, so that an error is about that one."""
    if not isinstance(prompt, list):
        return "a string"
    shapes = {int: "token ids", list: "lists of ids"}
    return shapes.get(type(prompt[0]), "strings") if prompt else "strings"


class CompletionRequest(SamplingRequest):
    """POST /v1/completions"""

    prompt: Annotated[
        Annotated[str, Tag("a string")]
        | Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS), Tag("strings")]
        | Annotated[TokenIds, Tag("token ids")]
        | Annotated[list[TokenIds], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS), Tag("lists of ids")],
        Discriminator(_prompt_shape),
    ]
    max_tokens: int | None = Field(None, ge=1, lt=INT64, description="Default: 16.")
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    best_of: Literal[1] | None = None
    echo: Unsupported = None
    suffix: Unsupported = None
