"""Random images, encoded files, and image processor settings."""

import io
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from PIL import Image

from mmvllm.kernels.normalize import normalize
from mmvllm.models.vision_language import IMAGE_DEFAULTS
from mmvllm.processors.images.processor import ImageProcessorConfig


def noise(width: int, height: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    """Uniform noise: (height, width, channels) uint8."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)


def encode(image: Image.Image, file_format: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, file_format, **options)
    return buffer.getvalue()


RGB = noise(13, 7)
PNG = encode(Image.fromarray(RGB))


def image_config(**settings: Any) -> ImageProcessorConfig:
    """The settings of Qwen2-VL, except for the given ones."""
    return replace(IMAGE_DEFAULTS, **settings)


def normalized(patches: torch.Tensor, config: ImageProcessorConfig) -> torch.Tensor:
    """Patches of images or of videos as float32, normalized as the engine does it."""
    return normalize(patches, config.pixel_table())
