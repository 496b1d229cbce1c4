"""Qwen2-VL as the rest of mmvllm sees it."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from mmvllm.config import ModelConfig
from mmvllm.inputs import MediaItem, MediaRules
from mmvllm.layers.attention import AttentionBackend
from mmvllm.models.interface import ModelFamily
from mmvllm.models.qwen2_vl.config import TEXT_ONLY, parse_config
from mmvllm.models.qwen2_vl.model import Qwen2VL
from mmvllm.models.qwen2_vl.processing import IMAGE_DEFAULTS, PLACEHOLDER_TEXTS
from mmvllm.processors.image import ImageProcessorConfig
from mmvllm.processors.positions import mrope_positions


class Qwen2VLFamily(ModelFamily):
    """Checkpoints of arXiv 2409.12191."""

    architectures = ("Qwen2VLForConditionalGeneration", TEXT_ONLY)

    def parse_config(self, architecture: str, raw: dict, generation: dict) -> ModelConfig:
        return parse_config(architecture, raw, generation)

    def image_config(self, folder: Path) -> ImageProcessorConfig:
        return ImageProcessorConfig.from_pretrained(folder, IMAGE_DEFAULTS)

    def media_rules(self, config: ModelConfig) -> MediaRules | None:
        if config.vision is None:
            return None
        return MediaRules(
            image_token_id=config.image_token_id,
            start_token_id=config.vision_start_token_id,
            end_token_id=config.vision_end_token_id,
            **PLACEHOLDER_TEXTS,
            merge_size=config.vision.spatial_merge_size,
            patch_dim=config.vision.patch_dim,
            positions=partial(_positions, config.vision.spatial_merge_size),
        )

    def build(self, config: ModelConfig, attention: type[AttentionBackend]) -> Qwen2VL:
        return Qwen2VL(config, attention)


def _positions(merge_size: int, num_tokens: int, items: Sequence[MediaItem]) -> tuple[np.ndarray, int]:
    spans = [span for item in items for span in item.spans]
    return mrope_positions(num_tokens, spans, [item.grid for item in items], merge_size)


FAMILY = Qwen2VLFamily()
