"""Expand the placeholders of a prompt to the tokens of its images and videos, with items and M-RoPE positions."""

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import NamedTuple

import numpy as np

from mmvllm.errors import RequestError
from mmvllm.inputs import EngineInput, MediaRules, MultiModalInput, PlaceholderRange
from mmvllm.processors.positions import mrope_positions
from mmvllm.utils.text import counted

Encode = Callable[[str], list[int]]  # text -> token ids


class Expansion(NamedTuple):
    """The tokens between the start and end token of an image or a video."""

    token_ids: list[int]
    placeholders: list[PlaceholderRange]  # one per temporal patch, relative to the first of these tokens


class _Pair(NamedTuple):
    """Indices of a start and an end token in a prompt, which mark the placeholder of an image or a video."""

    modality: str
    start: int
    end: int


def place_media(
    token_ids: list[int], media: Sequence[MultiModalInput], rules: MediaRules, encode: Encode
) -> EngineInput:
    """Return the engine's input, with placeholders expanded for their images and videos.

    Raises RequestError if placeholders and media do not match.
    """
    by_modality = {name: [one for one in media if one.modality == name] for name in ("image", "video")}
    expansions = {name: [expansion_of(one, rules, encode) for one in given] for name, given in by_modality.items()}
    expanded, placeholders = expand_placeholders(token_ids, expansions["image"], rules, expansions["video"])
    queues = {name: iter(given) for name, given in by_modality.items()}
    return engine_input(expanded, [(next(queues[name]), ranges) for name, ranges in placeholders], rules)


def engine_input(
    token_ids: list[int], placed: Sequence[tuple[MultiModalInput, Sequence[PlaceholderRange]]], rules: MediaRules
) -> EngineInput:
    """Return the engine's input for an expanded prompt and its media in order, with a range per temporal patch."""
    numbers = {"image": count(), "video": count()}
    items = tuple(item for media, ranges in placed for item in media.mm_items(ranges, next(numbers[media.modality])))
    if not items:
        return EngineInput(token_ids)
    runs = [run for media, ranges in placed for run in _runs(media, ranges, rules)]
    ranges, grids, steps = zip(*runs, strict=True)
    return EngineInput(token_ids, items, *mrope_positions(len(token_ids), ranges, grids, rules.merge_size, steps))


def _runs(
    media: MultiModalInput, ranges: Sequence[PlaceholderRange], rules: MediaRules
) -> Iterator[tuple[PlaceholderRange, tuple, float]]:
    """Yield range, grid and time step of each contiguous run of placeholders, which M-RoPE treats as a unit."""
    _, h, w = media.grid
    step = 1.0
    if media.modality == "video" and rules.tokens_per_second is not None:  # as in transformers, even without times
        step = float(np.float32(rules.tokens_per_second) * np.float32(media.seconds_per_patch or 1.0))
    first, num_tokens = ranges[0].offset, rules.num_tokens(media.grid)
    if ranges[-1].end - first == num_tokens:
        yield PlaceholderRange(first, num_tokens), media.grid, step
    else:
        yield from ((one, (1, h, w), step) for one in ranges)


def expansion_of(media: MultiModalInput, rules: MediaRules, encode: Encode) -> Expansion:
    """Return the tokens of an image or a video.

    With timestamps (Qwen3-VL), in the format of transformers 5.10 and later, inside the outer start and end tokens:
    <0.3 seconds> start placeholders end <0.8 seconds> start placeholders end ...
    """
    t, h, w = media.grid
    length = rules.num_tokens((1, h, w))
    if media.modality == "image" or rules.timestamp is None:
        ranges = [PlaceholderRange(i * length, length) for i in range(t)]
        return Expansion([rules.token_id(media.modality)] * (t * length), ranges)
    token_ids: list[int] = []
    ranges: list[PlaceholderRange] = []
    for time in media.times:
        token_ids += [*encode(rules.timestamp.format(time)), rules.start_token_id]
        ranges.append(PlaceholderRange(len(token_ids), length))
        token_ids += [*[rules.video_token_id] * length, rules.end_token_id]
    return Expansion(token_ids, ranges)


def expand_placeholders(
    token_ids: list[int], images: Sequence[Expansion], rules: MediaRules, videos: Sequence[Expansion] = ()
) -> tuple[list[int], list[tuple[str, list[PlaceholderRange]]]]:
    """Replace the tokens between each pair of start and end tokens by an expansion, in order.

    A pair that contains a video token belongs to a video, any other pair to an image. Returns the ids, and the modality
    and placeholders of each pair. Raises RequestError if the number of pairs differs from the number of images or
    videos, and for a start token without an end, or a placeholder outside a pair.
    """
    pairs, num_open = _pairs(token_ids, rules)
    _check_pairs(token_ids, pairs, num_open, {"image": len(images), "video": len(videos)}, rules)
    remaining = {"image": iter(images), "video": iter(videos)}
    expanded: list[int] = []
    placed: list[tuple[str, list[PlaceholderRange]]] = []
    rest = 0
    for modality, start, end in pairs:
        expanded += token_ids[rest : start + 1]
        expansion = next(remaining[modality])
        placed.append(
            (modality, [PlaceholderRange(len(expanded) + offset, length) for offset, length in expansion.placeholders])
        )
        expanded += expansion.token_ids
        rest = end
    return expanded + token_ids[rest:], placed


def _pairs(token_ids: list[int], rules: MediaRules) -> tuple[list[_Pair], int]:
    """Return the pairs of start and end tokens, and the number of start tokens without a pair.

    Pairs nest only in a video whose temporal patches are already expanded.
    """
    marks: dict[int, tuple[int, bool, bool]] = {}  # start -> (end, has a start within, has a video token within)
    open_marks: list[list] = []  # [start, has a start, has a video token]
    for i, token_id in enumerate(token_ids):
        if token_id == rules.start_token_id:
            if open_marks:
                open_marks[-1][1] = True
            open_marks.append([i, False, False])
        elif token_id == rules.video_token_id and open_marks:
            open_marks[-1][2] = True
        elif token_id == rules.end_token_id and open_marks:
            start, nests, has_video = open_marks.pop()
            marks[start] = i, nests, has_video
            if open_marks:
                open_marks[-1][2] |= has_video
    pairs, end, num_open = [], 0, len(open_marks)
    for start, (own_end, nests, has_video) in sorted(marks.items()):
        if start < end:
            continue
        if nests and not (has_video and rules.timestamp):
            num_open += 1
            continue
        pairs.append(_Pair("video" if has_video else "image", start, own_end))
        end = own_end
    return pairs, num_open


def _check_pairs(
    token_ids: list[int], pairs: list[_Pair], num_open: int, given: dict[str, int], rules: MediaRules
) -> None:
    inside = {i for pair in pairs for i in range(pair.start, pair.end)}
    blamed = "video" if given["video"] and not given["image"] else "image"  # for a start token without an end
    for modality, token_id, text in (
        ("image", rules.image_token_id, rules.image),
        ("video", rules.video_token_id, rules.video),
    ):
        num_pairs = sum(pair.modality == modality for pair in pairs)
        num_outside = sum(one == token_id and i not in inside for i, one in enumerate(token_ids))
        own_open = num_open if modality == blamed else 0
        if num_pairs != given[modality] or num_outside or own_open:
            raise RequestError(_misplaced(modality, text, num_pairs, num_outside, own_open, given[modality], rules))


def _misplaced(
    modality: str, text: str, num_pairs: int, num_outside: int, num_open: int, num_given: int, rules: MediaRules
) -> str:
    found = counted(num_pairs, f"{modality} placeholder")
    if num_outside:
        found += f", {num_outside} {text} outside {rules.start} and {rules.end}"
    if num_open:
        found += f", {num_open} {rules.start} without {rules.end}"
    found += "," * bool(num_outside or num_open)
    were = "was" if num_given == 1 else "were"
    return (
        f"prompt has {found} but {counted(num_given, modality)} {were} given; "
        f"write {rules.start}{text}{rules.end} once per {modality} and nowhere else"
    )
