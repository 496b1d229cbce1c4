"""Convert RGB images to uint8 patches: resize them to the checkpoint's settings, cut them, and compute digests.

For the same RGB image, the result equals transformers' PIL image processors for the Qwen-VL models: the same grid and,
after normalization by `ImageProcessorConfig.pixel_table`, the same float32 values. Patches stay uint8 up to the device,
which takes a quarter of the bytes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import torch
from PIL import Image

from mmvllm.errors import ParameterError, RequestError
from mmvllm.grounding import ImageGeometry
from mmvllm.inputs import Grid, MultiModalInput
from mmvllm.processors.digest import digest_of
from mmvllm.processors.images.bounds import check_bounds, pixel_bounds
from mmvllm.processors.images.draft import Draft, source_size, with_source_size
from mmvllm.processors.images.pixels import orientation_of
from mmvllm.utils.arguments import check_int, is_number
from mmvllm.utils.text import beginning_of, load_json, printable, shown

Config = TypeVar("Config", bound="ImageProcessorConfig")

MAX_ASPECT_RATIO = 200
FRAME = "a frame"  # the noun of errors about frames of a video

# qwen-vl-utils' bounds in tokens, which apply to an image part that specifies sizes.
PART_MIN_TOKENS = 4
PART_MAX_TOKENS = 16384
LOW_TOKENS = 256  # maximum for an image whose detail is "low"
PART_SIZES = ("min_pixels", "max_pixels", "resized_height", "resized_width")

STRIP_PIXELS = 224 * 1024  # cut at a time; 448x448 is one strip

_SIZE_NAMES = {"shortest_edge", "longest_edge", "min_pixels", "max_pixels"}

_LARGEST = 1e6  # bound of the rescale factor, the means and the standard deviations
# Settings with one supported value.
_FIXED = {"do_resize": True, "do_rescale": True, "do_normalize": True, "resample": int(Image.Resampling.BICUBIC)}


@dataclass(frozen=True, slots=True)
class ImageProcessorConfig:
    """How images are resized, cut into patches and normalized for a checkpoint."""

    min_pixels: int
    max_pixels: int
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    rescale_factor: float
    image_mean: tuple[float, ...]
    image_std: tuple[float, ...]

    section: ClassVar[str] = "image_processor"  # key in processor_config.json
    files: ClassVar[tuple[str, ...]] = ("preprocessor_config.json",)

    def __post_init__(self):
        for name in ("min_pixels", "max_pixels", "patch_size", "temporal_patch_size", "merge_size"):
            check_int(name, getattr(self, name))
        check_bounds(self.min_pixels, self.max_pixels)
        if not is_number(self.rescale_factor) or not 1 / _LARGEST <= self.rescale_factor <= _LARGEST:
            raise ValueError(f"rescale_factor must be above 0, such as 1 / 255, got {shown(self.rescale_factor, 60)}")

    @classmethod
    def from_pretrained(cls, folder: str | Path, defaults: Config) -> Config:
        """Read a checkpoint's settings as transformers does; missing settings are the family's `defaults`.

        They are under `section` in `processor_config.json`, or else in the first of `files` that exists. New files keep
        the pixel bounds under `size`, old ones at the top level, which takes precedence. Raises ValueError for damaged
        files and unsupported settings.
        """
        path, raw = _read_settings(Path(folder), cls.section, cls.files)
        if not isinstance(raw, dict):
            raise ValueError(f"{path}: the settings must be a JSON object, got {raw!r:.40}")
        try:
            for name, value in _FIXED.items():
                if raw.get(name) not in (value, None):
                    raise ValueError(f"{name} is {shown(raw[name])}, mmvllm supports only {value!r}")
            return replace(defaults, **_known_settings(cls, raw))
        except (TypeError, ValueError, OverflowError) as error:  # integers beyond the range of floats
            raise ValueError(f"{path}: {beginning_of(printable(str(error)), 1000)}") from error

    @property
    def factor(self) -> int:
        """Pixels per side of a merged token; the sides of a resized image are multiples of it."""
        return self.patch_size * self.merge_size

    def pixel_table(self) -> torch.Tensor:
        """Return the normalized value of each level of each channel, (C, 256) float32, with transformers' rounding.

        transformers rescales in float64, rounds to float32 and normalizes; any other order of operations is off by many
        ulps for values near the mean.
        """
        levels = (torch.arange(256, dtype=torch.float64) * self.rescale_factor).float()
        mean, std = (torch.tensor(x, dtype=torch.float32) for x in (self.image_mean, self.image_std))
        return normalized_levels(levels, mean, std)

    def resized(
        self, height: int, width: int, min_pixels: int | None = None, max_pixels: int | None = None
    ) -> tuple[int, int]:
        """Return the (height, width) that an image is resized to; given bounds replace the checkpoint's.

        A `max_pixels` below the checkpoint's `min_pixels` is never exceeded, whereas transformers rounds up. Raises
        ValueError for bounds that cannot be met.
        """
        low, high = pixel_bounds(min_pixels, max_pixels, self.min_pixels, self.max_pixels)
        size = smart_resize(height, width, self.factor, low, high)
        return size if high >= self.min_pixels else _shrink(size, self.factor, high)


def normalized_levels(levels: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    """levels (256,), mean and std (C,), all float32 -> (C, 256)."""
    return (levels - mean[:, None]) / std[:, None]


def _read_settings(folder: Path, section: str, files: Sequence[str]) -> tuple[Path, Any]:
    """Return the path of the settings file, and its settings; {} if the file does not exist."""
    path = folder / "processor_config.json"
    processor = _read_json(path)
    if isinstance(processor, dict) and section in processor:
        return path, processor[section]
    path = next((folder / name for name in files if (folder / name).is_file()), folder / files[-1])
    return path, _read_json(path)


def _read_json(path: Path) -> Any:
    if not path.is_file():
        return {}
    try:
        return load_json(path)
    except ValueError as error:  # not JSON, or not UTF-8
        raise ValueError(f"{path} is damaged: not valid JSON ({error}); download it again") from None


def _known_settings(config_class: type, raw: dict) -> dict[str, Any]:
    """Return the settings that are fields of the class, from either layout; null means the default."""
    found = {one.name: raw[one.name] for one in fields(config_class) if raw.get(one.name) is not None}
    size = raw.get("size") or {}
    if not isinstance(size, dict) or any(size[name] is not None for name in size.keys() - _SIZE_NAMES):
        raise ValueError(f"size must have shortest_edge and longest_edge, and nothing else, got {size!r:.60}")
    for name, new_name in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
        bound = size.get(name) if size.get(new_name) is None else size[new_name]
        if bound is not None:
            found.setdefault(name, bound)
    for name in ("image_mean", "image_std"):
        if name in found:  # one number applies to all three channels
            values = np.broadcast_to(np.asarray(found[name], dtype=np.float64), 3)
            least = 1 / _LARGEST if name == "image_std" else -_LARGEST
            if not ((least <= values) & (values <= _LARGEST)).all():
                bound = f"{', above 0' * (name == 'image_std')}, at most {_LARGEST:g}"
                raise ValueError(f"{name} must be finite numbers{bound}, got {shown(raw[name], 60)}")
            found[name] = tuple(values.tolist())
    return found


def smart_resize(
    height: int,
    width: int,
    factor: int,
    min_pixels: int,
    max_pixels: int,
    min_side: int = 0,
    noun: str = "image",
) -> tuple[int, int]:
    """Return the nearest (height, width) in multiples of `factor`, with a similar aspect ratio and min <= area <= max.

    Rounding follows transformers, where a side below factor / 2 rounds to 0 and the image is thus enlarged. With
    `min_side=factor`, such a side is rounded up, as in qwen-vl-utils. An image too thin for `max_pixels` stays one
    factor thick. Raises RequestError, which calls the image `noun`, for an aspect ratio above 200.
    """
    check_aspect_ratio(height, width, noun)
    h_bar, w_bar = (max(min_side, round(side / factor) * factor) for side in (height, width))
    if h_bar * w_bar > max_pixels:
        beta = math.sqrt(height * width / max_pixels)
        h_bar = max(factor, math.floor(height / beta / factor) * factor)
        w_bar = max(factor, math.floor(width / beta / factor) * factor)
    elif h_bar * w_bar < min_pixels:
        beta = math.sqrt(min_pixels / (height * width))
        h_bar = math.ceil(height * beta / factor) * factor
        w_bar = math.ceil(width * beta / factor) * factor
    return h_bar, w_bar


def check_aspect_ratio(height: int, width: int, noun: str = "image") -> None:
    """Raise RequestError for an image or a frame without pixels, or with an aspect ratio above 200."""
    if min(height, width) < 1:
        raise RequestError(f"{noun} is {width}x{height} pixels; both sides must be at least 1")
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        raise RequestError(
            f"{noun} is {width}x{height} pixels: the long side may be at most {MAX_ASPECT_RATIO} times the short one; "
            "crop it"
        )


def _shrink(size: tuple[int, int], factor: int, max_pixels: int) -> tuple[int, int]:
    """Shorten the longer side until the area is at most `max_pixels`."""
    if max_pixels < factor**2:
        raise ParameterError("max_pixels", max_pixels, f"at least {factor**2}, the pixels of one token")
    height, width = size
    short = min(height, width, math.isqrt(max_pixels) // factor * factor)
    long = min(max(height, width), max_pixels // short // factor * factor)
    return (short, long) if height <= width else (long, short)


def resize_for_part(image: Image.Image, part: dict, factor: int) -> Image.Image:
    """Resize an image to the sizes of its message part, which mean the same as in qwen-vl-utils' `fetch_image`.

    `resized_height` and `resized_width` together set the size (one alone is ignored). `min_pixels` and `max_pixels`
    bound the area, as does OpenAI's `detail` "low". The image processor's bounds apply afterwards, as when
    qwen-vl-utils is used with transformers' processor.
    """
    if not any(part.get(key) for key in (*PART_SIZES, "detail")):
        return image
    low, high = PART_MIN_TOKENS * factor**2, PART_MAX_TOKENS * factor**2
    if part.get("resized_height") and part.get("resized_width"):
        height, width = part["resized_height"], part["resized_width"]
    else:
        width, height = source_size(image)
        low, high = pixel_bounds(part.get("min_pixels"), _most_pixels(part, factor), low, high)
    height, width = smart_resize(height, width, factor, low, high, min_side=factor)
    return with_source_size(image.resize((width, height), Image.Resampling.BICUBIC), (width, height))


def _most_pixels(part: dict, factor: int) -> int | None:
    limits = [part.get("max_pixels"), LOW_TOKENS * factor**2 if part.get("detail") == "low" else None]
    return min(filter(None, limits), default=None)


def draft_for(
    config: ImageProcessorConfig, part: dict, min_pixels: int | None = None, max_pixels: int | None = None
) -> Draft | None:
    """Return the draft for a JPEG, from an image part and a request's bounds; None for a part that sets its size."""
    if part.get("resized_height") and part.get("resized_width"):
        return None
    _, high = pixel_bounds(min_pixels, max_pixels, config.min_pixels, config.max_pixels)
    if any(part.get(key) for key in (*PART_SIZES, "detail")):  # the image is resized to the part's bounds first
        bounds = PART_MIN_TOKENS * config.factor**2, PART_MAX_TOKENS * config.factor**2
        _, high = pixel_bounds(part.get("min_pixels"), _most_pixels(part, config.factor), *bounds)
    return Draft(high, config.factor)


class SourceGeometry(NamedTuple):
    """The size of an upright image before it is resized, and the EXIF orientation in which it is stored."""

    width: int
    height: int
    orientation: int

    @classmethod
    def of(cls, image: Image.Image) -> "SourceGeometry":
        return cls(*source_size(image), orientation_of(image))

    def resized_to(self, grid: Grid, patch_size: int) -> ImageGeometry:
        """Return the geometry of the image after resizing it to a grid of patches."""
        _, h, w = grid
        return ImageGeometry(self.width, self.height, w * patch_size, h * patch_size, self.orientation)


class ImageProcessor:
    """Converts RGB images to `MultiModalInput` with the settings of a checkpoint."""

    def __init__(self, config: ImageProcessorConfig):
        self.config = config

    def __call__(
        self, image: Image.Image, min_pixels: int | None = None, max_pixels: int | None = None
    ) -> MultiModalInput:
        """Resize, cut and digest one RGB image; `min_pixels` and `max_pixels` replace the checkpoint's bounds."""
        c = self.config
        low, high = pixel_bounds(min_pixels, max_pixels, c.min_pixels, c.max_pixels)
        source, decoded = source_size(image), image.size
        height, width = c.resized(source[1], source[0], min_pixels, max_pixels)
        if (width, height) != image.size:
            image = image.resize((width, height), Image.Resampling.BICUBIC)
        patches = patches_of(image, c.patch_size, c.merge_size, c.temporal_patch_size)
        grid = (1, height // c.patch_size, width // c.patch_size)
        draft = ("jpeg_draft", source, decoded) if source != decoded else ()
        digest = digest_of(patches.data, repr(("image", grid, low, high, c, *draft)).encode())
        return MultiModalInput("image", torch.from_numpy(patches), grid, (digest,))


def patches_of(image: Image.Image, patch_size: int, merge_size: int, frames: int) -> np.ndarray:
    """Cut an RGB image into patches (h * w, 3 * frames * patch_size**2) uint8, like `patchify` with equal frames.

    The image is cut strip by strip, so intermediate data stays in the CPU's cache. A row of a patch is contiguous in
    the bytes of a channel, and is copied as one element.
    """
    width, height = image.size
    p, m = patch_size, merge_size
    rows, columns = height // (m * p), width // (m * p)
    patches = np.empty((rows, columns, m, m, 3, frames, p, p), np.uint8)
    runs = patches.view(f"V{p}")[..., 0]
    squares = patches.reshape(-1, p * p).view(f"V{p * p}").reshape(rows, -1, frames)
    step = max(1, STRIP_PIXELS // (m * p * width))
    for top in range(0, rows, step):
        strip = image if step >= rows else image.crop((0, top * m * p, width, min(top + step, rows) * m * p))
        for channel, name in enumerate("RGB"):
            levels = np.frombuffer(strip.tobytes("raw", name), f"V{p}").reshape(-1, m, p, columns, m)
            runs[top : top + step, ..., channel, 0, :] = levels.transpose(0, 3, 1, 4, 2)
        for frame in range(1, frames):  # np.repeat would hold the GIL
            squares[top : top + step, :, frame] = squares[top : top + step, :, 0]
    return patches.reshape(rows * columns * m * m, -1)


def patchify(pixels: np.ndarray, patch_size: int, merge_size: int) -> np.ndarray:
    """Cut (t, frames, height, width, C) uint8 into patches (t, h * w, C * frames * patch_size**2) in merge order.

    The merge_size**2 patches of a token are consecutive; tokens are ordered row by row.
    """
    t, frames, height, width, channels = pixels.shape
    p, m = patch_size, merge_size
    split = pixels.reshape(t, frames, height // (m * p), m, p, width // (m * p), m, p, channels)
    return np.ascontiguousarray(split.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)).reshape(t, -1, channels * frames * p * p)
