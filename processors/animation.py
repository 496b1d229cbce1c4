"""Frames of animated images and of images with several pages by Pillow, as of a video."""

import io
from bisect import bisect_left
from collections.abc import Callable
from contextlib import closing
from itertools import accumulate
from typing import TypeVar

import numpy as np
from PIL import Image, UnidentifiedImageError

from mmvllm.errors import VideoError
from mmvllm.processors.clip import Clip, VideoInfo
from mmvllm.processors.decode import Reserve, readable_formats
from mmvllm.processors.decode_video import guarded, sampled
from mmvllm.processors.pixels import upright_rgb
from mmvllm.processors.scan import TIFF_MAGIC, scan
from mmvllm.processors.video import DEFAULT_FPS, ClipPlan
from mmvllm.processors.video_limits import VideoLimits

T = TypeVar("T")

HEAD_BYTES = 12  # that tell such an image from a video
DEFAULT_SECONDS = 0.1  # of frames that declare no time, as browsers show them

_MAGIC = (b"GIF87a", b"GIF89a", b"\x89PNG\r\n\x1a\n", *TIFF_MAGIC)
_DECODED_TIMES = ("WEBP", "AVIF")  # whose frames have times only once they are decoded


def is_animation(head: bytes) -> bool:
    """Whether a file that begins so is an image in a format that may have several frames."""
    is_webp = head.startswith(b"RIFF") and head[8:12] == b"WEBP"
    return head.startswith(_MAGIC) or is_webp or head[4:12] in (b"ftypavif", b"ftypavis")


def animation_info(data: bytes, name: str, limits: VideoLimits) -> VideoInfo:
    """As `video_info`."""
    return _read(data, name, limits, lambda animation: animation.info)


def decode_animation(data: bytes, name: str, plan: ClipPlan, limits: VideoLimits, reserve: Reserve) -> Clip:
    """As `decode_video`; transparency is laid over white."""

    def take(animation: "_Animation") -> Clip:
        return sampled(name, animation.info, animation.frame_at, plan, limits, reserve)

    return _read(data, name, limits, take)


class _Animation:
    """An opened image, whose frames are read at the indices of a constant rate."""

    def __init__(self, image: Image.Image, name: str, limits: VideoLimits):
        self._image = image
        # Such a PNG shows its first image only where animations are not supported.
        self._first = 1 if getattr(image, "default_image", False) else 0
        number = max(getattr(image, "n_frames", 1) - self._first, 1)
        limits.check(name, VideoInfo(1, 1.0, image.height, image.width))
        *self._starts, end = accumulate((self._seconds(i) for i in range(number)), initial=0.0)
        self._image.seek(self._first)
        upright = upright_rgb(image)
        self.info = VideoInfo(number, number / end, upright.height, upright.width)
        limits.check(name, self.info)

    def frame_at(self, index: int) -> np.ndarray:
        """What is shown at index / average rate, give or take half a frame."""
        shown = bisect_left(self._starts, (index + 0.5) / self.info.fps) - 1
        self._image.seek(self._first + max(shown, 0))
        return np.asarray(upright_rgb(self._image))

    def _seconds(self, i: int) -> float:
        self._image.seek(self._first + i)
        if self._image.format == "TIFF":
            return 1 / DEFAULT_FPS
        if self._image.format in _DECODED_TIMES:
            self._image.load()
        return float(self._image.info.get("duration") or 0) / 1000 or DEFAULT_SECONDS


def _read(data: bytes, name: str, limits: VideoLimits, use: Callable[[_Animation], T]) -> T:
    formats = readable_formats(limits.animated)

    def read() -> T:
        scan(data)
        try:
            image = Image.open(io.BytesIO(data), formats=formats)
        except UnidentifiedImageError:
            raise VideoError(name, f"is not an animated image in {', '.join(formats)}") from None
        with closing(image):
            return use(_Animation(image, name, limits))

    return guarded(name, read)
