"""Read animated and multi-page images with Pillow, and treat them as videos."""

import io
import logging
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import accumulate
from typing import TypeVar

import numpy as np
from PIL import Image, UnidentifiedImageError

from mmvllm.errors import VideoError
from mmvllm.processors.images.decode import Reserve, readable_formats
from mmvllm.processors.images.pixels import upright_rgb
from mmvllm.processors.images.scan import TIFF_MAGIC, check_opened, read_in_few_pieces, scan
from mmvllm.processors.videos.clip import DEFAULT_FPS, Clip, VideoInfo, is_later_shown
from mmvllm.processors.videos.decode import BYTES_PER_PIXEL, guarded, sampled
from mmvllm.processors.videos.limits import VideoLimits
from mmvllm.processors.videos.processor import ClipPlan

T = TypeVar("T")

HEAD_BYTES = 12  # enough to tell such an image from a video
DEFAULT_MILLISECONDS = 100  # of frames that declare no duration, as in browsers

_logger = logging.getLogger(__name__)

_MAGIC = (b"GIF87a", b"GIF89a", b"\x89PNG\r\n\x1a\n", *TIFF_MAGIC)


def is_animation(head: bytes) -> bool:
    """Return whether a file with this head is an image in a format that may have several frames."""
    is_webp = head.startswith(b"RIFF") and head[8:12] == b"WEBP"
    return head.startswith(_MAGIC) or is_webp or head[4:12] in (b"ftypavif", b"ftypavis")


def animation_info(data: bytes, name: str, limits: VideoLimits, reserve: Reserve) -> VideoInfo:
    """Return the metadata of an animated image, like `video_info`."""
    return _read(data, name, limits, reserve, lambda animation: animation.info)


def decode_animation(data: bytes, name: str, plan: ClipPlan, limits: VideoLimits, reserve: Reserve) -> Clip:
    """Decode the frames of an animated image, like `decode_video`; transparency is blended with white."""

    def take(animation: "_Animation") -> Clip:
        return sampled(name, animation.info, animation.frame_at, plan, limits, reserve)

    return _read(data, name, limits, reserve, take)


class _Animation:
    """An opened animated image, whose frames are read by index at a constant frame rate."""

    def __init__(self, image: Image.Image, name: str, limits: VideoLimits):
        self._image, self._name = image, name
        # The first image of such a PNG is shown only where animations are not supported.
        self._first = 1 if getattr(image, "default_image", False) else 0
        number = max(getattr(image, "n_frames", 1) - self._first, 1)
        *starts, end = accumulate(self._durations(number), initial=0)
        number, self._starts = len(starts), [start / 1000 for start in starts]
        self._image.seek(self._first)
        upright = upright_rgb(image)
        self.info = VideoInfo(number, 1000 * number / end, upright.height, upright.width)
        limits.check(name, self.info)

    def frame_at(self, index: int) -> np.ndarray:
        """Return the frame for the time index / average rate (see `is_later_shown`)."""
        at, period = index / self.info.fps, 1 / self.info.fps
        shown = bisect_right(self._starts, at) - 1
        while shown + 1 < len(self._starts) and is_later_shown(at, *self._starts[shown : shown + 2], period):
            shown += 1
        self._image.seek(self._first + shown)
        return np.array(upright_rgb(self._image))

    def _durations(self, number: int) -> Iterator[float]:
        """Yield the milliseconds of each frame up to the first one that cannot be decoded."""
        for i in range(number):
            try:
                self._image.seek(self._first + i)
                self._image.load()
            except Exception:  # Pillow's readers raise any exception for a damaged file
                if i == 0:
                    raise
                _logger.warning("%s: has %d frames, but only %d can be decoded", self._name, number, i)
                return
            is_page = self._image.format == "TIFF"
            duration = 1000 / DEFAULT_FPS if is_page else self._image.info.get("duration") or DEFAULT_MILLISECONDS
            if duration < 0:  # libwebp counts milliseconds in 32 bits
                raise VideoError(self._name, f"frame {i} lasts {duration} ms; write the animation with shorter times")
            yield duration


def _read(data: bytes, name: str, limits: VideoLimits, reserve: Reserve, use: Callable[[_Animation], T]) -> T:
    formats = readable_formats(limits.animated)

    def read() -> T:
        scan(data)
        try:
            image = Image.open(io.BytesIO(data), formats=formats)
        except UnidentifiedImageError:
            raise VideoError(name, f"is not an animated image in {', '.join(formats)}") from None
        except Image.DecompressionBombError as error:
            raise VideoError(name, f"too large to decode ({error}); shrink it first") from None
        with closing(image):
            limits.check_size(name, image.height, image.width)
            check_opened(image)
            read_in_few_pieces(image, len(data))
            with reserve(image.height * image.width * BYTES_PER_PIXEL):
                animation = _Animation(image, name, limits)
            return use(animation)

    return guarded(name, read)
