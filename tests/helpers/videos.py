"""Clips made with PyAV: frames whose content says which they are, and a full decode to compare with."""

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np


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
) -> Path:
    """Write a clip of `number` moving frames of `size` (height, width); its container follows from the suffix.

    Args:
        times: seconds at which frames are shown, for a variable rate; with a time base of 1 ms.
        gop: frames from one keyframe to the next.
        rotation: in degrees, as metadata.
    """
    frames = moving(number, *size, seed) if frames is None else frames
    with av.open(str(path), "w", format=format) as container:
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
