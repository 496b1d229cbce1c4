"""The forms of a request: chat messages, text with images, and prompts as vLLM's users write them."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from mmvllm.errors import ParameterError, RequestError
from mmvllm.processors.image import PART_SIZES
from mmvllm.processors.template_kwargs import check_template_kwargs
from mmvllm.text import listed

FORMS = ("messages", "text", "prompt", "prompt_token_ids")
PROMPT_KEYS = ("prompt", "prompt_token_ids", "multi_modal_data")
REQUEST_KEYS = frozenset(
    (
        *("messages", "text", "images", "min_pixels", "max_pixels", *PROMPT_KEYS),
        *("allow_special_tokens", "chat_template_kwargs"),
        *("request_id", "priority", "cache_salt", "sampling_params"),
    )
)
TEXT_KEYS = frozenset(("type", "text"))
SOURCE_KEYS = ("image", "image_url", "url", "path", "base64")
IMAGE_KEYS = frozenset(("type", *SOURCE_KEYS, *PART_SIZES))


class ParsedRequest(NamedTuple):
    """A request taken apart; one of `messages` (for the chat template), `text` and `token_ids` is given.

    Each of `images` is a dict with what to load under "image", and perhaps sizes of its own. Special tokens in messages
    are text, unless `allow_special_tokens`. `template_kwargs` are arguments for the chat template.
    """

    messages: list[dict] | None
    images: list[dict]
    text: str | None = None
    token_ids: Any = None
    allow_special_tokens: bool = False
    template_kwargs: Mapping[str, Any] = MappingProxyType({})


def parse_request(request: Any) -> ParsedRequest:
    """Take a request apart; raises RequestError that says what is wrong."""
    if not isinstance(request, dict):
        raise RequestError(f"a request must be a dict with 'messages' or 'text', not {type(request).__name__}")
    _check_keys("request", request, REQUEST_KEYS)
    _check_sizes(request)
    form, content = _form(request)
    allow_special_tokens, template_kwargs = _allows_special_tokens(request, form), _template_kwargs(request, form)
    images = _as_list(request.get("images")) + _multi_modal_images(request.get("multi_modal_data"))
    if form == "messages":
        if images:
            raise RequestError("'images' go with 'text'; with 'messages', put each image into its message as a part")
        messages, images = _parse_messages(content)
        keys = {"allow_special_tokens": allow_special_tokens, "template_kwargs": template_kwargs}
        return ParsedRequest(messages, images, **keys)
    parts = [image if isinstance(image, dict) else {"image": image} for image in images]
    parsed = ParsedRequest(None, [_image_part(i, part) for i, part in enumerate(parts)])
    if form == "prompt_token_ids":
        return parsed._replace(token_ids=content)
    if not isinstance(content, str):
        raise RequestError(f"{form!r} must be a string, not {type(content).__name__}")
    return parsed._replace(text=content)


def _form(request: dict) -> tuple[str, Any]:
    """The key that holds the prompt, and its value.

    A value of None counts as absent, except that messages of None, if nothing else is given, are named as invalid.
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


def _template_kwargs(request: dict, form: str) -> dict[str, Any]:
    kwargs = check_template_kwargs(request.get("chat_template_kwargs"))
    if kwargs and form != "messages":
        raise RequestError(
            f"chat_template_kwargs goes with 'messages'; no template is applied to {form!r}",
            param="chat_template_kwargs",
        )
    return kwargs


def _as_list(images: Any) -> list:
    return [] if images is None else list(images) if isinstance(images, list | tuple) else [images]


def _multi_modal_images(data: Any) -> list:
    if data is None:
        return []
    if not isinstance(data, Mapping):
        raise RequestError(f"multi_modal_data must be a dict such as {{'image': ...}}, not {type(data).__name__}")
    if unknown := sorted(map(str, data.keys() - {"image"})):
        raise RequestError(f"multi_modal_data has {', '.join(unknown)}; only 'image' is supported")
    return _as_list(data.get("image"))


def _parse_messages(messages: Any) -> tuple[list[dict], list[dict]]:
    if not isinstance(messages, list | tuple) or not messages:
        raise RequestError(
            f"'messages' must be a list of at least one {{'role', 'content'}} dict, not {messages!r:.100}"
        )
    parsed, images = [], []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise RequestError(f"a message must be a dict with 'role' and 'content', not {message!r:.100}")
        content = message["content"]
        if isinstance(content, list | tuple):
            content = [_parse_part(part, images) for part in content]
        elif not isinstance(content, str):
            raise RequestError(f"message content must be a string or a list of parts, not {type(content).__name__}")
        parsed.append({**message, "content": content})
    return parsed, images


def _parse_part(part: Any, images: list[dict]) -> dict:
    """The part as the template needs it; what to load goes to `images`."""
    if not isinstance(part, dict):
        raise RequestError(f"a content part must be a dict, not {type(part).__name__}")
    part = {key: value for key, value in part.items() if value is not None}
    kind = part.get("type") or next((key for key in (*SOURCE_KEYS, "video", "text") if key in part), None)
    if kind in SOURCE_KEYS:
        images.append(_image_part(len(images), part))
        return {"type": "image"}
    if kind in ("video", "video_url"):
        raise RequestError("video parts are not supported; give frames of it as image parts")
    if kind != "text":
        raise RequestError(
            f"a content part must be text, image or image_url, not {kind!r} with keys {sorted(map(str, part))}"
        )
    _check_keys("text part", part, TEXT_KEYS)
    if not isinstance(part.get("text"), str):
        raise RequestError(f"a text part needs 'text' with a string, not {part.get('text')!r:.40}")
    return {"type": "text", "text": part["text"]}


def _image_part(i: int, part: dict) -> dict:
    """What to load under "image", with the sizes that are given."""
    with naming_image(i):
        part = {key: value for key, value in part.items() if value is not None}
        _check_keys("image part", part, IMAGE_KEYS)
        _check_sizes(part)
        return {"image": _source(part), **{key: part[key] for key in PART_SIZES if key in part}}


def _source(part: dict) -> Any:
    """What `load_image` takes, from the keys of mmvllm, OpenAI, qwen-vl-utils and transformers."""
    if "path" in part:
        return part["path"] if isinstance(part["path"], Path) else Path(_string(part, "path"))
    if "base64" in part:
        text = _string(part, "base64")
        return text if text.startswith("data:") else f"data:image/*;base64,{text}"
    source = next((part[key] for key in ("image", "image_url", "url") if key in part), None)
    if isinstance(source, dict):
        source = source.get("url")
    if source is None:
        raise RequestError("an image part needs 'image', or 'image_url' with 'url'")
    return source


def _string(part: dict, key: str) -> str:
    if not isinstance(part[key], str):
        raise RequestError(f"{key!r} of an image part must be a string, not {type(part[key]).__name__}")
    return part[key]


@contextmanager
def naming_image(i: int) -> Iterator[None]:
    """Say in an error which image it is about."""
    try:
        yield
    except RequestError as error:
        error.image_index = i
        raise
    except ValueError as error:
        raise RequestError(str(error), image_index=i) from error


def _check_keys(what: str, given: dict, known: frozenset[str]) -> None:
    if unknown := sorted(map(str, given.keys() - known)):
        raise RequestError(
            f"{what} has unknown keys {', '.join(unknown)}; known: {', '.join(sorted(known))}", param=unknown[0]
        )


def _check_sizes(given: dict) -> None:
    for key in PART_SIZES:
        value = given.get(key)
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= sys.maxsize
        ):
            raise ParameterError(key, value, f"an integer of at least 1 and at most {sys.maxsize}")
