"""Configs of Qwen2-VL and of text-only Qwen2."""

from dataclasses import dataclass, fields

from mmvllm.arguments import check_int
from mmvllm.config import ModelConfig, VisionConfig
from mmvllm.models.hf_config import decoder_fields, json_object

TEXT_ONLY = "Qwen2ForCausalLM"
# Of configs that leave them out.
TOKEN_IDS = {"image_token_id": 151655, "vision_start_token_id": 151652, "vision_end_token_id": 151653}
MROPE_SECTION = (16, 24, 24)


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen2VLVisionConfig(VisionConfig):
    """The ViT. Defaults are those of transformers' class, because published configs rely on them."""

    depth: int = 32
    embed_dim: int = 1280
    num_heads: int = 16
    in_channels: int = 3
    patch_size: int = 14
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    hidden_size: int = 3584
    mlp_ratio: int = 4
    hidden_act: str = "quick_gelu"

    @property
    def intermediate_size(self) -> int:
        return self.mlp_ratio * self.embed_dim

    @property
    def out_hidden_size(self) -> int:
        return self.hidden_size


def parse_config(architecture: str, raw: dict, generation: dict) -> ModelConfig:
    decoder = decoder_fields(raw, generation)
    if architecture == TEXT_ONLY:
        return ModelConfig(architecture=architecture, **decoder | {"mrope_section": None})
    decoder["mrope_section"] = decoder["mrope_section"] or MROPE_SECTION
    vision = _vision_config(json_object("vision_config", raw.get("vision_config", {})))
    if vision.hidden_size != decoder["hidden_size"]:
        raise ValueError(
            f"vision_config's hidden_size is {vision.hidden_size}, must be the decoder's, {decoder['hidden_size']}"
        )
    token_ids = {name: raw.get(name, default) for name, default in TOKEN_IDS.items()}
    return ModelConfig(architecture=architecture, **decoder, **token_ids, vision=vision)


def _vision_config(raw: dict) -> Qwen2VLVisionConfig:
    known = [field.name for field in fields(Qwen2VLVisionConfig)]
    vision = Qwen2VLVisionConfig(**{name: raw[name] for name in known if name in raw})
    for name in known:
        if name != "hidden_act":
            check_int(f"vision_config's {name}", getattr(vision, name))
    if vision.embed_dim % vision.num_heads:
        raise ValueError(
            f"vision_config's embed_dim is {vision.embed_dim}, must be a multiple of num_heads, {vision.num_heads}"
        )
    return vision
