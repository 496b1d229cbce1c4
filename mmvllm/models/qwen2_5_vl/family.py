"""Qwen2.5-VL as the rest of mmvllm sees it."""

from mmvllm.models.qwen2_5_vl.config import parse_config
from mmvllm.models.qwen2_5_vl.vision import Qwen25VLVisionTransformer
from mmvllm.models.vision_language import QwenVLFamily


class Qwen25VLFamily(QwenVLFamily):
    """Checkpoints of arXiv 2502.13923."""

    architectures = ("Qwen2_5_VLForConditionalGeneration",)
    vision_transformer = Qwen25VLVisionTransformer
    parse_config = staticmethod(parse_config)


FAMILY = Qwen25VLFamily()
