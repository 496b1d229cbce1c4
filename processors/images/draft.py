"""Decode JPEGs at a reduced scale, which is faster but gives other pixel values than the full scale."""

import math
from typing import NamedTuple

from PIL import Image

_KEY = "mmvllm.source_size"  # in `Image.info` of images decoded at a reduced scale


class Draft(NamedTuple):
    """The target of a JPEG that is resized after decoding: at most `max_pixels`, with sides of at least `min_side`."""

    max_pixels: int
    min_side: int

    def apply(self, image: Image.Image) -> None:
        """Make an opened JPEG decode at the smallest scale (1/8, 1/4, 1/2 or 1) with enough pixels for the target."""
        scale = min(1.0, math.sqrt(self.max_pixels / max(1, image.width * image.height)))
        image.draft(None, tuple(max(self.min_side, math.ceil(side * scale)) for side in image.size))


def source_size(image: Image.Image) -> tuple[int, int]:
    """Return the (width, height) of an upright image at its full scale."""
    return image.info.get(_KEY, image.size)


def with_source_size(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Return the image, marked as decoded at a reduced scale unless `size` is its size."""
    image.info.pop(_KEY, None)
    if size != image.size:
        image.info[_KEY] = size
    return image
