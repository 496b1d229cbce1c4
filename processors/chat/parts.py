"""Parse the parts of a request that refer to images and videos: their sources and options."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

from mmvllm.errors import ParameterError, RequestError
from mmvllm.processors.images.processor import PART_SIZES
from mmvllm.processors.videos import qwen_vl_utils
from mmvllm.processors.videos.processor import check_fps
from mmvllm.utils.arguments import is_number
from mmvllm.utils.text import listed, with_article

SOURCE_KEYS = ("image", "image_url", "image_pil", "url", "path", "base64")
VIDEO_SOURCE_KEYS = ("video", "video_url", "url", "path", "base64")
DETAILS = ("auto", "low", "high")  # of OpenAI's API
IMAGE_KEYS = frozenset(("type", "detail", *SOURCE_KEYS, *PART_SIZES))
VIDEO_KEYS = frozenset(("type", *VIDEO_SOURCE_KEYS, *qwen_vl_utils.KEYS, "num_frames"))
PROCESSOR_KEYS = frozenset(("fps", "num_frames", "do_sample_frames", "min_pixels", "max_pixels", "jpeg_draft"))
_EDGES = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}  # of `size`; despite their names, areas
THOUGHTS = ("thinking", "redacted_thinking", "reasoning")  # types of parts
_RATES = ("fps", "sample_fps", "raw_fps")
_TIMES = ("video_start", "video_end")


def is_video_part(part: Mapping[str, Any]) -> bool:
    """Return whether a part, without nulls, refers to a video."""
    kind = part.get("type")
    return kind in ("video", "video_url") or (kind is None and ("video" in part or "video_url" in part))


def image_part(i: int, part: dict) -> dict:
    """Return a dict with the source of an image under "image", and the sizes and detail of its part."""
    with naming_media(image_index=i):
        part = _with_options_of_urls(without_nulls(part), "image")
        check_keys("image part", part, IMAGE_KEYS)
        check_numbers(part)
        if (detail := part.get("detail", "auto")) not in DETAILS:
            raise ParameterError("detail", detail, listed(DETAILS))
        own = {key: part[key] for key in PART_SIZES if key in part}
        return {"image": _source("image", SOURCE_KEYS, part), **own} | ({"detail": detail} if detail == "low" else {})


def video_part(i: int, part: dict) -> dict:
    """Return a dict with the source of a video under "video", and the options of `qwen_vl_utils` in its part."""
    with naming_media(video_index=i):
        part = _with_options_of_urls(without_nulls(part), "video")
        check_keys("video part", part, VIDEO_KEYS)
        check_numbers(part)
        source = _source("video", VIDEO_SOURCE_KEYS, part)
        if "num_frames" in part and part.setdefault("nframes", part["num_frames"]) != part["num_frames"]:
            raise RequestError("num_frames is another name of nframes; give one of them", param="num_frames")
        return {"video": source, **{key: part[key] for key in qwen_vl_utils.KEYS if key in part}}


def given_videos(value: Any) -> list:
    """Return the videos of `videos` or `multi_modal_data` as a list; a list of images is a single video."""
    if value is None:
        return []
    is_one = isinstance(value, tuple) or not isinstance(value, list) or (value and _is_frame(value[0]))
    return [value] if is_one else value


def _is_frame(value: Any) -> bool:
    return isinstance(value, Image.Image) or getattr(value, "ndim", None) == 3


def without_nulls(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part without the keys whose value is None."""
    return {key: value for key, value in part.items() if value is not None}


def _with_options_of_urls(part: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return the part with the options from the objects of its URLs merged into it."""
    for key in (kind, f"{kind}_url"):
        if isinstance(given := part.get(key), Mapping):
            options = without_nulls(given)
            url = options.pop("url", None)
            if twice := [name for name in options if name in part and part[name] != options[name]]:
                both = f"{part[twice[0]]!r:.50} and {options[twice[0]]!r:.50}"
                raise RequestError(f"{twice[0]} is given twice, {both}; leave one of them out", param=twice[0])
            part = without_nulls(part | {key: url} | options)
    return part


def _source(kind: str, keys: tuple[str, ...], part: dict) -> Any:
    """Return the source for `load_image` or `load_video`; reads keys of OpenAI, qwen-vl-utils and transformers, too."""
    if "path" in part:
        return part["path"] if isinstance(part["path"], Path) else Path(_string(kind, part, "path"))
    if "base64" in part:
        text = _string(kind, part, "base64")
        return text if text.startswith("data:") else f"data:{kind}/*;base64,{text}"
    source = next((part[key] for key in keys if key in part), None)
    if source is None:
        raise RequestError(f"{with_article(kind)} part needs {kind!r}, or '{kind}_url' with 'url'")
    return source


def _string(kind: str, part: dict, key: str) -> str:
    if not isinstance(part[key], str):
        raise RequestError(f"{key!r} of {with_article(kind)} part must be a string, got {type(part[key]).__name__}")
    return part[key]


def as_part_of_chats(part: Any) -> Any:
    """Convert a string, a refusal or a part of the Responses API to a chat part; return other parts unchanged."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("input_text", "output_text"):
        return {"type": "text", "text": part.get("text")}
    return part | {"type": "image_url"} if kind == "input_image" else refusal_as_text(part)


def without_thoughts(content: Any) -> Any:
    """Return the content of an earlier answer without reasoning parts, which later prompts do not include."""
    if not isinstance(content, list | tuple):
        return content
    return [part for part in content if not (isinstance(part, dict) and part.get("type") in THOUGHTS)]


def refusal_as_text(part: Any) -> Any:
    """Convert a refusal in an earlier answer to a text part; return other parts unchanged."""
    is_refusal = isinstance(part, dict) and part.get("type") == "refusal"
    return {"type": "text", "text": part.get("refusal")} if is_refusal else part


def plain_processor_kwargs(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `mm_processor_kwargs` without nulls, with `size` converted to `min_pixels` and `max_pixels`.

    The vendor's processors take `size`. qwen-vl-utils returns `fps` as a list with the rate of each video, which is
    replaced by a number if the rates are equal. Raises RequestError.
    """
    kwargs = without_nulls(given)
    if isinstance(rates := kwargs.get("fps"), list | tuple) and all(rate == rates[0] for rate in rates):
        kwargs = without_nulls(kwargs | {"fps": rates[0] if rates else None})
    size = kwargs.pop("size", {})
    if not isinstance(size, Mapping) or size.keys() - _EDGES.keys():
        raise ParameterError("size", size, f"a dict of {listed(_EDGES)}")
    for edge, bound in _EDGES.items():
        if (value := size.get(edge)) is not None and kwargs.setdefault(bound, value) != value:
            reason = f"size has {edge} {value!r:.50}, and {bound} is {kwargs[bound]!r:.50}; leave one of them out"
            raise RequestError(reason, param="size")
    return kwargs


@contextmanager
def naming_media(**index: int) -> Iterator[None]:
    """Set `image_index` or `video_index` on RequestErrors in the block, and convert ValueErrors to RequestErrors."""
    try:
        yield
    except RequestError as error:
        for name, value in index.items():
            setattr(error, name, value)
        raise
    except ValueError as error:
        raise RequestError(str(error), **index) from error


def check_keys(what: str, given: Mapping[str, Any], known: frozenset[str]) -> None:
    """Raise RequestError for keys that are not known."""
    if unknown := sorted(map(str, given.keys() - known)):
        raise RequestError(
            f"{what} has unknown keys {', '.join(unknown)}; known: {', '.join(sorted(known))}", param=unknown[0]
        )


def check_numbers(given: Mapping[str, Any]) -> None:
    """Raise ParameterError for invalid sizes, numbers of frames, rates or times."""
    for key in (*PART_SIZES, "total_pixels", "nframes", "num_frames", "min_frames", "max_frames"):
        value = given.get(key)
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= sys.maxsize
        ):
            raise ParameterError(key, value, "an integer of at least 1 that fits into 64 bits")
    for key in _RATES:
        if given.get(key) is not None:
            check_fps(key, given[key])
    for key in _TIMES:
        value = given.get(key)
        if value is not None and (not is_number(value) or value != value):
            raise ParameterError(key, value, "a number of seconds")
