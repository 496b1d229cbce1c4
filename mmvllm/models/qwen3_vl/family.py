"""The Qwen3-VL model family."""

from dataclasses import replace
from types import MappingProxyType

from mmvllm.config import ModelConfig
from mmvllm.grounding import BoxFormat
from mmvllm.inputs import MediaRules
from mmvllm.models.qwen3_vl.config import DENSE, SPARSE, TEXT_ONLY, parse_config
from mmvllm.models.qwen3_vl.video import VIDEO_DEFAULTS
from mmvllm.models.qwen3_vl.vision import Qwen3VLVisionTransformer
from mmvllm.models.vision_language import QwenVLFamily


class Qwen3VLFamily(QwenVLFamily):
    """Qwen3-VL checkpoints (arXiv 2511.21631) and text-only Qwen3 (arXiv 2505.09388)."""

    architectures = (DENSE, SPARSE, TEXT_ONLY)
    vision_transformer = Qwen3VLVisionTransformer
    published = MappingProxyType({"decoder.": "model.language_model.", "visual.": "model.visual.", ".fc": ".linear_fc"})
    video_defaults = VIDEO_DEFAULTS
    parse_config = staticmethod(parse_config)
    boxes = BoxFormat("json", scale=1000)

    def media_rules(self, config: ModelConfig) -> MediaRules | None:
        rules = super().media_rules(config)
        return rules and replace(rules, timestamp="<{:.1f} seconds>")


FAMILY = Qwen3VLFamily()
