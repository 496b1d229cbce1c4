"""Bounds on the number of pixels of a resized image; does not import torch, so settings are checked fast."""

from mmvllm.errors import ParameterError, RequestError
from mmvllm.processors.images.load import MAX_SOURCE_PIXELS


def pixel_bounds(min_pixels: int | None, max_pixels: int | None, default_min: int, default_max: int) -> tuple[int, int]:
    """Return the (min, max) to resize with; a single given bound moves the other's default if they would cross."""
    low = min_pixels or min(default_min, max_pixels or default_min)
    high = max_pixels or max(default_max, low)
    check_bounds(low, high)
    return low, high


def check_bounds(low: int, high: int) -> None:
    """Raise RequestError for bounds that contradict each other or are too large."""
    if low > high:
        raise RequestError(f"min_pixels is {low}, above max_pixels {high}", param="min_pixels", value=low, limit=high)
    if low > MAX_SOURCE_PIXELS:  # small images would be enlarged to this
        raise ParameterError("min_pixels", low, f"at most {MAX_SOURCE_PIXELS}")
