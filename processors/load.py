"""Loads an image from any source as upright 8-bit RGB, or raises ImageError with the source and the reason."""

import base64
import errno
import http.client
import io
import os
import stat
import string
import sys
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any, BinaryIO

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError
from PIL.Image import Transpose

from mmvllm.errors import ImageError

# Larger images are refused before they are decoded. It is Pillow's own limit, which callers may have changed there.
MAX_SOURCE_PIXELS = 178_956_970
MAX_FILE_BYTES = 1024 * 1024 * 1024
MAX_DOWNLOAD_BYTES = 64 * 1024 * 1024
DOWNLOAD_TIMEOUT_S = 20.0  # without receiving a byte

# EXIF orientation -> the transposition that undoes it. `ImageOps.exif_transpose` would also rewrite the EXIF block,
# which fails if that block is damaged although the image is not.
_UPRIGHT = {
    2: Transpose.FLIP_LEFT_RIGHT,
    3: Transpose.ROTATE_180,
    4: Transpose.FLIP_TOP_BOTTOM,
    5: Transpose.TRANSPOSE,
    6: Transpose.ROTATE_270,
    7: Transpose.TRANSVERSE,
    8: Transpose.ROTATE_90,
}

_WHITESPACE = string.whitespace.encode()

# A lazily opened PIL image or a file object that several requests share must not be read by two threads at once.
_SHARED = threading.Lock()

BYTES_PER_PIXEL = 12  # of an image while it is decoded, with its copies
MAX_DECODING_BYTES = 2 * 1024 * 1024 * 1024


class DecodeBudget:
    """Bounds the bytes of the images that are decoded at once; one image is always let in."""

    def __init__(self, max_bytes: int = MAX_DECODING_BYTES):
        self._max_bytes, self._num_bytes, self._changed = max_bytes, 0, threading.Condition()

    @contextmanager
    def reserve(self, num_bytes: int) -> Iterator[None]:
        """Wait until there is room for so many bytes, and hold them."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_bytes or self._num_bytes + num_bytes <= self._max_bytes)
            self._num_bytes += num_bytes
        try:
            yield
        finally:
            with self._changed:
                self._num_bytes -= num_bytes
                self._changed.notify_all()


DECODING = DecodeBudget()  # of this process; worker processes ask their parent's


def load_image(
    source: Any,
    draft: int | None = None,
    max_source_pixels: int | None = None,
    formats: Collection[str] | None = None,
    reserve: Callable[[int], AbstractContextManager] = DECODING.reserve,
) -> Image.Image:
    """Load an image as a new upright 8-bit RGB image.

    EXIF rotation is applied, and transparency is laid over white (as qwen-vl-utils does). Images with 16 or 32 bits per
    channel are scaled to 8 bits, where transformers clips them. Of an animation the first frame is taken (of a PIL
    image its current frame).

    Args:
        source: a PIL image; a path; encoded bytes or a binary file object; a file:// or http(s):// URL or a data URI;
            a numpy array or torch tensor of uint8 with shape (height, width, 3), (height, width, 4) with alpha, or
            (height, width) in grey.
        draft: decode a JPEG at the smallest of its scales (1/8, 1/4, 1/2, 1) that has at least this many pixels on each
            side, which is faster and gives other pixel values.
        max_source_pixels: an image with more pixels is refused before it is decoded (default: MAX_SOURCE_PIXELS).
        formats: Pillow's names of the accepted formats of encoded images (default: all that Pillow reads without
            external programs).
        reserve: called with the number of bytes that decoding takes; the image is decoded within what it returns.

    Raises ImageError, a ValueError.
    """
    max_pixels = MAX_SOURCE_PIXELS if max_source_pixels is None else max_source_pixels
    if isinstance(source, Image.Image):
        name = "the PIL image"
        with _SHARED:
            image = _decode(
                source, name, max_pixels, reserve
            )  # without a draft, which would stay with the caller's image
    elif _is_array(source):
        name = "the array"
        image = _decode(_from_array(source, name), name, max_pixels, reserve)
    else:
        data, name = _read(source)
        if not data:
            raise ImageError(name, "is empty (0 bytes)")
        image = _decode(data, name, max_pixels, reserve, formats, draft)
    if 0 in image.size:
        raise ImageError(name, f"has no pixels, it is {image.width}x{image.height}")
    return image


def _is_array(source: Any) -> bool:
    torch = sys.modules.get("torch")  # loading images does not need torch
    return isinstance(source, np.ndarray) or (torch is not None and isinstance(source, torch.Tensor))


def _from_array(array: Any, name: str) -> Image.Image:
    """A PIL image of a numpy array or torch tensor; raises ImageError for another shape or dtype."""
    shape, dtype = tuple(array.shape), str(array.dtype).removeprefix("torch.")
    if dtype != "uint8" or len(shape) not in (2, 3) or shape[2:] not in ((), (3,), (4,)):
        required = "uint8 of shape (height, width, 3), (height, width, 4) or (height, width)"
        raise ImageError(name, f"has shape {shape} and dtype {dtype}, must be {required}")
    if 0 in shape:
        raise ImageError(name, f"has no pixels, it is {shape[1]}x{shape[0]}")
    return Image.fromarray(array if isinstance(array, np.ndarray) else array.cpu().numpy())


def _read(source: Any) -> tuple[bytes, str]:
    """The encoded image, and its name for error messages."""
    if isinstance(source, bytes | bytearray | memoryview):
        return (data := bytes(source)), f"the image of {len(data)} bytes"
    if hasattr(source, "read") and hasattr(source, "seek"):
        return _read_file_object(source), "the image in the file object"
    scheme = source.partition(":")[0].lower() if isinstance(source, str) else ""
    if scheme in ("http", "https"):
        return _download(source), f"the image at {source}"
    if scheme == "data":
        return decode_data_uri(source), "the image in the data URI"
    if scheme == "file":
        return _read_file(_file_url_path(source))
    if isinstance(source, os.PathLike) or (isinstance(source, str) and "://" not in source):
        return _read_file(os.fsdecode(source))
    given = f"{source:.100}" if isinstance(source, str) else type(source).__name__
    accepted = "a PIL image, a path, bytes, a binary file, a file:// or http(s):// URL, a data: URI, or a uint8 array"
    raise ImageError("", f"cannot load an image from {given}; give {accepted}")


def _file_url_path(url: str) -> str:
    """Everything after the scheme is the path, including '?' and '#'; it may be relative, as in qwen-vl-utils."""
    path = url[len("file:") :].removeprefix("//")
    if path.startswith("localhost/"):
        path = path.removeprefix("localhost")
    return urllib.request.url2pathname(path)


def _read_file_object(file: BinaryIO) -> bytes:
    """All bytes of a binary file object, whatever its position."""
    name = "the file object"
    try:
        with _SHARED:
            if file.seekable():
                file.seek(0)
            data = file.read(MAX_FILE_BYTES + 1)
    except (AttributeError, OSError, ValueError) as error:  # for example a closed file, or one opened for writing
        raise ImageError(name, f"cannot be read ({error})") from None
    if not isinstance(data, bytes):
        raise ImageError(name, f"gives {type(data).__name__} instead of bytes; open it in binary mode")
    if len(data) > MAX_FILE_BYTES:
        raise ImageError(name, f"cannot be read (it has more than {MAX_FILE_BYTES} bytes)")
    return data


def _read_file(path: str) -> tuple[bytes, str]:
    name = f"{path:.200}" or "''"  # shortened: it may be base64 that was meant to be a data URI
    try:
        # Not Path.expanduser, which fails on a file named "~something".
        path = os.path.expanduser(path)
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):  # reading might block forever
            raise OSError(errno.EINVAL, "it is a device or a pipe")
        if status.st_size > MAX_FILE_BYTES:
            raise OSError(errno.EFBIG, f"it has {status.st_size} bytes, more than {MAX_FILE_BYTES}")
        with open(path, "rb") as file:
            return file.read(), name
    except FileNotFoundError:
        raise ImageError(name, "no such file") from None
    except IsADirectoryError:
        raise ImageError(name, "is a folder, not an image") from None
    except OSError as error:
        raise ImageError(name, f"cannot be read ({error.strerror})") from None
    except ValueError as error:  # for example a NUL in the path
        raise ImageError(name, f"is not a path ({error})") from None


def _download(url: str) -> bytes:
    quoted = urllib.parse.quote(url, safe="%/:=&?~#+!$,;'@()*[]")  # keeps existing escapes
    try:
        # Some sites refuse urllib's default user agent.
        request = urllib.request.Request(quoted, headers={"User-Agent": "mmvllm"})
        with urllib.request.urlopen(request, timeout=DOWNLOAD_TIMEOUT_S) as response:
            data = response.read(MAX_DOWNLOAD_BYTES + 1)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise ImageError(url, f"cannot be fetched ({error})") from None
    if len(data) > MAX_DOWNLOAD_BYTES:
        raise ImageError(url, f"more than {MAX_DOWNLOAD_BYTES} bytes; fetch and shrink it first")
    return data


def decode_data_uri(uri: str) -> bytes:
    """The bytes in a data URI; raises ImageError with the first characters of the URI."""
    header, comma, payload = uri.partition(",")
    if not comma:
        raise ImageError("", f"data URI without a comma: {uri[:40]!r}; write data:image/png;base64,<data>")
    try:
        data = urllib.parse.unquote_to_bytes(payload)
        if not header.lower().endswith(";base64"):
            return data
        return base64.b64decode(data.translate(None, _WHITESPACE), validate=True)  # encoders insert line breaks
    except ValueError as error:
        raise ImageError("", f"data URI is not valid base64 ({error}): {uri[:40]!r}") from None


def _decode(
    data: Image.Image | bytes,
    name: str,
    max_pixels: int,
    reserve: Callable[[int], AbstractContextManager],
    formats: Collection[str] | None = None,
    draft: int | None = None,
) -> Image.Image:
    known = _formats() if formats is None else [one for one in formats if one in _formats()]
    try:
        image = Image.open(io.BytesIO(data), formats=known) if isinstance(data, bytes) else data
        if image.width * image.height > max_pixels:
            raise Image.DecompressionBombError(f"it is {image.width}x{image.height}, more than {max_pixels} pixels")
        if draft is not None:
            image.draft(None, (draft, draft))
        with reserve(image.width * image.height * BYTES_PER_PIXEL):
            image.load()
            return _to_rgb(_upright(image))
    except UnidentifiedImageError:
        required = "an image that Pillow can read" if formats is None else f"an image in {', '.join(known)}"
        raise ImageError(name, f"not {required}") from None
    except Image.DecompressionBombError as error:
        raise ImageError(name, f"too large to decode ({error}); shrink it first") from None
    except Exception as error:  # Pillow's readers raise any exception for a damaged file
        raise ImageError(name, f"cannot be decoded, damaged or truncated ({error})") from error


@cache
def _formats() -> list[str]:
    """All formats that Pillow reads, except EPS, for which it would run Ghostscript on the file."""
    Image.init()
    return [name for name in Image.OPEN if name != "EPS"]


def _upright(image: Image.Image) -> Image.Image:
    method = _UPRIGHT.get(image.getexif().get(ExifTags.Base.Orientation))
    return image if method is None else image.transpose(method)


def _to_rgb(image: Image.Image) -> Image.Image:
    """A new RGB image."""
    if image.mode == "F" or image.mode.startswith("I"):
        image = _to_8_bits(image)
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        image = Image.new("RGB", rgba.size, (255, 255, 255))
        image.paste(rgba, mask=rgba.getchannel("A"))
    return image.convert("RGB")


def _to_8_bits(image: Image.Image) -> Image.Image:
    """Scale grey levels to 8 bits; Pillow's own conversion clips them.

    32-bit and float images do not define their white level: it is 1 or 255 if no level lies above that, else 65535.
    """
    levels = np.asarray(image, dtype=np.float32)
    top = levels.max(where=np.isfinite(levels), initial=0)
    levels = np.nan_to_num(levels).clip(0, top)
    if image.mode.startswith("I;16") or top > 255:
        levels = levels // 256
    elif image.mode == "F" and top <= 1:
        levels = levels * 255
    return Image.fromarray(np.rint(levels).clip(0, 255).astype(np.uint8))
