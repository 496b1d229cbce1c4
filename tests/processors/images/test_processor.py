"""RGB images become the patches that transformers makes of them, within the pixel bounds of a request."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as hf

from mmvllm.processors.images.bounds import pixel_bounds
from mmvllm.processors.images.load import load_image
from mmvllm.processors.images.processor import ImageProcessor, ImageProcessorConfig, smart_resize
from tests.helpers.engine.requests import noise_image
from tests.helpers.media.images import PNG, RGB, encode, image_config, noise, normalized

# Size

side = st.integers(1, 6000) | st.integers(1, 60)
bound = st.integers(1, 4_000_000) | st.integers(1, 5000)


@settings(max_examples=500)
@given(side, side, st.sampled_from([28, 32, 4, 1]), bound, bound)
def test_smart_resize_equals_transformers(height, width, factor, a, b):
    arguments = height, width, factor, min(a, b), max(a, b)
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(ValueError, match="absolute aspect ratio must be smaller than 200"):
            hf.smart_resize(*arguments)
        with pytest.raises(ValueError, match="the long side may be at most 200 times the short one; crop it"):
            smart_resize(*arguments)
    else:
        assert smart_resize(*arguments) == hf.smart_resize(*arguments)


@pytest.mark.parametrize("height, width", [(0, 5), (5, 0), (-1, 5)])
def test_an_image_without_pixels_is_refused(height, width):
    with pytest.raises(ValueError, match=f"image is {width}x{height} pixels; both sides must be at least 1"):
        image_config().resized(height, width)


@pytest.mark.parametrize("width, height", [(1, 201), (201, 1), (1, 1000), (2, 401)])
def test_a_thin_image_is_refused(width, height):
    process = ImageProcessor(image_config())
    with pytest.raises(ValueError, match=f"image is {width}x{height} pixels: the long side may be at most 200 times"):
        process(Image.new("RGB", (width, height)))
    assert process(Image.new("RGB", (200, 1))).grid[0] == 1


def test_a_single_bound_moves_the_other_if_they_would_cross():
    assert pixel_bounds(None, None, 100, 200) == (100, 200)
    assert pixel_bounds(None, 150, 100, 200) == (100, 150)
    assert pixel_bounds(None, 50, 100, 200) == (50, 50)
    assert pixel_bounds(150, None, 100, 200) == (150, 200)
    assert pixel_bounds(300, None, 100, 200) == (300, 300)
    assert pixel_bounds(7, 9, 100, 200) == (7, 9)


@pytest.mark.parametrize(
    "bounds, message",
    [
        ((200, 100), "min_pixels is 200, above max_pixels 100"),
        ((10**12, None), "min_pixels must be at most 178956970, got 1000000000000"),
    ],
)
def test_invalid_bounds_are_refused(bounds, message):
    with pytest.raises(ValueError, match=message):
        ImageProcessor(image_config())(noise_image(50, 50), *bounds)


def test_max_pixels_has_no_upper_limit():
    process = ImageProcessor(image_config(max_pixels=28 * 28 * 4))
    assert process(noise_image(300, 200), max_pixels=2**63 - 1).grid == (1, 14, 22)


# A request's `max_pixels` is never exceeded, also below the checkpoint's `min_pixels`

CONFIG = image_config()
TOKEN = CONFIG.factor**2  # pixels of one token


@pytest.mark.slow
@settings(max_examples=600)
@given(
    short=st.integers(1, 3000),
    ratio=st.floats(1, 200),
    is_tall=st.booleans(),
    below=st.integers(0, 10_000),
    min_tokens=st.integers(2, 400),
)
def test_the_area_never_exceeds_max_pixels_below_min_pixels(short, ratio, is_tall, below, min_tokens):
    config = image_config(min_pixels=min_tokens * TOKEN, max_pixels=1000 * TOKEN)
    max_pixels = TOKEN + below % (config.min_pixels - TOKEN)  # at least one token, below the checkpoint's minimum
    long = int(short * ratio)
    height, width = (long, short) if is_tall else (short, long)
    resized = config.resized(height, width, max_pixels=max_pixels)
    assert resized[0] * resized[1] <= max_pixels
    assert min(resized) >= config.factor and not any(side % config.factor for side in resized)


@pytest.mark.parametrize("is_tall", [False, True])
def test_the_longer_side_stays_the_longer_one(is_tall):
    height, width = (600, 100) if is_tall else (100, 600)
    resized = CONFIG.resized(height, width, max_pixels=3 * TOKEN)
    assert resized == ((84, 28) if is_tall else (28, 84))


@pytest.mark.parametrize("max_pixels", [1, TOKEN - 1])
def test_less_than_a_token_is_refused(max_pixels):
    with pytest.raises(
        ValueError, match=f"max_pixels must be at least {TOKEN}, the pixels of one token, got {max_pixels}"
    ):
        CONFIG.resized(60, 60, max_pixels=max_pixels)


@settings(max_examples=30)
@given(width=st.integers(20, 300), height=st.integers(20, 300), tokens=st.integers(1, 3))
def test_prepared_images_have_no_more_tokens_than_asked_for(width, height, tokens):
    made = ImageProcessor(CONFIG)(noise_image(width, height), max_pixels=tokens * TOKEN)
    t, h, w = made.grid
    assert t * h * w // 4 <= tokens and len(made.patches) == t * h * w


# Patches


def transformers_patches(image: Image.Image, **settings) -> tuple[tuple[int, int, int], torch.Tensor]:
    """Grid and float32 patches from the processor of transformers."""
    made = hf.Qwen2VLImageProcessorPil(**settings)(image, return_tensors="pt")
    return tuple(made["image_grid_thw"][0].tolist()), made["pixel_values"]


def assert_equals_transformers(image: Image.Image, **settings) -> None:
    config = image_config(**settings)
    made = ImageProcessor(config)(load_image(image))
    grid, pixel_values = transformers_patches(image, **settings)
    assert made.grid == grid
    assert made.patches.dtype == torch.uint8
    assert torch.equal(normalized(made.patches, config), pixel_values)


@settings(max_examples=60)
@given(st.integers(1, 400), st.integers(1, 400), st.integers(1, 300_000), st.integers(1, 300_000), st.integers(0, 99))
def test_patches_equal_transformers(width, height, a, b, seed):
    width, height = min(width, 200 * height), min(height, 200 * width)
    assert_equals_transformers(noise_image(width, height, seed), min_pixels=min(a, b), max_pixels=max(a, b))


@pytest.mark.parametrize(
    "settings",
    [
        {"image_mean": (0.5, 0.4, 0.3), "image_std": (0.5, 0.25, 0.1)},
        {"image_mean": (0.0, 0.0, 0.0), "image_std": (1.0, 1.0, 1.0), "rescale_factor": 1 / 127.5},
        {"rescale_factor": 0.00392156862745098},
        {"patch_size": 16},
        {"patch_size": 8, "merge_size": 3},
        {"merge_size": 1},
        {"temporal_patch_size": 1},
        {"temporal_patch_size": 3},
    ],
    ids=str,
)
def test_patches_with_other_settings_equal_transformers(settings):
    assert_equals_transformers(Image.fromarray(noise(123, 77)), **settings)


def test_each_of_256_levels_is_normalized_as_in_transformers():
    ramp = np.repeat(np.arange(256, dtype=np.uint8).repeat(12).reshape(48, 64, 1), 3, axis=2)
    assert_equals_transformers(Image.fromarray(ramp), patch_size=8, min_pixels=1, max_pixels=48 * 64)


def test_bounds_of_a_request_replace_those_of_the_checkpoint():
    process, image = ImageProcessor(image_config(min_pixels=10_000, max_pixels=20_000)), noise_image(300, 200)
    for low, high in (
        (None, 50_000),
        (30_000, 50_000),
        (10_000, 15_000),
        (70_000, 90_000),
        (25_000, None),
        (100, 5_000),
    ):
        grid, _ = transformers_patches(image, min_pixels=low or 10_000, max_pixels=high or 25_000)
        made = process(image, low, high)
        assert made.grid == grid
        assert made.patches.shape == (math.prod(grid), 3 * 2 * 14 * 14)
    assert process(image, None, None).grid == process(image).grid


# Digests


def digest(source, config: ImageProcessorConfig | None = None, **bounds) -> bytes:
    return ImageProcessor(config or image_config())(load_image(source), **bounds).digests[0]


def test_the_same_pixels_have_the_same_digest(tmp_path):
    image = Image.fromarray(RGB)
    image.save(tmp_path / "same.bmp")
    digests = {digest(form) for form in (image, PNG, tmp_path / "same.bmp", encode(image, "WEBP", lossless=True))}
    assert len(digests) == 1
    assert len(digests.pop()) == 16
    assert digest(encode(Image.fromarray(RGB), "BMP")) == digest(PNG) == digest(encode(Image.fromarray(RGB), "TIFF"))


def test_different_pixels_or_settings_have_different_digests():
    image, other = Image.fromarray(noise(60, 90)), noise(60, 90)
    other[45, 30] ^= 128
    config = image_config
    digests = [
        digest(image),
        digest(Image.fromarray(other)),
        digest(image, max_pixels=1_000_000),
        digest(image, min_pixels=3_000),
        digest(image, config(max_pixels=2_000_000)),
        digest(image, config(min_pixels=3_001)),
        digest(image, config(image_mean=(0.5, 0.5, 0.5))),
        digest(image, config(image_std=(0.5, 0.5, 0.5))),
        digest(image, config(rescale_factor=1 / 256)),
        digest(image, config(temporal_patch_size=1)),
        digest(image, config(patch_size=7, merge_size=4)),
    ]
    assert len(set(digests)) == len(digests)


def test_the_shape_is_part_of_the_digest():
    flat = noise(1, 6, 3)
    assert digest(Image.fromarray(flat.reshape(2, 3, 3))) != digest(Image.fromarray(flat.reshape(3, 2, 3)))
    # Images of one colour: the patches are equal and only the grids differ.
    grey = [Image.new("RGB", size, (9, 9, 9)) for size in ((84, 56), (56, 84))]
    wide, high = (ImageProcessor(image_config())(image) for image in grey)
    assert torch.equal(wide.patches, high.patches)
    assert wide.digests != high.digests
