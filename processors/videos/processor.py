"""Convert videos to uint8 patches: select and resize frames, and compute their times and digests.

For the same decoded frames, the result equals transformers' video processors for the Qwen-VL models, which need
torchvision: the same frames, grid and times and, after normalization by `VideoProcessorConfig.pixel_table`, the same
float32 values. Patches stay uint8 up to the device.

    VideoInfo ── ClipPlan.frame_indices ── a reader decodes these frames, and resizes them to ClipPlan.sizes ── Clip
    Clip ── VideoProcessor ── MultiModalInput
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from mmvllm.errors import ParameterError, PromptTooLong
from mmvllm.inputs import Grid, MultiModalInput
from mmvllm.processors.digest import digest_of
from mmvllm.processors.images.bounds import pixel_bounds
from mmvllm.processors.images.processor import ImageProcessorConfig, normalized_levels, patchify
from mmvllm.processors.videos import qwen_vl_utils
from mmvllm.processors.videos.clip import DEFAULT_FPS, MAX_FPS, MIN_FPS, Clip, VideoInfo
from mmvllm.utils.arguments import check_int, is_number


@dataclass(frozen=True, slots=True)
class VideoProcessorConfig(ImageProcessorConfig):
    """How the frames of videos are sampled, resized, cut into patches and normalized for a checkpoint.

    Args:
        fps, num_frames: the default rate or number of sampled frames, which a request may replace; at most one is set.
        min_frames, max_frames: bounds of the number of frames that `fps` selects.
    """

    fps: float | None = None
    num_frames: int | None = None
    min_frames: int = 4
    max_frames: int = 768

    section = "video_processor"
    files = ("video_preprocessor_config.json", "preprocessor_config.json")

    def __post_init__(self):
        super(VideoProcessorConfig, self).__post_init__()
        for name in ("min_frames", "max_frames") + ("num_frames",) * (self.num_frames is not None):
            check_int(name, getattr(self, name))
        if self.fps is not None:
            check_fps("fps", self.fps)

    def pixel_table(self) -> torch.Tensor:
        """Return the normalized values (C, 256) float32 of all levels, with transformers' rounding for videos.

        transformers folds rescaling into mean and standard deviation for videos, so the values differ in the last bit
        from the values for images.
        """
        scale, levels = 1.0 / self.rescale_factor, torch.arange(256, dtype=torch.float32)
        mean, std = (torch.tensor(x, dtype=torch.float32) * scale for x in (self.image_mean, self.image_std))
        return normalized_levels(levels, mean, std)

    def frame_indices(self, info: VideoInfo, fps: float | None = None, num_frames: int | None = None) -> list[int]:
        """Return the indices of the frames to sample; `fps` or `num_frames` of a request replace the checkpoint's."""
        if fps is None and num_frames is None:
            fps, num_frames = self.fps, self.num_frames
            if fps is None and num_frames is None:
                fps = DEFAULT_FPS
        return self.sampled(info, fps, num_frames)

    @abstractmethod
    def sampled(self, info: VideoInfo, fps: float | None, num_frames: int | None) -> list[int]:
        """Return the indices of the frames that `fps` or `num_frames` selects, as in transformers."""

    @abstractmethod
    def frame_size(self, num_frames: int, height: int, width: int, low: int, high: int) -> tuple[int, int]:
        """Return the (height, width) that frames are resized to; families interpret the pixel bounds differently."""


def check_fps(name: str, fps: Any) -> None:
    """Raise ParameterError for anything but a number from `MIN_FPS` to `MAX_FPS`."""
    if not is_number(fps) or not MIN_FPS <= fps <= MAX_FPS:
        raise ParameterError(name, fps, f"a number from {MIN_FPS} to {MAX_FPS}")


class Resize(NamedTuple):
    """A size that frames are resized to.

    Args:
        as_floats: resize floats and round once, like torchvision's older transforms, which qwen-vl-utils uses.
            Otherwise resize uint8, rounding after each dimension, like transforms v2, which transformers uses.
    """

    height: int
    width: int
    as_floats: bool = False


@dataclass(frozen=True, slots=True)
class ClipPlan:
    """Selects the frames of a video and their sizes, from the options of a request and its checkpoint.

    Args:
        fps, num_frames, min_pixels, max_pixels: the request's options, which replace the checkpoint's and mean the same
            as in transformers.
        do_sample_frames: the request's option; False takes all frames.
        part: options of the video's message part, which mean the same as in qwen-vl-utils; the checkpoint's pixel
            bounds apply afterwards.
        max_tokens: a video with this many placeholder tokens or more is refused before its frames are decoded.
    """

    config: VideoProcessorConfig
    fps: float | None = None
    num_frames: int | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    do_sample_frames: bool | None = None
    part: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    is_preview: ClassVar[bool] = False  # True if the video is also read with another plan, which logs the warnings

    def frame_indices(self, info: VideoInfo) -> list[int]:
        """Return the indices of the frames to sample, in order; an index may occur twice."""
        if self.part:
            return qwen_vl_utils.frame_indices(self.part, info)
        if self.do_sample_frames is False:
            return list(range(info.total_num_frames))
        return self.config.frame_indices(info, self.fps, self.num_frames)

    def sizes(self, num_frames: int, height: int, width: int) -> list[Resize]:
        """Return the sizes to which each frame is resized, one after the other.

        Raises RequestError for bounds that cannot be met, and for a video of `max_tokens` or more.
        """
        if not self.part:
            return self.final_sizes(num_frames, height, width)
        size = qwen_vl_utils.frame_size(self.part, num_frames, height, width, self.config.factor)
        return [Resize(*size, as_floats=True)] * (size != (height, width)) + self.final_sizes(num_frames, *size)

    def final_sizes(self, num_frames: int, height: int, width: int) -> list[Resize]:
        """Return the size within the pixel bounds of request and checkpoint; [] if frames already have this size."""
        c = self.config
        low, high = pixel_bounds(self.min_pixels, self.max_pixels, c.min_pixels, c.max_pixels)
        size = c.frame_size(num_frames, height, width, low, high)
        self._check_length(num_frames, *size)
        return [Resize(*size, as_floats=bool(self.part))] * (size != (height, width))

    def timed(self, clip: Clip) -> Clip:
        """Return the clip with the metadata from which the times of its frames are computed."""
        return qwen_vl_utils.timed(self.part, clip) if self.part else clip

    def grid(self, info: VideoInfo) -> Grid:
        """Return the size of a video in patches; raises RequestError as `frame_indices` and `sizes` do."""
        return self._grid(len(self.frame_indices(info)), info)

    def num_tokens(self, info: VideoInfo) -> int:
        """Return the number of placeholder tokens of a video; raises RequestError as `grid` does."""
        return prod(self.grid(info)) // self.config.merge_size**2

    def num_tokens_of(self, num_frames: int, info: VideoInfo) -> int:
        """Return the number of placeholder tokens for `num_frames` frames; raises RequestError as `sizes` does."""
        return prod(self._grid(num_frames, info)) // self.config.merge_size**2

    def _grid(self, num_frames: int, info: VideoInfo) -> Grid:
        c = self.config
        height, width = resized_to(self.sizes(num_frames, info.height, info.width), info.height, info.width)
        return -(-num_frames // c.temporal_patch_size), height // c.patch_size, width // c.patch_size

    def _check_length(self, num_frames: int, height: int, width: int) -> None:
        num_tokens = -(-num_frames // self.config.temporal_patch_size) * (height * width // self.config.factor**2)
        if self.max_tokens is not None and num_tokens >= self.max_tokens:
            problem = f"{num_frames} frames of {width}x{height} pixels are {num_tokens} tokens"
            advice = "lower fps, num_frames or max_pixels"
            raise PromptTooLong(problem, advice, value=num_tokens, limit=self.max_tokens)


def resized_to(sizes: Sequence[Resize], height: int, width: int) -> tuple[int, int]:
    """Return the (height, width) of a frame after `resize_frame`."""
    return sizes[-1][:2] if sizes else (height, width)


def shrunk(height: int, width: int, max_height: int, max_width: int) -> Resize:
    """Return the size of a frame within bounds, with about the same aspect ratio; frames are never enlarged."""
    scale = min(max_height / height, max_width / width, 1.0)
    return Resize(max(round(height * scale), 1), max(round(width * scale), 1))


def resize_frame(frame: np.ndarray, sizes: Sequence[Resize]) -> np.ndarray:
    """Resize (height, width, 3) uint8 to each of `sizes`, one after the other, with torchvision's pixel values."""
    for size in sizes:
        # torch expects a writable array; arrays of PIL images are read-only.
        image = torch.from_numpy(np.require(frame, requirements=("C", "W"))).permute(2, 0, 1)[None]
        if size.as_floats:
            resized = F.interpolate(image.float(), size=size[:2], mode="bicubic", antialias=True)
            resized = resized.clamp(0, 255).round().byte()
        else:
            resized = F.interpolate(image, size=size[:2], mode="bicubic", antialias=True)
        frame = resized[0].permute(1, 2, 0).numpy()
    return frame


class VideoProcessor:
    """Converts clips to `MultiModalInput` with the settings of a checkpoint."""

    def __init__(self, config: VideoProcessorConfig):
        self.config = config

    def __call__(self, clip: Clip) -> MultiModalInput:
        """Cut frames of final size into patches; the last frame is repeated to complete its temporal patch."""
        c, frames, size = self.config, clip.frames, self.config.temporal_patch_size
        missing = -len(frames) % size
        frames = np.concatenate([frames, *[frames[-1:]] * missing]) if missing else frames
        T, height, width, _ = frames.shape
        grid = (T // size, height // c.patch_size, width // c.patch_size)
        patches = patchify(frames.reshape(T // size, size, height, width, 3), c.patch_size, c.merge_size)
        seconds_per_patch = clip.seconds_per_patch(size)
        return MultiModalInput(
            "video",
            torch.from_numpy(patches.reshape(prod(grid), -1)),
            grid,
            tuple(_digest(own, grid, seconds_per_patch, c) for own in patches),
            clip.patch_times(size),
            seconds_per_patch,
        )


def _digest(patches: np.ndarray, grid: tuple[int, int, int], seconds_per_patch: float, config: Any) -> bytes:
    return digest_of(patches.data, repr(("video", grid[1:], seconds_per_patch, config)).encode())
