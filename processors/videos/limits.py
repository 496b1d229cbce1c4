"""Limits of videos, checked before frames are decoded."""

from dataclasses import dataclass

from mmvllm.errors import VideoError
from mmvllm.processors.images.load import MAX_SOURCE_PIXELS
from mmvllm.processors.videos.clip import VideoInfo

ANIMATED = ("GIF", "WEBP", "AVIF", "PNG", "TIFF")  # Pillow's names


@dataclass(frozen=True, slots=True)
class VideoLimits:
    """The limits of a video; by default, everything that FFmpeg reads from local files is accepted.

    Args:
        containers, codecs: FFmpeg's names of demuxers and decoders; if given, FFmpeg runs no others.
        animated: Pillow's names of the formats of animated images.
        max_frame_pixels: maximum pixels of a frame; `max_pixels`: of all sampled frames, before they are resized.
        max_seconds: maximum duration.
    """

    containers: tuple[str, ...] = ()
    codecs: tuple[str, ...] = ()
    animated: tuple[str, ...] = ANIMATED
    max_frame_pixels: int = MAX_SOURCE_PIXELS
    max_pixels: int | None = None
    max_seconds: float | None = None

    def check(self, name: str, info: VideoInfo) -> None:
        """Raise VideoError for frames that are too large, and for a video that is too long."""
        self.check_size(name, info.height, info.width)
        self.check_seconds(name, info.duration)

    def check_size(self, name: str, height: int, width: int) -> None:
        """Raise VideoError for frames that are too large."""
        if height * width > self.max_frame_pixels:
            size = f"{width}x{height}"
            raise VideoError(name, f"has frames of {size}, more than {self.max_frame_pixels} pixels; shrink it first")

    def check_seconds(self, name: str, seconds: float) -> None:
        """Raise VideoError for a video that is too long."""
        if self.max_seconds is not None and seconds > self.max_seconds:
            raise VideoError(name, f"lasts {seconds:.0f} s, more than {self.max_seconds:g} s; cut it first")

    def check_frames(self, name: str, info: VideoInfo, num_frames: int) -> None:
        """Raise VideoError if the sampled frames have too many pixels."""
        if self.max_pixels is not None and num_frames * info.height * info.width > self.max_pixels:
            frames = f"{num_frames} frames of {info.width}x{info.height}"
            raise VideoError(name, f"{frames} are more than {self.max_pixels} pixels; take fewer or shrink the video")


ANY_VIDEO = VideoLimits()
