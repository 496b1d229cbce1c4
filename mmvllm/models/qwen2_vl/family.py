"""The Qwen2-VL model family."""

from mmvllm.grounding import BoxFormat
from mmvllm.models.qwen2_vl.config import TEXT_ONLY, parse_config
from mmvllm.models.qwen2_vl.vision import Qwen2VLVisionTransformer
from mmvllm.models.vision_language import QwenVLFamily


class Qwen2VLFamily(QwenVLFamily):
    """Qwen2-VL checkpoints (arXiv 2409.12191) and text-only Qwen2."""

    architectures = ("Qwen2VLForConditionalGeneration", TEXT_ONLY)
    vision_transformer = Qwen2VLVisionTransformer
    parse_config = staticmethod(parse_config)
    boxes = BoxFormat("tokens", scale=1000)


FAMILY = Qwen2VLFamily()
