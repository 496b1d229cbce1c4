"""Decode encoded images and PIL images to upright 8-bit RGB within a memory budget; every failure is an ImageError."""

import io
import re
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, closing, suppress
from functools import cache, partial

from PIL import Image, UnidentifiedImageError

from mmvllm.errors import ImageError
from mmvllm.processors.images.draft import Draft, with_source_size
from mmvllm.processors.images.pixels import orientation_of, upright_rgb
from mmvllm.processors.images.png import PNG_MAGIC, essential_chunks
from mmvllm.processors.images.scan import (
    JPEG_XL_MAGIC,
    RefusedImage,
    check_opened,
    embedded_size,
    has_all_scans,
    read_in_few_pieces,
    scan,
)

Reserve = Callable[[int], AbstractContextManager]

MAX_SIDE = 500_000  # pixels; each row takes 12 extra bytes in each copy, whatever its width
_END_OF_JPEG = b"\xff\xd9"
_NOISE = b"\xa5\x3c" * 64
_TRUNCATED = "mmvllm.truncated"  # in `Image.info`
_ICONS = (b"\0\0\1\0", b"icns")
_HEIF_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs", b"mif1", b"msf1")

_VIDEO = re.compile(rb"....ftyp|\x1aE\xdf\xa3|RIFF....AVI ", re.DOTALL)  # MP4 and MOV, Matroska and WebM, AVI

# Bytes per pixel, measured as the growth of the resident size by images of 4000x4000 pixels: modes without four bytes
# (RGB has an unused one); the new RGB image, with the arrays for 16 and 32 bits; and the buffers of a format's decoder
# beside the image. Estimates are from 1 % below to 2.4 times the measured size: HEIF and AVIF have slack on purpose.
_MODE_BYTES = {"1": 1, "L": 1, "P": 1, "I;16": 2, "I;16B": 2, "I;16L": 2, "I;16N": 2}
_RGB_BYTES = {"I;16": 5, "I;16B": 5, "I;16L": 5, "I;16N": 5, "I": 9, "F": 9}
_DECODER_BYTES = {"WEBP": 8, "AVIF": 8, "HEIF": 8, "JPEG2000": 12, "FITS": 40}
_PROGRESSIVE_BYTES = 6  # coefficients of the whole image, even for a draft


def decode(
    source: Image.Image | bytes,
    name: str,
    max_pixels: int,
    reserve: Reserve,
    formats: Collection[str] | None = None,
    draft: Draft | None = None,
    accept_truncated: bool = False,
) -> Image.Image:
    """Return a new upright RGB image; raises ImageError, which references neither image data nor other exceptions."""
    try:
        if isinstance(source, bytes):
            own = {"max_pixels": max_pixels, "reserve": reserve, "formats": readable_formats(formats), "draft": draft}
            return _decode_whole(source, partial(_decode_bytes, **own), accept_truncated)
        return _decode_image(source, max_pixels, reserve)
    except UnidentifiedImageError:
        reason = _unidentified(source, formats)
    except Exception as error:  # Pillow's readers raise any exception for a damaged file
        reason = _reason(error)
    raise ImageError(name, reason)  # raised here, after the exception above and its frames are gone


def readable_formats(names: Collection[str] | None = None) -> list[str]:
    """Return Pillow's names of the formats that this installation reads, restricted to `names` if given."""
    return _formats() if names is None else [name for name in names if name in _formats()]


@cache
def _formats() -> list[str]:
    """Return all formats that Pillow reads, with HEIF and JPEG XL if installed, without EPS, which runs Ghostscript."""
    Image.init()
    with suppress(ImportError):
        from pillow_heif import register_heif_opener

        register_heif_opener()
    with suppress(ImportError):
        from pillow_jxl import JpegXLImagePlugin

        JpegXLImagePlugin.DECODE_THREADS = 0  # images are decoded side by side
    return [name for name in Image.OPEN if name != "EPS"]


def is_truncated(image: Image.Image) -> bool:
    """Return whether the image is from a file that lacks its end, which `accept_truncated` permits."""
    return _TRUNCATED in image.info


def _decode_whole(data: bytes, decode_one: Callable[[bytes], Image.Image], accept_truncated: bool) -> Image.Image:
    """Decode an encoded image, also a JPEG that lacks nothing but its end marker.

    libjpeg replaces missing data silently. Nothing is missing if other bytes before the end marker change no pixel.
    """
    try:
        return decode_one(data)
    except OSError as error:
        if not data.startswith(b"\xff\xd8\xff") or "image file is truncated" not in str(error):
            raise
        reason = str(error)
    data = data.rstrip(b"\xff")  # perhaps the first half of the end marker
    image = decode_one(data + _END_OF_JPEG)
    try:
        is_whole = has_all_scans(data) and decode_one(data + _NOISE + _END_OF_JPEG).tobytes() == image.tobytes()
    except Exception:  # from Pillow's readers, or for damaged headers
        is_whole = False
    if is_whole:
        return image
    if not accept_truncated:
        raise OSError(reason)
    image.info[_TRUNCATED] = True
    return image


def _decode_bytes(
    data: bytes, max_pixels: int, reserve: Reserve, formats: list[str], draft: Draft | None
) -> Image.Image:
    data = essential_chunks(data) if data.startswith(PNG_MAGIC) else data
    scan(data)
    if data.startswith(_ICONS):
        return _decode_icon(data, max_pixels, reserve, formats)
    with closing(Image.open(io.BytesIO(data), formats=formats)) as image:
        _check_size(image.size, max_pixels)
        check_opened(image)
        if image.format == "JXL" and not image.jpeg:  # turned upright by its header, so that EXIF must be ignored
            image.info.pop("exif", None)
        read_in_few_pieces(image, len(data))
        size, num_encoded_pixels = image.size, _area(image.size)
        if draft is not None:
            draft.apply(image)
        num_bytes = decoding_bytes(image, _area(image.size), num_encoded_pixels)
        with reserve(num_bytes), closing(image):  # closed before its bytes are released
            upright = _pixels(image, num_bytes, is_own=True)
            if draft is None:
                return upright
            return with_source_size(upright, size[::-1] if orientation_of(upright) > 4 else size)


def _decode_icon(data: bytes, max_pixels: int, reserve: Reserve, formats: list[str]) -> Image.Image:
    """Decode an icon in the size of its embedded image: Pillow ignores the header, and decodes an ICO on opening."""
    size = embedded_size(data)
    _check_size(size, max_pixels)
    num_bytes = 12 * _area(size)
    with reserve(num_bytes), closing(Image.open(io.BytesIO(data), formats=formats)) as image:
        return _pixels(image, num_bytes, is_own=True)


def _decode_image(image: Image.Image, max_pixels: int, reserve: Reserve) -> Image.Image:
    _check_size(image.size, max_pixels)
    num_bytes = decoding_bytes(image, _area(image.size), _area(image.size))
    with reserve(num_bytes):
        return _pixels(image, num_bytes)


def decoding_bytes(image: Image.Image, num_pixels: int, num_encoded_pixels: int) -> int:
    """Return an upper estimate of the peak memory for decoding an opened image to RGB, in bytes.

    Args:
        num_pixels: pixels that are decoded, fewer than `num_encoded_pixels` with a draft.
    """
    mode = _MODE_BYTES.get(image.mode, 4)
    turned = 0 if image.mode == "RGB" else mode  # a turned RGB image is not copied again
    flattened = 4 if image.has_transparency_data and image.mode != "RGBA" else 0
    decoder = _PROGRESSIVE_BYTES if "progressive" in image.info else _DECODER_BYTES.get(image.format, 0)
    per_pixel = mode + turned + flattened + _RGB_BYTES.get(image.mode, 4)
    return num_pixels * per_pixel + num_encoded_pixels * decoder


def _pixels(image: Image.Image, num_bytes: int, is_own: bool = False) -> Image.Image:
    try:
        image.load()
        upright = upright_rgb(image, is_own)
        return with_source_size(upright, upright.size)  # do not trust the size in the file's metadata
    except MemoryError:
        size, num_mb = f"{image.width}x{image.height} pixels", max(1, round(num_bytes / 1e6))
    raise MemoryError(f"{size} need about {num_mb:,} MB")


def _area(size: tuple[int, int]) -> int:
    return size[0] * size[1]


def _check_size(size: tuple[int, int], max_pixels: int) -> None:
    if max(size) > MAX_SIDE:
        raise Image.DecompressionBombError(f"it is {size[0]}x{size[1]}, more than {MAX_SIDE} pixels on a side")
    if _area(size) > max_pixels:
        raise Image.DecompressionBombError(f"it is {size[0]}x{size[1]}, more than {max_pixels} pixels")


def _unidentified(source: Image.Image | bytes, formats: Collection[str] | None) -> str:
    is_heif = isinstance(source, bytes) and source[4:8] == b"ftyp" and source[8:12] in _HEIF_BRANDS
    if is_heif and _lacks("HEIF", formats):
        return "is HEIC/HEIF; pip install 'mmvllm[heif]'"
    if isinstance(source, bytes) and source.startswith(JPEG_XL_MAGIC) and _lacks("JXL", formats):
        return "is JPEG XL; pip install 'mmvllm[jxl]'"
    known = "an image that Pillow can read" if formats is None else _one_of(formats)
    if isinstance(source, bytes) and _VIDEO.match(source) and not is_heif:
        return f"not {known}, but a video; give it as one"
    return f"not {known}"


def _lacks(format: str, formats: Collection[str] | None) -> bool:
    """Return whether an accepted format needs a package that is not installed."""
    return format not in _formats() and (formats is None or format in formats)


def _one_of(formats: Collection[str]) -> str:
    return f"an image in {', '.join(readable_formats(formats))}"


def _reason(error: Exception) -> str:
    if isinstance(error, RefusedImage):
        return str(error)
    if isinstance(error, Image.DecompressionBombError):
        return f"too large to decode ({error}); shrink it first"
    if isinstance(error, MemoryError):
        return f"not enough memory to decode it{f': {error}' if str(error) else ''}; shrink it first"
    # The text of other exceptions, such as KeyError and RecursionError, is no sentence; their type says more.
    is_sentence = str(error) and isinstance(error, OSError | SyntaxError | ValueError | EOFError)
    detail = error if is_sentence else ": ".join(filter(None, (type(error).__name__, str(error))))
    return f"cannot be decoded, damaged or truncated ({detail})"
