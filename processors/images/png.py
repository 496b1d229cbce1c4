"""Reduce an encoded PNG to the chunks that its pixels and its orientation need, and verify their checksums.

Pillow does not verify the checksums of pixel data: a file whose end was never written would be decoded, with wrong
pixels. It reads all other chunks, and fails for a damaged or a large one, although these hold no pixels: generators of
images store megabytes of texts. Like libpng, mmvllm refuses a damaged critical chunk, and ignores other damaged ones.
"""

import struct
import zlib
from collections.abc import Iterator

from PIL.PngImagePlugin import MAX_TEXT_CHUNK

from mmvllm.processors.images.scan import RefusedImage

PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
MAX_CHUNKS = 10_000  # and one more per KiB of the file: each runs Python code
MAX_TEXT_BYTES = 16 * 1024 * 1024  # of a text with the orientation
_NEEDED = (b"tRNS", b"eXIf")  # beside critical chunks: transparency and orientation


def essential_chunks(data: bytes) -> bytes:
    """Return a PNG without the chunks that are not needed; raises RefusedImage for a damaged or a hostile PNG.

    A file that ends early is returned up to its end, which Pillow reports unless it has all pixels.
    """
    kept, texts = [(0, len(PNG_MAGIC))], _OrientationTexts()
    for start, end, kind, is_complete in _chunks(data):
        is_critical = not kind[0] & 0x20
        if not is_critical and kind not in _NEEDED and not texts.takes(kind, memoryview(data)[start + 8 : end - 4]):
            continue
        if not is_complete or zlib.crc32(memoryview(data)[start + 4 : end - 4]) != int.from_bytes(data[end - 4 : end]):
            if not is_critical:
                continue
            if is_complete:
                name = kind.decode("latin-1")
                raise RefusedImage(f"cannot be decoded, damaged or truncated (its {name} chunk has a wrong checksum)")
        if kept[-1][1] == start:
            start = kept.pop()[0]
        kept.append((start, end))
    return data if kept == [(0, len(data))] else b"".join(memoryview(data)[start:end] for start, end in kept)


def _chunks(data: bytes) -> Iterator[tuple[int, int, bytes, bool]]:
    """Yield (start, end, type, whether it is complete) of each chunk, up to the last one or an incomplete one."""
    at, most = len(PNG_MAGIC), MAX_CHUNKS + len(data) // 1024
    for _ in range(most):
        if at + 8 > len(data):
            return
        length, kind = struct.unpack_from(">I4s", data, at)
        start, at = at, at + 12 + length
        yield start, min(at, len(data)), kind, at <= len(data)
        if kind == b"IEND" or at > len(data):
            return
    raise RefusedImage(f"is a PNG of more than {most:,} chunks; save it again with larger ones")


class _OrientationTexts:
    """Selects the texts in which Pillow looks for the orientation: one of each kind, of a limited size."""

    def __init__(self) -> None:
        self._keywords = {b"Raw profile type exif", b"XML:com.adobe.xmp"}

    def takes(self, kind: bytes, body: memoryview) -> bool:
        if kind not in (b"tEXt", b"zTXt", b"iTXt") or len(body) > MAX_TEXT_BYTES:
            return False
        keyword, _, rest = bytes(body).partition(b"\0")
        if keyword not in self._keywords:
            return False
        self._keywords.remove(keyword)
        if kind == b"iTXt":  # flag and method of compression, language and translated keyword, text
            return rest[:1] != b"\1" or _inflates(rest[2:].split(b"\0", 2)[-1])
        return kind == b"tEXt" or _inflates(rest[1:])


def _inflates(compressed: bytes) -> bool:
    """Return whether Pillow accepts a compressed text."""
    inflating = zlib.decompressobj()
    try:
        inflating.decompress(compressed, MAX_TEXT_CHUNK)
    except zlib.error:
        return False
    return not inflating.unconsumed_tail
