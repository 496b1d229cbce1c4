"""Qwen2.5-VL as the rest of mmvllm sees it."""

from mmvllm.config import ModelConfig
from mmvllm.models.qwen2_5_vl.config import parse_config
from mmvllm.models.qwen2_5_vl.vision import Qwen25VisionTransformer
from mmvllm.models.vision_language import QwenVLFamily


class Qwen25VLFamily(QwenVLFamily):
    """Checkpoints of arXiv 2502.13923."""

    architectures = ("Qwen2_5_VLForConditionalGeneration",)
    vision_transformer = Qwen25VisionTransformer

    def parse_config(self, architecture: str, raw: dict, generation: dict) -> ModelConfig:
        return parse_config(architecture, raw, generation)


FAMILY = Qwen25VLFamily()
