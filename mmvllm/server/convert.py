"""Converts OpenAI requests to requests and sampling parameters of the engine."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from mmvllm.errors import RequestError
from mmvllm.pooling_params import PoolingParams
from mmvllm.processors.images.processor import LOW_TOKENS, ImageProcessorConfig
from mmvllm.sampling_params import CHOSEN_AT_END, SamplingParams, with_defaults
from mmvllm.server.embedding_response import VectorEncoding
from mmvllm.server.errors import ApiError
from mmvllm.server.messages import (
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
from mmvllm.server.protocol import (
    NO_LIMIT,
    ChatPrompt,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    SamplingRequest,
)
from mmvllm.server.structured import StructuredField, structured_field
from mmvllm.server.videos import KWARGS

AUTO_TOKENS = 1280  # maximum image tokens of an image with detail auto
COMPLETION_TOKENS = 16

PARAMS_OF_BOTH_APIS = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("logit_bias", "allowed_token_ids", "bad_words", "no_repeat_ngram_size"),
    *("n", "seed", "stop", "stop_token_ids", "min_tokens", "ignore_eos", "stop_on_repetition", "prompt_logprobs"),
    "logprob_token_ids",
    *("skip_special_tokens", "include_stop_str_in_output"),
    *("best_of", "beam_width", "length_penalty", "early_stopping"),
)
_ROLES = {"developer": "system", "function": "tool"}  # the names that templates know
OPTIONS_OF_TEMPLATE = ("add_generation_prompt", "continue_final_message", "chat_template")
# The engine's default is greedy. The other defaults are the same in both APIs.
OPENAI_DEFAULTS = MappingProxyType({"temperature": 1.0})


@dataclass(frozen=True, slots=True)
class DetailLimits:
    """Maximum pixels of an image after resizing, by its `detail`."""

    low: int
    auto: int
    high: int

    @classmethod
    def of(cls, config: ImageProcessorConfig, auto: int | None = None) -> "DetailLimits":
        """The limits of a checkpoint; `auto` is the server's own setting."""
        token = config.factor**2
        auto = auto or min(config.max_pixels, AUTO_TOKENS * token)
        return cls(min(LOW_TOKENS * token, auto), auto, max(config.max_pixels, auto))

    def max_pixels(self, detail: str | None, requested: int | None) -> int:
        """`requested`, the request's `max_pixels`, replaces the limits of auto and high, and may lower that of low."""
        if detail == "low":
            return min(self.low, requested or self.low)
        return requested or (self.high if detail == "high" else self.auto)


@dataclass(frozen=True, slots=True)
class ImageReference:
    """An image of a request; `param` is the path of its URL in the request, `sizes` are the fields of ImageSizes."""

    param: str
    url: str | None  # None for one that was kept under its uuid
    detail: str | None
    sizes: Mapping[str, int]
    uuid: str | None = None

    def bound(self, name: str) -> tuple[str, int | None]:
        """The path of one of its sizes, and its value."""
        return f"{self.path}.{name}", self.sizes.get(name)

    @property
    def path(self) -> str:
        """The path of its part in the request."""
        return self.param.removesuffix(".url").removesuffix(".image_url")


def images_of(body: ChatPrompt) -> list[ImageReference]:
    """All images of a request, in the order of the prompt."""
    return [
        ImageReference(
            f"{path}.image_url.url",
            part.url,
            None if part.image_url is None else part.image_url.detail,
            options_of(ImageSizes, path, part, part.image_url),
            part.uuid,
        )
        for path, part in parts_of(body.messages, ImagePart)
    ]


def max_pixels_of(body: ChatPrompt, images: Sequence[ImageReference], limits: DetailLimits) -> list[int]:
    """Maximum pixels of each image; raises ApiError for bounds that are too large or contradict each other."""
    bounds = [_bound_of(body, name, images) for name in ("min_pixels", "max_pixels")]
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
            raise ApiError(400, f"{param} is {value}, must be at most {most} here", param=param)


def _check_low(param: str, low: int | None, most: int) -> None:
    if low is not None and low > most:
        message = f"{param} is {low}, above the {most} that detail and max_pixels allow"
        raise ApiError(400, message, param=param)


def _bound_of(body: ChatPrompt, name: str, images: Sequence[ImageReference]) -> tuple[str, int | None]:
    """A bound of the request's images and its path: their own, else that of images and videos, if there are images."""
    own, shared = getattr(body, name), body.mm_processor_kwargs
    if own is None and images and shared is not None:
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
    """The engine's request, given the encoded bytes of each image of `images_of(body)` and its `max_pixels`.

    `template_kwargs` are arguments of the chat template for requests that do not give these themselves; `videos` are
    the parts of the request's videos (`VideoReference.part`); `tools` are the functions that the prompt describes.

    The largest `max_pixels` becomes that of the request, as in `LLM.generate_multimodal`; images with a smaller limit
    carry it in their part, beside sizes of their own.
    """
    largest = max(max_pixels, default=None)
    images = (
        {"type": "image", "image": one, **image.sizes} | ({"max_pixels": limit} if limit < largest else {})
        for image, one, limit in zip(images_of(body), data, max_pixels, strict=True)
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
    if kwargs := {**template_kwargs, **_reasoning_kwargs(body), **(body.chat_template_kwargs or {})}:
        request["chat_template_kwargs"] = kwargs
    return request | ({"min_pixels": body.min_pixels, "max_pixels": largest} if max_pixels else {})


def _reasoning_kwargs(body: ChatPrompt) -> dict[str, Any]:
    """Arguments of the chat template, as in vLLM."""
    if body.reasoning_effort in (None, "none"):
        return {} if body.reasoning_effort is None else {"enable_thinking": False}
    return {"reasoning_effort": body.reasoning_effort, "enable_thinking": True}


def texts_of(body: ChatPrompt) -> Iterator[str]:
    """All texts of a conversation."""
    for message in body.messages:
        yield from (one.arguments for one in _functions_called(message) if isinstance(one.arguments, str))
        content = _content_of(message)
        if isinstance(content, str):
            yield content
        else:
            yield from (part.text for part in content if isinstance(part, TextPart))


def echoed_text(body: ChatRequest) -> str:
    """What the content of an answer begins with, beyond what the model writes."""
    if not body.echo:
        return ""
    if not body.continue_final_message:
        raise ApiError(400, "echo is true, which needs continue_final_message: true", param="echo")
    content = _content_of(body.messages[-1])
    return content if isinstance(content, str) else "".join(part.text for part in content if isinstance(part, TextPart))


def _functions_called(message: InputMessage) -> Sequence[CalledFunction]:
    return message.functions_called if isinstance(message, HistoryMessage) else ()


def _content_of(message: InputMessage) -> str | Sequence[Part]:
    content = message.content
    if isinstance(message, HistoryMessage) and isinstance(content, list):
        content = [part for part in content if not isinstance(part, ThoughtPart)]
    return content or (message.refusal if isinstance(message, HistoryMessage) else None) or ""


def _message(message: InputMessage, media: Mapping[type, Iterator[dict]]) -> dict:
    made: dict[str, Any] = {"role": _ROLES.get(message.role, message.role)}
    if called := _functions_called(message):
        functions = ({"name": function.name, "arguments": function.arguments} for function in called)
        made["tool_calls"] = [{"function": function} for function in functions]
    content = _content_of(message)
    if not isinstance(content, str):
        content = [
            {"type": "text", "text": part.text} if isinstance(part, TextPart) else next(media[type(part)])
            for part in content
        ]
    return made | {"content": content}


def prompts_of(body: CompletionRequest | EmbeddingRequest) -> list[str | list[int]]:
    """The prompts of a request, whose field has one of four shapes."""
    prompts = body.prompt if isinstance(body, CompletionRequest) else body.input
    return [prompts] if isinstance(prompts, str) or isinstance(prompts[0], int) else prompts


def pooling_params(body: EmbeddingRequest, hidden_size: int) -> PoolingParams:
    """How the vectors of a request are made."""
    given = {name: getattr(body, name) for name in ("pooling", "normalize", "dimensions")}
    if body.normalize is None:
        given["normalize"] = body.use_activation
    try:
        params = PoolingParams(**{name: value for name, value in given.items() if value is not None})
        params.check_dimensions(hidden_size)
    except RequestError as error:
        raise ApiError(400, str(error), param=error.param) from None
    return params


def encoding_of(body: EmbeddingRequest) -> VectorEncoding | None:
    """How vectors are written in base64; None for lists of numbers."""
    in_base64 = body.encoding_format == "base64"
    for name in ("embed_dtype", "endianness"):
        if getattr(body, name) is not None and not in_base64:
            raise ApiError(400, f'{name} is of values in base64; give encoding_format "base64", too', param=name)
    return VectorEncoding(body.embed_dtype or "float32", body.endianness or "little") if in_base64 else None


def chat_params(body: ChatRequest, max_model_len: int, defaults: Mapping[str, Any] = OPENAI_DEFAULTS) -> SamplingParams:
    """The sampling parameters of a chat, with `defaults` for those that are left out or null.

    Without a limit of its own, a completion may fill the context.
    """
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    if body.logprob_token_ids and not body.logprobs:
        raise ApiError(400, "logprob_token_ids needs logprobs: true", param="logprob_token_ids")
    limits = {body.max_completion_tokens, body.max_tokens} - {None, NO_LIMIT}
    if len(limits) == 2:
        message = "max_completion_tokens and max_tokens are two names of the same limit; give one of them"
        raise ApiError(400, message, param="max_tokens")
    max_tokens = limits.pop() if limits else max_model_len
    return _params(body, defaults, max_tokens, (body.top_logprobs or 0) if body.logprobs else None)


def completion_params(
    body: CompletionRequest, max_model_len: int, defaults: Mapping[str, Any] = OPENAI_DEFAULTS
) -> SamplingParams:
    """The sampling parameters of a completion request, with `defaults` for those that are left out or null."""
    max_tokens = {None: COMPLETION_TOKENS, NO_LIMIT: max_model_len}.get(body.max_tokens, body.max_tokens)
    if max_tokens == 0 and not body.echo and body.prompt_logprobs is None:
        raise ApiError(400, "max_tokens is 0, which needs echo: true or prompt_logprobs", param="max_tokens")
    if body.logprob_token_ids and body.logprobs is None:
        raise ApiError(400, "logprob_token_ids needs logprobs, which may be 0", param="logprob_token_ids")
    own = {}
    if body.echo and (body.logprobs is not None or not max_tokens or body.stream):  # which the first delta then has
        own["prompt_logprobs"] = max(body.prompt_logprobs or 0, body.logprobs or 0)
    return _params(body, defaults, max_tokens, body.logprobs, own)


def _set_beam_width(given: dict[str, Any], use_beam_search: bool | None) -> None:
    if use_beam_search:  # vLLM's width: best_of, in earlier versions, or n
        given["beam_width"] = given.get("beam_width") or given.pop("best_of", None) or given.get("n", 1)
    elif use_beam_search is False and "beam_width" in given:
        message = f"beam_width is {given['beam_width']}, but use_beam_search is false; leave one of them out"
        raise ApiError(400, message, param="beam_width")


def _params(
    body: SamplingRequest,
    defaults: Mapping[str, Any],
    max_tokens: int,
    logprobs: int | None,
    own: Mapping[str, Any] = MappingProxyType({}),
) -> SamplingParams:
    given = {name: value for name in PARAMS_OF_BOTH_APIS if (value := getattr(body, name)) is not None}
    if body.logprob_token_ids:
        logprobs = 0  # in place of the most likely tokens, as in vLLM
    _set_beam_width(given, body.use_beam_search)
    if "beam_width" in given and own:  # beam search reads no prompts
        if logprobs is not None:
            message = "echo with logprobs cannot be used with beam search; leave one of them out"
            raise ApiError(400, message, param="echo")
        own = {}
    field = StructuredField({}, {})
    try:
        field = structured_field(body)
        own = {**own, "structured": field.params(), "max_tokens": max_tokens, "logprobs": logprobs}
        params = SamplingParams(**with_defaults(given | own, defaults))
    except RequestError as error:  # for rules that the schema of the request cannot express
        message, param = field.spelled(error) or (str(error), error.param)
        raise ApiError(400, message, param=param) from None
    if body.stream and params.chooses_at_end:
        raise ApiError(400, f"stream is true, {CHOSEN_AT_END}", param="stream")
    return params
