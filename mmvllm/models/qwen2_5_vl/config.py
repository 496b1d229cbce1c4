"""Configs of Qwen2.5-VL."""

from dataclasses import dataclass

from mmvllm.config import ModelConfig, VisionConfig
from mmvllm.models.hf_config import decoder_fields, integers, special_token_ids, vision_fields

MROPE_SECTION = (16, 24, 24)  # default for configs that leave it out

# Defaults of transformers' Qwen2_5_VLVisionConfig, because published configs rely on them.
VISION_DEFAULTS = {
    "depth": 32,
    "hidden_size": 3584,
    "hidden_act": "silu",
    "intermediate_size": 3420,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "tokens_per_second": 4,
    "window_size": 112,
    "out_hidden_size": 3584,
    "fullatt_block_indexes": (7, 15, 23, 31),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen25VLVisionConfig(VisionConfig):
    """The config of a ViT with window attention.

    Args:
        tokens_per_second: positions per second of video on the time axis of M-RoPE.
        window_size: side of a window in pixels.
        fullatt_block_indexes: blocks whose patches attend to their whole frame.
    """

    tokens_per_second: int
    window_size: int
    fullatt_block_indexes: frozenset[int]

    def __post_init__(self) -> None:
        super(Qwen25VLVisionConfig, self).__post_init__()
        if self.hidden_act != "silu":
            raise ValueError(f"the ViT's hidden_act must be 'silu', got {self.hidden_act!r}")
        if self.window_size < self.patch_size * self.spatial_merge_size:
            raise ValueError(
                f"window_size must be at least the {self.patch_size * self.spatial_merge_size} pixels of one merged "
                f"token, got {self.window_size}"
            )

    @property
    def window_rows(self) -> int:
        """Number of merged tokens along a window's side."""
        return self.window_size // self.spatial_merge_size // self.patch_size


def parse_config(architecture: str, raw: dict, generation: dict) -> ModelConfig:
    decoder = decoder_fields(raw, generation) | {"qkv_bias": True, "qk_norm": False}
    decoder["mrope_section"] = decoder["mrope_section"] or MROPE_SECTION
    ids = special_token_ids(raw)
    return ModelConfig(architecture=architecture, **decoder, **ids, vision=_vision_config(raw))


def _vision_config(raw: dict) -> Qwen25VLVisionConfig:
    fields = vision_fields(raw, VISION_DEFAULTS)
    fields["fullatt_block_indexes"] = frozenset(integers("fullatt_block_indexes", fields["fullatt_block_indexes"]))
    return Qwen25VLVisionConfig(embed_dim=fields.pop("hidden_size"), **fields)
