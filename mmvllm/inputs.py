"""What a processor makes of a request and the engine takes: token ids, multimodal items and positions.

Plain data, made once per request. Whoever makes an `EngineInput` gives it away: the engine keeps ids, patches and
positions by reference, so their buffers must not be written to afterwards. What comes from other code is copied first
(`processors/tensors.py`).
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
    """A run of placeholder tokens in a prompt, by vLLM's name."""

    offset: int
    length: int

    @property
    def end(self) -> int:
        """The token after the last placeholder."""
        return self.offset + self.length


class _Prompt(TypedDict, total=False):
    multi_modal_data: dict[str, Any]  # "image" and "video": one, or a list of them
    mm_processor_kwargs: dict[str, Any]
    multi_modal_uuids: dict[str, Any]  # accepted as in vLLM, and not used: media are told apart by their content
    cache_salt: str


class TextPrompt(_Prompt):
    """A prompt of `LLM.generate`, by vLLM's names."""

    prompt: str


class TokensPrompt(_Prompt):
    """A prompt of `LLM.generate` that has been tokenized, by vLLM's names."""

    prompt_token_ids: list[int]


@dataclass(frozen=True, slots=True)
class MultiModalInput:
    """A prepared image or video of a request, before its placeholders are expanded.

    Args:
        modality: "image" or "video".
        patches: (P, patch_dim) uint8, or floats that are already normalised; on the host.
        grid: P = t * h * w patches.
        digests: one per temporal patch. Equal digests mean equal embeddings and, for a video, equal M-RoPE positions
            relative to its first token.
        times: seconds from the start of the video, one for each temporal patch; empty for an image.
        seconds_per_patch: from one temporal patch of a video to the next.
        geometry: sizes of an image; None for a video, and for tensors.
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

    Patches attend within their temporal patch only, so the patches of a video can be encoded in any steps.

    Args:
        modality: "image" or "video".
        patches: (P, patch_dim) uint8, or floats that are already normalised; on the host.
        grid: P = t * h * w patches; t is 1.
        digest: identifies the item in the prefix cache and the encoder cache (`MultiModalInput.digests`).
        placeholder: the tokens in the prompt that the item's embeddings replace.
        index: of the image or video in the prompt, from 0, counted separately for images and videos.
        time: seconds from the start of the video, in the middle of the temporal patch; None if it is not known.
        geometry: as in `MultiModalInput`.
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
        """Placeholder tokens in the prompt, which is also the number of the item's embeddings."""
        return self.placeholder.length

    @property
    def num_patches(self) -> int:
        return len(self.patches)

    @property
    def offset(self) -> int:
        """The item's first placeholder token."""
        return self.placeholder.offset

    @property
    def end(self) -> int:
        """The token after the item's last placeholder."""
        return self.placeholder.end

    def embeds_in(self, start: int, end: int) -> tuple[int, int]:
        """The item's embeddings [first, last) that replace tokens in [start, end), which must overlap the item."""
        return max(start - self.offset, 0), min(end, self.end) - self.offset

    def __reduce__(self):
        # From worker processes as bytes: torch would use shared memory, which may be scarce, and a descriptor each.
        data, dtype = self.patches.view(torch.uint8).numpy(), self.patches.dtype  # numpy has no bfloat16
        others = (self.modality, self.grid, self.digest, self.placeholder, self.index, self.time, self.geometry)
        return _item_from_bytes, (data, dtype, *others)


def _item_from_bytes(data: np.ndarray, dtype: torch.dtype, modality: str, *others: Any) -> MultiModalItem:
    return MultiModalItem(modality, torch.from_numpy(data).view(dtype), *others)


@dataclass(frozen=True, slots=True)
class EngineInput:
    """A prompt made ready for `LLMEngine.add_request`.

    Args:
        token_ids: with every placeholder expanded to the number of tokens that its item needs.
        mm_items: in the order of their placeholders; the items of a video are consecutive.
        positions: (3, T) int64: time, height and width; None for text, whose tokens count up on all three axes.
        position_delta: what is added to the index of a generated token to get its position.
        preparation: when it was begun and when it was done, in seconds since the epoch.
        text: what was tokenized, with one placeholder per image or video; None if token ids were given.
    """

    token_ids: list[int]
    mm_items: tuple[MultiModalItem, ...] = ()
    positions: np.ndarray | None = None
    position_delta: int = 0
    preparation: tuple[float, float] | None = None
    text: str | None = None

    @property
    def num_bytes(self) -> int:
        """Host memory of the patches."""
        return sum(item.patches.nbytes for item in self.mm_items)

    @property
    def num_media_tokens(self) -> int:
        return sum(item.num_tokens for item in self.mm_items)


def continued(prompt: EngineInput, token_ids: list[int]) -> EngineInput:
    """The prompt with more tokens of text, at the positions that generated ones would have."""
    positions, length = prompt.positions, len(prompt.token_ids)
    if positions is not None:
        added = np.arange(length, length + len(token_ids)) + prompt.position_delta
        positions = np.concatenate([positions, np.tile(added, (3, 1))], axis=1)
    return replace(prompt, token_ids=[*prompt.token_ids, *token_ids], positions=positions)


def in_pinned_memory(prompt: EngineInput) -> EngineInput:
    """The prompt with patches that a step copies to a GPU without waiting."""
    return replace(prompt, mm_items=tuple(replace(item, patches=pinned(item.patches)) for item in prompt.mm_items))


@dataclass(frozen=True, slots=True)
class MediaRules:
    """How a model family represents media in a prompt; the processors use nothing else of it.

    Args:
        image_token_id, video_token_id: the placeholders; `start_token_id` and `end_token_id` enclose the placeholders
            of an image or a video. A checkpoint without a video token takes no videos.
        start, image, video, end: the same tokens as text, for messages.
        merge_size: merge_size**2 patches become one token.
        patch_dim: values in a patch.
        tokens_per_second: of a video, on the time axis of M-RoPE; None where temporal patches are one position apart.
        timestamp: what stands before each temporal patch of a video, with a place for its time in seconds; each
            temporal patch is then enclosed in its own start and end tokens.
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
        """The placeholder of images or of videos."""
        return self.image_token_id if modality == "image" else self.video_token_id

    def num_tokens(self, grid: Grid) -> int:
        """Placeholder tokens of an image or a video."""
        return prod(grid) // self.merge_size**2
