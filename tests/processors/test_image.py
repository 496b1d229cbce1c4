"""RGB pictures become the patches transformers would make of them."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as hf

from mmvllm.models.qwen2_vl.processing import IMAGE_DEFAULTS
from mmvllm.models.weights import BUNDLED
from mmvllm.processors.image import (
    ImageProcessor,
    ImageProcessorConfig,
    normalize_patches,
    pixel_bounds,
    resize_for_part,
    smart_resize,
)
from mmvllm.processors.load import load_image
from tests.helpers.images import PNG, RGB, encode, image_config, noise
from tests.helpers.requests import noise_image

steady = settings(derandomize=True, deadline=None)


# Size

side = st.integers(1, 6000) | st.integers(1, 60)
bound = st.integers(1, 4_000_000) | st.integers(1, 5000)


@settings(steady, max_examples=500)
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


def test_the_default_bounds_are_transformers():
    for height, width in ((1, 1), (20, 4000), (700, 500), (5000, 3000)):
        assert image_config().resized(height, width) == hf.smart_resize(height, width)


@pytest.mark.parametrize("height, width", [(0, 5), (5, 0), (-1, 5)])
def test_an_image_needs_pixels(height, width):
    with pytest.raises(ValueError, match=f"image is {width}x{height} pixels; both sides must be at least 1"):
        image_config().resized(height, width)


@pytest.mark.parametrize("width, height", [(1, 201), (201, 1), (1, 1000), (2, 401)])
def test_a_thin_image_is_refused(width, height):
    process = ImageProcessor(image_config())
    with pytest.raises(ValueError, match=f"image is {width}x{height} pixels: the long side may be at most 200 times"):
        process(Image.new("RGB", (width, height)))
    assert process(Image.new("RGB", (200, 1))).grid_thw[0] == 1


def test_a_bound_given_alone_moves_the_other_where_they_would_cross():
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
        ((10**12, 10**13), "min_pixels is 1000000000000, must be at most 178956970"),
        ((10**12, None), "min_pixels is 1000000000000, must be at most 178956970"),
    ],
)
def test_bad_bounds_are_refused(bounds, message):
    with pytest.raises(ValueError, match=message):
        ImageProcessor(image_config())(noise_image(50, 50), *bounds)


def test_max_pixels_may_be_without_bound():
    process = ImageProcessor(image_config(max_pixels=28 * 28 * 4))
    assert process(noise_image(300, 200), max_pixels=2**63 - 1).grid_thw == (1, 14, 22)


# Patches


def transformers_patches(image: Image.Image, **settings) -> tuple[tuple[int, int, int], torch.Tensor]:
    """Grid and float32 patches of transformers' own processor."""
    made = hf.Qwen2VLImageProcessorPil(**settings)(image, return_tensors="pt")
    return tuple(made["image_grid_thw"][0].tolist()), made["pixel_values"]


def assert_equals_transformers(image: Image.Image, **settings) -> None:
    config = image_config(**settings)
    made = ImageProcessor(config)(load_image(image))
    grid, pixel_values = transformers_patches(image, **settings)
    assert made.grid_thw == grid
    assert made.pixel_values.dtype == torch.uint8
    assert torch.equal(normalize_patches(made.pixel_values, config), pixel_values)


@settings(steady, max_examples=60)
@given(st.integers(1, 400), st.integers(1, 400), st.integers(1, 300_000), st.integers(1, 300_000), st.integers(0, 99))
def test_patches_equal_transformers(width, height, a, b, seed):
    width, height = min(width, 200 * height), min(height, 200 * width)
    assert_equals_transformers(noise_image(width, height, seed), min_pixels=min(a, b), max_pixels=max(a, b))


@pytest.mark.parametrize("width, height", [(1, 1), (1, 200), (200, 1), (28, 28), (56, 84), (13, 2600), (1500, 900)])
def test_patches_of_odd_sizes_equal_transformers(width, height):
    assert_equals_transformers(noise_image(width, height))


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


def test_every_level_is_normalised_as_in_transformers():
    ramp = np.repeat(np.arange(256, dtype=np.uint8).repeat(12).reshape(48, 64, 1), 3, axis=2)
    assert_equals_transformers(Image.fromarray(ramp), patch_size=8, min_pixels=1, max_pixels=48 * 64)


def test_requests_bounds_replace_the_checkpoints():
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
        assert made.grid_thw == grid
        assert made.pixel_values.shape == (math.prod(grid), 3 * 2 * 14 * 14)
    assert process(image, None, None).grid_thw == process(image).grid_thw


# Digests


def digest(source, config: ImageProcessorConfig | None = None, **bounds) -> bytes:
    return ImageProcessor(config or image_config())(load_image(source), **bounds).digest


def test_the_same_pixels_have_the_same_digest(tmp_path):
    image = Image.fromarray(RGB)
    image.save(tmp_path / "same.bmp")
    digests = {digest(form) for form in (image, PNG, tmp_path / "same.bmp", encode(image, "WEBP", lossless=True))}
    assert len(digests) == 1
    assert len(digests.pop()) == 16
    assert digest(encode(Image.fromarray(RGB), "BMP")) == digest(PNG) == digest(encode(Image.fromarray(RGB), "TIFF"))


def test_what_differs_has_another_digest():
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
    # Of one colour, the patches are the same and only the grid differs.
    grey = [Image.new("RGB", size, (9, 9, 9)) for size in ((84, 56), (56, 84))]
    wide, high = (ImageProcessor(image_config())(image) for image in grey)
    assert torch.equal(wide.pixel_values, high.pixel_values)
    assert wide.digest != high.digest


# Sizes of an image part


def fetch_image(ele: dict) -> Image.Image:
    """qwen-vl-utils' rule for a picture that is already RGB."""
    if "resized_height" in ele and "resized_width" in ele:
        size = qwen_smart_resize(ele["resized_height"], ele["resized_width"])
    else:
        width, height = ele["image"].size
        low, high = ele.get("min_pixels", 4 * 28 * 28), ele.get("max_pixels", 16384 * 28 * 28)
        size = qwen_smart_resize(height, width, low, high)
    return ele["image"].resize((size[1], size[0]))


def qwen_smart_resize(height: int, width: int, low: int = 4 * 28 * 28, high: int = 16384 * 28 * 28) -> tuple[int, int]:
    """Differs from transformers' in that no side rounds to 0."""
    assert high >= low
    rounded = [max(28, round(side / 28) * 28) for side in (height, width)]
    if rounded[0] * rounded[1] > high:
        beta = math.sqrt((height * width) / high)
        # The library itself lets a side become 0 here, and then fails.
        rounded = [max(28, math.floor(side / beta / 28) * 28) for side in (height, width)]
    elif rounded[0] * rounded[1] < low:
        beta = math.sqrt(low / (height * width))
        rounded = [math.ceil(side * beta / 28) * 28 for side in (height, width)]
    return rounded[0], rounded[1]


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
@pytest.mark.parametrize("width, height", [(300, 200), (60, 60), (2, 2), (1000, 9), (9, 1000), (28, 28)])
def test_sizes_of_a_part_mean_what_they_mean_in_qwen_vl_utils(sizes, width, height):
    image = noise_image(width, height)
    got, want = resize_for_part(image, sizes, 28), fetch_image({"image": image, **sizes})
    assert got.size == want.size
    assert got.tobytes() == want.tobytes()


@settings(steady, max_examples=150)
@given(st.integers(1, 300), st.integers(1, 300), st.integers(28 * 28, 10**5), st.integers(28 * 28, 10**5))
def test_bounds_of_a_part_mean_what_they_mean_in_qwen_vl_utils(width, height, a, b):
    width, height = min(width, 200 * height), min(height, 200 * width)
    sizes = {"min_pixels": min(a, b), "max_pixels": max(a, b)}
    got = resize_for_part(Image.new("RGB", (width, height)), sizes, 28)
    assert (got.height, got.width) == qwen_smart_resize(height, width, *sizes.values())


def test_a_part_without_sizes_leaves_the_picture_alone():
    image = noise_image(33, 44)
    for part in ({}, {"image": image}, {"min_pixels": None, "max_pixels": None, "resized_height": None}):
        assert resize_for_part(image, part, 28) is image


def test_the_parts_default_bounds_go_by_the_tokens_size():
    part = {"resized_height": 16, "resized_width": 16}
    assert resize_for_part(noise_image(50, 50), part, factor=32).size == (64, 64)
    assert resize_for_part(noise_image(50, 50), part, factor=28).size == (56, 56)


@pytest.mark.parametrize(
    "part, message",
    [
        ({"min_pixels": 5000, "max_pixels": 4000}, "min_pixels is 5000, above max_pixels 4000"),
        ({"min_pixels": 10**10}, "min_pixels is 10000000000, must be at most"),
        ({"resized_height": 1, "resized_width": 500}, "500x1 pixels: the long side may be at most 200 times"),
        ({"resized_height": 2**62, "resized_width": 1}, "the long side may be at most 200 times"),
    ],
)
def test_bad_sizes_of_a_part_are_refused(part, message):
    with pytest.raises(ValueError, match=message):
        resize_for_part(noise_image(50, 50), part, 28)


def test_absurd_sizes_of_a_part_are_bounded():
    part = {"resized_height": 2**62, "resized_width": 2**62}
    assert resize_for_part(noise_image(2, 2), part, 28).size == (3584, 3584)


# Settings of a checkpoint

NORM = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}
CHECKPOINTS = {
    "empty": {},
    "old": {"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2},
    "old, mean": {"min_pixels": 784, "max_pixels": 7840, **NORM},
    "new": {"size": {"shortest_edge": 1000, "longest_edge": 50000}, "patch_size": 16, "do_convert_rgb": True},
    "both": {"min_pixels": 1000, "max_pixels": 2000, "size": {"shortest_edge": 5, "longest_edge": 7}},
    "both, published": {"min_pixels": 9, "max_pixels": 99, "size": {"min_pixels": 5, "max_pixels": 7}},
    "min and size": {"min_pixels": 6, "size": {"shortest_edge": 5, "longest_edge": 7}},
    "max and size": {"max_pixels": 6, "size": {"shortest_edge": 5, "longest_edge": 7}},
    "min only": {"min_pixels": 6},
    "max only": {"max_pixels": 6000},
    "nulls": {"min_pixels": None, "size": None, "image_mean": None, "rescale_factor": None},
    "one mean": {"image_mean": 0.5, "image_std": 0.25},
    "all": {
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "resample": 3,
        "rescale_factor": 0.004,
        **NORM,
    },
    "no rgb": {"do_convert_rgb": False},
    "more": {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2VLProcessor", "do_pad": True},
}


def from_transformers(folder: Path) -> ImageProcessorConfig:
    theirs = hf.Qwen2VLImageProcessorPil.from_pretrained(folder)
    names = ("patch_size", "temporal_patch_size", "merge_size", "rescale_factor")
    means = {name: getattr(theirs, name) for name in ("image_mean", "image_std")}
    return image_config(
        min_pixels=theirs.size["shortest_edge"],
        max_pixels=theirs.size["longest_edge"],
        **{name: getattr(theirs, name) for name in names},
        **{name: (mean,) * 3 if isinstance(mean, float) else tuple(mean) for name, mean in means.items()},
    )


def checkpoint_with(folder: Path, **files) -> Path:
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / f"{name}.json").write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_settings_are_read_as_transformers_does(name, tmp_path):
    if "null" in name:  # transformers reads null as nothing in some places and fails in others
        want = image_config()
    else:
        want = from_transformers(checkpoint_with(tmp_path, preprocessor_config=CHECKPOINTS[name]))
    checkpoint_with(tmp_path, preprocessor_config=CHECKPOINTS[name])
    assert ImageProcessorConfig.from_pretrained(tmp_path, IMAGE_DEFAULTS) == want


@pytest.mark.parametrize("name", [name for name in CHECKPOINTS if "null" not in name])
def test_processor_config_comes_first(name, tmp_path):
    processor = {"processor_class": "Qwen2VLProcessor", "image_processor": CHECKPOINTS[name]}
    checkpoint_with(tmp_path, processor_config=processor, preprocessor_config={"min_pixels": 77, "patch_size": 7})
    assert ImageProcessorConfig.from_pretrained(tmp_path, IMAGE_DEFAULTS) == from_transformers(tmp_path)


def test_processor_config_may_say_nothing_of_pictures(tmp_path):
    checkpoint_with(tmp_path, processor_config={"processor_class": "X"}, preprocessor_config={"min_pixels": 77})
    assert ImageProcessorConfig.from_pretrained(tmp_path, IMAGE_DEFAULTS) == from_transformers(tmp_path)
    assert ImageProcessorConfig.from_pretrained(tmp_path, IMAGE_DEFAULTS).min_pixels == 77


def test_settings_that_transformers_saves_are_read_back(tmp_path):
    hf.Qwen2VLImageProcessorPil(min_pixels=999, max_pixels=8888, patch_size=16, **NORM).save_pretrained(tmp_path)
    assert ImageProcessorConfig.from_pretrained(str(tmp_path), IMAGE_DEFAULTS) == image_config(
        min_pixels=999, max_pixels=8888, patch_size=16, image_mean=(0.1, 0.2, 0.3), image_std=(0.4, 0.5, 0.6)
    )


def test_sizes_in_their_oldest_place_are_read(tmp_path):
    checkpoint_with(tmp_path, preprocessor_config={"size": {"min_pixels": 5, "max_pixels": 7}})
    config = ImageProcessorConfig.from_pretrained(tmp_path, IMAGE_DEFAULTS)
    assert (config.min_pixels, config.max_pixels) == (5, 7)


def test_the_bundled_checkpoint_is_read_as_transformers_does():
    assert ImageProcessorConfig.from_pretrained(BUNDLED, IMAGE_DEFAULTS) == from_transformers(BUNDLED)


def test_without_settings_they_are_qwen2_vls(tmp_path):
    assert ImageProcessorConfig.from_pretrained(tmp_path, IMAGE_DEFAULTS) == image_config()
    assert from_transformers(checkpoint_with(tmp_path, preprocessor_config={})) == image_config()
    assert image_config().factor == 28


@pytest.mark.parametrize(
    "content, message",
    [
        ("{", r"preprocessor_config\.json is damaged: not valid JSON \(.*\); download it again"),
        ("", r"preprocessor_config\.json is damaged: not valid JSON"),
        ("[]", r"preprocessor_config\.json: the settings must be a JSON object, not \[\]"),
        ({"patch_size": "14"}, r"preprocessor_config\.json: patch_size is '14', must be an integer of at least 1"),
        ({"merge_size": 0}, "merge_size is 0, must be an integer of at least 1"),
        ({"min_pixels": 0}, "min_pixels is 0, must be an integer of at least 1"),
        ({"max_pixels": 1e6}, "max_pixels is 1000000.0, must be an integer"),
        ({"min_pixels": True}, "min_pixels is True, must be an integer"),
        ({"min_pixels": 9, "max_pixels": 8}, "min_pixels is 9, above max_pixels 8"),
        ({"size": 224}, "size is 224, must have shortest_edge and longest_edge"),
        ({"image_mean": [0.5, 0.5]}, r"preprocessor_config\.json: "),
        ({"image_std": "wide"}, r"preprocessor_config\.json: "),
        ({"do_resize": False}, "do_resize is False, mmvllm supports only True"),
        ({"do_rescale": False}, "do_rescale is False, mmvllm supports only True"),
        ({"do_normalize": False}, "do_normalize is False, mmvllm supports only True"),
        ({"resample": 2}, "resample is 2, mmvllm supports only 3"),
    ],
)
def test_bad_settings_are_named(content, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        ImageProcessorConfig.from_pretrained(checkpoint_with(tmp_path, preprocessor_config=content), IMAGE_DEFAULTS)


@pytest.mark.parametrize(
    "content, message",
    [
        ("{", r"processor_config\.json is damaged"),
        ({"image_processor": 5}, r"processor_config\.json: the settings must be a JSON object, not 5"),
        ({"image_processor": {"patch_size": 0}}, r"processor_config\.json: patch_size is 0"),
    ],
)
def test_a_bad_processor_config_is_named(content, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        ImageProcessorConfig.from_pretrained(checkpoint_with(tmp_path, processor_config=content), IMAGE_DEFAULTS)


def test_settings_that_are_not_text_are_named(tmp_path):
    (tmp_path / "preprocessor_config.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(ValueError, match=r"preprocessor_config\.json is damaged"):
        ImageProcessorConfig.from_pretrained(tmp_path, IMAGE_DEFAULTS)
