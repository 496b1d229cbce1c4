"""How Qwen2-VL and Qwen2.5-VL sample the frames of a video and limit their sizes."""

import math
from dataclasses import dataclass

import torch

from mmvllm.processors.images.processor import FRAME, smart_resize
from mmvllm.processors.videos.clip import VideoInfo
from mmvllm.processors.videos.processor import VideoProcessorConfig


@dataclass(frozen=True, slots=True)
class QwenVideoProcessorConfig(VideoProcessorConfig):
    """The rules of transformers' Qwen2VLVideoProcessor: pixel limits apply to each frame."""

    def sampled(self, info: VideoInfo, fps: float | None, num_frames: int | None) -> list[int]:
        # transformers raises for fewer frames than requested; here all frames are used.
        total, size = info.total_num_frames, self.temporal_patch_size
        if fps is None:
            number = round(num_frames / size) * size
        else:
            most = math.floor(min(self.max_frames, total) / size) * size
            number = math.floor(min(max(total / info.fps * fps, self.min_frames), most, total) / size) * size
        number = min(max(number, 1), total)
        # Rounding in float32 may give one more index, sometimes beyond the last frame.
        return [index for index in torch.arange(0, total, total / number).int().tolist() if index < total]

    def frame_size(self, num_frames: int, height: int, width: int, low: int, high: int) -> tuple[int, int]:
        return smart_resize(height, width, self.factor, low, high, noun=FRAME)


# Defaults of transformers' Qwen2VLVideoProcessor, for checkpoints that leave them out.
VIDEO_DEFAULTS = QwenVideoProcessorConfig(
    min_pixels=128 * 28 * 28,
    max_pixels=768 * 28 * 28,
    patch_size=14,
    temporal_patch_size=2,
    merge_size=2,
    rescale_factor=1 / 255,
    image_mean=(0.48145466, 0.4578275, 0.40821073),
    image_std=(0.26862954, 0.26130258, 0.27577711),
)
