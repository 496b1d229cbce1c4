"""Videos -> uint8 patches: which frames are taken, to what size they are resized, their times and digests.

From decoded frames on, the result equals that of transformers' video processors for the Qwen-VL models, which need
torchvision: the same frames, grid and times, and after `normalize_video_patches` the same float32 values. Frames stay
uint8 up to the device.

    VideoInfo ── ClipPlan.frames ── indices ── a reader decodes them, each resized to ClipPlan.sizes ── Clip
    Clip ── VideoProcessor ── Media
"""

import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from numbers import Real
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import xxhash

from mmvllm.arguments import check_int
from mmvllm.errors import ParameterError, RequestError
from mmvllm.inputs import Media
from mmvllm.processors import qwen_vl_utils
from mmvllm.processors.bounds import pixel_bounds
from mmvllm.processors.clip import Clip, VideoInfo
from mmvllm.processors.image import ImageProcessorConfig, patchify

DEFAULT_FPS = 2.0  # of frames that are given as they are, and of sampling where neither request nor checkpoint say more


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
    """Raise ParameterError for anything but a number above 0 and at most 1000."""
    if isinstance(fps, bool) or not isinstance(fps, Real) or not 0 < fps <= 1000:
        raise ParameterError(name, fps, "a number above 0 and at most 1000")


@dataclass(frozen=True, slots=True)
class ClipPlan:
    """Which frames of a video are taken, and their sizes: what a request and its checkpoint say.

    Args:
        fps, num_frames, min_pixels, max_pixels: of the request, in place of the checkpoint's, with the meaning that
            they have in transformers.
        part: keys of the video's part of a message, with the meaning that they have in qwen-vl-utils; the checkpoint's
            bounds of pixels apply afterwards.
        max_tokens: a video of more placeholder tokens is refused before its frames are decoded.
    """

    config: VideoProcessorConfig
    fps: float | None = None
    num_frames: int | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    part: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None

    def frame_indices(self, info: VideoInfo) -> list[int]:
        """The frames to take, in order; an index may occur twice."""
        if self.part:
            return qwen_vl_utils.frame_indices(self.part, info)
        return self.config.frame_indices(info, self.fps, self.num_frames)

    def sizes(self, num_frames: int, height: int, width: int) -> list[tuple[int, int]]:
        """The sizes (height, width) to which each frame is resized, one after the other.

        Raises RequestError for bounds that cannot be met, and for a video of more than `max_tokens`.
        """
        c, sizes = self.config, [(height, width)]
        low, high = pixel_bounds(self.min_pixels, self.max_pixels, c.min_pixels, c.max_pixels)
        with naming_video():
            if self.part:
                sizes.append(qwen_vl_utils.frame_size(self.part, num_frames, height, width, c.factor))
            sizes.append(c.frame_size(num_frames, *sizes[-1], low, high))
        self._check_length(num_frames, *sizes[-1])
        return [size for before, size in pairwise(sizes) if size != before]

    def num_tokens(self, info: VideoInfo) -> int:
        """Placeholder tokens of a video; raises RequestError as `frame_indices` and `sizes` do."""
        num_frames = len(self.frame_indices(info))
        sizes = self.sizes(num_frames, info.height, info.width)
        return self._num_tokens(num_frames, *(sizes[-1] if sizes else (info.height, info.width)))

    def _num_tokens(self, num_frames: int, height: int, width: int) -> int:
        return -(-num_frames // self.config.temporal_patch_size) * (height * width // self.config.factor**2)

    def _check_length(self, num_frames: int, height: int, width: int) -> None:
        num_tokens = self._num_tokens(num_frames, height, width)
        if self.max_tokens is not None and num_tokens >= self.max_tokens:
            raise RequestError(
                f"{num_frames} frames of {width}x{height} pixels are {num_tokens} tokens, max_model_len is "
                f"{self.max_tokens}; lower fps, num_frames or max_pixels",
                value=num_tokens,
                limit=self.max_tokens,
            )


@contextmanager
def naming_video() -> Iterator[None]:
    """Errors of functions that sizes of images and of videos share speak of a video."""
    try:
        yield
    except RequestError as error:
        error.reason = re.sub("^image is", "a frame is", error.reason)
        raise


def resize_frame(frame: np.ndarray, sizes: Sequence[tuple[int, int]]) -> np.ndarray:
    """(height, width, 3) uint8 -> the last of `sizes`, as torchvision resizes uint8 tensors."""
    for size in sizes:
        image = torch.from_numpy(np.ascontiguousarray(frame)).permute(2, 0, 1)[None]
        resized = F.interpolate(image, size=size, mode="bicubic", antialias=True)[0]
        frame = resized.permute(1, 2, 0).numpy()
    return frame


class VideoProcessor:
    """Frames -> `Media`, with the settings of a checkpoint."""

    def __init__(self, config: VideoProcessorConfig):
        self.config = config

    def __call__(self, clip: Clip) -> Media:
        """Cut frames, which have their final size, into patches; an incomplete temporal patch repeats the last one."""
        c, frames, times = self.config, clip.frames, clip.times
        size = c.temporal_patch_size
        missing = -len(frames) % size
        frames = np.concatenate([frames, *[frames[-1:]] * missing]) if missing else frames
        times = times + times[-1:] * missing
        T, height, width, _ = frames.shape
        grid = (T // size, height // c.patch_size, width // c.patch_size)
        patches = patchify(frames.reshape(T // size, size, height, width, 3), c.patch_size, c.merge_size)
        seconds_per_patch = size / clip.sampled_fps
        return Media(
            "video",
            torch.from_numpy(patches.reshape(prod(grid), -1)),
            grid,
            tuple(_digest(own, grid, seconds_per_patch, c) for own in patches),
            tuple((times[i] + times[i + size - 1]) / 2 for i in range(0, T, size)),
            seconds_per_patch,
        )


def _digest(patches: np.ndarray, grid: tuple[int, int, int], seconds_per_patch: float, config: Any) -> bytes:
    digest = xxhash.xxh3_128(patches.data)
    digest.update(repr(("video", grid[1:], seconds_per_patch, config)).encode())
    return digest.digest()


def normalize_video_patches(patches: torch.Tensor, config: VideoProcessorConfig) -> torch.Tensor:
    """(P, C * T * p * p) uint8 -> float32, on the patches' device, with the rounding of transformers for videos.

    There rescaling is folded into mean and standard deviation, so that values differ from those of images in the last
    bit.
    """
    mean = torch.tensor(config.image_mean, device=patches.device) * (1.0 / config.rescale_factor)
    std = torch.tensor(config.image_std, device=patches.device) * (1.0 / config.rescale_factor)
    channels = patches.float().view(len(patches), len(mean), -1)
    return ((channels - mean[:, None]) / std[:, None]).view(patches.shape)
