"""What a processor makes of a request and the engine takes: token ids, media items and positions.

Plain data, made once per request. Whoever makes an `EngineInput` gives it away: the engine keeps ids, patches and
positions by reference, so their buffers must not be written to afterwards. What comes from other code is copied first
(`processors/tensors.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

Grid = tuple[int, int, int]  # (t, h, w) in patches
Span = tuple[int, int]  # (offset, length) of a run of tokens in the prompt


@dataclass(frozen=True, slots=True)
class MediaItem:
    """One image of a prompt. (A video is one item too, with a span and a time per temporal patch where a family asks.)

    Args:
        modality: "image".
        patches: (P, patch_dim) uint8, or floats that are already normalised; on the host.
        grid: P = t * h * w patches.
        digest: stands for the item in the prefix cache and the encoder cache: items with equal digests have equal
            rows, grids and times.
        spans: runs of placeholder tokens in the prompt that the item's rows replace, in order.
        times: seconds from the start of a video, one per temporal patch; empty for an image.
    """

    modality: str
    patches: Tensor
    grid: Grid
    digest: bytes
    spans: tuple[Span, ...]
    times: tuple[float, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Placeholder tokens in the prompt, which is also the number of rows that the ViT makes of the item."""
        return sum(length for _, length in self.spans)

    @property
    def num_patches(self) -> int:
        return len(self.patches)

    @property
    def offset(self) -> int:
        """The item's first placeholder token."""
        return self.spans[0][0]

    @property
    def end(self) -> int:
        """The token after the item's last placeholder."""
        return sum(self.spans[-1])

    def touches(self, start: int, end: int) -> bool:
        """Whether tokens [start, end) include one from the item's first to its last, with those between its spans."""
        return self.offset < end and start < self.end

    def rows_in(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """(first token, first row, number) of each run of the item's rows that tokens [start, end) need.

        tokens of the prompt     |----[ span: offset, length ]----|
        tokens of the chunk             [ start ....... end )
        """
        row = 0
        for offset, length in self.spans:
            first, last = max(start, offset), min(end, offset + length)
            if first < last:
                yield first, row + first - offset, last - first
            row += length

    def __reduce__(self):
        # From worker processes as bytes: torch would use shared memory, which may be scarce, and a descriptor each.
        fields = (self.modality, self.grid, self.digest, self.spans, self.times)
        return _item_from_array, (self.patches.numpy(), *fields)


def _item_from_array(
    patches: np.ndarray, modality: str, grid: Grid, digest: bytes, spans: Any, times: Any
) -> MediaItem:
    return MediaItem(modality, torch.from_numpy(patches), grid, digest, spans, times)


@dataclass(frozen=True, slots=True)
class EngineInput:
    """A prompt made ready for `LLMEngine.add_request`.

    Args:
        token_ids: with every placeholder expanded to the number of tokens that its item needs.
        items: in the order of their placeholders.
        positions: (3, T) int64: time, height and width; None for text, whose tokens count up on all three axes.
        position_delta: what is added to the index of a generated token to get its position.
    """

    token_ids: list[int]
    items: tuple[MediaItem, ...] = ()
    positions: np.ndarray | None = None
    position_delta: int = 0

    @property
    def num_bytes(self) -> int:
        """Host memory of the patches."""
        return sum(item.patches.nbytes for item in self.items)

    @property
    def num_media_tokens(self) -> int:
        return sum(item.num_tokens for item in self.items)


@dataclass(frozen=True, slots=True)
class MediaRules:
    """How a model family represents media in a prompt; the processors use nothing else of it.

    Args:
        image_token_id: the placeholder; `start_token_id` and `end_token_id` enclose an item's.
        start, image, end: the same three tokens as text, for messages.
        merge_size: merge_size**2 patches become one token.
        patch_dim: values in a patch.
        positions: (number of prompt tokens, items) -> positions (3, T) and their delta.
    """

    image_token_id: int
    start_token_id: int
    end_token_id: int
    start: str
    image: str
    end: str
    merge_size: int
    patch_dim: int
    positions: Callable[[int, Sequence[MediaItem]], tuple[np.ndarray, int]]

    def num_tokens(self, grid: Grid) -> int:
        """Placeholder tokens of an item."""
        return prod(grid) // self.merge_size**2

    def engine_input(self, token_ids: list[int], items: tuple[MediaItem, ...]) -> EngineInput:
        """The input with its positions."""
        return (
            EngineInput(token_ids, items, *self.positions(len(token_ids), items)) if items else EngineInput(token_ids)
        )
