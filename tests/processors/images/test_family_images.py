"""Each family's images, prepared as by transformers' PIL image processors: odd files, odd sizes and pixel bounds."""

import json
import warnings
from contextlib import suppress
from itertools import product
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from mmvllm.errors import ImageError
from mmvllm.models.vision_language import IMAGE_DEFAULTS
from mmvllm.processors.images.load import load_image
from mmvllm.processors.images.processor import ImageProcessor, ImageProcessorConfig
from tests.corpus.generate import corpus
from tests.helpers.engine.requests import noise_image
from tests.helpers.media.images import normalized
from tests.helpers.models.checkpoints import PATCH_14, PATCH_16

# As published, of Qwen2-VL and Qwen2.5-VL, and of Qwen3-VL dense and with experts.
PUBLISHED = {
    "patch 14": {**PATCH_14, "min_pixels": 3136, "max_pixels": 12845056},
    "patch 16": {**PATCH_16, "size": {"shortest_edge": 65536, "longest_edge": 16777216}},
}
MERGED = {"patch 14": 28, "patch 16": 32}


def bounded(name: str, low: int, high: int) -> dict:
    """Published settings with other pixel bounds, in the layout that the family's checkpoints have."""
    if "size" in PUBLISHED[name]:
        return {**PUBLISHED[name], "size": {"shortest_edge": low, "longest_edge": high}}
    return {**PUBLISHED[name], "min_pixels": low, "max_pixels": high}


class Both:
    """The image processors of transformers and of mmvllm, from one preprocessor_config.json."""

    def __init__(self, folder: Path, settings: dict):
        text = json.dumps({"image_processor_type": "Qwen2VLImageProcessor", **settings})
        (folder / "preprocessor_config.json").write_text(text)
        self.theirs = AutoImageProcessor.from_pretrained(folder, backend="pil")
        self.config = ImageProcessorConfig.from_pretrained(folder, IMAGE_DEFAULTS)
        self.ours = ImageProcessor(self.config)

    def assert_equal(self, image: Image.Image, name: str = "") -> None:
        want, got = self.theirs(image, return_tensors="pt"), self.ours(image)
        assert [list(got.grid)] == want["image_grid_thw"].tolist(), name
        assert torch.equal(normalized(got.patches, self.config), want["pixel_values"]), name


@pytest.fixture(scope="module")
def images() -> dict[str, Image.Image]:
    """The files of the corpus that are images."""
    loaded = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for file in corpus():
            with suppress(ImageError):
                loaded[file.name] = load_image(file.data)
    assert len(loaded) > 250
    return loaded


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_images_of_the_corpus(name, images, tmp_path):
    both = Both(tmp_path, PUBLISHED[name])
    for file, image in images.items():
        both.assert_equal(image, file)


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_around_both_pixel_bounds(name, tmp_path):
    """Areas of 4 and of 9 merged tokens, and sides that round to one multiple of a token or to the next."""
    side = MERGED[name]
    both = Both(tmp_path, bounded(name, 4 * side**2, 9 * side**2))
    sides = [near for tokens in (1, 2, 3, 4) for near in (tokens * side - 1, tokens * side, tokens * side + 1)]
    for width, height in product([1, side // 2, *sides, 5 * side + side // 2], repeat=2):
        both.assert_equal(noise_image(width, height, width + height), f"{width}x{height}")


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_around_the_published_pixel_bounds(name, tmp_path):
    both, side = Both(tmp_path, PUBLISHED[name]), MERGED[name]
    low, high = both.config.min_pixels, both.config.max_pixels
    assert (both.theirs.size["shortest_edge"], both.theirs.size["longest_edge"]) == (low, high)
    for bound, ratio, change in product((low, high), (1, 2, 3.7, 60, 199), (-side, -1, 0, 1, side)):
        height = max(1, round((bound / ratio) ** 0.5) + change)
        width = round(height * ratio)
        assert both.config.resized(height, width) == smart_resize(height, width, side, low, high)


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("size", [(1, 1), (1, 200), (200, 1), (56, 84), (13, 2600), (255, 257), (640, 480)])
def test_odd_sizes_with_the_published_settings(name, size, tmp_path):
    Both(tmp_path, PUBLISHED[name]).assert_equal(noise_image(*size))
