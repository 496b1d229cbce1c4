"""Image files built byte by byte, and the pixels loaded from them."""

import struct
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from PIL import Image

from mmvllm.processors.images import decode
from mmvllm.processors.images.load import load_image

# How a viewer transforms the stored (height, width, 3), by the EXIF standard's definition of each orientation.
UPRIGHT = {
    1: lambda stored: stored,
    2: lambda stored: stored[:, ::-1],
    3: lambda stored: stored[::-1, ::-1],
    4: lambda stored: stored[::-1],
    5: lambda stored: stored.swapaxes(0, 1),
    6: lambda stored: stored.swapaxes(0, 1)[:, ::-1],
    7: lambda stored: stored.swapaxes(0, 1)[::-1, ::-1],
    8: lambda stored: stored.swapaxes(0, 1)[::-1],
}


def levels(source) -> np.ndarray:
    """Pixels of a loaded image: (height, width, 3) uint8."""
    loaded = load_image(source)
    assert loaded.mode == "RGB"
    return np.asarray(loaded)


@contextmanager
def without_plugin(module: str, format: str) -> Iterator[None]:
    """As if a package from which Pillow has a format were not installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, module, None)
        patch.delitem(Image.OPEN, format, raising=False)
        decode._formats.cache_clear()
        yield
    decode._formats.cache_clear()


def exif(*tags: tuple[int, int, bytes]) -> bytes:
    """An EXIF block of (tag, type, 4 bytes)."""
    entries = b"".join(struct.pack("<HHI", tag, kind, 1) + value for tag, kind, value in sorted(tags))
    return b"Exif\0\0II*\0\x08\0\0\0" + struct.pack("<H", len(tags)) + entries + bytes(4)


def rotated(orientation: int) -> tuple[int, int, bytes]:
    return 0x0112, 3, struct.pack("<I", orientation)


def png(width: int, height: int, depth: int, colour_type: int, rows: bytes) -> bytes:
    """A PNG built from its chunks. Colour type 0 is grey, 2 RGB, 6 RGBA; `rows` is packed, without filter bytes."""
    stride = len(rows) // height if height else 0
    filtered = b"".join(b"\0" + rows[i * stride : (i + 1) * stride] for i in range(height if rows else 0))
    header = struct.pack(">IIBBBBB", width, height, depth, colour_type, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(filtered)), (b"IEND", b""))
    framed = (struct.pack(">I", len(body)) + kind + body for kind, body in chunks)
    checks = (struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(a + b for a, b in zip(framed, checks, strict=True))
