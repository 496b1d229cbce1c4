"""Configs of Qwen2-VL and of text-only Qwen2."""

from mmvllm.config import ModelConfig, VisionConfig
from mmvllm.models.hf_config import decoder_fields, special_token_ids, vision_fields

TEXT_ONLY = "Qwen2ForCausalLM"
MROPE_SECTION = (16, 24, 24)  # default for configs that leave it out

# Defaults of transformers' Qwen2VLVisionConfig, because published configs rely on them.
VISION_DEFAULTS = {
    "depth": 32,
    "embed_dim": 1280,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "hidden_size": 3584,
    "mlp_ratio": 4,
    "hidden_act": "quick_gelu",
}


def parse_config(architecture: str, raw: dict, generation: dict) -> ModelConfig:
    decoder = decoder_fields(raw, generation) | {"qkv_bias": True, "qk_norm": False}
    if architecture == TEXT_ONLY:
        return ModelConfig(architecture=architecture, **decoder | {"mrope_section": None})
    decoder["mrope_section"] = decoder["mrope_section"] or MROPE_SECTION
    ids = special_token_ids(raw)
    return ModelConfig(architecture=architecture, **decoder, **ids, vision=_vision_config(raw))


def _vision_config(raw: dict) -> VisionConfig:
    fields = vision_fields(raw, VISION_DEFAULTS)
    intermediate_size = fields.pop("mlp_ratio") * fields["embed_dim"]
    return VisionConfig(out_hidden_size=fields.pop("hidden_size"), intermediate_size=intermediate_size, **fields)
