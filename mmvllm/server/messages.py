"""Pydantic models of the messages of a chat and their parts."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from mmvllm.processors.clip import MAX_FPS, MIN_FPS
from mmvllm.processors.tools import MAX_TOOLS
from mmvllm.text import parse_json

INT64 = 2**63

P = TypeVar("P")


def _require_empty(value: Any) -> Any:
    if value is None or value is False or (isinstance(value, str | list | dict) and not value):
        return value
    raise PydanticCustomError("unsupported", "is not supported by this server; leave it out")


Ignored = Annotated[Any, BeforeValidator(lambda _: None), Field(description="Accepted and ignored.")]
Unsupported = Annotated[
    Any,
    AfterValidator(_require_empty),
    WithJsonSchema(
        {"description": "Not supported: must be omitted, null or empty.", "enum": [None, False, "", [], {}]}
    ),
]


class StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_unknown_nulls(cls, value: Any) -> Any:
        """A null means "not given", also for fields that this server does not know."""
        if not isinstance(value, dict):
            return value
        return {key: item for key, item in value.items() if item is not None or key in cls.model_fields}


class TextPart(StrictModel):
    type: Literal["text"]
    text: str
    cache_control: Ignored = None  # Anthropic's prompt caching hint, which LiteLLM passes on


class ImageUrl(StrictModel):
    url: str = Field(description="A data: URI, or an http(s): or file: URL that the server's media policy allows.")
    detail: Literal["auto", "low", "high"] | None = Field(
        None,
        description="low: at most 256 image tokens; auto: the server's limit (default); high: the checkpoint's limit.",
    )


class ImagePart(StrictModel):
    type: Literal["image_url"]
    image_url: ImageUrl
    cache_control: Ignored = None
    uuid: Ignored = None  # vLLM's cache key of the image


class VideoUrl(StrictModel):
    url: str = Field(
        description="A data: URI of a video, or of JPEG frames (data:video/jpeg;base64,FRAME,FRAME); or an http(s): or "
        "file: URL that the server's media policy allows."
    )


Rate = Annotated[float, Field(ge=MIN_FPS, le=MAX_FPS)]
Size = Annotated[int, Field(ge=1, lt=INT64)]


class VideoPart(StrictModel):
    """A video. The options mean what they mean in qwen-vl-utils; the checkpoint bounds them."""

    type: Literal["video_url"]
    video_url: VideoUrl
    fps: Rate | None = Field(None, description="Frames to take per second; of JPEG frames, those that there are.")
    nframes: Size | None = Field(None, description="Frames to take, in place of fps.")
    min_frames: Size | None = None
    max_frames: Size | None = None
    min_pixels: Size | None = Field(None, description="Pixels of a frame.")
    max_pixels: Size | None = Field(None, description="Pixels of a frame.")
    total_pixels: Size | None = Field(None, description="Pixels of all frames.")
    video_start: float | None = Field(None, description="Seconds.")
    video_end: float | None = Field(None, description="Seconds.")
    cache_control: Ignored = None
    uuid: Ignored = None


# Tags of unions appear in pydantic's error locations. With a space in them, they are not mistaken for fields.
def tag_by(key: str, tags: Mapping[str | None, str], other: str | None = None) -> Callable[[Any], str | None]:
    """What a discriminator calls: the tag of the value of `key`, or else `other`, or else the value, for the error."""

    def tag(given: Any) -> str | None:
        value = given.get(key) if isinstance(given, dict) else getattr(given, key, None)
        return tags.get(value, other or value) if isinstance(value, str | None) else other

    return tag


Part = Annotated[
    Annotated[TextPart, Tag("text part")]
    | Annotated[ImagePart, Tag("image part")]
    | Annotated[VideoPart, Tag("video part")],
    Discriminator(tag_by("type", {"text": "text part", "image_url": "image part", "video_url": "video part"})),
]
Parts = Annotated[list[Part], Field(fail_fast=True, min_length=1)]


class InputMessage(StrictModel):
    role: Annotated[
        Literal["system", "developer", "user", "assistant", "tool"],  # all of them, for the error message
        WithJsonSchema({"type": "string", "enum": ["system", "developer", "user"]}),
    ]
    content: str | Parts
    name: Ignored = None
    type: Ignored = None  # lm-eval sends "text"
    cache_control: Ignored = None
    refusal: Unsupported = None
    annotations: Unsupported = None
    audio: Unsupported = None
    tool_calls: Unsupported = None
    function_call: Unsupported = None


class ToolMessage(InputMessage):
    """The result of a call."""

    role: Literal["tool"]
    tool_call_id: str | None = None


def _check_arguments(text: str) -> str:
    try:
        value = parse_json(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise PydanticCustomError("arguments", "must be a JSON object, as text")
    return text


class CalledFunction(StrictModel):
    model_config = ConfigDict(extra="ignore")

    name: str
    arguments: Annotated[str, AfterValidator(_check_arguments)]


class CallOfHistory(StrictModel):
    model_config = ConfigDict(extra="ignore")

    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class HistoryMessage(InputMessage):
    """An assistant message in the history, to which clients and other servers add fields of their own."""

    model_config = ConfigDict(extra="ignore")

    role: Literal["assistant"]
    content: str | Parts | None = None
    annotations: Ignored = None
    tool_calls: Annotated[list[CallOfHistory], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None


def parts_of(messages: Sequence[InputMessage], kind: type[P]) -> Iterator[tuple[str, P]]:
    """The parts of a kind with their paths in the request, in the order of the prompt."""
    for i, message in enumerate(messages):
        for j, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if isinstance(part, kind):
                yield f"messages[{i}].content[{j}]", part


Message = Annotated[
    Annotated[InputMessage, Tag("input message")]
    | Annotated[HistoryMessage, Tag("history message")]
    | Annotated[ToolMessage, Tag("tool message")],
    Discriminator(tag_by("role", {"assistant": "history message", "tool": "tool message"}, "input message")),
]
