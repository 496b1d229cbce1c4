"""Clips made with PyAV: frames whose content says which they are, and a full decode to compare with."""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import ClassVar

import av
import numpy as np

from mmvllm.processors.videos.clip import VideoInfo
from mmvllm.processors.videos.processor import Resize
from tests.helpers.scheduling import as_scheduled


def moving(number: int, height: int, width: int, seed: int = 0) -> np.ndarray:
    """(number, height, width, 3) uint8: a gradient whose brightness says the frame, with a bar that moves across it."""
    y, x = np.mgrid[0:height, 0:width]
    frames = np.empty((number, height, width, 3), dtype=np.uint8)
    for t in range(number):
        frames[t, ..., 0] = (x * 2 + t * 5 + seed * 31) % 200
        frames[t, ..., 1] = (y * 3 + t * 9) % 200
        frames[t, ..., 2] = 40 + t % 180
        frames[t, :, (t * 4) % width :][:, :6] = 255
    return frames


def make_clip(
    path: Path,
    number: int = 24,
    fps: float | Fraction = 8,
    size: tuple[int, int] = (64, 96),
    codec: str = "libx264",
    *,
    times: Sequence[float] | None = None,
    gop: int = 8,
    rotation: int = 0,
    pix_fmt: str = "yuv420p",
    seed: int = 0,
    frames: np.ndarray | None = None,
    format: str | None = None,
    options: dict[str, str] | None = None,
) -> Path:
    """Write a clip of `number` moving frames of `size` (height, width); its container follows from the suffix.

    Args:
        times: seconds at which frames are shown, for a variable rate; with a time base of 1 ms.
        gop: frames from one keyframe to the next.
        rotation: in degrees, as metadata.
        options: of the container.
    """
    frames = moving(number, *size, seed) if frames is None else frames
    with as_scheduled(), av.open(str(path), "w", format=format, options=options) as container:
        stream = container.add_stream(codec, rate=Fraction(fps).limit_denominator(1001))
        stream.height, stream.width, stream.pix_fmt = frames.shape[1], frames.shape[2], pix_fmt
        stream.codec_context.gop_size = gop
        if times is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        if rotation:
            stream.set_display_rotation(rotation)
        for i, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            if times is not None:
                frame.pts, frame.time_base = round(times[i] * 1000), Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def full_decode(path: Path) -> list[tuple[float, np.ndarray]]:
    """(seconds, (height, width, 3) uint8) of every frame, as stored."""
    with av.open(str(path)) as container:
        return [(frame.time, frame.to_ndarray(format="rgb24")) for frame in container.decode(video=0)]


def frame_at(full: list[tuple[float, np.ndarray]], index: int, fps: float) -> np.ndarray:
    """The frame of a full decode for the time index / fps: the one shown, or one that begins just afterwards."""
    times, at = [time - full[0][0] for time, _ in full], index / fps
    shown = max((i for i, time in enumerate(times) if time < at + 0.1 / fps), default=0)
    after = shown + 1
    if after < len(times) and times[after] - at < min(0.5 / fps, at - times[shown]):
        return full[after][1]
    return full[shown][1]


@dataclass(frozen=True)
class FramesAt:
    """In place of a `ClipPlan`: the frames at `indices`, or all of them, in their own size or in `size`."""

    indices: tuple[int, ...] | None = None
    size: tuple[int, int] | None = None
    part: Mapping = field(default_factory=dict)
    fps: float | None = None
    num_frames: int | None = None
    is_preview: ClassVar[bool] = False

    def frame_indices(self, info: VideoInfo) -> list[int]:
        return list(range(info.total_num_frames) if self.indices is None else self.indices)

    def sizes(self, num_frames: int, height: int, width: int) -> list[Resize]:
        return [] if self.size is None else [Resize(*self.size)]


def make_sound(path: Path, seconds: float = 1.0, has_cover: bool = False) -> Path:
    """Write a file with silence and no video, or with a cover image alone."""
    with av.open(str(path), "w") as container:
        sound = container.add_stream("aac", rate=48000)
        if has_cover:
            image = container.add_stream("mjpeg", rate=1)
            image.width, image.height, image.pix_fmt = 16, 16, "yuvj420p"
            image.disposition = av.stream.Disposition.attached_pic
            container.mux(image.encode(av.VideoFrame.from_ndarray(moving(1, 16, 16)[0], format="rgb24")))
            container.mux(image.encode())
        for i in range(int(seconds * 48)):
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 2000), np.float32), format="flt", layout="stereo")
            frame.rate, frame.pts = 48000, i * 1000
            container.mux(sound.encode(frame))
        container.mux(sound.encode())
    return path


def declare_seconds(data: bytes, seconds: float) -> bytes:
    """The bytes of a Matroska file whose header declares another duration."""
    at = data.index(b"\x44\x89\x88") + 3
    return data[:at] + struct.pack(">d", seconds * 1000) + data[at + 8 :]


def make_long_clip(path: Path, seconds: int, fps: int, size: tuple[int, int], gop: int) -> Path:
    """Write a video quickly: a still image with a stripe whose brightness says the frame."""
    height, width = size
    pixels = moving(1, height, width)[0]
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=fps, options={"preset": "ultrafast"})
        stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
        stream.codec_context.gop_size = gop
        planes = av.VideoFrame.from_ndarray(pixels, format="rgb24").reformat(format="yuv420p").to_ndarray()
        for i in range(seconds * fps):
            planes[:16, :width] = i % 200
            container.mux(stream.encode(av.VideoFrame.from_ndarray(planes, format="yuv420p")))
        container.mux(stream.encode())
    return path
