"""Image settings of a checkpoint are read as transformers reads them; invalid ones are refused by name."""

import json
from pathlib import Path

import pytest
from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as hf

from mmvllm.models.folder import BUNDLED
from mmvllm.models.vision_language import IMAGE_DEFAULTS
from mmvllm.processors.images.processor import ImageProcessorConfig
from tests.helpers.media.images import image_config

NORM = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}
CHECKPOINTS = {
    "empty": {},
    "old": {"min_pixels": 784, "max_pixels": 7840, "patch_size": 8, "merge_size": 3, "temporal_patch_size": 1, **NORM},
    "new": {"size": {"shortest_edge": 1000, "longest_edge": 50000}, "patch_size": 16, "do_convert_rgb": True},
    "both": {"min_pixels": 1000, "max_pixels": 2000, "size": {"shortest_edge": 5, "longest_edge": 7}},
    "both, published": {"min_pixels": 9, "max_pixels": 99, "size": {"min_pixels": 5, "max_pixels": 7}},
    "min and size": {"min_pixels": 6, "size": {"shortest_edge": 5, "longest_edge": 7}},
    "max and size": {"max_pixels": 6, "size": {"shortest_edge": 5, "longest_edge": 7}},
    "min only": {"min_pixels": 6},
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
        text = content if isinstance(content, str | bytes) else json.dumps(content)
        (folder / f"{name}.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_settings_are_read_as_in_transformers(name, tmp_path):
    if "null" in name:  # transformers ignores null in some places and fails in others
        want = image_config()
    else:
        want = from_transformers(checkpoint_with(tmp_path, preprocessor_config=CHECKPOINTS[name]))
    checkpoint_with(tmp_path, preprocessor_config=CHECKPOINTS[name])
    assert ImageProcessorConfig.from_pretrained(tmp_path, IMAGE_DEFAULTS) == want


@pytest.mark.parametrize("name", [name for name in CHECKPOINTS if "null" not in name])
def test_processor_config_has_precedence(name, tmp_path):
    processor = {"processor_class": "Qwen2VLProcessor", "image_processor": CHECKPOINTS[name]}
    checkpoint_with(tmp_path, processor_config=processor, preprocessor_config={"min_pixels": 77, "patch_size": 7})
    assert ImageProcessorConfig.from_pretrained(tmp_path, IMAGE_DEFAULTS) == from_transformers(tmp_path)


def test_processor_config_may_have_no_image_settings(tmp_path):
    checkpoint_with(tmp_path, processor_config={"processor_class": "X"}, preprocessor_config={"min_pixels": 77})
    assert ImageProcessorConfig.from_pretrained(tmp_path, IMAGE_DEFAULTS) == from_transformers(tmp_path)
    assert ImageProcessorConfig.from_pretrained(tmp_path, IMAGE_DEFAULTS).min_pixels == 77


def test_settings_saved_by_transformers_are_read(tmp_path):
    hf.Qwen2VLImageProcessorPil(min_pixels=999, max_pixels=8888, patch_size=16, **NORM).save_pretrained(tmp_path)
    assert ImageProcessorConfig.from_pretrained(str(tmp_path), IMAGE_DEFAULTS) == image_config(
        min_pixels=999, max_pixels=8888, patch_size=16, image_mean=(0.1, 0.2, 0.3), image_std=(0.4, 0.5, 0.6)
    )


def test_pixel_bounds_under_size_are_read(tmp_path):
    checkpoint_with(tmp_path, preprocessor_config={"size": {"min_pixels": 5, "max_pixels": 7}})
    config = ImageProcessorConfig.from_pretrained(tmp_path, IMAGE_DEFAULTS)
    assert (config.min_pixels, config.max_pixels) == (5, 7)


def test_the_bundled_checkpoint_is_read_as_in_transformers():
    assert ImageProcessorConfig.from_pretrained(BUNDLED, IMAGE_DEFAULTS) == from_transformers(BUNDLED)


def test_defaults_are_those_of_qwen2_vl(tmp_path):
    assert ImageProcessorConfig.from_pretrained(tmp_path, IMAGE_DEFAULTS) == image_config()
    assert from_transformers(checkpoint_with(tmp_path, preprocessor_config={})) == image_config()
    assert image_config().factor == 28


@pytest.mark.parametrize(
    "content, message",
    [
        ("[" * 100_000, r"preprocessor_config\.json is damaged: not valid JSON"),
        ("{", r"preprocessor_config\.json is damaged: not valid JSON \(.*\); download it again"),
        (b"\xff\xfe{}", r"preprocessor_config\.json is damaged: not valid JSON"),
        ("[]", r"preprocessor_config\.json: the settings must be a JSON object, got \[\]"),
        ({"patch_size": "14"}, r"preprocessor_config\.json: patch_size must be an integer of at least 1, got '14'"),
        ({"min_pixels": 0}, "min_pixels must be an integer of at least 1, got 0"),
        ({"min_pixels": 9, "max_pixels": 8}, "min_pixels is 9, above max_pixels 8"),
        ({"size": 224}, "size must have shortest_edge and longest_edge.*, got 224"),
        (
            {"size": {"height": 64, "width": 64}},
            "size must have shortest_edge and longest_edge, and nothing else, got .*",
        ),
        ({"image_mean": [0.5, float("nan"), 0.5]}, r"image_mean must be finite numbers.*, got \[0\.5, nan, 0\.5\]"),
        ({"image_std": 0}, r"image_std must be finite numbers, above 0, .*, got 0"),
        ({"image_mean": [1e308, 0, 0]}, r"must be finite numbers, at most 1e\+06"),
        ({"image_mean": [10**400, 0, 0]}, r"preprocessor_config\.json: int too large"),
        ({"image_std": 1e-30}, r"must be finite numbers, above 0, at most 1e\+06"),
        *(
            ({"rescale_factor": value}, "rescale_factor must be above 0, such as 1 / 255, got .*")
            for value in (-1, 1e-30, 10**30, 10**400, float("nan"), "1", True)
        ),
        ({"do_resize": "x" * 100_000}, "^.{100,400}$"),
        ({"image_std": "wide"}, r"preprocessor_config\.json: "),
        *(({f"do_{one}": False}, f"do_{one} is False.*only True") for one in ("resize", "rescale", "normalize")),
        ({"resample": 2}, "resample is 2, mmvllm supports only 3"),
    ],
)
def test_invalid_settings_are_named(content, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        ImageProcessorConfig.from_pretrained(checkpoint_with(tmp_path, preprocessor_config=content), IMAGE_DEFAULTS)


@pytest.mark.parametrize(
    "content, message",
    [
        ("{", r"processor_config\.json is damaged"),
        ({"image_processor": 5}, r"processor_config\.json: the settings must be a JSON object, got 5"),
        ({"image_processor": {"patch_size": 0}}, r"processor_config\.json: patch_size must be .*, got 0"),
    ],
)
def test_an_invalid_processor_config_is_named(content, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        ImageProcessorConfig.from_pretrained(checkpoint_with(tmp_path, processor_config=content), IMAGE_DEFAULTS)
