"""Models of the Qwen-VL families: a ViT, whose embeddings replace the placeholders, and a decoder.

Without a ViT, the same class serves text-only checkpoints.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

from torch import Tensor, nn

from mmvllm.config import ModelConfig, VisionConfig
from mmvllm.grounding import BoxFormat
from mmvllm.inputs import Grid, MediaRules
from mmvllm.kernels.common.kv_cache import KVCache
from mmvllm.kernels.splice import splice
from mmvllm.layers.attention import AttentionBackend
from mmvllm.layers.batch import Batch
from mmvllm.layers.vocabulary import VocabularyHead
from mmvllm.models.decoder import Decoder
from mmvllm.models.interface import Model, ModelFamily
from mmvllm.models.splitting import rank_config
from mmvllm.models.video import VIDEO_DEFAULTS
from mmvllm.models.vision import PatchLayout
from mmvllm.processes.ranks import SINGLE, Operation, Ranks
from mmvllm.processors.images.processor import ImageProcessorConfig
from mmvllm.processors.videos.processor import VideoProcessorConfig

# Defaults of transformers' Qwen2VLImageProcessor, which serves all these families, for checkpoints that leave them out.
IMAGE_DEFAULTS = ImageProcessorConfig(
    min_pixels=56 * 56,
    max_pixels=28 * 28 * 1280,
    patch_size=14,
    temporal_patch_size=2,
    merge_size=2,
    rescale_factor=1 / 255,
    image_mean=(0.48145466, 0.4578275, 0.40821073),
    image_std=(0.26862954, 0.26130258, 0.27577711),
)

# Prefixes of tensor names, as published and as transformers saves them; the first match counts.
_PREFIXES = {
    "model.language_model.": "decoder.",
    "language_model.model.": "decoder.",
    "model.visual.": "visual.",
    "visual.": "visual.",
    "language_model.lm_head.": "lm_head.",
    "model.": "decoder.",
}
_MERGED = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}


class VisionLanguageModel(Model):
    """A ViT (None in a text-only checkpoint), a decoder and a head; every rank has the whole ViT.

    Args:
        config: config of the whole model.
        make_vit: creates the ViT of a VisionConfig, which maps patches (P, patch_dim) and a layout to embeddings.
        published: maps parts of our parameter names to the corresponding parts of published tensor names.
    """

    def __init__(
        self,
        config: ModelConfig,
        backend: type[AttentionBackend],
        make_vit: Callable[[VisionConfig], nn.Module],
        published: Mapping[str, str],
        ranks: Ranks = SINGLE,
    ):
        super().__init__()
        self.config, self.published, self.ranks = rank_config(config, ranks.size), published, ranks
        self.visual = make_vit(config.vision) if config.vision else None
        self.decoder = Decoder(config, backend, ranks)
        self.lm_head = VocabularyHead(self.config.hidden_size, self.config.vocab_size, ranks)
        self.tied = {}
        if config.tie_word_embeddings:
            self.tied, self.lm_head.weight = {"lm_head.weight": "decoder.embed_tokens.weight"}, None

    def tie_head(self) -> None:
        if self.tied:
            self.lm_head.weight = self.decoder.embed_tokens.weight
            self.lm_head.process_weights_after_loading()

    def layout(self, grids: Sequence[Grid]) -> PatchLayout:
        return self.visual.layout(grids)

    def encode_patches(self, patches: Tensor, layout: PatchLayout) -> Tensor:
        return self.visual(patches, layout)

    def hidden_states(self, batch: Batch, mm_embeds: Tensor, kv_cache: KVCache) -> Tensor:
        x = self.decoder.embed_tokens(batch.input_ids)  # (N, C)
        embeddings, *deepstack = mm_embeds.split(self.config.hidden_size, dim=1)
        splice(x, embeddings, batch.mm_token_indices)
        return self.decoder(x, kv_cache, batch, deepstack)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden)

    def operations(self, num_tokens: int, num_logits: Sequence[int]) -> list[Operation]:
        if self.ranks.size == 1:
            return []
        width, hidden_size = self.decoder.embed_tokens.weight.shape
        dtype = self.decoder.embed_tokens.weight.dtype
        # The embedding, and in each layer attention and the MLP.
        sums = [Operation("all_reduce", (num_tokens, hidden_size), dtype)] * (1 + 2 * len(self.decoder.layers))
        return sums + [Operation("gather", (number, width), dtype) for number in num_logits if number]

    def parameter_for(self, name: str) -> tuple[str, int | None] | None:
        if name.endswith(".inv_freq"):  # saved rotary frequencies
            return None
        for prefix, ours in _PREFIXES.items():
            if name.startswith(prefix):
                name = ours + name.removeprefix(prefix)
                break
        for ours, theirs in self.published.items():
            name = name.replace(theirs, ours)
        parts = name.split(".")
        if len(parts) >= 2 and parts[-2] in _MERGED:
            merged, part = _MERGED[parts[-2]]
            return ".".join([*parts[:-2], merged, parts[-1]]), part
        return name, None

    def checkpoint_name(self, parameter: str, part: int | None) -> str:
        for name, (merged, index) in _MERGED.items():
            if index == part:
                parameter = parameter.replace(f".{merged}.", f".{name}.")
        for ours, theirs in self.published.items():
            parameter = parameter.replace(ours, theirs, 1)
        return parameter


class QwenVLFamily(ModelFamily):
    """Base class of the Qwen-VL families: the media tokens of a prompt and the structure of the model."""

    vision_transformer: ClassVar[type[nn.Module]]
    boxes: ClassVar[BoxFormat]  # how the models are trained to write boxes and points
    published: ClassVar[Mapping[str, str]] = MappingProxyType({"decoder.": "model."})  # see `VisionLanguageModel`

    video_defaults: ClassVar[VideoProcessorConfig] = VIDEO_DEFAULTS

    def image_config(self, folder: Path) -> ImageProcessorConfig:
        return ImageProcessorConfig.from_pretrained(folder, IMAGE_DEFAULTS)

    def video_config(self, folder: Path) -> VideoProcessorConfig:
        return type(self.video_defaults).from_pretrained(folder, self.video_defaults)

    def media_rules(self, config: ModelConfig) -> MediaRules | None:
        if config.vision is None:
            return None
        return MediaRules(
            image_token_id=config.image_token_id,
            video_token_id=config.video_token_id if config.video_token_id < config.vocab_size else None,
            start_token_id=config.vision_start_token_id,
            end_token_id=config.vision_end_token_id,
            start="<|vision_start|>",
            image="<|image_pad|>",
            video="<|video_pad|>",
            end="<|vision_end|>",
            merge_size=config.vision.spatial_merge_size,
            patch_dim=config.vision.patch_dim,
            boxes=self.boxes,
        )

    def build(
        self,
        config: ModelConfig,
        attention: type[AttentionBackend],
        vision_attention: type[AttentionBackend] | None = None,
        ranks: Ranks = SINGLE,
    ) -> VisionLanguageModel:
        # Text-only checkpoints of all families use the tensor names of a plain decoder.
        published = QwenVLFamily.published if config.vision is None else self.published
        make_vit = partial(self.vision_transformer, backend=vision_attention or attention)
        return VisionLanguageModel(config, attention, make_vit, published, ranks)
