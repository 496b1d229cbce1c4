"""Check and copy token ids, patches and grids from other code, which may reuse its buffers at once."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from math import prod
from operator import index
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmvllm.errors import RequestError
from mmvllm.inputs import EngineInput, Grid, MediaRules, MultiModalInput, PlaceholderRange
from mmvllm.processors.digest import digest_of
from mmvllm.processors.placeholders import engine_input
from mmvllm.utils.arguments import are_ints
from mmvllm.utils.text import counted, shown

# The names of patches and grids in transformers' processors, by modality.
NAMES = {"image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw")}

Array = Tensor | np.ndarray | Sequence  # of numbers, nested or not, on any device


def own_token_ids(prompt: Any) -> list[int]:
    """Return token ids from a list, a tuple, or a one-dimensional array or tensor of integers; raises RequestError."""
    if isinstance(prompt, Tensor | np.ndarray):
        array = _to_numpy(prompt)
        if array.shape == (0,):  # numpy and torch make empty arrays of floats by default
            return []
        if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
            raise RequestError(
                f"token ids of a prompt must be integers in one row, got shape {array.shape} and dtype {array.dtype}"
            )
        return array.tolist()
    if not isinstance(prompt, list | tuple):
        raise RequestError(f"prompt must be a string or a list of token ids, got {type(prompt).__name__}")
    if are_ints(prompt):
        return list(prompt)
    return [_as_token_id(item) for item in prompt]


def _as_token_id(item: Any) -> Any:
    """Convert an integer of numpy or torch to Python's; return anything else unchanged."""
    if isinstance(item, Tensor | np.ndarray) and item.ndim == 0:
        item = _to_numpy(item)[()]
    return int(item) if isinstance(item, np.integer) else item


def input_from_tensors(
    rules: MediaRules | None,
    token_ids: list[int],
    pixel_values: Array | None = None,
    image_grid_thw: Array | None = None,
    vision_placeholders: Iterable[PlaceholderRange] | None = None,
    image_digests: Iterable[bytes] | None = None,
    pixel_values_videos: Array | None = None,
    video_grid_thw: Array | None = None,
    second_per_grid_ts: Iterable[float] | None = None,
) -> EngineInput:
    """Return the engine's input for an expanded prompt and the tensors of transformers' processors.

    Args:
        pixel_values: (P, patch_dim), all images packed, or one array per image: uint8 patches or normalized floats.
        image_grid_thw: (number of images, 3), in patches.
        vision_placeholders: (offset, length) of each image's tokens; by default, they are located in the prompt.
        image_digests: by default, they are computed from the copied patches.
        pixel_values_videos, video_grid_thw: the same for videos.
        second_per_grid_ts: seconds from one temporal patch of a video to the next, for families that use them.

    Raises RequestError for arguments that do not match.
    """
    images = _media("image", rules, token_ids, pixel_values, image_grid_thw, digests=image_digests)
    videos = _media("video", rules, token_ids, pixel_values_videos, video_grid_thw, seconds=second_per_grid_ts)
    if not images and not videos:
        return EngineInput(token_ids)
    given = None if vision_placeholders is None else _own_placeholders(vision_placeholders)
    placed = [*_placed(images, token_ids, rules, given), *_placed(videos, token_ids, rules)]
    placed.sort(key=lambda one: one[1][0])
    _check_apart(placed)
    return engine_input(token_ids, placed, rules)


def _media(
    modality: str,
    rules: MediaRules | None,
    token_ids: list[int],
    patches: Array | None,
    grids: Array | None,
    **keys: Any,
) -> list[MultiModalInput]:
    """Return the images or the videos; raises RequestError if media or placeholders are missing or not supported."""
    patches_name, grids_name = NAMES[modality]
    rows, token_id = _as_list(grids_name, grids), None if rules is None else rules.token_id(modality)
    if not rows:
        num_tokens = 0 if token_id is None else token_ids.count(token_id)
        if num_tokens:
            found = counted(num_tokens, f"{modality} placeholder")
            raise RequestError(f"prompt has {found} but no {modality}s were given")
        if _as_list(patches_name, patches):
            raise RequestError(f"{patches_name} were given without {grids_name}", param=grids_name)
        return []
    if rules is None:
        raise RequestError(f"this is a text-only model, it cannot take {modality}s")
    if token_id is None:
        raise RequestError(f"this model has no token for {modality}s, it cannot take them")
    return media_from_tensors(modality, rules, patches, rows, **keys)


def media_from_tensors(
    modality: str,
    rules: MediaRules,
    patches: Array | None,
    grids: Array,
    digests: Iterable[bytes] | None = None,
    seconds: Iterable[float] | None = None,
) -> list[MultiModalInput]:
    """Return images or videos from the outputs of transformers' processors; errors use transformers' names."""
    patches_name, grids_name = NAMES[modality]
    own = own_grids(grids, rules.merge_size, grids_name)
    pieces = _split(patches_name, patches, own, grids_name, rules.patch_dim)
    seconds = _own_seconds(seconds, len(own)) if modality == "video" else [None] * len(own)
    given = _as_list("image_digests", digests) or [None] * len(own)
    if len(given) != len(own) or not all(isinstance(digest, bytes | None) for digest in given):
        raise RequestError(
            f"{len(given)} image_digests were given for {counted(len(own), 'image')}; each must be bytes",
            param="image_digests",
        )
    return [
        MultiModalInput(modality, piece, grid, _digests(modality, piece, grid, digest, step), seconds_per_patch=step)
        for piece, grid, digest, step in zip(pieces, own, given, seconds, strict=True)
    ]


def _digests(
    modality: str, patches: Tensor, grid: Grid, given: bytes | None, seconds_per_patch: float | None
) -> tuple[bytes, ...]:
    """Return the digest of each temporal patch, derived from the digest of the whole if there is one."""
    t, h, w = grid
    if given is not None:
        return (given,) if t == 1 else tuple(given + bytes(repr(i), "ascii") for i in range(t))
    facts = modality, (h, w), seconds_per_patch, patches.dtype, patches.shape[1]
    described = repr(facts).encode()
    return tuple(digest_of(own.view(torch.uint8).numpy().data, described) for own in patches.view(t, h * w, -1))


def _own_seconds(given: Iterable[float] | None, number: int) -> list[float | None]:
    seconds = _as_list("second_per_grid_ts", given)
    try:
        own = [float(value) for value in seconds]
    except (TypeError, ValueError):
        own = [0.0]
    if not all(0 < value < float("inf") for value in own) or len(own) not in (0, number):
        raise RequestError(
            f"second_per_grid_ts must be {counted(number, 'number')} above 0, one per video, got {shown(seconds, 100)}",
            param="second_per_grid_ts",
        )
    return own or [None] * number


def _placed(
    media: list[MultiModalInput],
    token_ids: list[int],
    rules: MediaRules,
    placeholders: list[PlaceholderRange] | None = None,
) -> Iterator[tuple[MultiModalInput, list[PlaceholderRange]]]:
    """Yield each image or video with the placeholders of its temporal patches; the prompt must have no others."""
    if not media:
        return
    modality, token_id = media[0].modality, rules.token_id(media[0].modality)
    lengths = [rules.num_tokens(one.grid) for one in media]
    at = [i for i, one in enumerate(token_ids) if one == token_id]
    if placeholders is not None:
        _check_placeholders(placeholders, lengths, at)
    elif len(at) != sum(lengths):
        raise RequestError(
            f"prompt has {counted(len(at), f'{modality} token')} for {counted(len(lengths), modality)}, which need "
            f"{' + '.join(map(str, lengths))}; expand the placeholders first"
        )
    first = 0
    for one, length in zip(media, lengths, strict=True):
        own, t = at[first : first + length], one.grid[0]
        first += length
        yield one, [PlaceholderRange(own[i], length // t) for i in range(0, length, length // t)]
        if any(own[i + length // t - 1] - own[i] != length // t - 1 for i in range(0, length, length // t)):
            what = "an image" if modality == "image" else "a temporal patch of a video"
            raise RequestError(f"the prompt's {modality} tokens are interrupted; {what} needs one run of them")


def _check_apart(placed: list[tuple[MultiModalInput, list[PlaceholderRange]]]) -> None:
    """Raise RequestError for overlapping media: a video with another video's grid would extend past the next image."""
    for (media, placeholders), (_, following) in pairwise(placed):
        if placeholders[-1].end > following[0].offset:
            raise RequestError(
                f"the tokens of an image or a video are inside a {media.modality} of grid {media.grid}; "
                "give grids in the order of the prompt",
                param=NAMES[media.modality][1],
            )


def _to_numpy(array: Any) -> np.ndarray:
    """Return a copy on the host."""
    return array.detach().cpu().numpy().copy() if isinstance(array, Tensor) else np.array(array)


def _as_list(name: str, given: Any) -> list:
    """Return the items of an array, a list or another iterable; [] for None."""
    try:
        return [] if given is None else list(given)
    except TypeError:
        raise RequestError(f"{name} must be an array or a list, got {shown(given, 100)}", param=name) from None


def own_grids(given: Array, merge_size: int, name: str = "image_grid_thw") -> list[Grid]:
    """Return sizes (t, h, w) in patches; raises RequestError for anything but an array (number, 3) of such sizes."""
    rows = _as_list(name, given)
    try:
        array = np.stack([_to_numpy(row) for row in rows])
    except ValueError:  # rows of different lengths
        raise RequestError(
            f"{name} must have shape (number of {name[:5]}s, 3), got rows of different lengths", param=name
        ) from None
    if array.ndim != 2 or array.shape[1] != 3:
        raise RequestError(f"{name} must have shape (number of {name[:5]}s, 3), got {array.shape}", param=name)
    if array.dtype.kind not in "iuf" or not np.array_equal(array, np.floor(array)) or np.isinf(array).any():
        raise RequestError(f"{name} must have integers, got {array.tolist()}", param=name)
    for t, h, w in array.astype(np.int64).tolist():
        if min(t, h, w) < 1 or h % merge_size or w % merge_size:
            raise RequestError(
                f"{name} must have positive sizes, h and w multiples of {merge_size}, got {(t, h, w)}",
                param=name,
            )
    return [tuple(grid) for grid in array.astype(np.int64).tolist()]


def _own_placeholders(given: Any) -> list[PlaceholderRange]:
    try:
        return [PlaceholderRange(index(offset), index(length)) for offset, length in given]
    except (TypeError, ValueError):
        raise RequestError(
            f"vision_placeholders must be (offset, length) pairs, got {shown(given, 100)}", param="vision_placeholders"
        ) from None


def _check_placeholders(placeholders: list[PlaceholderRange], lengths: list[int], at: list[int]) -> None:
    given = [length for _, length in placeholders]
    if given != lengths:
        raise RequestError(
            f"vision_placeholders have lengths {given}, image_grid_thw needs {lengths}", param="vision_placeholders"
        )
    if at != [i for offset, length in placeholders for i in range(offset, offset + length)]:
        raise RequestError(
            f"vision_placeholders {[*map(tuple, placeholders)]} are not where the prompt's image tokens are; "
            "an image needs one run of them",
            param="vision_placeholders",
        )


def _split(name: str, pixel_values: Array | None, grids: list[Grid], grids_name: str, patch_dim: int) -> list[Tensor]:
    """Return a copy of the patches (P, patch_dim) of each image or video."""
    sizes = [prod(grid) for grid in grids]
    if isinstance(pixel_values, np.ndarray):
        pixel_values = _as_tensor(name, pixel_values)
    if isinstance(pixel_values, Tensor) and pixel_values.dim() == 2:
        pixel_values = pixel_values.split(sizes) if len(pixel_values) == sum(sizes) else [pixel_values]
    given = [_as_tensor(name, patches) for patches in _as_list(name, pixel_values)]
    shapes = [tuple(patches.shape) for patches in given]
    if shapes != [(size, patch_dim) for size in sizes]:
        raise RequestError(
            f"{name} have shapes {shapes!s:.200}, {grids_name} needs {[(size, patch_dim) for size in sizes]!s:.200}",
            param=name,
        )
    for patches in given:
        if patches.dtype != torch.uint8 and not patches.is_floating_point():
            raise RequestError(
                f"{name} have dtype {patches.dtype}; give uint8 patches, or floats that are normalized already",
                param=name,
            )
    return [patches.detach().to("cpu", copy=True, memory_format=torch.contiguous_format) for patches in given]


def _as_tensor(name: str, patches: Any) -> Tensor:
    """Return a tensor, which may share memory with `patches`; raises RequestError."""
    try:
        # torch does not support every numpy layout: the copy has no negative strides and native byte order.
        return torch.as_tensor(_in_native_order(patches) if isinstance(patches, np.ndarray) else patches)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RequestError(f"{name} cannot be read ({error})", param=name) from None


def _in_native_order(array: np.ndarray) -> np.ndarray:
    return np.array(array, dtype=array.dtype.newbyteorder("="))
