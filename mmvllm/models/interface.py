"""The interface of a model family. The engine, the processors and the server use this alone and name no family.

A family is one folder: its config and its ViT. `vision_language.py`, `decoder.py` and `vision.py` have what families
share; what differs between decoders is a field of `ModelConfig`. docs/extending.md says how to add a family.

How a recurrent state per sequence, which is not here yet, would fit: as a second cache, indexed by the request
index that a running sequence has in `InputBatch`, which `Batch` then carries. A state exists at the positions where it
was saved, so a prefix hit and `BlockManager.fork` begin at the last of these, and `ModelConfig` says which layers have
a KV cache. The next step may be in flight when one is committed, so the step that reaches such a position copies the
state, and its commit makes the copy known.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from torch import Tensor, nn

from mmvllm.config import ModelConfig
from mmvllm.inputs import Grid, MediaRules
from mmvllm.kernels.common.kv_cache import KVCache
from mmvllm.layers.attention import AttentionBackend
from mmvllm.layers.batch import Batch
from mmvllm.models.vision import PatchLayout
from mmvllm.processes.ranks import SINGLE, Operation, Ranks
from mmvllm.processors.images.processor import ImageProcessorConfig
from mmvllm.processors.videos.processor import VideoProcessorConfig


class Model(nn.Module, ABC):
    """Weights and the forward pass; it keeps nothing of a request.

    Of several ranks, each has a part of the weights, and calls `forward` with the same batch. `config` has the head
    counts of this rank, and is otherwise that of the whole model. `tied` maps each parameter that the model does not
    store to the parameter that it is tied to.
    """

    config: ModelConfig
    tied: Mapping[str, str]

    def encode(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Normalised patches (P, patch_dim) of packed items -> embeddings (M, mm_embed_size), packed alike."""
        return self.encode_patches(patches, self.layout(grids).to(patches.device))

    @abstractmethod
    def layout(self, grids: Sequence[Grid]) -> PatchLayout:
        """What `encode_patches` must be told about items with these grids."""

    @abstractmethod
    def encode_patches(self, patches: Tensor, layout: PatchLayout) -> Tensor:
        """`encode` with a layout on the patches' device; it can be captured in a CUDA graph.

        There, patches after the layout's items are padding in separate segments, and are ignored.
        """

    def forward(self, batch: Batch, mm_embeds: Tensor, kv_cache: KVCache) -> Tensor:
        """`logits` of `hidden_states`; it can be captured in a CUDA graph."""
        return self.logits(self.hidden_states(batch, mm_embeds, kv_cache))

    @abstractmethod
    def hidden_states(self, batch: Batch, mm_embeds: Tensor, kv_cache: KVCache) -> Tensor:
        """The decoder's last, normalised hidden states (R, C) of the tokens in `batch.logits_indices`, on every rank.

        mm_embeds (M, mm_embed_size) belong to the placeholder tokens `batch.mm_token_indices`: the first C values
        replace their embeddings, further ones are added after the first layers (DeepStack). kv_cache (layers, 2,
        num_blocks, block_size, K, D) is written in place.
        """

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states (R, C) -> logits (R, V), in the model's dtype; of any width on ranks other than 0."""

    def operations(self, num_tokens: int, num_logits: Sequence[int]) -> list[Operation]:
        """The collectives of `hidden_states` for N tokens, then of each call of `logits` with `num_logits[i]` rows."""

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
        """Share the loaded embedding with a tied head, or give the head a copy if it is processed differently."""


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
    def video_config(self, folder: Path) -> VideoProcessorConfig:
        """Which frames of videos are taken for a checkpoint, and how they are resized, cut and normalised."""

    @abstractmethod
    def media_rules(self, config: ModelConfig) -> MediaRules | None:
        """Placeholder tokens, tokens of a grid and positions of a prompt; None for a text-only checkpoint."""

    @abstractmethod
    def build(
        self,
        config: ModelConfig,
        attention: type[AttentionBackend],
        vision_attention: type[AttentionBackend] | None = None,
        ranks: Ranks = SINGLE,
    ) -> Model:
        """What the rank has of the model, on the current default device; `config` is that of the whole model.

        Its ViT uses `attention` unless `vision_attention` is given. Raises ValueError for a number of ranks that the
        model cannot be split over.
        """
