"""Prepared requests, which processors pass to the engine: token ids, multimodal items and positions.

They are plain data, created once per request. The creator of an `EngineInput` gives it away: the engine keeps ids,
patches and positions by reference, so nobody may write to their buffers afterwards. Buffers from other code are copied
first (`processors/tensors.py`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple, TypedDict

import numpy as np
import torch
from torch import Tensor

from mmvllm.grounding import BoxFormat, ImageGeometry
from mmvllm.utils.transfer import pinned

Grid = tuple[int, int, int]  # (t, h, w) in patches


class PlaceholderRange(NamedTuple):
    """A run of placeholder tokens in a prompt, with vLLM's class name."""

    offset: int
    length: int

    @property
    def end(self) -> int:
        """Index of the token after the last placeholder."""
        return self.offset + self.length


class _Prompt(TypedDict, total=False):
    multi_modal_data: dict[str, Any]  # "image" and "video": an item, or a list of them
    mm_processor_kwargs: dict[str, Any]
    multi_modal_uuids: dict[str, Any]  # accepted as in vLLM but not used: the content identifies media
    cache_salt: str


class TextPrompt(_Prompt):
    """A prompt for `LLM.generate`, with vLLM's names."""

    prompt: str


class TokensPrompt(_Prompt):
    """A tokenized prompt for `LLM.generate`, with vLLM's names."""

    prompt_token_ids: list[int]


@dataclass(frozen=True, slots=True)
class MultiModalInput:
    """A prepared image or video of a request, before its placeholders are expanded.

    Args:
        modality: "image" or "video".
        patches: (P, patch_dim) uint8, or floats that are already normalized; on the host.
        grid: P = t * h * w patches.
        digests: one per temporal patch. Equal digests mean equal embeddings and, for a video, equal M-RoPE positions
            relative to its first token.
        times: seconds from the start of the video, one for each temporal patch; empty for an image.
        seconds_per_patch: seconds between consecutive temporal patches of a video.
        geometry: sizes of an image; None for a video and for tensors.
    """

    modality: str
    patches: Tensor
    grid: Grid
    digests: tuple[bytes, ...]
    times: tuple[float, ...] = ()
    seconds_per_patch: float | None = None
    geometry: ImageGeometry | None = None

    def mm_items(self, placeholders: Sequence[PlaceholderRange], index: int) -> "Iterator[MultiModalItem]":
        """Yield an item for each temporal patch, with its placeholder tokens in the prompt."""
        t, h, w = self.grid
        patches = self.patches.view(t, h * w, -1)
        for i, (digest, placeholder) in enumerate(zip(self.digests, placeholders, strict=True)):
            time = self.times[i] if self.times else None
            yield MultiModalItem(self.modality, patches[i], (1, h, w), digest, placeholder, index, time, self.geometry)


@dataclass(frozen=True, slots=True)
class MultiModalItem:
    """One input of the ViT: an image, or a temporal patch of a video, with its placeholder tokens in the prompt.

    Patches attend only within their temporal patch, so different steps may encode the temporal patches of a video.

    Args:
        modality: "image" or "video".
        patches: (P, patch_dim) uint8, or floats that are already normalized; on the host.
        grid: P = t * h * w patches; t is 1.
        digest: identifies the item in the prefix cache and the encoder cache (`MultiModalInput.digests`).
        placeholder: the tokens in the prompt that the item's embeddings replace.
        index: index of the image or video in the prompt, from 0, counted separately for images and videos.
        time: seconds from the start of the video to the middle of the temporal patch; None if not known.
        geometry: see `MultiModalInput`.
    """

    modality: str
    patches: Tensor
    grid: Grid
    digest: bytes
    placeholder: PlaceholderRange
    index: int = 0
    time: float | None = None
    geometry: ImageGeometry | None = None

    @property
    def num_tokens(self) -> int:
        """Number of placeholder tokens in the prompt, which is also the number of the item's embeddings."""
        return self.placeholder.length

    @property
    def num_patches(self) -> int:
        return len(self.patches)

    @property
    def offset(self) -> int:
        """Index of the item's first placeholder token."""
        return self.placeholder.offset

    @property
    def end(self) -> int:
        """Index of the token after the item's last placeholder."""
        return self.placeholder.end

    def embeds_in(self, start: int, end: int) -> tuple[int, int]:
        """Return the item's embeddings [first, last) for tokens [start, end), which must overlap the item."""
        return max(start - self.offset, 0), min(end, self.end) - self.offset

    def __reduce__(self):
        # Worker processes send bytes: torch would use shared memory, which may be scarce, and a descriptor per tensor.
        data, dtype = self.patches.view(torch.uint8).numpy(), self.patches.dtype  # numpy has no bfloat16
        others = (self.modality, self.grid, self.digest, self.placeholder, self.index, self.time, self.geometry)
        return _item_from_bytes, (data, dtype, *others)


def _item_from_bytes(data: np.ndarray, dtype: torch.dtype, modality: str, *others: Any) -> MultiModalItem:
    return MultiModalItem(modality, torch.from_numpy(data).view(dtype), *others)


@dataclass(frozen=True, slots=True)
class EngineInput:
    """A prepared prompt, the argument of `LLMEngine.add_request`.

    Args:
        token_ids: the prompt's tokens; each placeholder is repeated for every embedding of its item.
        mm_items: items in the order of their placeholders; the items of a video are consecutive.
        positions: (3, T) int64: time, height and width; None for text, where all three count the tokens.
        position_delta: added to the index of a generated token to get its position.
        preparation: when preparation began and ended, in seconds since the epoch.
        text: the tokenized text, with one placeholder per image or video; None if the request has token ids.
    """

    token_ids: list[int]
    mm_items: tuple[MultiModalItem, ...] = ()
    positions: np.ndarray | None = None
    position_delta: int = 0
    preparation: tuple[float, float] | None = None
    text: str | None = None

    @property
    def num_bytes(self) -> int:
        """Host memory that the patches take, in bytes."""
        return sum(item.patches.nbytes for item in self.mm_items)

    @property
    def num_media_tokens(self) -> int:
        return sum(item.num_tokens for item in self.mm_items)


def continued(prompt: EngineInput, token_ids: list[int]) -> EngineInput:
    """Append text tokens to the prompt, at the positions that generated tokens would have."""
    positions, length = prompt.positions, len(prompt.token_ids)
    if positions is not None:
        added = np.arange(length, length + len(token_ids)) + prompt.position_delta
        positions = np.concatenate([positions, np.tile(added, (3, 1))], axis=1)
    return replace(prompt, token_ids=[*prompt.token_ids, *token_ids], positions=positions)


def in_pinned_memory(prompt: EngineInput) -> EngineInput:
    """Return the prompt with patches in pinned memory, which a step copies to a GPU without waiting."""
    return replace(prompt, mm_items=tuple(replace(item, patches=pinned(item.patches)) for item in prompt.mm_items))


@dataclass(frozen=True, slots=True)
class MediaRules:
    """How a model family represents media in a prompt; processors know nothing else about the family.

    Args:
        image_token_id, video_token_id: the placeholders; `start_token_id` and `end_token_id` enclose the placeholders
            of an image or a video. A checkpoint without a video token accepts no videos.
        start, image, video, end: the same tokens as text, for messages.
        merge_size: merge_size**2 patches become one token.
        patch_dim: values in a patch.
        tokens_per_second: positions per second of video in M-RoPE; None if temporal patches are one position apart.
        timestamp: format of the text before each temporal patch of a video, with a field for its time in seconds; each
            temporal patch then has a start and an end token.
        boxes: how the family writes boxes and points; None if it writes none.
    """

    image_token_id: int
    video_token_id: int | None
    start_token_id: int
    end_token_id: int
    start: str
    image: str
    video: str
    end: str
    merge_size: int
    patch_dim: int
    tokens_per_second: int | None = None
    timestamp: str | None = None
    boxes: BoxFormat | None = None

    @property
    def takes_videos(self) -> bool:
        return self.video_token_id is not None

    def token_id(self, modality: str) -> int | None:
        """Return the placeholder token of "image" or "video"."""
        return self.image_token_id if modality == "image" else self.video_token_id

    def num_tokens(self, grid: Grid) -> int:
        """Return the number of placeholder tokens of an image or a video."""
        return prod(grid) // self.merge_size**2
