"""What a model family says of itself. Everything outside `models/<family>/` asks here and knows no family by name.

A family is one folder: its config, its ViT, its model, and what its processor needs to know. To add one, write that
folder and name it in `registry.py`. How families that are not here yet fit:

- Qwen2.5-VL: window attention, RMSNorm and SwiGLU belong to its own `vision.py`; the positions of its `media_rules`
  scale the time axis of videos; everything else is as in Qwen2-VL.
- Qwen3-VL: its config is nested in `text_config` and `vision_config`, which `parse_config` flattens; patch size 16,
  learned positions and merged rows of several layers stay inside its ViT. `encode` returns rows of `row_size` =
  (1 + 3) * hidden_size values, which the encoder cache counts and `forward` takes apart: the first quarter replaces the
  placeholders' embeddings, the others are added after the first decoder layers. q/k norm, no bias and interleaved
  M-RoPE are fields of `ModelConfig` that `Decoder` reads; `head_dim` is explicit already. `parameter_for` maps the
  prefixes `model.visual.` and `model.language_model.`.
- Mixture of experts: another MLP in the decoder's layers, and `parameter_for` with an expert as part.
- Video: an item with modality "video", one span per run of placeholders and the times of its temporal patches, which
  positions are computed from; `encode` sees a grid with t > 1.
- A recurrent state per sequence: a second cache beside `kv_cache`, indexed per sequence; `Batch` gains the state slots.
- Weights split over devices: `build` runs once per device, and linear layers know their part.
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
        """How a checkpoint wants its images resized, cut and normalised."""

    @abstractmethod
    def media_rules(self, config: ModelConfig) -> MediaRules | None:
        """Placeholder tokens, tokens of a grid and positions of a prompt; None for a text-only checkpoint."""

    @abstractmethod
    def build(self, config: ModelConfig, attention: type[AttentionBackend]) -> Model:
        """The model, on the current default device."""
