"""Pictures -> uint8 patches: load any form of picture, resize as Qwen2-VL does, cut into patches, digest.

From the RGB picture on, the result equals transformers' `Qwen2VLImageProcessorPil`: the same grid, and after
`normalize_patches` the same float32 values. Between here and the device a picture stays uint8, a quarter of the bytes.
"""

import base64
import binascii
import io
import json
import math
import threading
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from PIL import Image, ImageOps, UnidentifiedImageError

# What a file may declare before we refuse to decode it. Pillow itself warns at half of this and raises at this size.
MAX_SOURCE_PIXELS = 178_956_970
MAX_DOWNLOAD_BYTES = 64 * 1024 * 1024
DOWNLOAD_TIMEOUT_S = 20.0
MAX_ASPECT_RATIO = 200

# qwen-vl-utils' own bounds, which apply to an image part that carries sizes of its own.
PART_MIN_PIXELS = 4 * 28 * 28
PART_MAX_PIXELS = 16384 * 28 * 28

# A lazily opened PIL image that several requests share must not be read by two threads at once.
_LOADING = threading.Lock()


@dataclass(frozen=True, slots=True)
class ImageProcessorConfig:
    """What `preprocessor_config.json` says; the defaults are Qwen2-VL's."""

    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    patch_size: int = 14
    temporal_patch_size: int = 2
    merge_size: int = 2
    rescale_factor: float = 1 / 255
    image_mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)
    image_std: tuple[float, ...] = (0.26862954, 0.26130258, 0.27577711)

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> "ImageProcessorConfig":
        """Read `preprocessor_config.json`; new files keep the pixel bounds under `size`, old ones at the top."""
        path = Path(folder) / "preprocessor_config.json"
        if not path.is_file():
            return cls()
        raw = json.loads(path.read_text(encoding="utf-8"))
        size = raw.get("size") or {}
        found = {name: raw[name] for name in cls.__slots__ if raw.get(name) is not None}
        found.setdefault("min_pixels", size.get("shortest_edge") or size.get("min_pixels") or cls().min_pixels)
        found.setdefault("max_pixels", size.get("longest_edge") or size.get("max_pixels") or cls().max_pixels)
        for name in ("image_mean", "image_std"):
            if name in found:
                found[name] = tuple(found[name])
        return cls(**found)

    @property
    def factor(self) -> int:
        """Sides of a resized picture are multiples of this many pixels: one merged token."""
        return self.patch_size * self.merge_size


@dataclass(frozen=True, slots=True)
class ImageInput:
    """One prepared picture: P = t * h * w patches, of which merge_size**2 make one placeholder token."""

    pixel_values: torch.Tensor  # (P, channels * temporal_patch_size * patch_size**2) uint8
    grid_thw: tuple[int, int, int]
    digest: bytes  # 16 bytes, of the patches and of everything that was done to them


def smart_resize(
    height: int, width: int, factor: int = 28, min_pixels: int = 56 * 56, max_pixels: int = 28 * 28 * 1280
) -> tuple[int, int]:
    """Nearest (height, width) in multiples of `factor` with about the same aspect ratio and min <= area <= max.

    The rule, rounding included, is that of Qwen2-VL (qwen-vl-utils and transformers have the same one).
    Raises ValueError for an aspect ratio above 200.
    """
    if min(height, width) < 1:
        raise ValueError(f"picture is {width}x{height} pixels; both sides must be at least 1")
    if max(height, width) / min(height, width) > MAX_ASPECT_RATIO:
        raise ValueError(
            f"picture is {width}x{height} pixels: the long side may be at most {MAX_ASPECT_RATIO} times the short one; "
            "crop it"
        )
    h_bar, w_bar = round(height / factor) * factor, round(width / factor) * factor
    if h_bar * w_bar > max_pixels:
        beta = math.sqrt(height * width / max_pixels)
        h_bar = max(factor, math.floor(height / beta / factor) * factor)
        w_bar = max(factor, math.floor(width / beta / factor) * factor)
    elif h_bar * w_bar < min_pixels:
        beta = math.sqrt(min_pixels / (height * width))
        h_bar = math.ceil(height * beta / factor) * factor
        w_bar = math.ceil(width * beta / factor) * factor
    return h_bar, w_bar


def load_image(source: Any) -> Image.Image:
    """Load a picture from a PIL image, path, bytes, file/http(s) URL or data URI, as upright 8-bit RGB.

    EXIF rotation is applied, transparency is laid over white (as qwen-vl-utils does), 16-bit is scaled to 8, and of an
    animation the first frame is taken. Raises ValueError that says what came and what was wrong with it.
    """
    if isinstance(source, Image.Image):
        return _decode(source, "the PIL image")
    if isinstance(source, bytes | bytearray | memoryview):
        return _decode(bytes(source), f"the picture of {len(source)} bytes")
    if isinstance(source, str) and source.startswith(("http://", "https://")):
        return _decode(_download(source), f"the picture at {source}")
    if isinstance(source, str) and source.startswith("data:"):
        return _decode(_data_uri(source), "the picture in the data URI")
    if isinstance(source, str) and source.startswith("file://"):
        source = urllib.request.url2pathname(urllib.parse.urlsplit(source).path)
    if isinstance(source, str | Path):
        return _decode(_read_file(Path(source)), f"{source}")
    raise ValueError(
        f"cannot load a picture from {type(source).__name__}; "
        "give a PIL image, a path, bytes, a file:// or http(s):// URL, or a data: URI"
    )


def _read_file(path: Path) -> bytes:
    try:
        data = path.expanduser().read_bytes()
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise ValueError(f"{path}: cannot be read ({error})") from None
    if not data:
        raise ValueError(f"{path}: the file is empty")
    return data


def _download(url: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=DOWNLOAD_TIMEOUT_S) as response:
            data = response.read(MAX_DOWNLOAD_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ValueError(f"{url}: cannot be fetched ({error})") from None
    if len(data) > MAX_DOWNLOAD_BYTES:
        raise ValueError(f"{url}: more than {MAX_DOWNLOAD_BYTES} bytes; fetch and shrink it first")
    return data


def _data_uri(uri: str) -> bytes:
    header, comma, payload = uri.partition(",")
    if not comma:
        raise ValueError(f"data URI without a comma: {uri[:40]!r}; write data:image/png;base64,<data>")
    try:
        payload = urllib.parse.unquote_to_bytes(payload)
        return base64.b64decode(payload, validate=True) if header.endswith(";base64") else payload
    except binascii.Error as error:
        raise ValueError(f"data URI is not valid base64 ({error})") from None


def _decode(data: Image.Image | bytes, name: str) -> Image.Image:
    try:
        image = Image.open(io.BytesIO(data)) if isinstance(data, bytes) else data
        if image.width * image.height > MAX_SOURCE_PIXELS:
            raise Image.DecompressionBombError(f"{image.width}x{image.height} pixels")
        with _LOADING:
            image.load()
        return _to_rgb(ImageOps.exif_transpose(image))
    except UnidentifiedImageError:
        raise ValueError(f"{name}: not a picture that Pillow can read") from None
    except Image.DecompressionBombError as error:
        raise ValueError(f"{name}: too large to decode ({error}); the limit is {MAX_SOURCE_PIXELS} pixels") from None
    except (OSError, ValueError, SyntaxError, EOFError, ArithmeticError, LookupError, MemoryError) as error:
        # Pillow's readers raise any of these on a damaged file.
        raise ValueError(f"{name}: damaged or truncated ({error})") from None


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # Pillow's own conversion clips at 255 instead of scaling
        values = np.asarray(image).astype(np.int64)
        image = Image.fromarray((values >> 8 if values.max() > 255 else values).clip(0, 255).astype(np.uint8))
    elif image.mode == "F":
        values = np.nan_to_num(np.asarray(image))
        image = Image.fromarray((values * 255 if values.max() <= 1 else values).clip(0, 255).astype(np.uint8))
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        image = Image.new("RGB", rgba.size, (255, 255, 255))
        image.paste(rgba, mask=rgba.getchannel("A"))
    return image.convert("RGB")


def resize_for_part(image: Image.Image, part: dict, factor: int = 28) -> Image.Image:
    """Apply the sizes an image part carries, with the meaning they have in qwen-vl-utils' `fetch_image`.

    `resized_height` with `resized_width` ask for that size, `min_pixels` and `max_pixels` bound the area. The picture
    processor's own bounds apply afterwards, as they do when qwen-vl-utils feeds transformers' processor.
    """
    if not any(part.get(key) for key in ("resized_height", "resized_width", "min_pixels", "max_pixels")):
        return image
    if part.get("resized_height") and part.get("resized_width"):
        height, width = smart_resize(
            part["resized_height"], part["resized_width"], factor, PART_MIN_PIXELS, PART_MAX_PIXELS
        )
    else:
        low, high = part.get("min_pixels") or PART_MIN_PIXELS, part.get("max_pixels") or PART_MAX_PIXELS
        height, width = smart_resize(image.height, image.width, factor, low, high)
    return image.resize((width, height), Image.Resampling.BICUBIC)


class ImageProcessor:
    """RGB picture -> `ImageInput`, with the settings of a checkpoint."""

    def __init__(self, config: ImageProcessorConfig):
        self.config = config

    def __call__(self, image: Image.Image, min_pixels: int | None = None, max_pixels: int | None = None) -> ImageInput:
        """Resize, cut and digest one RGB picture; `min_pixels` and `max_pixels` replace the checkpoint's bounds."""
        c = self.config
        low, high = min_pixels or c.min_pixels, max_pixels or c.max_pixels
        height, width = smart_resize(image.height, image.width, c.factor, low, high)
        if (width, height) != image.size:
            image = image.resize((width, height), Image.Resampling.BICUBIC)
        patches = patchify(np.asarray(image), c.patch_size, c.merge_size)  # (P, C * p * p)
        grid_thw = (1, height // c.patch_size, width // c.patch_size)
        # A still picture fills every frame of its temporal patch.
        channels = patches.reshape(len(patches), 3, 1, c.patch_size**2)
        pixel_values = np.repeat(channels, c.temporal_patch_size, axis=2).reshape(len(patches), -1)
        digest = xxhash.xxh3_128(patches.data)
        digest.update(repr((grid_thw, low, high, c)).encode())
        return ImageInput(torch.from_numpy(pixel_values), grid_thw, digest.digest())


def patchify(pixels: np.ndarray, patch_size: int, merge_size: int) -> np.ndarray:
    """(height, width, C) uint8 -> (P, C * patch_size**2), patches in Qwen order.

    The merge_size**2 patches that become one token follow each other; tokens go row by row.
    """
    height, width, channels = pixels.shape
    p, m = patch_size, merge_size
    split = pixels.reshape(height // (m * p), m, p, width // (m * p), m, p, channels)
    return np.ascontiguousarray(split.transpose(0, 3, 1, 4, 6, 2, 5)).reshape(-1, channels * p * p)


def normalize_patches(patches: torch.Tensor, config: ImageProcessorConfig) -> torch.Tensor:
    """(P, C * T * p * p) uint8 -> float32, on the patches' device, with transformers' rounding.

    transformers rescales in float64, rounds to float32 and normalises there; any other order of operations is off by
    many ulps where a value lies near the mean.
    """
    channels = (patches.double() * config.rescale_factor).float().view(len(patches), len(config.image_mean), -1)
    mean = torch.tensor(config.image_mean, dtype=torch.float32, device=patches.device)[:, None]  # (C, 1)
    std = torch.tensor(config.image_std, dtype=torch.float32, device=patches.device)[:, None]
    return ((channels - mean) / std).view(patches.shape)
