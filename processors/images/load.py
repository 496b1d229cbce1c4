"""Loads an image from any source as upright 8-bit RGB, or raises ImageError with the source and the reason."""

import base64
import errno
import io
import os
import re
import stat
import string
import sys
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import numpy as np
from PIL import Image

from mmvllm.errors import ImageError, MediaFileError, RequestError, without_frames
from mmvllm.processors.budget import DECODING
from mmvllm.processors.download import download, without_login
from mmvllm.processors.images.decode import Reserve, decode
from mmvllm.processors.images.draft import Draft
from mmvllm.utils.text import with_article

# Larger images are refused before they are decoded. This is Pillow's default, which callers may change in Pillow.
MAX_SOURCE_PIXELS = 178_956_970
MAX_FILE_BYTES = 1024 * 1024 * 1024
MAX_DOWNLOAD_BYTES = 64 * 1024 * 1024
MAX_ESCAPED = 1_000_000  # characters of a data URI without base64, which take up to 80 times as much memory
MAX_SHORT_NAME = 100  # characters; a longer path that looks like base64 may be base64

# For clients that escape the whole URI. They are replaced one by one: `unquote_to_bytes` takes up to 80 times the size.
_ESCAPES = {
    escape: chr(int(escape[1:], 16))
    for code in ("%2B", "%2F", "%3D", "%0A", "%0D", "%20")
    for escape in (code, code.lower())
}
_BASE64 = re.compile(r"[0-9A-Za-z+/_\s-]+={0,2}")
_WHITESPACE = string.whitespace.encode()
_STANDARD_BASE64 = bytes.maketrans(b"-_", b"+/")  # from the URL-safe alphabet

# A lazily opened PIL image or a file object that several requests share must not be read by two threads at once.
_SHARED = threading.Lock()


def load_image(
    source: Any,
    draft: Draft | None = None,
    max_source_pixels: int | None = None,
    formats: Collection[str] | None = None,
    reserve: Reserve = DECODING.reserve,
    check: Callable[[bytes], None] | None = None,
    accept_truncated: bool = False,
) -> Image.Image:
    """Load an image as a new upright 8-bit RGB image.

    EXIF rotation is applied, and transparency is blended with white (as in qwen-vl-utils). Images with 16 or 32 bits
    per channel are scaled to 8 bits, whereas transformers clips them. An animation yields its first frame, and a PIL
    image its current frame.

    Args:
        source: a PIL image; a path; encoded bytes or a binary file object; a file:// or http(s):// URL or a data URI;
            a numpy array or torch tensor of uint8 with shape (height, width, 3), (height, width, 4) with alpha, or
            (height, width) in gray.
        draft: decode a JPEG at a reduced scale, which is faster and gives other pixel values.
        max_source_pixels: an image with more pixels is refused before it is decoded (default: MAX_SOURCE_PIXELS).
        formats: Pillow's names of the accepted formats of encoded images (default: all that Pillow reads without
            external programs).
        reserve: called before decoding with the bytes that it takes; returns a context manager that waits until there
            is room for them. By default, the whole process shares `DECODING`.
        check: called with an encoded image before it is decoded.
        accept_truncated: load a JPEG that lacks its last rows, which become gray; `is_truncated` then returns True. A
            JPEG that lacks only its end marker is not truncated.

    Raises ImageError, a ValueError that references no decoded image and no other exception, or an error of `check`.
    """
    try:
        return _load(source, draft, max_source_pixels, formats, reserve, check, accept_truncated)
    except ImageError as error:
        failure = without_frames(error)
    try:
        raise failure
    finally:  # the traceback's frame must reference neither the encoded image nor, in a cycle, the error
        del source, failure


def _load(
    source: Any,
    draft: Draft | None,
    max_source_pixels: int | None,
    formats: Collection[str] | None,
    reserve: Reserve,
    check: Callable[[bytes], None] | None,
    accept_truncated: bool,
) -> Image.Image:
    max_pixels = MAX_SOURCE_PIXELS if max_source_pixels is None else max_source_pixels
    if isinstance(source, Image.Image):
        name = "the PIL image"
        with _SHARED:
            image = decode(source, name, max_pixels, reserve)  # without a draft, which would change the caller's image
    elif is_array(source):
        name = "the array"
        image = decode(_from_array(source, name), name, max_pixels, reserve)
    else:
        data, name = _read(source)
        if not data:
            raise ImageError(name, "is empty (0 bytes)")
        if check is not None:
            check(data)
        image = decode(data, name, max_pixels, reserve, formats, draft, accept_truncated)
    if 0 in image.size:
        raise ImageError(name, f"has no pixels, it is {image.width}x{image.height}")
    return image


def is_array(source: Any) -> bool:
    torch = sys.modules.get("torch")  # loading images does not need torch
    return isinstance(source, np.ndarray) or (torch is not None and isinstance(source, torch.Tensor))


def dtype_name(array: Any) -> str:
    """Return the name of the dtype of an array of numpy or torch, such as "uint8"."""
    return str(array.dtype).removeprefix("torch.")


def _from_array(array: Any, name: str) -> Image.Image:
    """Convert a numpy array or torch tensor to a PIL image; raises ImageError for an unsupported shape or dtype."""
    shape, dtype = tuple(array.shape), dtype_name(array)
    if dtype != "uint8" or len(shape) not in (2, 3) or shape[2:] not in ((), (3,), (4,)):
        required = "uint8 of shape (height, width, 3), (height, width, 4) or (height, width)"
        raise ImageError(name, f"must be {required}, got shape {shape} and dtype {dtype}")
    if 0 in shape:
        raise ImageError(name, f"has no pixels, it is {shape[1]}x{shape[0]}")
    return Image.fromarray(array if isinstance(array, np.ndarray) else array.cpu().numpy())


def _read(source: Any) -> tuple[bytes, str]:
    """Return the encoded image, and its name for error messages."""
    if isinstance(source, bytes | bytearray | memoryview):
        return (data := bytes(source)), f"the image of {len(data)} bytes"
    if hasattr(source, "read") and hasattr(source, "seek"):
        return _read_file_object(source), "the image in the file object"
    scheme = source.partition(":")[0].lower() if isinstance(source, str) else ""
    if scheme in ("http", "https"):
        return _download(source), f"the image at {without_login(source)}"
    if scheme == "data":
        return decode_data_uri(source), "the image in the data URI"
    if scheme == "file":
        return _read_file(file_url_path(source))
    if isinstance(source, os.PathLike) or (isinstance(source, str) and "://" not in source):
        return _read_file(os.fsdecode(source))
    given = f"{without_login(source):.100}" if isinstance(source, str) else type(source).__name__
    accepted = "a PIL image, a path, bytes, a binary file, a file:// or http(s):// URL, a data: URI, or a uint8 array"
    raise ImageError("", f"cannot load an image from {given}; give {accepted}")


def file_url_path(url: str) -> str:
    """Return everything after the scheme, including '?' and '#'; the path may be relative, as in qwen-vl-utils."""
    path = url[len("file:") :].removeprefix("//")
    if path.startswith("localhost/"):
        path = path.removeprefix("localhost")
    return urllib.request.url2pathname(path)


def _read_file_object(file: BinaryIO) -> bytes:
    """Read all bytes of a binary file object, whatever its position."""
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
    with local_file(path, "image", ImageError) as (path, name):
        size = os.stat(path).st_size
        if size > MAX_FILE_BYTES:
            raise OSError(errno.EFBIG, f"it has {size} bytes, more than {MAX_FILE_BYTES}")
        try:
            with open(path, "rb") as file:
                return file.read(), name
        except MemoryError:
            raise ImageError(name, f"not enough memory to read its {size:,} bytes") from None


@contextmanager
def local_file(path: str, kind: str, error_class: type[MediaFileError]) -> Iterator[tuple[str, str]]:
    """Yield the path of a regular file, and its name for messages; failures in the block become `error_class`."""
    name = f"{path:.200}" or "''"  # shortened: it may be base64 that was meant to be a data URI
    try:
        # Not Path.expanduser, which fails on a file named "~something".
        path = os.path.expanduser(path)
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError
        if not stat.S_ISREG(mode):  # reading might block forever
            raise OSError(errno.EINVAL, "it is a device or a pipe")
        yield path, name
    except RequestError:
        raise
    except FileNotFoundError:
        raise error_class(name, f"no such file{_hint_of_base64(path, kind)}") from None
    except IsADirectoryError:
        raise error_class(name, f"is a folder, not {with_article(kind)}") from None
    except OSError as error:
        raise error_class(name, f"cannot be read ({error.strerror}){_hint_of_base64(path, kind)}") from None
    except ValueError as error:  # for example a NUL in the path
        raise error_class(name, f"is not a valid path ({error})") from None


def _hint_of_base64(path: str, kind: str) -> str:
    is_base64 = len(path) > MAX_SHORT_NAME and _BASE64.fullmatch(path)
    return f"; if it is base64, write data:{kind}/...;base64,<data>" if is_base64 else ""


def _download(url: str) -> bytes:
    data = io.BytesIO()
    download(url, data, MAX_DOWNLOAD_BYTES, ImageError)
    return data.getvalue()


def decode_data_uri(uri: str, example: str = "image/png", error_class: type[MediaFileError] = ImageError) -> bytes:
    """Return the bytes in a data URI; raises `error_class`, which shows the first characters of the URI."""
    header, comma, payload = uri.partition(",")
    if not comma:
        raise error_class("", f"data URI without a comma: {uri[:40]!r}; write data:{example};base64,<data>")
    is_base64 = header.lower().endswith(";base64")
    if not is_base64 and len(payload) > MAX_ESCAPED:
        reason = f"must have at most {MAX_ESCAPED:,} characters without base64, got {len(payload):,}"
        raise error_class("", f"data URI {reason}: {uri[:40]!r}; write data:{example};base64,<data>")
    try:
        if not is_base64:
            return urllib.parse.unquote_to_bytes(payload)
        for escape, character in _ESCAPES.items():
            payload = payload.replace(escape, character)
        data = payload.encode().translate(_STANDARD_BASE64, _WHITESPACE)  # encoders insert line breaks
        return base64.b64decode(data + b"=" * (-len(data) % 4), validate=True)  # and omit the padding
    except ValueError as error:
        raise error_class("", f"data URI is not valid base64 ({error}): {uri[:40]!r}") from None
