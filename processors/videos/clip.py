"""Frames sampled from a video, and their positions in it."""

from dataclasses import dataclass

import numpy as np

DEFAULT_FPS = 2.0  # of lists of frames, and of sampling if neither request nor checkpoint sets a rate
MIN_FPS, MAX_FPS = 1e-6, 1000  # accepted in requests; rates above the maximum in file headers are ignored


@dataclass(frozen=True, slots=True)
class VideoInfo:
    """The metadata of a video that are known before its frames are decoded.

    Args:
        total_num_frames: number of frames to sample from.
        fps: average frames per second.
        height, width: pixels of an upright frame.
    """

    total_num_frames: int
    fps: float
    height: int
    width: int

    @property
    def duration(self) -> float:
        """Duration in seconds."""
        return self.total_num_frames / self.fps


def is_later_shown(at: float, earlier: float, later: float, period: float) -> bool:
    """Return whether the later of two successive frames, given their start times, is taken for the time `at`.

    Usually the frame shown at that time is taken. A later frame is taken if it is nearer and begins within half a
    `period`, the average duration of a frame. At a constant rate, rounded times thus give the same frame as exact ones.
    """
    wait = later - at
    return wait < 0.1 * period or (wait < 0.5 * period and wait < at - earlier)


@dataclass(frozen=True, slots=True)
class Clip:
    """Frames sampled from a video, with the metadata that transformers uses.

    Args:
        frames: (T, height, width, 3) uint8.
        indices: the indices of the frames in the video, at `info.fps`.
    """

    frames: np.ndarray
    info: VideoInfo
    indices: tuple[int, ...]

    @property
    def sampled_fps(self) -> float:
        """Sampled frames per second of the video."""
        return len(self.indices) / self.info.total_num_frames * self.info.fps

    def seconds_per_patch(self, size: int) -> float:
        """Return the seconds from one temporal patch of `size` frames to the next."""
        return size / self.sampled_fps

    @property
    def times(self) -> list[float]:
        """Seconds from the start of the video, one per frame."""
        return [index / self.info.fps for index in self.indices]

    def patch_times(self, size: int) -> tuple[float, ...]:
        """Return seconds from the start of the video, one per temporal patch of `size` frames: the mean of its ends."""
        times = self.times + self.times[-1:] * (-len(self.indices) % size)
        return tuple((times[i] + times[i + size - 1]) / 2 for i in range(0, len(times), size))
