"""Scan encoded images cheaply, and refuse images that take Pillow far more time or memory than their size suggests.

A progressive JPEG is decoded once per scan. The EXIF segments of a JPEG and the comments of a GIF are concatenated one
by one. The entries of an EXIF block may all refer to the same bytes, which are copied for each. Pillow refuses files
that a scan cannot parse. Scanning an ordinary JPEG of 5 MB takes 0.9 ms on a CPU core, decoding it more than a hundred
times as long. `png.py` scans PNGs.
"""

import math
import re
import struct
from collections.abc import Iterator
from itertools import zip_longest

import numpy as np
from PIL import Image
from PIL.ImageFile import ImageFile

# A progressive JPEG is decoded once per scan, and a scan may have only a few bytes. libjpeg's default script for color
# has 10 scans; mozjpeg, jpegli and cameras use fewer than 20; no encoder has a reason for more than about 60.
MAX_JPEG_SCANS = 100
MAX_JPEG_SEGMENTS = 1024  # before the first scan; a profile takes up to 255, XMP with a depth map about 200
MAX_FILL_BYTES = 64 * 1024  # between those segments, and between the blocks of a GIF: Pillow reads them one by one
MAX_GIF_BLOCKS = 100_000  # before the first frame; XMP of 1 MB takes about 12,000
MAX_GIF_COMMENT_BYTES = 1024 * 1024
MAX_EXIF_PREFIXES = 8
MAX_PIECES = 16  # per file that is decoded, unless the pieces would be very small
MAX_FAX_ROWS = 100_000  # libtiff prints a line to the terminal for each damaged row
MAX_TIFF_RATIONALS = 10_000  # in one entry; each becomes a Python object of several hundred bytes
MAX_TIFF_VALUES = 200_000  # in one entry that is no block of bytes: Pillow makes each a Python object

_JPEG_SEGMENT = re.compile(rb"\xff[\xc0-\xc7\xc9-\xcf\xd9-\xef\xfe]")  # a marker with a length, or the end
_RESTART, _RESTART_INTERVAL = re.compile(rb"\xff[\xd0-\xd7]"), 0xDD
_START_OF_FRAME = (0xC0, 0xC1, 0xC2, 0xC9, 0xCA)
_START_OF_SCAN, _END_OF_IMAGE, _APP1, _APP2 = 0xDA, 0xD9, 0xE1, 0xE2
_GIF_COMMENT, _GIF_APPLICATION = 0xFE, 0xFF
_GIF_BLOCK = re.compile(rb"[!,;]")
_EXIF_PREFIXES = re.compile(rb"(?:Exif\0\0)*")
_PNG_SIZE = re.compile(rb"\x89PNG\r\n\x1a\n....IHDR(.{8})", re.DOTALL)
_JPEG_2000_SIZE = re.compile(rb"\xff\x4f\xff\x51....(.{8})", re.DOTALL)
_BITMAP_SIZE = re.compile(rb"\x28\0\0\0(.{8})\x01\0", re.DOTALL)
TIFF_MAGIC = (b"II*\0", b"MM\0*", b"II\0*", b"MM*\0", b"II+\0", b"MM\0+")  # Pillow accepts the swapped ones, too
_TIFF_UNITS = (0, 1, 1, 2, 4, 8, 1, 1, 2, 4, 8, 4, 8, 4, 0, 0, 8)  # bytes of a value of each type
_TIFF_RATIONALS = (5, 10)
_TIFF_BLOCKS = (1, 2, 6, 7)  # types of byte blocks
_TIFF_OFFSETS = (273, 324)  # tags of strip and tile offsets, which may have any type
_FAX = ("group3", "group4", "tiff_ccitt", "tiff_raw_16")  # Pillow's names of compressions
_RUN_LENGTHS = (1, 2)  # compressions of bitmaps
_JPEG_2000 = (b"\xff\x4f\xff\x51", b"\0\0\0\x0cjP  \r\n\x87\n")
JPEG_XL_MAGIC = (b"\xff\x0a", b"\0\0\0\x0cJXL \r\n\x87\n")
_PNM = re.compile(rb"P[0-6fy]")  # including types that only Pillow knows
# Bits, and numbers that need no scaling: Pillow reads other numbers, and comments, in Python.
_FAST_PNM = re.compile(rb"P4\s\d+\s\d+\s|P[56]\s\d+\s\d+\s255\s|P5\s\d+\s\d+\s65535\s")
_BITMAP_HEADER_SIZES = (40, 52, 56, 64, 108, 124)  # of bitmaps that may be compressed


class RefusedImage(ValueError):
    """An image is refused before it is decoded; in messages, the text follows the image's name."""


def scan(data: bytes) -> None:
    """Raise RefusedImage for an encoded image that takes unreasonable time or memory to open or decode."""
    if data.startswith(b"\xff\xd8\xff"):
        _scan_jpeg(data)
    elif data.startswith((b"GIF87a", b"GIF89a")):
        _scan_gif(data)
    elif data.startswith(TIFF_MAGIC):
        _scan_directory(data, "a TIFF directory")


def needs_limits(data: bytes) -> bool:
    """Return whether an image must be decoded in a process with limits: its pixels bound neither memory nor time.

    This applies to JPEG XL, which is decoded to find its size, JPEG 2000 with many tiles, TIFF whose tiles are larger
    than the image or whose strips all refer to the same bytes, HEIF and AVIF whose frames are larger than declared or
    whose metadata is copied on opening, lossless WebP, which may have large Huffman tables for every block, bitmaps
    with jumps in their run lengths, and formats that Pillow decodes in Python: QOI, and PNM with text or unusual
    levels.
    """
    is_slow = data.startswith(b"qoif") or (_PNM.match(data) is not None and _FAST_PNM.match(data) is None)
    is_large = (
        data.startswith((*TIFF_MAGIC, *_JPEG_2000, *JPEG_XL_MAGIC))
        or data[4:8] == b"ftyp"
        or _is_run_length_bitmap(data)
    )
    return is_slow or is_large or _is_lossless_webp(data)


def _is_lossless_webp(data: bytes) -> bool:
    """Return whether a WebP image may be lossless, or may have a lossless alpha channel."""
    return data[8:12] == b"WEBP" and (b"VP8L" in data or b"ALPH" in data)


def _is_run_length_bitmap(data: bytes) -> bool:
    start = 14 if data.startswith(b"BM") else 0
    header = data[start : start + 20]
    if len(header) < 20 or int.from_bytes(header[:4], "little") not in _BITMAP_HEADER_SIZES:
        return False
    return int.from_bytes(header[16:20], "little") in _RUN_LENGTHS


def check_opened(image: Image.Image) -> None:
    """Raise RefusedImage for an opened image that is unreasonable to decode."""
    if image.format == "TIFF" and image.info.get("compression") in _FAX and image.height > MAX_FAX_ROWS:
        rows = f"{image.height:,} rows in a fax compression; at most {MAX_FAX_ROWS:,} are accepted"
        raise RefusedImage(f"is a TIFF of {rows}")


def read_in_few_pieces(image: ImageFile, num_bytes: int) -> None:
    """Make the decoder of an opened image receive its bytes in large pieces.

    Pillow joins the unread rest of a piece with the next one by copying: small pieces may take quadratic time.
    """
    image.decodermaxblock = max(image.decodermaxblock, num_bytes // MAX_PIECES)


def scan_exif(block: bytes) -> None:
    """Raise RefusedImage for an EXIF block that takes far more memory than its size when it is read."""
    prefixes = _EXIF_PREFIXES.match(block).end()
    if prefixes > MAX_EXIF_PREFIXES * len(b"Exif\0\0"):  # removing one copies the rest
        raise RefusedImage(f"has an EXIF block that begins {prefixes // 6:,} times")
    _scan_directory(block[prefixes:], "an EXIF directory")


def embedded_size(data: bytes) -> tuple[int, int]:
    """Return the width and height of the largest image inside an icon; (0, 0) without one.

    The icon's header may declare a smaller size. Recognizes PNG, bitmaps and JPEG 2000.
    """
    sizes = [struct.unpack(">II", size) for size in _PNG_SIZE.findall(data) + _JPEG_2000_SIZE.findall(data)]
    sizes += [struct.unpack("<II", size) for size in _BITMAP_SIZE.findall(data)]  # twice the height, for a mask
    return max(sizes, key=lambda size: size[0] * size[1], default=(0, 0))


def has_all_scans(jpeg: bytes) -> bool:
    """Return whether a JPEG's scans have every coefficient up to its last bit, and all their restart markers."""
    missing: set[tuple[int, int]] = set()
    size, samplings, interval = (0, 0), {}, 0
    segments = list(_jpeg_segments(jpeg))
    for (marker, start, end), following in zip_longest(segments, segments[1:]):
        if marker == _RESTART_INTERVAL:
            (interval,) = struct.unpack_from(">H", jpeg, start)
        elif marker in _START_OF_FRAME:
            size, own = struct.unpack_from(">xHH", jpeg, start), jpeg[start + 6 : start + 6 + 3 * jpeg[start + 5]]
            samplings = {id: (factors & 15, factors >> 4) for id, factors in zip(own[::3], own[1::3], strict=True)}
            missing = {(id, coefficient) for id in samplings for coefficient in range(64)}
        elif marker == _START_OF_SCAN:
            ids, (first, last, bits) = jpeg[start + 1 : end - 3 : 2], jpeg[end - 3 : end]
            if not bits & 15:  # no further scan has lower bits
                missing -= {(id, number) for id in ids for number in range(first, last + 1)}
            num_restarts = len(_RESTART.findall(jpeg, end, len(jpeg) if following is None else following[1] - 4))
            if interval and num_restarts != (_num_units(size, samplings, ids) - 1) // interval:
                return False
    return not missing


def _num_units(size: tuple[int, int], samplings: dict[int, tuple[int, int]], ids: bytes) -> int:
    """Return the number of minimum coded units of a scan with these components; sizes are vertical, horizontal."""
    number = 1
    for axis, length in enumerate(size):
        most = max(factors[axis] for factors in samplings.values())
        if len(ids) > 1:
            number *= math.ceil(length / (8 * most))
        else:
            number *= math.ceil(math.ceil(length * samplings[ids[0]][axis] / most) / 8)
    return number


def _scan_jpeg(data: bytes) -> None:
    _check_num_scans(data)
    headers = list(_jpeg_headers(data))
    exif = [data[start + 6 : end] for marker, start, end in headers if marker == _APP1 and _is_exif(data, start)]
    if exif:
        scan_exif(b"".join(exif))
    for marker, start, end in headers:
        if marker == _APP2 and data.startswith(b"MPF\0", start):
            _scan_directory(data[start + 4 : end], "a directory of images")


def _check_num_scans(data: bytes) -> None:
    if _max_scans(data) <= MAX_JPEG_SCANS:
        return
    scans = sum(marker == _START_OF_SCAN for marker, _, _ in _jpeg_segments(data))
    if scans > MAX_JPEG_SCANS:
        reason = f"with {scans:,} scans; at most {MAX_JPEG_SCANS} are accepted; save it as a baseline JPEG"
        raise RefusedImage(f"is a progressive JPEG {reason}")


def _is_exif(data: bytes, start: int) -> bool:
    return data.startswith(b"Exif\0\0", start)


def _jpeg_headers(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield the segments before the first scan; raises RefusedImage for too many, or too many bytes between them."""
    before, num_fill, count = 2, 0, 0
    for count, (marker, start, end) in enumerate(_jpeg_segments(data), 1):
        if marker == _START_OF_SCAN:
            return
        num_fill, before = num_fill + start - 4 - before, end
        _check_jpeg_headers(count, num_fill)
        yield marker, start, end
    # Pillow also looks for a scan after the end marker.
    _check_jpeg_headers(count, num_fill + len(data) - before)


def _check_jpeg_headers(count: int, num_fill: int) -> None:
    if count > MAX_JPEG_SEGMENTS or num_fill > MAX_FILL_BYTES:
        what = f"{MAX_JPEG_SEGMENTS:,} segments" if count > MAX_JPEG_SEGMENTS else f"{MAX_FILL_BYTES:,} bytes"
        raise RefusedImage(f"is a JPEG with more than {what} before or between its headers")


def _max_scans(data: bytes) -> int:
    """Count the scan markers at even and odd offsets; six times as fast as `bytes.count`."""
    pairs = (np.frombuffer(data, "<u2", (len(data) - start) // 2, start) for start in (0, 1))
    return sum(int(np.count_nonzero(pair == 0xDAFF)) for pair in pairs)


def _jpeg_segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield (marker, start of the content, end) of each segment; skips the data of scans, which has no markers."""
    at = 2
    while (found := _JPEG_SEGMENT.search(data, at)) and (marker := data[found.end() - 1]) != _END_OF_IMAGE:
        start = found.end() + 2
        at = found.end() + max(2, int.from_bytes(data[found.end() : start]))
        yield marker, start, at


def _scan_gif(data: bytes) -> None:
    num_blocks, num_comment_bytes = 0, 0
    for label, size in _gif_blocks(data):
        num_blocks, num_comment_bytes = num_blocks + 1, num_comment_bytes + (size if label == _GIF_COMMENT else 0)
        if num_blocks > MAX_GIF_BLOCKS:
            raise RefusedImage(f"is a GIF with more than {MAX_GIF_BLOCKS:,} blocks before its first frame")
        if num_comment_bytes > MAX_GIF_COMMENT_BYTES:
            raise RefusedImage(f"is a GIF with more than {MAX_GIF_COMMENT_BYTES:,} bytes of comments")


def _gif_blocks(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield (label, size) of the blocks before the first frame as Pillow reads them, even against the format.

    Each extension ends with a block of size 0. Raises RefusedImage for too many bytes between the blocks.
    """
    if len(data) < 13:
        return
    at, num_fill = 13 + (3 << (data[10] & 7) + 1 if data[10] & 128 else 0), 0
    while True:
        end = min(len(data), at + MAX_FILL_BYTES + 1)
        found = _GIF_BLOCK.search(data, at, end)
        num_fill += max(0, (found.start() if found else end) - at)
        if num_fill > MAX_FILL_BYTES:
            raise RefusedImage(f"is a GIF with more than {MAX_FILL_BYTES:,} bytes before or between its blocks")
        if not found or found[0] != b"!" or found.end() == len(data):
            return
        label, at = data[found.end()], found.end() + 1
        # Pillow reads on if the first block is empty, and if the block with the number of loops is.
        is_loop = label == _GIF_APPLICATION and data.startswith(b"NETSCAPE2.0", at + 1)
        for _ in range(0 if label == _GIF_COMMENT else 2 if is_loop else 1):
            at += 1 + data[at] if at < len(data) else 0
        while at < len(data) and (size := data[at]):
            at += 1 + size
            yield label, size
        at += 1
        yield label, 0


def _scan_directory(data: bytes, name: str) -> None:
    """Refuse entries that share bytes, which Pillow copies for each entry, and long lists."""
    declared = 0
    for tag, kind, number, offset in _directory(data):
        size = number * _TIFF_UNITS[kind] if kind < len(_TIFF_UNITS) else 0
        if size <= (8 if _is_big_tiff(data) else 4) or offset + size > len(data):
            continue  # the value is in the entry, or missing
        declared += size
        if kind in _TIFF_RATIONALS and number > MAX_TIFF_RATIONALS:
            raise RefusedImage(f"has a list of {number:,} rationals in {name}")
        if number > MAX_TIFF_VALUES and (kind not in _TIFF_BLOCKS or tag in _TIFF_OFFSETS):
            raise RefusedImage(f"has a list of {number:,} values in {name}")
    if declared > 2 * len(data):
        raise RefusedImage(f"has {name} whose entries declare {declared:,} bytes in {len(data):,}")


def _is_big_tiff(data: bytes) -> bool:
    return data[2:3] == b"+"  # Pillow checks this byte for either byte order


def _directory(data: bytes) -> Iterator[tuple[int, int, int, int]]:
    """Yield (tag, type, number of values, their offset or the values themselves) for the first directory's entries."""
    is_big = _is_big_tiff(data)
    order = ">" if data[:2] == b"MM" else "<"
    head, count, entry = [order + form for form in (("8xQ", "Q", "HHQQ") if is_big else ("4xI", "H", "HHII"))]
    try:
        (at,) = struct.unpack_from(head, data)
        (num_entries,) = struct.unpack_from(count, data, at)
    except (struct.error, OverflowError):  # the directory begins after the end; Pillow reports it
        return
    at += struct.calcsize(count)
    num_entries = min(num_entries, (len(data) - at) // struct.calcsize(entry))
    yield from struct.iter_unpack(entry, data[at : at + num_entries * struct.calcsize(entry)])
