"""Parse requests in all forms: chat messages, text with images and videos, and prompts in vLLM's format."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from mmvllm.errors import ParameterError, RequestError
from mmvllm.processors.chat.length_limit import Truncation
from mmvllm.processors.chat.parts import (
    PROCESSOR_KEYS,
    SOURCE_KEYS,
    as_part_of_chats,
    check_keys,
    check_numbers,
    given_videos,
    image_part,
    is_video_part,
    plain_processor_kwargs,
    video_part,
    without_nulls,
    without_thoughts,
)
from mmvllm.processors.chat.separate_media import with_media
from mmvllm.processors.chat.template import WITH_PROMPT
from mmvllm.processors.chat.template_kwargs import check_template_kwargs
from mmvllm.processors.chat.tools import check_calls, check_tools
from mmvllm.utils.text import counted, listed, shown

FORMS = ("messages", "text", "prompt", "prompt_token_ids")
PROMPT_KEYS = ("prompt", "prompt_token_ids", "multi_modal_data", "mm_processor_kwargs", "multi_modal_uuids")
TEMPLATE_KEYS = ("tools", "chat_template_kwargs", "chat_template", "add_generation_prompt", "continue_final_message")
REQUEST_KEYS = frozenset(
    (
        *("messages", "text", "images", "videos", "min_pixels", "max_pixels", *PROMPT_KEYS),
        *("allow_special_tokens", "truncate_prompt_tokens", "truncation_side", *TEMPLATE_KEYS),
        *("request_id", "priority", "cache_salt", "lora_request", "trace_headers", "sampling_params"),
    )
)
TEXT_KEYS = frozenset(("type", "text"))


class ParsedRequest(NamedTuple):
    """A parsed request; exactly one of `messages` (for the chat template), `text` and `token_ids` is set.

    Each of `images` is a dict with a source under "image" and optional sizes; each of `videos` is a dict with a source
    under "video" and optional keys of `qwen_vl_utils`. `video_kwargs` are the request's arguments for each video, and
    `image_bounds` its `min_pixels` and `max_pixels` for images. With `jpeg_draft`, JPEGs may be decoded at a reduced
    scale. Special tokens in messages are text, unless `allow_special_tokens`. `template_kwargs` are arguments of the
    chat template, `template_options` of `apply_chat_template`; `chat_template` replaces the checkpoint's. `tools` are
    the functions that the model may call. `truncation` applies to `text` or `token_ids`.
    """

    messages: list[dict] | None
    images: list[dict]
    videos: list[dict]
    video_kwargs: Sequence[Mapping[str, Any]]
    image_bounds: tuple[int | None, int | None]
    text: str | None = None
    token_ids: Any = None
    allow_special_tokens: bool = False
    template_kwargs: Mapping[str, Any] = MappingProxyType({})
    template_options: Mapping[str, Any] = WITH_PROMPT
    chat_template: str | None = None
    tools: Sequence[dict] = ()
    jpeg_draft: bool = False
    truncation: Truncation | None = None


def parse_request(request: Any) -> ParsedRequest:
    """Parse a request; raises RequestError that says what is wrong."""
    if not isinstance(request, dict):
        raise RequestError(f"a request must be a dict with 'messages' or 'text', got {type(request).__name__}")
    check_keys("request", request, REQUEST_KEYS)
    check_numbers(request)
    form, content = _form(request)
    truncation = _truncation(request, form)
    allow_special_tokens, options = _allows_special_tokens(request, form), _template_options(request)
    template_kwargs, chat_template = check_template_kwargs(request.get("chat_template_kwargs")), _chat_template(request)
    tools = check_tools(request.get("tools"))
    if form != "messages":
        _check_no_template(request, form)
    images, videos = _given_media(request)
    kwargs = _processor_kwargs(request)
    draft = kwargs.pop("jpeg_draft", False)
    bounds = tuple(request.get(name) or kwargs.get(name) for name in ("min_pixels", "max_pixels"))
    if form == "messages":
        messages, images, videos = _parse_messages(with_media(content, {"image": images, "video": videos}))
        if "continue_final_message" in options:
            _check_continued(messages[-1])
        keys = {"allow_special_tokens": allow_special_tokens, "template_kwargs": template_kwargs, "tools": tools}
        keys |= {"template_options": options, "chat_template": chat_template}
        return ParsedRequest(messages, images, videos, _for_each(videos, kwargs), bounds, **keys, jpeg_draft=draft)
    images = [image if isinstance(image, dict) else {"image": image} for image in images]
    videos = [video if isinstance(video, dict) else {"video": video} for video in videos]
    images, videos = list(map(image_part, count(), images)), list(map(video_part, count(), videos))
    keys = {"jpeg_draft": draft, "truncation": truncation}
    parsed = ParsedRequest(None, images, videos, _for_each(videos, kwargs), bounds, **keys)
    if form == "prompt_token_ids":
        return parsed._replace(token_ids=content)
    if not isinstance(content, str):
        raise RequestError(f"{form!r} must be a string, got {type(content).__name__}")
    return parsed._replace(text=content)


def _form(request: dict) -> tuple[str, Any]:
    """Return the key that holds the prompt, and its value.

    None counts as absent. If no form is present, `messages` of None are returned, and refused later.
    """
    given = {key: request[key] for key in FORMS if request.get(key) is not None}
    if not given and "messages" in request:
        return "messages", None
    if len(given) != 1:
        found = listed(given, "and") if given else "none"
        raise RequestError(f"a request needs exactly one of {listed(FORMS, 'and')}; this one has {found}")
    return next(iter(given.items()))


def _allows_special_tokens(request: dict, form: str) -> bool:
    allowed = request.get("allow_special_tokens")
    if not isinstance(allowed, bool | None):
        raise ParameterError("allow_special_tokens", allowed, "True or False")
    if allowed is False and form != "messages":
        raise RequestError(
            f"allow_special_tokens=False goes with 'messages'; special tokens in {form!r} are control tokens",
            param="allow_special_tokens",
        )
    return bool(allowed)


def _truncation(request: dict, form: str) -> Truncation | None:
    number, side = request.get("truncate_prompt_tokens"), request.get("truncation_side")
    if side not in (None, "left", "right"):
        raise ParameterError("truncation_side", side, "'left' or 'right'")
    if number is None:
        if side is not None:
            raise RequestError("truncation_side needs truncate_prompt_tokens; give both", param="truncation_side")
        return None
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ParameterError("truncate_prompt_tokens", number, "an integer of at least 1")
    if form == "messages":
        reason = "truncate_prompt_tokens is for prompts; the beginning of a conversation cannot be cut off"
        raise RequestError(reason, param="truncate_prompt_tokens")
    return Truncation(number, side or "left")


def _check_no_template(request: dict, form: str) -> None:
    for name in TEMPLATE_KEYS:
        if request.get(name):
            raise RequestError(f"{name} goes with 'messages'; no template is applied to {form!r}", param=name)


def _template_options(request: dict) -> Mapping[str, Any]:
    """Return the arguments of `apply_chat_template` for the end of the prompt."""
    given = {name: request.get(name) for name in ("add_generation_prompt", "continue_final_message")}
    for name, value in given.items():
        if not isinstance(value, bool | None):
            raise ParameterError(name, value, "True or False")
    adds, continues = given.values()
    if not continues:
        return WITH_PROMPT if adds is None else {"add_generation_prompt": adds}
    if adds:
        reason = "add_generation_prompt and continue_final_message exclude each other; leave one of them out"
        raise RequestError(reason, param="add_generation_prompt")
    return {"add_generation_prompt": False, "continue_final_message": True}


def _check_continued(message: dict) -> None:
    content = message["content"]
    has_text = bool(content) if isinstance(content, str) else any(part.get("text") for part in content)
    if not has_text or message.get("tool_calls"):
        what = "tool_calls, which cannot be continued" if has_text else "no text to continue"
        raise RequestError(f"continue_final_message: the final message has {what}", param="continue_final_message")


def _chat_template(request: dict) -> str | None:
    template = request.get("chat_template")
    if not isinstance(template, str | None):
        raise ParameterError("chat_template", template, "a Jinja template as a string")
    return template


def _as_list(images: Any) -> list:
    return [] if images is None else list(images) if isinstance(images, list | tuple) else [images]


def _given_media(request: dict) -> tuple[list, list]:
    """Return the images and the videos that are not parts of messages."""
    data = {} if request.get("multi_modal_data") is None else request["multi_modal_data"]
    if not isinstance(data, Mapping):
        raise RequestError(f"multi_modal_data must be a dict such as {{'image': ...}}, got {type(data).__name__}")
    if unknown := sorted(map(str, data.keys() - {"image", "video"})):
        raise RequestError(f"multi_modal_data has {', '.join(unknown)}; only 'image' and 'video' are supported")
    images = _as_list(request.get("images")) + _as_list(data.get("image"))
    return images, given_videos(request.get("videos")) + given_videos(data.get("video"))


def _processor_kwargs(request: dict) -> dict[str, Any]:
    """Return the request's checked arguments for image and video processors, by vLLM's names."""
    kwargs = request.get("mm_processor_kwargs") or {}
    if not isinstance(kwargs, Mapping):
        raise ParameterError("mm_processor_kwargs", kwargs, "a dict")
    kwargs = without_nulls(kwargs)
    check_keys("mm_processor_kwargs", kwargs, PROCESSOR_KEYS | {"size"})
    kwargs = plain_processor_kwargs(kwargs)
    for rate in _rates(kwargs):
        check_numbers({**kwargs, "fps": rate})
    for name in ("jpeg_draft", "do_sample_frames"):
        if not isinstance(flag := kwargs.get(name, False), bool):
            raise ParameterError(name, flag, "True or False")
    if "fps" in kwargs and "num_frames" in kwargs:
        raise RequestError("mm_processor_kwargs has both fps and num_frames; give one of them", param="num_frames")
    return kwargs


def _rates(kwargs: Mapping[str, Any]) -> Sequence[Any]:
    """Return `fps` of `plain_processor_kwargs` as a list, with one rate for all videos or one for each."""
    fps = kwargs.get("fps")
    return fps if isinstance(fps, list | tuple) else [fps]


def _for_each(videos: list[dict], kwargs: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the arguments of each video, with its rate; raises RequestError if their numbers differ."""
    rates = _rates(kwargs)
    if len(rates) == 1:
        return [kwargs] * len(videos)
    if len(rates) != len(videos):
        reason = f"fps has {len(rates)} rates for {counted(len(videos), 'video')}; give one, or one for each video"
        raise RequestError(reason, param="fps")
    return [{**kwargs, "fps": rate} for rate in rates]


def media_kinds(request: dict) -> Iterator[Literal["image", "video"]]:
    """Yield the kind of each medium in an unchecked request, which may be invalid in any way."""
    messages = request.get("messages")
    for message in messages if isinstance(messages, list | tuple) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list | tuple) else ():
            if isinstance(part, dict):
                part = without_nulls(part)
                if is_video_part(part):
                    yield "video"
                elif part.get("type") in SOURCE_KEYS or any(key in part for key in SOURCE_KEYS):
                    yield "image"
    data = request.get("multi_modal_data")
    for kind, name in (("image", "images"), ("video", "videos")):
        given = request.get(name), data.get(kind) if isinstance(data, Mapping) else None
        if any(one is not None and not (isinstance(one, list | tuple) and not one) for one in given):
            yield kind


def _parse_messages(messages: Any) -> tuple[list[dict], list[dict], list[dict]]:
    if not isinstance(messages, list | tuple) or not messages:
        raise RequestError(
            f"'messages' must be a list of at least one {{'role', 'content'}} dict, got {shown(messages, 100)}"
        )
    parsed, images, videos = [], [], []
    for i, message in enumerate(messages):
        calls = check_calls(message, f"messages[{i}]") if isinstance(message, dict) else []
        if isinstance(message, dict) and message.get("role") == "assistant":
            message = {**message, "content": without_thoughts(message.get("content"))}
        if isinstance(message, dict) and message.get("role") in ("assistant", "tool") and not message.get("content"):
            message = {**message, "content": message.get("refusal") or ""}  # some clients and models leave it empty
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise RequestError(f"a message must be a dict with 'role' and 'content', got {shown(message, 100)}")
        content = message["content"]
        if isinstance(content, list | tuple):
            content = [_parse_part(part, images, videos) for part in content]
        elif not isinstance(content, str):
            raise RequestError(f"message content must be a string or a list of parts, got {type(content).__name__}")
        parsed.append({**message, "content": content} | ({"tool_calls": calls} if calls else {}))
    return parsed, images, videos


def _parse_part(part: Any, images: list[dict], videos: list[dict]) -> dict:
    """Return the part for the template, and append its source to `images` or `videos`."""
    part = as_part_of_chats(part)
    if not isinstance(part, dict):
        raise RequestError(f"a content part must be a dict or a string, got {type(part).__name__}")
    part = without_nulls(part)
    if is_video_part(part):
        videos.append(video_part(len(videos), part))
        return {"type": "video"}
    kind = part.get("type") or next((key for key in (*SOURCE_KEYS, "text") if key in part), None)
    if kind in SOURCE_KEYS:
        images.append(image_part(len(images), part))
        return {"type": "image"}
    if kind != "text":
        raise RequestError(
            "a content part must be text, image, image_url, video or video_url, "
            f"not {kind!r} with keys {sorted(map(str, part))}"
        )
    check_keys("text part", part, TEXT_KEYS)
    if not isinstance(part.get("text"), str):
        raise RequestError(f"a text part needs 'text' with a string, not {part.get('text')!r:.40}")
    return {"type": "text", "text": part["text"]}
