"""Any form of picture -> upright 8-bit RGB, or a ValueError that says what came and what was wrong with it."""

import base64
import errno
import http.client
import io
import os
import stat
import string
import threading
import urllib.parse
import urllib.request
from collections.abc import Collection
from functools import cache
from typing import Any

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError
from PIL.Image import Transpose

# Larger pictures are refused before they are decoded. Pillow's own limit is the same unless the caller has changed it.
MAX_SOURCE_PIXELS = 178_956_970
MAX_FILE_BYTES = 1024 * 1024 * 1024
MAX_DOWNLOAD_BYTES = 64 * 1024 * 1024
DOWNLOAD_TIMEOUT_S = 20.0  # without a single byte

# EXIF orientation -> what undoes it. `ImageOps.exif_transpose` also writes the EXIF block anew, which fails where that
# is damaged although the picture is not.
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

# A lazily opened PIL image that several requests share must not be read by two threads at once.
_SHARED = threading.Lock()


def load_image(
    source: Any,
    draft: int | None = None,
    max_source_pixels: int | None = None,
    formats: Collection[str] | None = None,
) -> Image.Image:
    """Load a picture from a PIL image, path, bytes, file/http(s) URL or data URI, as upright 8-bit RGB.

    EXIF rotation is applied, transparency is laid over white (as qwen-vl-utils does), grey levels of more than 8 bits
    are scaled to 8, and of an animation the first frame is taken (of a PIL image the one it stands at). The result is
    the caller's own. With `draft` an encoded JPEG is decoded at the smallest of its scales (1/8, 1/4, 1/2, 1) that is
    at least this many pixels on each side: faster, other pixel values. A picture of more than `max_source_pixels`
    (default: MAX_SOURCE_PIXELS) is refused before it is decoded, an encoded one also if it is in none of the `formats`
    (Pillow's names; default: all that Pillow reads by itself). Raises ValueError that says what came and what was wrong
    with it.
    """
    max_pixels = MAX_SOURCE_PIXELS if max_source_pixels is None else max_source_pixels
    if isinstance(source, Image.Image):
        name = "the PIL image"
        with _SHARED:
            image = _decode(source, name, max_pixels)  # without a draft, which would stay with the caller's image
    else:
        data, name = _read(source)
        if not data:
            raise ValueError(f"{name}: is empty (0 bytes)")
        image = _decode(data, name, max_pixels, formats, draft)
    if 0 in image.size:
        raise ValueError(f"{name}: has no pixels, it is {image.width}x{image.height}")
    return image


def _read(source: Any) -> tuple[bytes, str]:
    """The encoded picture, and what to call it in an error."""
    if isinstance(source, bytes | bytearray | memoryview):
        return (data := bytes(source)), f"the picture of {len(data)} bytes"
    scheme = source.partition(":")[0].lower() if isinstance(source, str) else ""
    if scheme in ("http", "https"):
        return _download(source), f"the picture at {source}"
    if scheme == "data":
        return decode_data_uri(source), "the picture in the data URI"
    if scheme == "file":
        return _read_file(_file_url_path(source))
    if isinstance(source, os.PathLike) or (isinstance(source, str) and "://" not in source):
        return _read_file(os.fsdecode(source))
    came = f"{source:.100}" if isinstance(source, str) else type(source).__name__
    raise ValueError(
        f"cannot load a picture from {came}; "
        "give a PIL image, a path, bytes, a file:// or http(s):// URL, or a data: URI"
    )


def _file_url_path(url: str) -> str:
    """All that follows is path, '?' and '#' too; and relative ones are allowed, as in qwen-vl-utils."""
    path = url[len("file:") :].removeprefix("//")
    if path.startswith("localhost/"):
        path = path.removeprefix("localhost")
    return urllib.request.url2pathname(path)


def _read_file(path: str) -> tuple[bytes, str]:
    name = f"{path:.200}" or "''"  # it may be base64 that was meant for a data URI
    try:
        # Not Path.expanduser, which fails on a file named "~something".
        path = os.path.expanduser(path)
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):  # reading might never end
            raise OSError(errno.EINVAL, "it is a device or a pipe")
        if status.st_size > MAX_FILE_BYTES:
            raise OSError(errno.EFBIG, f"it has {status.st_size} bytes, more than {MAX_FILE_BYTES}")
        with open(path, "rb") as file:
            return file.read(), name
    except FileNotFoundError:
        raise ValueError(f"{name}: no such file") from None
    except IsADirectoryError:
        raise ValueError(f"{name}: is a folder, not a picture") from None
    except OSError as error:
        raise ValueError(f"{name}: cannot be read ({error.strerror})") from None
    except ValueError as error:  # a NUL in the path, say
        raise ValueError(f"{name}: is not a path ({error})") from None


def _download(url: str) -> bytes:
    quoted = urllib.parse.quote(url, safe="%/:=&?~#+!$,;'@()*[]")  # spaces and the like; what is quoted stays
    try:
        request = urllib.request.Request(
            quoted, headers={"User-Agent": "mmvllm"}
        )  # some sites refuse urllib's own name
        with urllib.request.urlopen(request, timeout=DOWNLOAD_TIMEOUT_S) as response:
            data = response.read(MAX_DOWNLOAD_BYTES + 1)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise ValueError(f"{url}: cannot be fetched ({error})") from None
    if len(data) > MAX_DOWNLOAD_BYTES:
        raise ValueError(f"{url}: more than {MAX_DOWNLOAD_BYTES} bytes; fetch and shrink it first")
    return data


def decode_data_uri(uri: str) -> bytes:
    """What a data URI holds; raises ValueError that shows how it begins."""
    header, comma, payload = uri.partition(",")
    if not comma:
        raise ValueError(f"data URI without a comma: {uri[:40]!r}; write data:image/png;base64,<data>")
    try:
        data = urllib.parse.unquote_to_bytes(payload)
        if not header.lower().endswith(";base64"):
            return data
        return base64.b64decode(data.translate(None, _WHITESPACE), validate=True)  # encoders wrap their lines
    except ValueError as error:
        raise ValueError(f"data URI is not valid base64 ({error}): {uri[:40]!r}") from None


def _decode(
    data: Image.Image | bytes,
    name: str,
    max_pixels: int,
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
        image.load()
        return _to_rgb(_upright(image))
    except UnidentifiedImageError:
        wanted = "a picture that Pillow can read" if formats is None else f"a picture in {', '.join(known)}"
        raise ValueError(f"{name}: not {wanted}") from None
    except Image.DecompressionBombError as error:
        raise ValueError(f"{name}: too large to decode ({error}); shrink it first") from None
    except Exception as error:  # on a damaged file Pillow's readers raise anything
        raise ValueError(f"{name}: cannot be decoded, damaged or truncated ({error})") from error


@cache
def _formats() -> list[str]:
    """All that Pillow reads by itself; for EPS it would run Ghostscript on the file."""
    Image.init()
    return [name for name in Image.OPEN if name != "EPS"]


def _upright(image: Image.Image) -> Image.Image:
    method = _UPRIGHT.get(image.getexif().get(ExifTags.Base.Orientation))
    return image if method is None else image.transpose(method)


def _to_rgb(image: Image.Image) -> Image.Image:
    """A new RGB picture."""
    if image.mode == "F" or image.mode.startswith("I"):
        image = _to_8_bits(image)
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        image = Image.new("RGB", rgba.size, (255, 255, 255))
        image.paste(rgba, mask=rgba.getchannel("A"))
    return image.convert("RGB")


def _to_8_bits(image: Image.Image) -> Image.Image:
    """Scale grey levels, which Pillow's own conversion clips.

    32-bit and float pictures do not say what white is: 1 or 255 where no level lies above that, else 65535.
    """
    levels = np.asarray(image, dtype=np.float32)
    top = levels.max(where=np.isfinite(levels), initial=0)
    levels = np.nan_to_num(levels).clip(0, top)
    if image.mode.startswith("I;16") or top > 255:
        levels = levels // 256
    elif image.mode == "F" and top <= 1:
        levels = levels * 255
    return Image.fromarray(np.rint(levels).clip(0, 255).astype(np.uint8))
