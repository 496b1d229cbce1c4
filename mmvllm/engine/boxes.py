"""Finds the boxes and points in a completion, in the notation of the model's family; malformed ones are ignored."""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mmvllm.grounding import Box, BoxFormat, ImageGeometry, Pair, Point, box_of
from mmvllm.inputs import MultiModalItem

KEYS = ("bbox_2d", "point_2d")
LABELS = ("label", "text_content")  # Qwen2.5-VL writes the second for text that it reads
# Limits on failed attempts to parse an object and on characters parsed in vain (or four times the text): 0.03 s.
MAX_FAILURES, MAX_WASTED = 1000, 2**20

_NUMBER = r"-?\d{1,6}(?:\.\d{1,6})?"
_PAIR = rf"\(({_NUMBER}),({_NUMBER})\)"
_PAIRS = re.compile(rf"{_PAIR}(?:,?{_PAIR})*")  # without white space
_WITHIN = r"([^<]*(?:<(?!\|)[^<]*)*)"  # up to the next special token
_SPANS = re.compile(
    rf"<\|object_ref_start\|>(?P<label>{_WITHIN})<\|object_ref_end\|>"
    rf"|<\|(?P<kind>box|quad)_start\|>(?P<pairs>{_WITHIN})<\|(?P=kind)_end\|>"
)


class Written(NamedTuple):
    """Coordinates that the model wrote: one pair for a point, two for a box, four for a quadrilateral."""

    label: str | None
    pairs: tuple[Pair, ...]
    image: int | None = None


class BoxReader:
    """Reads the boxes and points of completions; `box_format` is None for a model that writes none."""

    def __init__(self, tokenizer: Any, box_format: BoxFormat | None):
        self._tokenizer, self._format = tokenizer, box_format
        self._starts: frozenset[int] = frozenset()
        if box_format is not None and box_format.syntax == "tokens":
            vocab = tokenizer.get_vocab()
            self._starts = frozenset(vocab[name] for name in ("<|box_start|>", "<|quad_start|>") if name in vocab)

    def read(self, text: str, token_ids: Sequence[int], items: Sequence[MultiModalItem]) -> tuple[Box | Point, ...]:
        """Return the boxes and points of a completion, in the order in which the model wrote them."""
        if self._format is None or not items:
            return ()
        written = self._written(text, token_ids)
        geometries, is_single = _geometries(items)
        return tuple(found for one in written if (found := _placed(one, self._format, geometries, is_single)))

    def _written(self, text: str, token_ids: Sequence[int]) -> Sequence[Written]:
        if self._format.syntax == "json":
            return [*objects_in(text)] if any(f'"{key}"' in text for key in KEYS) else []
        if self._starts.isdisjoint(token_ids):
            return []
        return [*spans_in(self._tokenizer.decode(token_ids, skip_special_tokens=False))]


def spans_in(text: str) -> Iterator[Written]:
    """Yield boxes and points between special tokens; a label applies to all that follow it without other text."""
    label, end = None, 0
    for match in _SPANS.finditer(text):
        if text[end : match.start()].strip(" \n,;"):
            label = None
        end = match.end()
        if match["kind"] is None:
            label = match["label"].strip() or None
        elif _PAIRS.fullmatch(written := "".join(match["pairs"].split())):
            pairs = tuple((float(x), float(y)) for x, y in re.findall(_PAIR, written))
            if len(pairs) in (1, 2, 4):
                yield Written(label, pairs)


def objects_in(text: str) -> Iterator[Written]:
    """Yield boxes and points of JSON objects in a text, which may be fenced, nested, or in a list that is cut off."""
    decoder, at, num_failures, wasted = json.JSONDecoder(), text.find("{"), 0, 0
    most = max(MAX_WASTED, 4 * len(text))
    while at >= 0 and num_failures < MAX_FAILURES and wasted < most:
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            num_failures, wasted, end = num_failures + 1, wasted + _position(error, text) - at, at + 1
        else:
            yield from _in_value(value)
        at = text.find("{", end)


def _position(error: ValueError | RecursionError, text: str) -> int:
    """Return how far a text was parsed, at most; for an unterminated string, the error has its beginning."""
    is_known = isinstance(error, json.JSONDecodeError) and not error.msg.startswith("Unterminated")
    return error.pos if is_known else len(text)


def _in_value(value: Any) -> Iterator[Written]:
    rest = [value]  # no recursion, in which each box would pass through all levels above it
    while rest:
        value = rest.pop()
        if isinstance(value, dict):
            yield from _in_object(value)
        if isinstance(value, dict | list):
            rest += [*(value.values() if isinstance(value, dict) else value)][::-1]


def _in_object(value: dict[str, Any]) -> Iterator[Written]:
    label = next((value[key] for key in LABELS if isinstance(value.get(key), str)), None)
    image = value.get("image")
    for key, size in zip(KEYS, (4, 2), strict=True):
        numbers = value.get(key)
        if isinstance(numbers, list) and len(numbers) == size and all(map(_is_coordinate, numbers)):
            pairs = tuple(zip(map(float, numbers[::2]), map(float, numbers[1::2]), strict=True))
            yield Written(label, pairs, image if type(image) is int else None)


def _is_coordinate(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e6 and not math.isnan(value)


def _geometries(items: Sequence[MultiModalItem]) -> tuple[Mapping[int, ImageGeometry], bool]:
    """Return the geometry of each image by its index, and whether the request has one image and nothing else."""
    known = {item.index: item.geometry for item in items if item.geometry is not None}
    return known, len({(item.modality, item.index) for item in items}) == 1


def _placed(
    written: Written, box_format: BoxFormat, geometries: Mapping[int, ImageGeometry], is_single: bool
) -> Box | Point | None:
    """Convert it to pixels of its image; return None if the image or its size is unknown."""
    image = 0 if is_single else written.image
    if (geometry := geometries.get(image)) is None:
        return None
    pairs = tuple(geometry.place(*pair, box_format.scale) for pair in written.pairs)
    if len(pairs) == 1:
        return Point(written.label, image, *pairs[0], geometry)
    return box_of(written.label, image, pairs, geometry)
