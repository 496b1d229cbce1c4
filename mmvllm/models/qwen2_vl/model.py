"""Qwen2-VL: a ViT whose rows replace the placeholders' embeddings in front of a Qwen2 decoder.

The same class without a ViT serves text-only Qwen2 checkpoints.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mmvllm.batch import Batch
from mmvllm.config import ModelConfig
from mmvllm.inputs import Grid
from mmvllm.kernels.splice import splice
from mmvllm.layers.attention import AttentionBackend
from mmvllm.layers.linear import Linear
from mmvllm.models.decoder import Decoder
from mmvllm.models.interface import Model
from mmvllm.models.qwen2_vl.vision import VisionTransformer

# Where checkpoints keep the two halves: as published, and as transformers 5 saves them. Longest prefixes first.
_PREFIXES = {
    "model.language_model.": "decoder.",
    "language_model.model.": "decoder.",
    "model.visual.": "visual.",
    "visual.": "visual.",
    "language_model.lm_head.": "lm_head.",
    "lm_head.": "lm_head.",
    "model.": "decoder.",
}
_MERGED = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}


class Qwen2VL(Model):
    """One ViT (None in a text-only checkpoint), one decoder, one head."""

    def __init__(self, config: ModelConfig, backend: type[AttentionBackend]):
        super().__init__()
        self.config = config
        self.visual = VisionTransformer(config.vision, backend) if config.vision else None
        self.decoder = Decoder(config, backend)
        self.lm_head = None if config.tie_word_embeddings else self._head()

    def _head(self) -> Linear:
        return Linear(self.config.hidden_size, self.config.vocab_size, bias=False)

    def tie_head(self) -> None:
        if self.lm_head is None:
            with torch.device("meta"):
                self.lm_head = self._head()
            self.lm_head.weight = self.decoder.embed_tokens.weight

    def encode(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        return self.visual(patches, list(grids))  # (M, C)

    def forward(self, batch: Batch, media_rows: Tensor, kv_cache: Tensor) -> Tensor:
        x = self.decoder.embed_tokens(batch.input_ids)  # (N, C)
        splice(x, media_rows, batch.image_at)
        return self.lm_head(self.decoder(x, kv_cache, batch)).float()

    def parameter_for(self, name: str) -> tuple[str, int | None] | None:
        # No parameter needs saved rotary frequencies, or the copy of a tied head.
        if name.endswith(".inv_freq") or (self.config.tie_word_embeddings and name.endswith("lm_head.weight")):
            return None
        for prefix, ours in _PREFIXES.items():
            if name.startswith(prefix):
                name = ours + name.removeprefix(prefix)
                break
        parts = name.split(".")
        if len(parts) >= 2 and parts[0] == "decoder" and parts[-2] in _MERGED:
            merged, part = _MERGED[parts[-2]]
            return ".".join([*parts[:-2], merged, parts[-1]]), part
        return name, None

    def checkpoint_name(self, parameter: str, part: int | None) -> str:
        for name, (merged, index) in _MERGED.items():
            if index == part:
                parameter = parameter.replace(f".{merged}.", f".{name}.")
        return parameter.replace("decoder.", "model.", 1) if parameter.startswith("decoder.") else parameter
