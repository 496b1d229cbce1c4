"""The Qwen2.5-VL model family."""

from dataclasses import replace

from mmvllm.config import ModelConfig
from mmvllm.grounding import BoxFormat
from mmvllm.inputs import MediaRules
from mmvllm.models.qwen2_5_vl.config import parse_config
from mmvllm.models.qwen2_5_vl.vision import Qwen25VLVisionTransformer
from mmvllm.models.vision_language import QwenVLFamily


class Qwen25VLFamily(QwenVLFamily):
    """Qwen2.5-VL checkpoints (arXiv 2502.13923)."""

    architectures = ("Qwen2_5_VLForConditionalGeneration",)
    vision_transformer = Qwen25VLVisionTransformer
    parse_config = staticmethod(parse_config)
    boxes = BoxFormat("json")

    def media_rules(self, config: ModelConfig) -> MediaRules | None:
        rules = super().media_rules(config)
        return rules and replace(rules, tokens_per_second=config.vision.tokens_per_second)


FAMILY = Qwen25VLFamily()
