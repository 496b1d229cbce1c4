"""Pydantic models of the messages of a chat and their parts."""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from mmvllm.processors.chat.parts import PROCESSOR_KEYS, THOUGHTS, as_part_of_chats
from mmvllm.processors.chat.tools import MAX_TOOLS
from mmvllm.processors.videos import qwen_vl_utils
from mmvllm.processors.videos.clip import MAX_FPS, MIN_FPS
from mmvllm.server.errors import ApiError

INT64 = 2**63
CONTENT = (
    *("text", "image", "image_url", "video", "video_url", "audio", "input_audio", "file", "file_data"),
    *("input_text", "input_image", "input_file"),
)
MOST_COMPARED = 32  # keys of an object whose spelling is checked, which takes 0.02 ms
OPTIONS = (*qwen_vl_utils.KEYS, *PROCESSOR_KEYS, "detail")

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
    def _as_clients_write(cls, value: Any) -> Any:
        """Drop unknown fields that are null, and convert whole floats, which are integers in JSON, to int."""
        if not isinstance(value, dict):
            return value
        if None in value.values():
            value = {key: item for key, item in value.items() if item is not None or key in _fields_of(cls)}
        whole = {key: int(value[key]) for key in _integers_of(cls) & value.keys() if _is_whole_float(value[key])}
        return {**value, **whole} if whole else value


class OpenModel(StrictModel):
    """An object to which clients add keys; unknown keys are ignored unless they hold content or options."""

    model_config = ConfigDict(extra="ignore")
    misplaced: ClassVar[Collection[str]] = ()  # names of content and options that belong elsewhere

    @model_validator(mode="before")
    @classmethod
    def _lose_nothing(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        fields, names = _fields_of(cls), _names_by_plain(cls)
        if not (others := [key for key in value if key not in fields]):
            return value
        misplaced = frozenset(cls.misplaced)
        for i, key in enumerate(others):
            is_known = key in misplaced or (i < MOST_COMPARED and _plain(key) in names)
            if is_known and value[key] not in (None, "", [], {}):
                meant = names[_plain(key)]
                hint = f"; did you mean {meant}?" if meant != key and meant in fields else ""
                reason = PydanticCustomError("misplaced", "does not belong here{hint}", {"hint": hint})
                lines = [InitErrorDetails(type=reason, loc=(key,), input=None)]
                raise ValidationError.from_exception_data(cls.__name__, lines)
        return value


@cache
def _fields_of(model: type[BaseModel]) -> frozenset[str]:
    """Return the names of a model's fields, which pydantic looks up slowly."""
    return frozenset(model.model_fields)


@cache
def _names_by_plain(model: type[OpenModel]) -> dict[str, str]:
    """Map plain spellings to the names that must not be ignored; empty if the model has no misplaced names."""
    return {_plain(name): name for name in (*model.misplaced, *model.model_fields)} if model.misplaced else {}


def _plain(name: str) -> str:
    """Return a name without case, separators and plural, so that `maxPixel` equals `max_pixels`."""
    return name.lower().replace("_", "").replace("-", "").removesuffix("s")


@cache
def _integers_of(model: type[BaseModel]) -> frozenset[str]:
    """Return the keys of a model's fields that accept integers but not floats."""
    kinds = {field.alias or name: set(_kinds_of(field.annotation)) for name, field in model.model_fields.items()}
    return frozenset(key for key, found in kinds.items() if int in found and float not in found)


def _kinds_of(annotation: Any) -> Iterator[Any]:
    """Yield the types of a union, but not the types of the items of its lists."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType, Annotated):
        for one in args[:1] if origin is Annotated else args:
            yield from _kinds_of(one)
    else:
        yield from map(type, args) if origin is Literal else [annotation]


def _is_whole_float(value: Any) -> bool:
    return isinstance(value, float) and value.is_integer()


def _as_flag(value: Any) -> Any:
    return {"true": True, "false": False}.get(value.lower(), value) if isinstance(value, str) else value


Flag = Annotated[bool | None, BeforeValidator(_as_flag)]


class OpenPart(OpenModel):
    misplaced = (*CONTENT, *OPTIONS)


class TextPart(OpenPart):
    type: Literal["text"]
    text: str


Rate = Annotated[float, Field(ge=MIN_FPS, le=MAX_FPS)]
Size = Annotated[int, Field(ge=1, lt=INT64)]


class ImageSizes(OpenPart):
    """Size options of an image, with their meaning in qwen-vl-utils."""

    min_pixels: Size | None = Field(None, description="A smaller image is enlarged to this many pixels.")
    max_pixels: Size | None = Field(None, description="Replaces the limit of detail auto and high.")
    resized_height: Size | None = Field(None, description="With resized_width: the size of the image.")
    resized_width: Size | None = None

    @model_validator(mode="after")
    def _check_resized(self) -> Self:
        if (self.resized_height is None) != (self.resized_width is None):
            raise PydanticCustomError("sizes", "resized_height and resized_width must be given together")
        return self


class ImageUrl(ImageSizes):
    url: str | None = Field(
        None, description="A data: URI, or an http(s): or file: URL that the server's media policy allows."
    )
    detail: Literal["auto", "low", "high"] | None = Field(
        None,
        description="low: at most 256 image tokens; auto: the server's limit (default); high: the checkpoint's limit.",
    )


class MediaPart(OpenPart):
    """An image or a video, which may be omitted if the server has kept it under the `uuid`."""

    uuid: Annotated[str, Field(min_length=1, max_length=256)] | None = Field(
        None, description="A name that the client chooses; later requests may send the name alone."
    )

    @property
    def source(self) -> "ImageUrl | VideoUrl | None":
        """The field that has the name of the type."""
        return getattr(self, self.type)

    @property
    def url(self) -> str | list[str] | None:
        """The URL, or None if the part has only a `uuid`."""
        return None if self.source is None else self.source.url

    @model_validator(mode="after")
    def _has_source(self) -> Self:
        if self.uuid is None and self.url is None:
            path = (self.type,) if self.source is None else (self.type, "url")
            lines = [InitErrorDetails(type="missing", loc=path, input=None)]
            raise ValidationError.from_exception_data(type(self).__name__, lines)
        return self


class ImagePart(ImageSizes, MediaPart):
    """An image, with size options beside `image_url` or in it."""

    type: Literal["image_url"]
    image_url: ImageUrl | None = None


class VideoOptions(OpenPart):
    """Options for frames and sizes of a video, with their meaning in qwen-vl-utils; the checkpoint bounds them."""

    fps: Rate | None = Field(None, description="Frames to take per second; for JPEG frames, their rate.")
    nframes: Size | None = Field(None, description="Frames to take, in place of fps.")
    num_frames: Size | None = Field(None, description="Another name of nframes.")
    min_frames: Size | None = None
    max_frames: Size | None = None
    min_pixels: Size | None = Field(None, description="Minimum pixels of a frame.")
    max_pixels: Size | None = Field(None, description="Maximum pixels of a frame.")
    total_pixels: Size | None = Field(None, description="Maximum pixels of all frames together.")
    video_start: float | None = Field(None, description="Start of the clip in seconds.")
    video_end: float | None = Field(None, description="End of the clip in seconds.")


class VideoUrl(VideoOptions):
    url: str | Annotated[list[str], Field(fail_fast=True, min_length=1)] | None = Field(
        None,
        description="A data: URI of a video, or of JPEG frames (data:video/jpeg;base64,FRAME,FRAME); an http(s): or "
        "file: URL that the server's media policy allows; or a list of such URLs of the frames.",
    )


class VideoPart(VideoOptions, MediaPart):
    """A video, with options beside `video_url` or in it."""

    type: Literal["video_url"]
    video_url: VideoUrl | None = None


def options_of(kind: type[StrictModel], path: str, *given: StrictModel | None) -> dict[str, Any]:
    """Return the fields of `kind` that any of the objects sets; raises ApiError for a field with two values."""
    found: dict[str, Any] = {}
    for one in given:
        for name in kind.model_fields:
            if (value := getattr(one, name, None)) is not None and found.setdefault(name, value) != value:
                raise ApiError(400, f"{name} is given twice; leave one of them out", param=f"{path}.{name}")
    return found


# Tags of unions appear in pydantic's error locations. With a space in them, they are not mistaken for fields.
def tag_by(key: str, tags: Mapping[str | None, str], other: str | None = None) -> Callable[[Any], str | None]:
    """Return a discriminator that maps the value of `key` to its tag, else to `other` or, for errors, to itself."""

    def tag(given: Any) -> str | None:
        value = given.get(key) if isinstance(given, dict) else getattr(given, key, None)
        return tags.get(value, other or value) if isinstance(value, str | None) else other

    return tag


_MEDIA = {"image": "image", "image_url": "image", "video": "video", "video_url": "video"}  # media by types of parts


def in_openai_form(part: Any) -> Any:
    """Convert a part of another API, without a type, or with a URL outside an object, to OpenAI's form."""
    part = as_part_of_chats(part)
    if not isinstance(part, dict):
        return part
    given = part.get("type")
    if given is None and (named := [name for name in (*_MEDIA, "text") if part.get(name) is not None]):
        given = named[0]
        part = part | {"type": given}
    kind = _MEDIA.get(given) if isinstance(given, str) else None
    if kind is None:
        return part
    key = f"{kind}_url"
    sources = [part[name] for name in (kind, key) if part.get(name) is not None]
    if len(sources) != 1:
        return part | {"type": key}  # validation refuses it
    made = {name: value for name, value in part.items() if name not in (kind, key)} | {"type": key}
    return made | {key: {"url": sources[0]} if isinstance(sources[0], str | list) else sources[0]}


Part = Annotated[
    Annotated[TextPart, Tag("text part")]
    | Annotated[ImagePart, Tag("image part")]
    | Annotated[VideoPart, Tag("video part")],
    Discriminator(tag_by("type", {"text": "text part", "image_url": "image part", "video_url": "video part"})),
    BeforeValidator(in_openai_form),
]
Parts = Annotated[list[Part], Field(fail_fast=True, min_length=1)]
PartsOfHistory = Annotated[list[Part], Field(fail_fast=True)]  # some clients and models leave it empty


class ThoughtPart(OpenModel):
    """The reasoning before an earlier answer, which is left out of prompts."""

    type: Literal[THOUGHTS]


PartOfAnswer = Annotated[
    Annotated[ThoughtPart, Tag("a thought")] | Annotated[Part, Tag("another part")],
    Discriminator(tag_by("type", dict.fromkeys(THOUGHTS, "a thought"), "another part")),
]


class InputMessage(OpenModel):
    role: Annotated[
        str,
        Field(
            pattern=r"^[\w-]{1,64}$",
            description="system or its synonym developer, user, or another role that the chat template supports.",
        ),
    ]
    misplaced = (*CONTENT, *OPTIONS, "output", "result", "documents")

    content: str | Parts
    refusal: Unsupported = None
    annotations: Unsupported = None
    audio: Unsupported = None
    tool_calls: Unsupported = None
    function_call: Unsupported = None


class ToolMessage(InputMessage):
    """The result of a call; "function" is the older name of the role."""

    role: Literal["tool", "function"]
    content: str | PartsOfHistory | None = None
    tool_call_id: str | None = None


class CalledFunction(OpenModel):
    name: str
    arguments: Any = Field(
        None, description="A JSON object, or its text. Anything else that a model has written is read as {}."
    )


class CallOfHistory(OpenModel):
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class CalledCustomTool(OpenModel):
    name: str
    input: str = ""


class CustomCallOfHistory(OpenModel):
    id: str | None = None
    type: Literal["custom"]
    custom: CalledCustomTool

    @property
    def function(self) -> CalledFunction:
        """The call as the model wrote it, to a function with the parameter `input`."""
        return CalledFunction(name=self.custom.name, arguments=json.dumps({"input": self.custom.input}))


HistoryCall = Annotated[
    Annotated[CallOfHistory, Tag("a call")] | Annotated[CustomCallOfHistory, Tag("a custom call")],
    Discriminator(tag_by("type", {"custom": "a custom call"}, "a call")),
]


class HistoryMessage(InputMessage):
    """An assistant message of the history; fields that other servers added are ignored."""

    misplaced = ()

    role: Literal["assistant"]
    content: str | Annotated[list[PartOfAnswer], Field(fail_fast=True)] | None = None
    refusal: str | None = Field(None, description="Used as the content if that is empty.")
    annotations: Ignored = None
    tool_calls: Annotated[list[HistoryCall], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    function_call: CalledFunction | None = Field(None, description="The older form of a single call.")

    @property
    def functions_called(self) -> Sequence[CalledFunction]:
        if self.tool_calls:
            return [call.function for call in self.tool_calls]
        return [] if self.function_call is None else [self.function_call]


def parts_of(messages: Sequence[InputMessage], kind: type[P]) -> Iterator[tuple[str, P]]:
    """Yield the parts of a kind with their paths in the request, in the order of the prompt."""
    for i, message in enumerate(messages):
        for j, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if isinstance(part, kind):
                yield f"messages[{i}].content[{j}]", part


Message = Annotated[
    Annotated[InputMessage, Tag("input message")]
    | Annotated[HistoryMessage, Tag("history message")]
    | Annotated[ToolMessage, Tag("tool message")],
    Discriminator(
        tag_by(
            "role",
            {"assistant": "history message", **dict.fromkeys(("tool", "function"), "tool message")},
            "input message",
        )
    ),
]
