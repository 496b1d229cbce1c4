"""Placeholders of a prompt are expanded to the number of tokens of each image and video."""

import re
from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmvllm.errors import RequestError
from mmvllm.inputs import MediaRules, MultiModalInput, PlaceholderRange
from mmvllm.models.folder import BUNDLED
from mmvllm.models.qwen2_vl import FAMILY
from mmvllm.models.registry import load_config
from mmvllm.processors import placeholders as expanding
from mmvllm.processors.placeholders import place_media

RULES = FAMILY.media_rules(load_config(BUNDLED))
TOKENS = replace(RULES, image_token_id=9, start_token_id=8, end_token_id=7)


S, P, E = 8, 9, 7  # start, placeholder, end


def expand_placeholders(
    token_ids: list[int], lengths: list[int], rules: MediaRules
) -> tuple[list[int], list[PlaceholderRange]]:
    """Expansion for images of these lengths."""
    images = [expanding.Expansion([rules.image_token_id] * length, [PlaceholderRange(0, length)]) for length in lengths]
    expanded, placed = expanding.expand_placeholders(token_ids, images, rules)
    assert {modality for modality, _ in placed} <= {"image"}
    return expanded, [placeholder for _, placeholders in placed for placeholder in placeholders]


@pytest.mark.parametrize(
    "token_ids, lengths, want, placeholders",
    [
        ([], [], [], []),
        ([1, S, P, E, 2], [3], [1, S, P, P, P, E, 2], [(2, 3)]),
        ([1, S, P, E, 2, S, P, E, 3], [2, 3], [1, S, P, P, E, 2, S, P, P, P, E, 3], [(2, 2), (7, 3)]),
        ([S, P, E, S, P, E], [2, 3], [S, P, P, E, S, P, P, P, E], [(1, 2), (5, 3)]),
        ([1, S, P, P, P, E, 2], [3], [1, S, P, P, P, E, 2], [(2, 3)]),  # already expanded
        ([S, P, P, E], [3], [S, P, P, P, E], [(1, 3)]),  # another number of placeholders than the image needs
        ([S, E], [2], [S, P, P, E], [(1, 2)]),
        ([S, 5, 6, E, 5], [1], [S, P, E, 5], [(1, 1)]),  # other tokens between start and end are replaced
        ([1, E, 2], [], [1, E, 2], []),
    ],
)
def test_placeholders_are_expanded_once(token_ids, lengths, want, placeholders):
    before = list(token_ids)
    assert expand_placeholders(token_ids, lengths, TOKENS) == (want, placeholders)
    assert expand_placeholders(want, lengths, TOKENS) == (want, placeholders)
    assert token_ids == before


@pytest.mark.parametrize(
    "token_ids, lengths, message",
    [
        ([1, 2], [4], "prompt has 0 image placeholders but 1 image was given; write .* once per image"),
        ([S, P, E], [2, 2], "prompt has 1 image placeholder but 2 images were given"),
        (
            [S, P, E, P, P],
            [1],
            "1 image placeholder, 2 <.image_pad.> outside <.vision_start.> and <.vision_end.>, but 1",
        ),
        ([1, S, P, 2], [1], "0 image placeholders, 1 .* outside .*, 1 <.vision_start.> without <.vision_end.>, but"),
        ([S], [], "0 image placeholders, 1 <.vision_start.> without <.vision_end.>, but 0 images were"),
    ],
)
def test_placeholders_that_do_not_fit_are_refused(token_ids, lengths, message):
    with pytest.raises(RequestError, match=message):
        expand_placeholders(token_ids, lengths, TOKENS)


LETTERS = {1: "a", 2: "b", S: "s", P: "p", E: "e"}
IDS = {letter: token_id for token_id, letter in LETTERS.items()}


def ranges_of(lengths: Iterable[int], befores: Iterable[str]) -> list[tuple[int, int]]:
    """Offset and length of each run of placeholders, given the text before each of them."""
    offsets = accumulate(befores, lambda offset, before: offset + len(before), initial=0)
    ends = accumulate(lengths, initial=0)
    return [(offset + end, length) for offset, end, length in zip([*offsets][1:], ends, lengths, strict=False)]


def check_against_a_regular_expression(case: tuple[list[int], list[int]]) -> None:
    """A pair is a start and the next end, without another start between them."""
    token_ids, lengths = case
    word = "".join(LETTERS[token_id] for token_id in token_ids)
    pieces = re.split("s[^se]*e", word)
    num_pairs, rest = len(pieces) - 1, "".join(pieces)
    if num_pairs == len(lengths) and not {"s", "p"} & {*rest}:
        placeholders = ["p" * length for length in lengths]
        want = "".join(f"{piece}s{p}e" for piece, p in zip(pieces, placeholders, strict=False)) + pieces[-1]
        befores = [f"e{piece}s" if i else f"{piece}s" for i, piece in enumerate(pieces[:-1])]
        got = ([IDS[letter] for letter in want], ranges_of(lengths, befores))
        assert expand_placeholders(token_ids, lengths, TOKENS) == got
        assert expand_placeholders(got[0], lengths, TOKENS) == got, "an expanded prompt is expanded again as it is"
        return
    with pytest.raises(RequestError) as error:
        expand_placeholders(token_ids, lengths, TOKENS)
    outside, opened = (re.search(rf", (\d+) {what}", str(error.value)) for what in (r"\S+ outside", r"\S+ without"))
    assert int(re.match(r"prompt has (\d+) image placeholder", str(error.value))[1]) == num_pairs
    assert int(outside[1] if outside else 0) == rest.count("p")
    assert int(opened[1] if opened else 0) == rest.count("s")


def prompts() -> st.SearchStrategy[list[int]]:
    """Random tokens among whole pairs, so that some prompts are right and most are almost right."""
    one, pair = st.sampled_from([*LETTERS]), st.sampled_from([(S, P, E), (S, E), (S, P, P, E), (S, 1, E)])
    pieces = st.lists(one.map(lambda token_id: (token_id,)) | pair, max_size=12)
    right = st.lists(st.sampled_from([(1,), (2,), (E,)]) | pair, max_size=12)
    return (pieces | right).map(lambda pieces: [token_id for piece in pieces for token_id in piece])


@st.composite
def prompts_with_lengths(draw) -> tuple[list[int], list[int]]:
    token_ids = draw(prompts())
    number = max(0, token_ids.count(S) + draw(st.sampled_from([0, 0, 0, -1, 1])))
    return token_ids, draw(st.lists(st.integers(1, 5), min_size=number, max_size=number))


@pytest.mark.parametrize("num_examples", [100, pytest.param(20_000, marks=pytest.mark.slow)])
def test_expansion_equals_a_regular_expression(num_examples):
    settings(max_examples=num_examples)(given(prompts_with_lengths())(check_against_a_regular_expression))()


V = 6  # the placeholder of a video
VIDEO_TOKENS = replace(TOKENS, video_token_id=V)
NESTED_TOKENS = replace(VIDEO_TOKENS, timestamp="<{:.1f} seconds>")  # Qwen3-VL
BOTH_RULES = pytest.mark.parametrize("rules", [VIDEO_TOKENS, NESTED_TOKENS], ids=["one run", "with times"])


def media(modality: str, t: int, length: int) -> MultiModalInput:
    """An image or a video of `t` temporal patches, each of `length` tokens."""
    patches, times = torch.zeros(4 * t * length, 1), tuple(i + 0.25 for i in range(t))
    digests = tuple(bytes([i]) for i in range(t))
    return MultiModalInput(modality, patches, (t, 2, 2 * length), digests, times if modality == "video" else ())


def encode(text: str) -> list[int]:
    """Token ids of a time, which are none of the placeholders."""
    return [100 + ord(letter) for letter in text]


@pytest.mark.parametrize(
    "rules, want, ranges",
    [
        (VIDEO_TOKENS, [1, S, *[V] * 6, E, 2, S, P, E], [(2, 3), (5, 3), (11, 1)]),
        (
            NESTED_TOKENS,
            [1, S, *encode("<0.2 seconds>"), S, V, V, V, E, *encode("<1.2 seconds>"), S, V, V, V, E, E, 2, S, P, E],
            [(16, 3), (34, 3), (41, 1)],
        ),
    ],
    ids=["one run", "with times"],
)
def test_each_temporal_patch_has_its_placeholders(rules, want, ranges):
    prompt = place_media([1, S, V, E, 2, S, P, E], [media("image", 1, 1), media("video", 2, 3)], rules, encode)
    assert prompt.token_ids == want
    assert ranges == [item.placeholder for item in prompt.mm_items]
    assert [item.modality for item in prompt.mm_items] == ["video", "video", "image"]


pieces = st.lists(
    st.tuples(st.lists(st.integers(1, 2), max_size=2), st.sampled_from(["image", "video"]), st.integers(1, 3)),
    max_size=5,
)


@BOTH_RULES
@settings(max_examples=60)
@given(pieces)
def test_an_expanded_prompt_is_expanded_again_as_it_is(rules, pieces):
    """Images and videos of any order, with and without text between them."""
    given = [media(modality, size if modality == "video" else 1, size) for _, modality, size in pieces]
    prompt = [x for text, modality, _ in pieces for x in (*text, S, P if modality == "image" else V, E)]
    once = place_media(prompt, given, rules, encode)
    again = place_media(once.token_ids, given, rules, encode)
    assert again.token_ids == once.token_ids
    assert [item.placeholder for item in again.mm_items] == [item.placeholder for item in once.mm_items]
    at = [i for item in once.mm_items for i in range(item.offset, item.end)]
    assert at == [i for i, one in enumerate(once.token_ids) if one in (P, V)]
    by_modality = {name: [item.index for item in once.mm_items if item.modality == name] for name in ("image", "video")}
    assert all(indices == sorted(indices) for indices in by_modality.values())
    numbers = {name: sum(one.modality == name for one in given) for name in by_modality}
    assert {name: {*indices} for name, indices in by_modality.items()} == {
        name: {*range(number)} for name, number in numbers.items()
    }


@BOTH_RULES
@pytest.mark.parametrize(
    "token_ids, num_videos, message",
    [
        ([1, 2], 1, "prompt has 0 video placeholders but 1 video was given; write .*video_pad.* once per video"),
        ([S, V, E], 0, "prompt has 1 video placeholder but 0 videos were given"),
        ([S, P, E], 1, "prompt has 1 image placeholder but 0 images were given"),
        ([S, V, E, V], 1, "1 video placeholder, 1 <.video_pad.> outside <.vision_start.> and <.vision_end.>, but"),
        ([S, V], 1, "0 video placeholders, 1 <.video_pad.> outside .*, 1 <.vision_start.> without <.vision_end.>, but"),
    ],
)
def test_video_placeholders_that_do_not_fit_are_refused(token_ids, num_videos, message, rules):
    with pytest.raises(RequestError, match=message):
        place_media(token_ids, [media("video", 2, 1)] * num_videos, rules, encode)


def test_pairs_within_a_pair_are_a_video_only_with_times():
    nested = [S, *encode("<0.2 seconds>"), S, V, E, E]
    assert len(place_media(nested, [media("video", 2, 1)], NESTED_TOKENS, encode).mm_items) == 2
    with pytest.raises(RequestError, match=r"1 video placeholder, 1 <.vision_start.> without <.vision_end.>"):
        place_media(nested, [media("video", 2, 1)], VIDEO_TOKENS, encode)
