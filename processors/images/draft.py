"""The reduced scales at which a JPEG can be decoded: faster, and with other pixel values than at its full scale."""

import math
from typing import NamedTuple

from PIL import Image

_KEY = "mmvllm.source_size"  # in `Image.info` of what was decoded at a reduced scale


class Draft(NamedTuple):
    """How small a JPEG may be decoded that will be resized to at most `max_pixels` and at least `min_side`."""

    max_pixels: int
    min_side: int

    def apply(self, image: Image.Image) -> None:
        """Have an opened JPEG decoded at the smallest of its scales (1/8, 1/4, 1/2, 1) that loses no pixel of these."""
        scale = min(1.0, math.sqrt(self.max_pixels / max(1, image.width * image.height)))
        image.draft(None, tuple(max(self.min_side, math.ceil(side * scale)) for side in image.size))


def source_size(image: Image.Image) -> tuple[int, int]:
    """The (width, height) that an upright image has at its full scale."""
    return image.info.get(_KEY, image.size)


def with_source_size(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """The image, marked as decoded at a reduced scale unless this is its size."""
    image.info.pop(_KEY, None)
    if size != image.size:
        image.info[_KEY] = size
    return image
