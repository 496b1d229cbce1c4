"""How Qwen3-VL samples the frames of a video and limits their sizes."""

import math
from dataclasses import dataclass

import numpy as np

from mmvllm.processors.images.processor import FRAME, check_aspect_ratio
from mmvllm.processors.videos.clip import VideoInfo
from mmvllm.processors.videos.processor import VideoProcessorConfig


@dataclass(frozen=True, slots=True)
class Qwen3VLVideoProcessorConfig(VideoProcessorConfig):
    """The rules of transformers' Qwen3VLVideoProcessor: pixel limits apply to all frames together."""

    def sampled(self, info: VideoInfo, fps: float | None, num_frames: int | None) -> list[int]:
        total = info.total_num_frames
        if num_frames is None:
            num_frames = min(max(int(total / info.fps * fps), self.min_frames), self.max_frames, total)
        return np.linspace(0, total - 1, num_frames).round().astype(int).tolist()

    def frame_size(self, num_frames: int, height: int, width: int, low: int, high: int) -> tuple[int, int]:
        size, factor = self.temporal_patch_size, self.factor
        num_frames = max(num_frames, size)  # transformers refuses a single frame, which fills a temporal patch here
        check_aspect_ratio(height, width, FRAME)
        if min(height, width) < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
        resized = [round(side / factor) * factor for side in (height, width)]
        num_pixels = round(num_frames / size) * size * resized[0] * resized[1]
        if num_pixels > high:
            beta = math.sqrt(num_frames * height * width / high)
            resized = [max(factor, math.floor(side / beta / factor) * factor) for side in (height, width)]
        elif num_pixels < low:
            beta = math.sqrt(low / (num_frames * height * width))
            resized = [math.ceil(side * beta / factor) * factor for side in (height, width)]
        return resized[0], resized[1]


# Defaults of transformers' Qwen3VLVideoProcessor, for checkpoints that leave them out.
VIDEO_DEFAULTS = Qwen3VLVideoProcessorConfig(
    min_pixels=128 * 32 * 32,
    max_pixels=768 * 32 * 32,
    patch_size=16,
    temporal_patch_size=2,
    merge_size=2,
    rescale_factor=1 / 255,
    image_mean=(0.5, 0.5, 0.5),
    image_std=(0.5, 0.5, 0.5),
    fps=2.0,
)
