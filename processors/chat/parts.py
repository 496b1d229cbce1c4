"""The parts of a request that name an image or a video: what to load, and the options that are given with it."""

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
_EDGES = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}  # of `size`, which are pixels in all
THOUGHTS = ("thinking", "redacted_thinking", "reasoning")  # types of parts
_RATES = ("fps", "sample_fps", "raw_fps")
_TIMES = ("video_start", "video_end")


def is_video_part(part: Mapping[str, Any]) -> bool:
    """Whether a part without its nulls names a video."""
    kind = part.get("type")
    return kind in ("video", "video_url") or (kind is None and ("video" in part or "video_url" in part))


def image_part(i: int, part: dict) -> dict:
    """What to load under "image", with the sizes that are given."""
    with naming_media(image_index=i):
        part = _with_options_of_urls(without_nulls(part), "image")
        check_keys("image part", part, IMAGE_KEYS)
        check_numbers(part)
        if (detail := part.get("detail", "auto")) not in DETAILS:
            raise ParameterError("detail", detail, listed(DETAILS))
        own = {key: part[key] for key in PART_SIZES if key in part}
        return {"image": _source("image", SOURCE_KEYS, part), **own} | ({"detail": detail} if detail == "low" else {})


def video_part(i: int, part: dict) -> dict:
    """What to load under "video", with the options of `qwen_vl_utils` that are given."""
    with naming_media(video_index=i):
        part = _with_options_of_urls(without_nulls(part), "video")
        check_keys("video part", part, VIDEO_KEYS)
        check_numbers(part)
        source = _source("video", VIDEO_SOURCE_KEYS, part)
        if "num_frames" in part and part.setdefault("nframes", part["num_frames"]) != part["num_frames"]:
            raise RequestError("num_frames is another name of nframes; give one of them", param="num_frames")
        return {"video": source, **{key: part[key] for key in qwen_vl_utils.KEYS if key in part}}


def given_videos(value: Any) -> list:
    """The videos of `videos` or `multi_modal_data`: one, or a list of them; a list of images is one video."""
    if value is None:
        return []
    is_one = isinstance(value, tuple) or not isinstance(value, list) or (value and _is_frame(value[0]))
    return [value] if is_one else value


def _is_frame(value: Any) -> bool:
    return isinstance(value, Image.Image) or getattr(value, "ndim", None) == 3


def without_nulls(part: Mapping[str, Any]) -> dict[str, Any]:
    """Only the keys that have a value."""
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
    """What `load_image` or `load_video` takes, from the keys of mmvllm, OpenAI, qwen-vl-utils and transformers."""
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
    """A string, a refusal or a part of the Responses API as a part of a chat; any other part as it is."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("input_text", "output_text"):
        return {"type": "text", "text": part.get("text")}
    return part | {"type": "image_url"} if kind == "input_image" else refusal_as_text(part)


def without_thoughts(content: Any) -> Any:
    """The content of an earlier answer without the parts in which a model thought, which no later prompt has."""
    if not isinstance(content, list | tuple):
        return content
    return [part for part in content if not (isinstance(part, dict) and part.get("type") in THOUGHTS)]


def refusal_as_text(part: Any) -> Any:
    """A part of an earlier answer in which a model refused it, as a part of text."""
    is_refusal = isinstance(part, dict) and part.get("type") == "refusal"
    return {"type": "text", "text": part.get("refusal")} if is_refusal else part


def plain_processor_kwargs(given: Mapping[str, Any]) -> dict[str, Any]:
    """`mm_processor_kwargs` without nulls, with `min_pixels` and `max_pixels` for `size`.

    The vendor's processors take `size`, and qwen-vl-utils returns the rate of each video as `fps`; it remains a list if
    they differ. Raises RequestError.
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
    """Say in an error which image or video it is about: `image_index` or `video_index`."""
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
    """Raise ParameterError for sizes, numbers of frames, rates or times that cannot be."""
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
