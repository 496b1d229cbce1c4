"""The interface of a model family; the engine, the processors and the server use only this and name no family.

A family is a folder with its config and its ViT. `vision_language.py`, `decoder.py` and `vision.py` implement what
families share; differences between decoders are fields of `ModelConfig`. docs/extending.md explains how to add a
family.

A recurrent state per sequence, which is not supported yet, would be a second cache, indexed by the request index of a
running sequence in `InputBatch`, which `Batch` would carry. A prefix hit and `BlockManager.fork` would begin at the
last position whose state was saved; `ModelConfig` would name the layers with a KV cache. When a step is committed, the
next may be in flight: the step that reaches such a position would copy the state, and its commit register the copy.
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
    """The weights and the forward pass; it keeps no state of requests.

    Each rank has a part of the weights and calls `forward` with the same batch. `config` has the head counts of this
    rank; its other fields describe the whole model. `tied` maps each parameter that the model does not store to the
    parameter that it is tied to.
    """

    config: ModelConfig
    tied: Mapping[str, str]

    def encode(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Encode packed, normalized patches (P, patch_dim) as packed embeddings (M, mm_embed_size)."""
        return self.encode_patches(patches, self.layout(grids).to(patches.device))

    @abstractmethod
    def layout(self, grids: Sequence[Grid]) -> PatchLayout:
        """Return the layout of items with these grids, which `encode_patches` takes."""

    @abstractmethod
    def encode_patches(self, patches: Tensor, layout: PatchLayout) -> Tensor:
        """`encode` with a layout on the patches' device; can be captured in a CUDA graph.

        In a CUDA graph, patches after the layout's items are padding in separate segments and are ignored.
        """

    def forward(self, batch: Batch, mm_embeds: Tensor, kv_cache: KVCache) -> Tensor:
        """Return the `logits` of `hidden_states`; can be captured in a CUDA graph."""
        return self.logits(self.hidden_states(batch, mm_embeds, kv_cache))

    @abstractmethod
    def hidden_states(self, batch: Batch, mm_embeds: Tensor, kv_cache: KVCache) -> Tensor:
        """Return the decoder's last, normalized hidden states (R, C) of tokens `batch.logits_indices`, on all ranks.

        mm_embeds (M, mm_embed_size) belong to the placeholder tokens `batch.mm_token_indices`: the first C values
        replace the tokens' embeddings, the others are added after the first layers (DeepStack). kv_cache (layers, 2,
        num_blocks, block_size, K, D) is written in place.
        """

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits (R, V) of hidden states (R, C) in the model's dtype; of any width on ranks other than 0."""

    def operations(self, num_tokens: int, num_logits: Sequence[int]) -> list[Operation]:
        """List the collectives of `hidden_states` for N tokens, then of a call of `logits` for each of `num_logits`."""

    @abstractmethod
    def parameter_for(self, name: str) -> tuple[str, int | None] | None:
        """Return the parameter that a checkpoint tensor belongs to, and its part if several tensors share a parameter.

        Returns None for a tensor that no parameter needs.
        """

    @abstractmethod
    def checkpoint_name(self, parameter: str, part: int | None) -> str:
        """Return the published name of the tensor that `parameter_for` maps to this parameter and part."""

    @abstractmethod
    def tie_head(self) -> None:
        """Share the loaded embedding with a tied head, or give the head a copy if it is processed differently."""


class ModelFamily(ABC):
    """One family of checkpoints, without state: its methods take the config or the folder of a checkpoint."""

    architectures: ClassVar[tuple[str, ...]]  # as config.json names them

    @abstractmethod
    def parse_config(self, architecture: str, raw: dict, generation: dict) -> ModelConfig:
        """Return the config of `config.json` and `generation_config.json`; raise ValueError if it is not supported."""

    @abstractmethod
    def image_config(self, folder: Path) -> ImageProcessorConfig:
        """Return how images are resized, cut into patches and normalized for a checkpoint."""

    @abstractmethod
    def video_config(self, folder: Path) -> VideoProcessorConfig:
        """Return how frames of videos are sampled, resized, cut into patches and normalized for a checkpoint."""

    @abstractmethod
    def media_rules(self, config: ModelConfig) -> MediaRules | None:
        """Return the rules of placeholder tokens, tokens of a grid and positions; None for a text-only checkpoint."""

    @abstractmethod
    def build(
        self,
        config: ModelConfig,
        attention: type[AttentionBackend],
        vision_attention: type[AttentionBackend] | None = None,
        ranks: Ranks = SINGLE,
    ) -> Model:
        """Build the rank's part of the model on the current default device; `config` describes the whole model.

        The ViT uses `vision_attention` if it is set, otherwise `attention`. Raises ValueError for a number of ranks
        that the model cannot be split over.
        """
