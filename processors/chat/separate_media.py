"""Conversations with images and videos in separate fields, as in data sets and in TRL.

{"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "..."}]}], "images": [image]}
"""

from collections.abc import Iterator, Mapping
from typing import Any

from mmvllm.errors import RequestError
from mmvllm.processors.chat.parts import without_nulls
from mmvllm.utils.text import counted

Media = Mapping[str, list]  # by kind, "image" and "video"


def with_media(messages: Any, media: Media) -> Any:
    """Return the messages with the media in place of parts without a source, in order.

    If there is no such part, media go to the beginning of the first user message, as in TRL. Invalid messages are left
    unchanged. Raises RequestError if the number of parts differs from the number of images or videos.
    """
    if not any(media.values()) or not isinstance(messages, list | tuple):
        return messages
    if not any(map(_bare_kind, _parts(messages))):
        messages = _with_places(messages, media)
    kinds = [*map(_bare_kind, _parts(messages))]
    for kind, given in media.items():
        if (number := kinds.count(kind)) != len(given):
            raise RequestError(
                f"messages have {counted(number, 'part')} {{'type': '{kind}'}} without a source, and "
                f"{counted(len(given), kind)} beside them; give one for each part"
            )
    left = {kind: iter(given) for kind, given in media.items()}
    return [_filled(message, left) for message in messages]


def _parts(messages: list | tuple) -> Iterator[Any]:
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        yield from content if isinstance(content, list | tuple) else ()


def _bare_kind(part: Any) -> str | None:
    """Return the kind of a part whose image or video is passed separately; None for any other part."""
    is_bare = isinstance(part, dict) and len(without_nulls(part)) == 1 and part.get("type") in ("image", "video")
    return part["type"] if is_bare else None


def _with_places(messages: list | tuple, media: Media) -> list:
    places = [{"type": kind} for kind, given in media.items() for _ in given]
    first = next((i for i, one in enumerate(messages) if isinstance(one, dict) and one.get("role") == "user"), None)
    if first is None:
        return list(messages)
    content = messages[first].get("content")
    own = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(own, list | tuple):
        return list(messages)
    return [*messages[:first], messages[first] | {"content": [*places, *own]}, *messages[first + 1 :]]


def _filled(message: Any, left: Mapping[str, Iterator]) -> Any:
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list | tuple):
        return message
    kinds = map(_bare_kind, content)
    parts = [part if kind is None else _part(kind, next(left[kind])) for part, kind in zip(content, kinds, strict=True)]
    return message | {"content": parts}


def _part(kind: str, own: Any) -> dict:
    return {"type": kind} | (own if isinstance(own, dict) else {kind: own})
