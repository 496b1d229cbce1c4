"""Converts a conversation to an engine request: messages, images and their sizes, chat template arguments."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from mmvllm.processors.images.processor import LOW_TOKENS, ImageProcessorConfig
from mmvllm.server.common.messages import (
    CalledFunction,
    HistoryMessage,
    ImagePart,
    ImageSizes,
    InputMessage,
    Part,
    TextPart,
    ThoughtPart,
    VideoPart,
    options_of,
    parts_of,
)
from mmvllm.server.common.protocol import ChatPrompt, ProcessorKwargs, ReasoningEffort
from mmvllm.server.common.videos import KWARGS
from mmvllm.server.errors import ApiError

AUTO_TOKENS = 1280  # maximum image tokens of an image with detail auto
_ROLES = {"developer": "system", "function": "tool"}  # roles that templates know by another name
OPTIONS_OF_TEMPLATE = ("add_generation_prompt", "continue_final_message", "chat_template")


@dataclass(frozen=True, slots=True)
class DetailLimits:
    """Maximum pixels of an image after resizing, by its `detail`."""

    low: int
    auto: int
    high: int

    @classmethod
    def of(cls, config: ImageProcessorConfig, auto: int | None = None) -> "DetailLimits":
        """Return the limits of a checkpoint; `auto` is the server's setting."""
        token = config.factor**2
        auto = auto or min(config.max_pixels, AUTO_TOKENS * token)
        return cls(min(LOW_TOKENS * token, auto), auto, max(config.max_pixels, auto))

    def max_pixels(self, detail: str | None, requested: int | None) -> int:
        """Return the limit; `requested`, the request's `max_pixels`, replaces auto and high, and may lower low."""
        if detail == "low":
            return min(self.low, requested or self.low)
        return requested or (self.high if detail == "high" else self.auto)


@dataclass(frozen=True, slots=True)
class ImageReference:
    """An image of a request; `param` is the path of its URL in the request, `sizes` are its fields of ImageSizes."""

    param: str
    url: str | None  # None if the request has only the uuid
    detail: str | None
    sizes: Mapping[str, int]
    uuid: str | None = None

    def bound(self, name: str) -> tuple[str, int | None]:
        """Return the request path and the value of a size."""
        return f"{self.path}.{name}", self.sizes.get(name)

    @property
    def path(self) -> str:
        """The path of the image's part in the request."""
        return self.param.removesuffix(".url").removesuffix(".image_url")


def images_of(messages: Sequence[InputMessage]) -> list[ImageReference]:
    """Return all images of a conversation, in the order of the prompt."""
    return [
        ImageReference(
            f"{path}.image_url.url",
            part.url,
            None if part.image_url is None else part.image_url.detail,
            options_of(ImageSizes, path, part, part.image_url),
            part.uuid,
        )
        for path, part in parts_of(messages, ImagePart)
    ]


def max_pixels_of(
    images: Sequence[ImageReference],
    limits: DetailLimits,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    kwargs: ProcessorKwargs | None = None,
) -> list[int]:
    """Return the maximum pixels of each image, given the bounds of a request and its `mm_processor_kwargs`.

    Raises ApiError for bounds that are too large or contradict each other.
    """
    shared = kwargs if images else None
    bounds = [_bound_of("min_pixels", min_pixels, shared), _bound_of("max_pixels", max_pixels, shared)]
    _check_most(bounds, limits.high)
    (param, low), (_, high) = bounds
    found = [_max_pixels(image, high, limits) for image in images]
    for image, most in zip(images, found, strict=True):
        _check_low(*((param, low) if "min_pixels" not in image.sizes else image.bound("min_pixels")), most)
    return found


def _max_pixels(image: ImageReference, requested: int | None, limits: DetailLimits) -> int:
    _check_most(map(image.bound, ("min_pixels", "max_pixels")), limits.high)
    if "resized_height" in image.sizes:
        size = image.sizes["resized_height"] * image.sizes["resized_width"]
        _check_most([(image.bound("resized_height")[0], size)], limits.high)
        return limits.high  # the image has this size, whatever its detail
    return limits.max_pixels(image.detail, image.sizes.get("max_pixels", requested))


def _check_most(bounds: Iterable[tuple[str, int | None]], most: int) -> None:
    for param, value in bounds:
        if value is not None and value > most:  # otherwise small images could be enlarged without limit
            raise ApiError(400, f"{param} must be at most {most} here, got {value}", param=param)


def _check_low(param: str, low: int | None, most: int) -> None:
    if low is not None and low > most:
        message = f"{param} is {low}, above the {most} that detail and max_pixels allow"
        raise ApiError(400, message, param=param)


def _bound_of(name: str, own: int | None, shared: ProcessorKwargs | None) -> tuple[str, int | None]:
    """Return the request path and the value of a bound of images: `own`, else the bound of `mm_processor_kwargs`."""
    if own is None and shared is not None:
        return f"{KWARGS}.{name}", getattr(shared, name)
    return name, own


def chat_request(
    body: ChatPrompt,
    data: Sequence[bytes],
    max_pixels: Sequence[int],
    template_kwargs: Mapping[str, Any] = MappingProxyType({}),
    videos: Sequence[dict] = (),
    tools: Sequence[dict] = (),
) -> dict:
    """Return the engine's request, given the encoded bytes and `max_pixels` of each of `images_of(body.messages)`.

    `template_kwargs` are default arguments of the chat template; `videos` are the parts of the request's videos
    (`VideoReference.part`); `tools` are the functions that the prompt describes.

    The largest `max_pixels` becomes the request's, as in `LLM.generate_multimodal`; images with a smaller limit have
    it in their part.
    """
    largest = max(max_pixels, default=None)
    images = (
        {"type": "image", "image": one, **image.sizes} | ({"max_pixels": limit} if limit < largest else {})
        for image, one, limit in zip(images_of(body.messages), data, max_pixels, strict=True)
    )
    parts = {ImagePart: images, VideoPart: iter(videos)}
    request = {"messages": [_message(message, parts) for message in body.messages], "cache_salt": body.cache_salt}
    if tools:
        request["tools"] = tools
    if body.mm_processor_kwargs is not None:
        request["mm_processor_kwargs"] = body.mm_processor_kwargs.model_dump(exclude_none=True)
    if body.allow_special_tokens:
        request["allow_special_tokens"] = True
    request |= {name: value for name in OPTIONS_OF_TEMPLATE if (value := getattr(body, name)) is not None}
    if kwargs := {**template_kwargs, **_reasoning_kwargs(body.reasoning_effort), **(body.chat_template_kwargs or {})}:
        request["chat_template_kwargs"] = kwargs
    return request | ({"min_pixels": body.min_pixels, "max_pixels": largest} if max_pixels else {})


def _reasoning_kwargs(effort: ReasoningEffort | None) -> dict[str, Any]:
    """Return the chat template arguments for a reasoning effort, as in vLLM."""
    if effort in (None, "none"):
        return {} if effort is None else {"enable_thinking": False}
    return {"reasoning_effort": effort, "enable_thinking": True}


def texts_of(messages: Sequence[InputMessage]) -> Iterator[str]:
    """Yield all texts of a conversation."""
    for message in messages:
        yield from (one.arguments for one in _functions_called(message) if isinstance(one.arguments, str))
        content = content_of(message)
        if isinstance(content, str):
            yield content
        else:
            yield from (part.text for part in content if isinstance(part, TextPart))


def _functions_called(message: InputMessage) -> Sequence[CalledFunction]:
    return message.functions_called if isinstance(message, HistoryMessage) else ()


def content_of(message: InputMessage) -> str | Sequence[Part]:
    """Return the text of a message, or its parts, without the reasoning of a model."""
    content = message.content
    if isinstance(message, HistoryMessage) and isinstance(content, list):
        content = [part for part in content if not isinstance(part, ThoughtPart)]
    return content or (message.refusal if isinstance(message, HistoryMessage) else None) or ""


def _message(message: InputMessage, media: Mapping[type, Iterator[dict]]) -> dict:
    made: dict[str, Any] = {"role": _ROLES.get(message.role, message.role)}
    if called := _functions_called(message):
        functions = ({"name": function.name, "arguments": function.arguments} for function in called)
        made["tool_calls"] = [{"function": function} for function in functions]
    content = content_of(message)
    if not isinstance(content, str):
        content = [
            {"type": "text", "text": part.text} if isinstance(part, TextPart) else next(media[type(part)])
            for part in content
        ]
    return made | {"content": content}
