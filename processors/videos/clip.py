"""Frames that were taken from a video, and where in it they stood."""

from dataclasses import dataclass

import numpy as np

DEFAULT_FPS = 2.0  # of frames that are given as they are, and of sampling where neither request nor checkpoint say more
MIN_FPS, MAX_FPS = 1e-6, 1000  # that may be asked for, or that a header is believed to have


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


def is_later_shown(at: float, earlier: float, later: float, period: float) -> bool:
    """Which of two successive frames is taken for the time `at`, given when they begin.

    It is the one that is shown then. A frame that begins up to half a `period`, the average time of a frame, afterwards
    is taken if it is nearer: at a constant rate, rounded times give the same frame as exact ones.
    """
    wait = later - at
    return wait < 0.1 * period or (wait < 0.5 * period and wait < at - earlier)


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

    @property
    def times(self) -> list[float]:
        """Seconds from the start of the video, one per frame."""
        return [index / self.info.fps for index in self.indices]

    def patch_times(self, size: int) -> tuple[float, ...]:
        """Seconds from the start of the video, one per temporal patch of `size` frames: the mean of its ends."""
        times = self.times + self.times[-1:] * (-len(self.indices) % size)
        return tuple((times[i] + times[i + size - 1]) / 2 for i in range(0, len(times), size))
