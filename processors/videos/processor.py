"""Videos -> uint8 patches: which frames are taken, to what size they are resized, their times and digests.

From decoded frames on, the result equals that of transformers' video processors for the Qwen-VL models, which need
torchvision: the same frames, grid and times, and normalised by `VideoProcessorConfig.pixel_table` the same float32
values. Frames stay uint8 up to the device.

    VideoInfo ── ClipPlan.frames ── indices ── a reader decodes them, each resized to ClipPlan.sizes ── Clip
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
    """How the frames of videos are taken, resized, cut into patches and normalised for a checkpoint.

    Args:
        fps, num_frames: how many frames are taken where a request does not say it; at most one of them.
        min_frames, max_frames: bounds of the number of frames that `fps` asks for.
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
        """(C, 256) float32: what each level of each channel is normalised to, with transformers' rounding for videos.

        There rescaling is folded into mean and standard deviation, so the values differ in the last bit from the
        values for images.
        """
        scale, levels = 1.0 / self.rescale_factor, torch.arange(256, dtype=torch.float32)
        mean, std = (torch.tensor(x, dtype=torch.float32) * scale for x in (self.image_mean, self.image_std))
        return normalized_levels(levels, mean, std)

    def frame_indices(self, info: VideoInfo, fps: float | None = None, num_frames: int | None = None) -> list[int]:
        """The frames to take; `fps` or `num_frames` of a request replace the checkpoint's."""
        if fps is None and num_frames is None:
            fps, num_frames = self.fps, self.num_frames
            if fps is None and num_frames is None:
                fps = DEFAULT_FPS
        return self.sampled(info, fps, num_frames)

    @abstractmethod
    def sampled(self, info: VideoInfo, fps: float | None, num_frames: int | None) -> list[int]:
        """The indices of the frames that one of `fps` and `num_frames` asks for, as transformers chooses them."""

    @abstractmethod
    def frame_size(self, num_frames: int, height: int, width: int, low: int, high: int) -> tuple[int, int]:
        """The (height, width) that frames are resized to, for bounds of pixels as the checkpoint means them."""


def check_fps(name: str, fps: Any) -> None:
    """Raise ParameterError for anything but a number from `MIN_FPS` to `MAX_FPS`."""
    if not is_number(fps) or not MIN_FPS <= fps <= MAX_FPS:
        raise ParameterError(name, fps, f"a number from {MIN_FPS} to {MAX_FPS}")


class Resize(NamedTuple):
    """A size that frames are resized to.

    Args:
        as_floats: as torchvision's older transforms do it, which qwen-vl-utils uses: they round once. Transforms v2,
            which transformers uses, resize uint8 and round after the columns and after the rows.
    """

    height: int
    width: int
    as_floats: bool = False


@dataclass(frozen=True, slots=True)
class ClipPlan:
    """Which frames of a video are taken, and their sizes: what a request and its checkpoint say.

    Args:
        fps, num_frames, min_pixels, max_pixels: of the request, in place of the checkpoint's, with the meaning that
            they have in transformers.
        do_sample_frames: of the request, too; False takes all frames.
        part: keys of the video's part of a message, with the meaning that they have in qwen-vl-utils; the checkpoint's
            bounds of pixels apply afterwards.
        max_tokens: a video of more placeholder tokens is refused before its frames are decoded.
    """

    config: VideoProcessorConfig
    fps: float | None = None
    num_frames: int | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    do_sample_frames: bool | None = None
    part: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    is_preview: ClassVar[bool] = False  # of a video that is read with another plan, too, which gives the warnings

    def frame_indices(self, info: VideoInfo) -> list[int]:
        """The frames to take, in order; an index may occur twice."""
        if self.part:
            return qwen_vl_utils.frame_indices(self.part, info)
        if self.do_sample_frames is False:
            return list(range(info.total_num_frames))
        return self.config.frame_indices(info, self.fps, self.num_frames)

    def sizes(self, num_frames: int, height: int, width: int) -> list[Resize]:
        """The sizes (height, width) to which each frame is resized, one after the other.

        Raises RequestError for bounds that cannot be met, and for a video of more than `max_tokens`.
        """
        if not self.part:
            return self.final_sizes(num_frames, height, width)
        size = qwen_vl_utils.frame_size(self.part, num_frames, height, width, self.config.factor)
        return [Resize(*size, as_floats=True)] * (size != (height, width)) + self.final_sizes(num_frames, *size)

    def final_sizes(self, num_frames: int, height: int, width: int) -> list[Resize]:
        """The size within the bounds of pixels of request and checkpoint; none if it is the given one."""
        c = self.config
        low, high = pixel_bounds(self.min_pixels, self.max_pixels, c.min_pixels, c.max_pixels)
        size = c.frame_size(num_frames, height, width, low, high)
        self._check_length(num_frames, *size)
        return [Resize(*size, as_floats=bool(self.part))] * (size != (height, width))

    def timed(self, clip: Clip) -> Clip:
        """The clip with the metadata that say when its frames are shown."""
        return qwen_vl_utils.timed(self.part, clip) if self.part else clip

    def grid(self, info: VideoInfo) -> Grid:
        """Sizes of a video in patches; raises RequestError as `frame_indices` and `sizes` do."""
        return self._grid(len(self.frame_indices(info)), info)

    def num_tokens(self, info: VideoInfo) -> int:
        """Placeholder tokens of a video; raises RequestError as `grid` does."""
        return prod(self.grid(info)) // self.config.merge_size**2

    def num_tokens_of(self, num_frames: int, info: VideoInfo) -> int:
        """Placeholder tokens for `num_frames` frames; raises RequestError as `sizes` does."""
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
    """The (height, width) of a frame after `resize_frame`."""
    return sizes[-1][:2] if sizes else (height, width)


def shrunk(height: int, width: int, max_height: int, max_width: int) -> Resize:
    """The size of a small frame with about the same aspect ratio; none is enlarged."""
    scale = min(max_height / height, max_width / width, 1.0)
    return Resize(max(round(height * scale), 1), max(round(width * scale), 1))


def resize_frame(frame: np.ndarray, sizes: Sequence[Resize]) -> np.ndarray:
    """(height, width, 3) uint8 -> the last of `sizes`, with the values of torchvision."""
    for size in sizes:
        # Writable, as torch wants it: arrays of PIL images are not.
        image = torch.from_numpy(np.require(frame, requirements=("C", "W"))).permute(2, 0, 1)[None]
        if size.as_floats:
            resized = F.interpolate(image.float(), size=size[:2], mode="bicubic", antialias=True)
            resized = resized.clamp(0, 255).round().byte()
        else:
            resized = F.interpolate(image, size=size[:2], mode="bicubic", antialias=True)
        frame = resized[0].permute(1, 2, 0).numpy()
    return frame


class VideoProcessor:
    """Frames -> `MultiModalInput`, with the settings of a checkpoint."""

    def __init__(self, config: VideoProcessorConfig):
        self.config = config

    def __call__(self, clip: Clip) -> MultiModalInput:
        """Cut frames, which have their final size, into patches; an incomplete temporal patch repeats the last one."""
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
