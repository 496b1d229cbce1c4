"""Frames that were taken from a video, and where in it they stood."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class VideoInfo:
    """What is known of a video before its frames are decoded.

    Args:
        total_num_frames: that frames can be taken from.
        fps: frames per second, on average.
        height, width: pixels of an upright frame.
    """

    total_num_frames: int
    fps: float
    height: int
    width: int

    @property
    def duration(self) -> float:
        """Seconds."""
        return self.total_num_frames / self.fps


@dataclass(frozen=True, slots=True)
class Clip:
    """Frames taken from a video, with transformers' metadata of where they come from.

    Args:
        frames: (T, height, width, 3) uint8.
        indices: of the frames in the video, at `info.fps`.
    """

    frames: np.ndarray
    info: VideoInfo
    indices: tuple[int, ...]

    @property
    def sampled_fps(self) -> float:
        """Frames that were taken, per second of the video."""
        return len(self.indices) / self.info.total_num_frames * self.info.fps

    def seconds_per_patch(self, size: int) -> float:
        """Seconds from one temporal patch of `size` frames to the next."""
        return size / self.sampled_fps

    def patch_times(self, size: int) -> tuple[float, ...]:
        """Seconds from the start of the video, one per temporal patch of `size` frames: the mean of its ends."""
        times = [index / self.info.fps for index in self.indices]
        times += times[-1:] * (-len(times) % size)
        return tuple((times[i] + times[i + size - 1]) / 2 for i in range(0, len(times), size))
