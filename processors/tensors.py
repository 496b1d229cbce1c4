"""Token ids, patches and grids that other code made, checked and copied: the caller may reuse its buffers at once."""

from collections.abc import Iterable, Sequence
from math import prod
from operator import index
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from mmvllm.errors import RequestError
from mmvllm.inputs import Grid, MediaItem, MediaRules, Span
from mmvllm.text import counted

Array = Tensor | np.ndarray | Sequence  # of numbers, nested or not, on any device


def own_token_ids(prompt: Any) -> list[int]:
    """Token ids from a list, a tuple, or a one-dimensional array or tensor of integers; raises RequestError."""
    if isinstance(prompt, Tensor | np.ndarray):
        array = _to_numpy(prompt)
        if array.shape == (0,):  # of floats, where numpy or torch chose the dtype
            return []
        if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
            raise RequestError(
                f"prompt is an array of shape {array.shape} and dtype {array.dtype}; token ids are integers, in one row"
            )
        return array.tolist()
    if not isinstance(prompt, list | tuple):
        raise RequestError(f"prompt must be a string or a list of token ids, not {type(prompt).__name__}")
    return [_as_token_id(item) for item in prompt]


def _as_token_id(item: Any) -> Any:
    """An integer of numpy or torch as Python's; anything else as it is."""
    if isinstance(item, Tensor | np.ndarray) and item.ndim == 0:
        item = _to_numpy(item)[()]
    return int(item) if isinstance(item, np.integer) else item


def items_from_tensors(
    rules: MediaRules | None,
    token_ids: list[int],
    pixel_values: Array | None,
    image_grid_thw: Array | None,
    vision_placeholders: Iterable[Span] | None = None,
    image_digests: Iterable[bytes] | None = None,
) -> tuple[MediaItem, ...]:
    """The images of a prompt whose placeholders are expanded already.

    Args:
        pixel_values: (P, patch_dim) of all images packed, or one array for each: uint8 patches or normalised floats.
        image_grid_thw: (number of images, 3), in patches.
        vision_placeholders: (offset, length) of each image's tokens; found in the prompt where not given.
        image_digests: computed from the copied patches where not given.

    Raises RequestError for anything that does not fit together.
    """
    num_image_tokens = 0 if rules is None else token_ids.count(rules.image_token_id)
    rows = _as_list("image_grid_thw", image_grid_thw)
    if not rows:
        if num_image_tokens:
            raise RequestError(f"prompt has {counted(num_image_tokens, 'image placeholder')} but no images were given")
        if _as_list("pixel_values", pixel_values):
            raise RequestError("pixel_values were given without image_grid_thw", param="image_grid_thw")
        return ()
    if rules is None:
        raise RequestError("this is a text-only model, it cannot take images")
    grids = own_grids(rows, rules.merge_size)
    lengths = [rules.num_tokens(grid) for grid in grids]
    if vision_placeholders is None:
        spans = _find_spans(token_ids, lengths, rules.image_token_id)
    else:
        spans = _own_spans(vision_placeholders)
    _check_spans(spans, lengths, token_ids, rules.image_token_id)
    patches = _split(pixel_values, grids, rules.patch_dim)
    digests = _as_list("image_digests", image_digests) or list(map(_digest, patches, grids))
    if len(digests) != len(grids) or not all(isinstance(digest, bytes) for digest in digests):
        raise RequestError(
            f"{len(digests)} image_digests were given for {counted(len(grids), 'image')}; each must be bytes",
            param="image_digests",
        )
    return tuple(
        MediaItem("image", own, grid, digest, (span,))
        for own, grid, digest, span in zip(patches, grids, digests, spans, strict=True)
    )


def _to_numpy(array: Any) -> np.ndarray:
    """A copy on the host."""
    return array.detach().cpu().numpy().copy() if isinstance(array, Tensor) else np.array(array)


def _as_list(name: str, given: Any) -> list:
    """The items of an array, a list or another iterable; none of None."""
    try:
        return [] if given is None else list(given)
    except TypeError:
        raise RequestError(f"{name} is {given!r:.100}, must be an array or a list", param=name) from None


def own_grids(given: Array, merge_size: int) -> list[Grid]:
    """Sizes (t, h, w) in patches; raises RequestError for what is not an array (number of images, 3) of such sizes."""
    rows = _as_list("image_grid_thw", given)
    try:
        array = np.stack([_to_numpy(row) for row in rows])
    except ValueError:  # rows of different lengths
        raise RequestError(
            "image_grid_thw has rows of different lengths, must be (number of images, 3)", param="image_grid_thw"
        ) from None
    if array.ndim != 2 or array.shape[1] != 3:
        raise RequestError(
            f"image_grid_thw has shape {array.shape}, must be (number of images, 3)", param="image_grid_thw"
        )
    if array.dtype.kind not in "iuf" or not np.array_equal(array, np.floor(array)) or np.isinf(array).any():
        raise RequestError(f"image_grid_thw has {array.tolist()}, sizes must be integers", param="image_grid_thw")
    for t, h, w in array.astype(np.int64).tolist():
        if min(t, h, w) < 1 or h % merge_size or w % merge_size:
            raise RequestError(
                f"image_grid_thw has {(t, h, w)}; sizes must be positive, h and w multiples of {merge_size}",
                param="image_grid_thw",
            )
    return [tuple(grid) for grid in array.astype(np.int64).tolist()]


def _find_spans(token_ids: list[int], lengths: list[int], image_token_id: int) -> list[Span]:
    """Where each image's tokens are, in a prompt that has exactly as many as the images need."""
    at = [i for i, token_id in enumerate(token_ids) if token_id == image_token_id]
    if len(at) != sum(lengths):
        raise RequestError(
            f"prompt has {counted(len(at), 'image token')} for {counted(len(lengths), 'image')}, which need "
            f"{' + '.join(map(str, lengths))}; expand the placeholders first"
        )
    firsts = np.cumsum([0, *lengths[:-1]])
    return [(at[first], length) for first, length in zip(firsts, lengths, strict=True)]


def _own_spans(given: Any) -> list[Span]:
    try:
        return [(index(offset), index(length)) for offset, length in given]
    except (TypeError, ValueError):
        raise RequestError(
            f"vision_placeholders are {given!r:.100}, must be (offset, length) pairs", param="vision_placeholders"
        ) from None


def _check_spans(spans: list[Span], lengths: list[int], token_ids: list[int], image_token_id: int) -> None:
    given = [length for _, length in spans]
    if given != lengths:
        raise RequestError(
            f"vision_placeholders have lengths {given}, image_grid_thw needs {lengths}", param="vision_placeholders"
        )
    covered = [i for offset, length in spans for i in range(offset, offset + length)]
    if covered != [i for i, token_id in enumerate(token_ids) if token_id == image_token_id]:
        raise RequestError(
            f"vision_placeholders {spans} are not where the prompt's image tokens are; an image needs one run of them",
            param="vision_placeholders",
        )


def _split(pixel_values: Array | None, grids: list[Grid], patch_dim: int) -> list[Tensor]:
    """A copy of each image's patches (P, patch_dim)."""
    sizes = [prod(grid) for grid in grids]
    if isinstance(pixel_values, np.ndarray):
        pixel_values = _as_tensor(pixel_values)
    if isinstance(pixel_values, Tensor) and pixel_values.dim() == 2:
        pixel_values = pixel_values.split(sizes) if len(pixel_values) == sum(sizes) else [pixel_values]
    given = [_as_tensor(patches) for patches in _as_list("pixel_values", pixel_values)]
    shapes = [tuple(patches.shape) for patches in given]
    if shapes != [(size, patch_dim) for size in sizes]:
        raise RequestError(
            f"pixel_values have shapes {shapes!s:.200}, image_grid_thw needs "
            f"{[(size, patch_dim) for size in sizes]!s:.200}",
            param="pixel_values",
        )
    for patches in given:
        if patches.dtype != torch.uint8 and not patches.is_floating_point():
            raise RequestError(
                f"pixel_values have dtype {patches.dtype}; give uint8 patches, or floats that are normalised already",
                param="pixel_values",
            )
    return [patches.detach().to("cpu", copy=True, memory_format=torch.contiguous_format) for patches in given]


def _as_tensor(patches: Any) -> Tensor:
    """A tensor, which may share the memory of one that is given; raises RequestError."""
    try:
        # Torch cannot read every layout of numpy: a copy has neither negative strides nor a foreign byte order.
        return torch.as_tensor(_in_native_order(patches) if isinstance(patches, np.ndarray) else patches)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RequestError(f"pixel_values cannot be read ({error})", param="pixel_values") from None


def _in_native_order(array: np.ndarray) -> np.ndarray:
    return np.array(array, dtype=array.dtype.newbyteorder("="))


def _digest(patches: Tensor, grid: Grid) -> bytes:
    digest = xxhash.xxh3_128(patches.view(torch.uint8).numpy().data)
    digest.update(repr((grid, patches.dtype, tuple(patches.shape))).encode())
    return digest.digest()
