"""The interface of a model family. The engine, the processors and the server use this alone and name no family.

A family is one folder: its config, its ViT, its model, and facts for its processor. To add one, write that folder and
name it in `registry.py`. How families that are not here yet fit, and which fields and hooks each would add:

- Qwen2.5-VL: window attention, RMSNorm and SwiGLU belong to its own `vision.py`, with the order of windows computed
  from the grids and undone before `encode` returns; the positions of its `media_rules` scale the time axis of videos by
  `MediaItem.times`. The decoder is that of Qwen2-VL.
- Qwen3-VL: its config is nested in `text_config` and `vision_config`, which `parse_config` flattens. Patch size 16 is
  a field already; learned interpolated positions stay inside its ViT. `encode` returns rows of `row_size` = (1 + 3) *
  hidden_size values, which the encoder cache counts in bytes and never reads; `forward` splices the first quarter over
  the placeholders' embeddings and gives `Decoder.forward` the other three, which it adds after the first layers: an
  argument that `Decoder` gains. `head_dim` is explicit already. q/k norm, the bias of q/k/v and interleaved M-RoPE
  become fields of `ModelConfig`, read by `Attention` and `mrope_cos_sin`. `parameter_for` maps the prefixes
  `model.visual.` and `model.language_model.`.
- Mixture of experts: another MLP in `DecoderLayer`, chosen by a field of `ModelConfig`. The part that `parameter_for`
  returns becomes an (expert, projection) pair, and the module says where each part is stored, as `MergedLinear` does.
- Video: a `MediaItem` with modality "video", a grid with t > 1, one span per run of placeholders and the times of its
  temporal patches; scheduler, caches, batches and `encode` take such items as they are. `MediaRules` gains the
  placeholder of videos and, for families that write times between the spans, a function from an item to its tokens and
  spans, which `expand_placeholders` calls instead of repeating one placeholder.
- A recurrent state per sequence: a second cache, indexed by a slot that `Batch` carries for each sequence. A state
  exists at the positions where it was saved, so a prefix hit and `BlockManager.fork` begin at the last of these, and
  `ModelConfig` says which layers have a KV cache.
- Weights split over devices: `build` is given the rank and the number of ranks; linear layers and the number of KV
  heads follow from them, `_destinations` in `weights.py` yields the slice that a rank keeps, and one `ModelRunner` per
  rank runs the same `Batch`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from torch import Tensor, nn

from mmvllm.batch import Batch
from mmvllm.config import ModelConfig
from mmvllm.inputs import Grid, MediaRules
from mmvllm.layers.attention import AttentionBackend
from mmvllm.processors.image import ImageProcessorConfig


class Model(nn.Module, ABC):
    """Weights and the forward pass; it keeps nothing of a request."""

    config: ModelConfig

    @abstractmethod
    def encode(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Normalised patches (P, patch_dim) of items packed in one call -> rows (M, row_size), packed alike."""

    @abstractmethod
    def forward(self, batch: Batch, media_rows: Tensor, kv_cache: Tensor) -> Tensor:
        """Logits (R, V) in float32 of the tokens in `batch.sample_at`.

        media_rows (M, row_size) belong at `batch.image_at`; kv_cache (layers, 2, num_blocks, block_size, K, D) is
        written in place.
        """

    @abstractmethod
    def parameter_for(self, name: str) -> tuple[str, int | None] | None:
        """The parameter that a checkpoint tensor belongs to, and its part where several tensors share one parameter.

        None for a tensor that no parameter needs.
        """

    @abstractmethod
    def checkpoint_name(self, parameter: str, part: int | None) -> str:
        """The published name of the tensor that `parameter_for` sends to this place."""

    @abstractmethod
    def tie_head(self) -> None:
        """Let a tied head share the embedding's weight, once that is loaded."""


class ModelFamily(ABC):
    """One family of checkpoints. Stateless: every method takes the config of a checkpoint."""

    architectures: ClassVar[tuple[str, ...]]  # as config.json names them

    @abstractmethod
    def parse_config(self, architecture: str, raw: dict, generation: dict) -> ModelConfig:
        """The config from `config.json` and `generation_config.json`; raises ValueError for what cannot be served."""

    @abstractmethod
    def image_config(self, folder: Path) -> ImageProcessorConfig:
        """How the images of a checkpoint are resized, cut into patches and normalised."""

    @abstractmethod
    def media_rules(self, config: ModelConfig) -> MediaRules | None:
        """Placeholder tokens, tokens of a grid and positions of a prompt; None for a text-only checkpoint."""

    @abstractmethod
    def build(self, config: ModelConfig, attention: type[AttentionBackend]) -> Model:
        """The model, on the current default device."""
