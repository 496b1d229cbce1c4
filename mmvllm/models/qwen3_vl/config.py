"""Configs of Qwen3-VL, dense and as a mixture of experts, and of text-only Qwen3."""

from dataclasses import dataclass
from math import isqrt

from mmvllm.config import ExpertsConfig, ModelConfig, VisionConfig
from mmvllm.models.hf_config import decoder_fields, integers, special_token_ids, text_config, vision_fields
from mmvllm.utils.arguments import check_int

DENSE, SPARSE, TEXT_ONLY = "Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration", "Qwen3ForCausalLM"
MROPE_SECTION = (24, 20, 20)  # default for configs that leave it out
HEAD_DIM = 128  # default for dense configs that leave it out

# Defaults of transformers' Qwen3VLVisionConfig, for configs that leave them out.
VISION_DEFAULTS = {
    "depth": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 16,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": (8, 16, 24),
}
# Defaults of transformers' Qwen3VLMoeTextConfig.
EXPERTS_DEFAULTS = {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408}


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3VLVisionConfig(VisionConfig):
    """The config of a ViT with learned positions and DeepStack (arXiv 2406.04334).

    Args:
        num_position_embeddings: number of learned positions, which form a square grid.
        deepstack_visual_indexes: blocks whose merged outputs are added to hidden states of the decoder: the output of
            the i-th block in this list after the decoder's i-th layer.
    """

    num_position_embeddings: int
    deepstack_visual_indexes: tuple[int, ...]

    def __post_init__(self) -> None:
        super(Qwen3VLVisionConfig, self).__post_init__()
        indexes = self.deepstack_visual_indexes
        if sorted({*indexes} & {*range(self.depth)}) != list(indexes):
            raise ValueError(
                f"deepstack_visual_indexes must be increasing indexes of the {self.depth} blocks, got {list(indexes)}"
            )
        if isqrt(self.num_position_embeddings) ** 2 != self.num_position_embeddings:
            raise ValueError(f"num_position_embeddings must be a square number, got {self.num_position_embeddings}")

    @property
    def mm_embed_size(self) -> int:
        return (1 + len(self.deepstack_visual_indexes)) * self.out_hidden_size


def parse_config(architecture: str, raw: dict, generation: dict) -> ModelConfig:
    if text_config(raw).get("attention_bias"):
        raise ValueError("asks for attention_bias, which is not supported")
    decoder = decoder_fields(raw, generation) | {"qkv_bias": False, "qk_norm": True}
    # Text configs may contradict it, because their class has another default; transformers ignores their value.
    decoder["tie_word_embeddings"] = bool(raw.get("tie_word_embeddings"))
    if architecture != SPARSE:
        decoder["head_dim"] = text_config(raw).get("head_dim", HEAD_DIM)
    if architecture == TEXT_ONLY:
        return ModelConfig(architecture=architecture, **decoder | {"mrope_section": None})
    decoder |= {"mrope_section": decoder["mrope_section"] or MROPE_SECTION, "mrope_interleaved": True}
    if architecture == SPARSE:
        decoder["experts"] = _experts_config(text_config(raw))
    ids = special_token_ids(raw)
    return ModelConfig(architecture=architecture, **decoder, **ids, vision=_vision_config(raw))


def _vision_config(raw: dict) -> Qwen3VLVisionConfig:
    fields = vision_fields(raw, VISION_DEFAULTS)
    fields["deepstack_visual_indexes"] = integers("deepstack_visual_indexes", fields["deepstack_visual_indexes"])
    return Qwen3VLVisionConfig(embed_dim=fields.pop("hidden_size"), **fields)


def _experts_config(text: dict) -> ExpertsConfig:
    # transformers 5 saves `num_experts` as `num_local_experts`.
    text = {"num_experts": text["num_local_experts"], **text} if "num_local_experts" in text else text
    sizes = {name: text.get(name, default) for name, default in EXPERTS_DEFAULTS.items()}
    step = text.get("decoder_sparse_step", 1)
    for name, size in {**sizes, "decoder_sparse_step": step}.items():
        check_int(name, size)
    layers, dense = range(text["num_hidden_layers"]), integers("mlp_only_layers", text.get("mlp_only_layers", ()))
    return ExpertsConfig(
        num_experts=sizes["num_experts"],
        num_experts_per_tok=sizes["num_experts_per_tok"],
        intermediate_size=sizes["moe_intermediate_size"],
        dense_layers=frozenset(i for i in layers if i in dense or (i + 1) % step),
    )
