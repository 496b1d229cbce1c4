"""Sizes given with an image part mean what they mean in qwen-vl-utils."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mmvllm.processors.images.processor import draft_for, resize_for_part
from tests.helpers.engine.requests import grids_of, noise_image, user
from tests.helpers.media.images import image_config
from tests.helpers.models.shapes import every_family


def fetch_image(ele: dict, factor: int) -> Image.Image:
    """The rule of qwen-vl-utils for an RGB image; `factor` is 2 * `image_patch_size` there."""
    if "resized_height" in ele and "resized_width" in ele:
        size = qwen_smart_resize(ele["resized_height"], ele["resized_width"], factor)
    else:
        width, height = ele["image"].size
        low, high = ele.get("min_pixels", 4 * factor**2), ele.get("max_pixels", 16384 * factor**2)
        size = qwen_smart_resize(height, width, factor, low, high)
    return ele["image"].resize((size[1], size[0]))


def qwen_smart_resize(height: int, width: int, factor: int, low: int | None = None, high: int | None = None):
    """Like the one of transformers, but no side is rounded to 0; returns (height, width)."""
    low, high = low or 4 * factor**2, high or 16384 * factor**2
    assert high >= low
    rounded = [max(factor, round(side / factor) * factor) for side in (height, width)]
    if rounded[0] * rounded[1] > high:
        beta = math.sqrt((height * width) / high)
        # The library lets a side become 0 here, and fails later.
        rounded = [max(factor, math.floor(side / beta / factor) * factor) for side in (height, width)]
    elif rounded[0] * rounded[1] < low:
        beta = math.sqrt(low / (height * width))
        rounded = [math.ceil(side * beta / factor) * factor for side in (height, width)]
    return rounded[0], rounded[1]


@pytest.mark.parametrize("factor", [28, 32])
@pytest.mark.parametrize(
    "sizes",
    [
        {"max_pixels": 28 * 28 * 6},
        {"min_pixels": 28 * 28 * 100},
        {"min_pixels": 28 * 28 * 10, "max_pixels": 28 * 28 * 20},
        {"resized_height": 100, "resized_width": 300},
        {"resized_height": 1, "resized_width": 1},
        {"resized_height": 10, "resized_width": 2000},
        {"resized_height": 100, "resized_width": 300, "min_pixels": 10**6, "max_pixels": 2 * 10**6},
        {"resized_height": 100},
        {"resized_width": 100, "max_pixels": 28 * 28 * 6},
    ],
    ids=str,
)
@pytest.mark.parametrize("width, height", [(300, 200), (60, 60), (2, 2), (1000, 9), (9, 1000), (28, 28), (32, 48)])
def test_sizes_of_a_part_mean_what_they_mean_in_qwen_vl_utils(sizes, width, height, factor):
    image = noise_image(width, height)
    got, want = resize_for_part(image, sizes, factor), fetch_image({"image": image, **sizes}, factor)
    assert got.size == want.size
    assert got.tobytes() == want.tobytes()


side = st.integers(1, 300)
bound = st.integers(32 * 32, 10**5)


@settings(max_examples=150)
@given(side, side, bound, bound, st.sampled_from([28, 32]))
def test_bounds_of_a_part_mean_what_they_mean_in_qwen_vl_utils(width, height, a, b, factor):
    width, height = min(width, 200 * height), min(height, 200 * width)
    sizes = {"min_pixels": min(a, b), "max_pixels": max(a, b)}
    got = resize_for_part(Image.new("RGB", (width, height)), sizes, factor)
    assert (got.height, got.width) == qwen_smart_resize(height, width, factor, *sizes.values())


@pytest.mark.thinned(4)
@every_family
@pytest.mark.parametrize("sizes", [{"resized_height": 100, "resized_width": 75}, {"min_pixels": 9000}], ids=str)
def test_a_request_resizes_by_the_patches_of_its_checkpoint(sizes, checkpoint, make_llm):
    llm, image = make_llm(checkpoint), noise_image(70, 50)
    part = {"type": "image", "image": image, **sizes}
    factor = 2 * llm.engine.model_config.vision.patch_size
    resized = fetch_image({"image": image, **sizes}, factor)
    grid = 1, resized.height // (factor // 2), resized.width // (factor // 2)
    assert grids_of(llm.processor(user(part))) == [grid]


@pytest.mark.parametrize("factor", [28, 32])
def test_low_detail_is_at_most_256_tokens(factor):
    image, most = noise_image(700, 600), 256 * factor**2
    low = resize_for_part(image, {"detail": "low"}, factor)
    assert low.tobytes() == resize_for_part(image, {"max_pixels": most}, factor).tobytes() and low.size != image.size
    assert resize_for_part(image, {"detail": "low", "max_pixels": 2 * most}, factor).size == low.size
    fewer = resize_for_part(image, {"max_pixels": most // 2}, factor)
    assert resize_for_part(image, {"detail": "low", "max_pixels": most // 2}, factor).size == fewer.size
    config = image_config(patch_size=factor // 2)
    assert draft_for(config, {"detail": "low"}) == draft_for(config, {"max_pixels": most})


def test_a_part_without_sizes_does_not_change_the_image():
    image = noise_image(33, 44)
    for part in ({}, {"image": image}, {"min_pixels": None, "max_pixels": None, "resized_height": None}):
        assert resize_for_part(image, part, 28) is image


@pytest.mark.parametrize(
    "part, message",
    [
        ({"min_pixels": 5000, "max_pixels": 4000}, "min_pixels is 5000, above max_pixels 4000"),
        ({"resized_height": 1, "resized_width": 500}, "500x1 pixels: the long side may be at most 200 times"),
        ({"resized_height": 2**62, "resized_width": 1}, "the long side may be at most 200 times"),
    ],
)
def test_invalid_sizes_of_a_part_are_refused(part, message):
    with pytest.raises(ValueError, match=message):
        resize_for_part(noise_image(50, 50), part, 28)


def test_huge_sizes_of_a_part_are_bounded():
    part = {"resized_height": 2**62, "resized_width": 2**62}
    assert resize_for_part(noise_image(2, 2), part, 28).size == (3584, 3584)
