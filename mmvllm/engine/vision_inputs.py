"""The pictures of one prompt: tensors from any processor, checked at the door."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
import xxhash
from torch import Tensor

from mmvllm.config import ModelConfig
from mmvllm.processors.chat import expand_placeholders

Grid = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class VisionInputs:
    """The pictures of one prompt, shared by all its sequences; the tuples run in step, one entry per picture.

    Pixels stay (as uint8 patches, from mmvllm's own processor) until the request finishes, because a preempted sequence
    may have to encode them again after the encoder cache has let go of its rows.
    """

    pixel_values: tuple[Tensor, ...] = ()  # each (P, patch_dim): uint8, or floats already normalised
    image_grid_thw: tuple[Grid, ...] = ()
    vision_placeholders: tuple[tuple[int, int], ...] = ()  # (offset, length) of each picture's tokens in the prompt
    image_digests: tuple[bytes, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(length for _, length in self.vision_placeholders)

    @property
    def num_bytes(self) -> int:
        return sum(pixels.nbytes for pixels in self.pixel_values)

    def touching(self, start: int, end: int) -> list[int]:
        """Indices of the pictures that have a token in [start, end)."""
        return [i for i, (at, length) in enumerate(self.vision_placeholders) if at < end and start < at + length]

    @classmethod
    def from_tensors(
        cls,
        config: ModelConfig,
        token_ids: list[int],
        pixel_values: Tensor | Sequence[Tensor] | None,
        image_grid_thw: Tensor | Sequence[Sequence[int]] | None,
        vision_placeholders: Sequence[tuple[int, int]] | None,
        image_digests: Sequence[bytes] | None,
    ) -> "VisionInputs":
        """Check and complete what came with a prompt.

        `pixel_values` is one tensor per picture, or all of them packed along the first axis. Placeholders are found
        where they are not given, digests computed. Raises ValueError for anything that does not fit together.
        """
        num_image_tokens = 0 if config.image_token_id is None else token_ids.count(config.image_token_id)
        if image_grid_thw is None or len(image_grid_thw) == 0:
            if num_image_tokens:
                raise ValueError(f"prompt has {num_image_tokens} image placeholder(s) but no images were given")
            if pixel_values is not None and len(pixel_values):
                raise ValueError("pixel_values were given without image_grid_thw")
            return cls()
        if config.vision is None:
            raise ValueError(f"{config.architecture} is a text-only model, it cannot take images")
        grids = tuple(_grid(grid, config) for grid in image_grid_thw)
        lengths = [prod(grid) // config.vision.spatial_merge_size**2 for grid in grids]
        if vision_placeholders is None:
            expanded, vision_placeholders = expand_placeholders(token_ids, lengths, config.image_token_id)
            if len(expanded) != len(token_ids):
                raise ValueError(
                    f"prompt has {num_image_tokens} image tokens for {len(grids)} image(s), which need "
                    f"{' + '.join(map(str, lengths))}; expand the placeholders first"
                )
        placeholders = tuple((int(offset), int(length)) for offset, length in vision_placeholders)
        _check_placeholders(placeholders, lengths, token_ids, config.image_token_id)
        pixels = _split(pixel_values, grids, config.vision.patch_dim)
        digests = tuple(image_digests or (_digest(*image) for image in zip(pixels, grids, strict=True)))
        if len(digests) != len(grids) or not all(isinstance(digest, bytes) for digest in digests):
            raise ValueError(f"{len(digests)} image_digests were given for {len(grids)} image(s); each must be bytes")
        return cls(pixels, grids, placeholders, digests)


def _grid(grid, config: ModelConfig) -> Grid:
    t, h, w = (int(size) for size in grid)
    merge_size = config.vision.spatial_merge_size
    if min(t, h, w) < 1 or h % merge_size or w % merge_size:
        raise ValueError(f"image_grid_thw has {(t, h, w)}; sizes must be positive, h and w multiples of {merge_size}")
    return t, h, w


def _check_placeholders(placeholders, lengths: list[int], token_ids: list[int], image_token_id: int) -> None:
    if [length for _, length in placeholders] != lengths:
        given = [length for _, length in placeholders]
        raise ValueError(f"vision_placeholders have lengths {given}, image_grid_thw needs {lengths}")
    covered = [i for offset, length in placeholders for i in range(offset, offset + length)]
    if covered != [i for i, token_id in enumerate(token_ids) if token_id == image_token_id]:
        raise ValueError(f"vision_placeholders {list(placeholders)} are not where the prompt's image tokens are")


def _split(pixel_values, grids: tuple[Grid, ...], patch_dim: int) -> tuple[Tensor, ...]:
    sizes = [prod(grid) for grid in grids]
    if isinstance(pixel_values, Tensor) and pixel_values.dim() == 2 and len(pixel_values) == sum(sizes):
        pixel_values = pixel_values.split(sizes)
    pixel_values = [torch.as_tensor(pixels) for pixels in ([] if pixel_values is None else pixel_values)]
    shapes = [tuple(pixels.shape) for pixels in pixel_values]
    if shapes != [(size, patch_dim) for size in sizes]:
        raise ValueError(f"pixel_values have shapes {shapes}, image_grid_thw needs {[(s, patch_dim) for s in sizes]}")
    return tuple(pixel_values)


def _digest(pixels: Tensor, grid: Grid) -> bytes:
    digest = xxhash.xxh3_128(pixels.contiguous().view(torch.uint8).cpu().numpy().data)
    digest.update(repr((grid, pixels.dtype, tuple(pixels.shape))).encode())
    return digest.digest()
