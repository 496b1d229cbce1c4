"""Image files, videos and expressions that are small and take much time or memory to open, decode or match."""

import io
import struct
import zlib
from fractions import Fraction

import av
from PIL import Image

from tests.helpers.media.images import encode

SMALL_JPEG = encode(Image.new("RGB", (64, 64), (200, 30, 90)), "JPEG")
SMALL_GIF = encode(Image.new("P", (8, 8)), "GIF")
SMALL_PNG = encode(Image.new("RGB", (8, 8)))


def truncated_png(width: int, height: int, mode: str = "RGBA") -> bytes:
    """A PNG of a few hundred bytes whose decoder allocates the whole image before it finds the end of the file."""
    header = struct.pack(">IIBBBBB", width, height, 8, {"L": 0, "RGB": 2, "RGBA": 6}[mode], 0, 0, 0)
    rows = zlib.compress(bytes(100_000))
    return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header) + png_chunk(b"IDAT", rows)[:-8]


def jpeg_2000_of_tiles(num_components: int = 60, side: int = 255) -> bytes:
    """A JPEG 2000 of 1 kB whose tiles have one pixel: for each of them and each component its decoder has structures.

    These take 4.7 GB by default.
    """
    data = encode(Image.new("RGB", (side, side)), "JPEG2000", num_resolutions=1, irreversible=False)
    boxes, codestream = data[: (at := data.index(b"\xff\x4f\xff\x51"))], data[at:]
    form = ">HHHIIIIIIIIH"
    fields = list(struct.unpack_from(form, codestream, 2 + 2)[:12])
    rest = codestream[4 + fields[0] :]
    fields[0], fields[7], fields[8], fields[11] = 38 + 3 * num_components, 1, 1, num_components
    header = struct.pack(form, *fields) + b"\x07\x01\x01" * num_components
    at = boxes.rindex(b"jp2c") - 4  # of a box that extends to the end
    return boxes[:at] + bytes(4) + boxes[at + 4 :] + b"\xff\x4f\xff\x51" + header + rest


def run_length_bitmap(width: int, height: int, jump: int = 0) -> bytes:
    """A BMP of one run length, after which the position moves by `jump` rows."""
    data = b"\x04\x01\0\0" + (b"\0\2\0" + bytes([jump]) if jump else b"") + b"\0\1"
    start = 14 + 40 + 1024
    head = struct.pack("<2sIHHI", b"BM", start + len(data), 0, 0, start)
    return head + struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, 1, len(data), 0, 0, 256, 0) + bytes(1024) + data


def png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png_with(*chunks: bytes) -> bytes:
    """A PNG with more chunks after its header."""
    end_of_header = 8 + 25
    return SMALL_PNG[:end_of_header] + b"".join(chunks) + SMALL_PNG[end_of_header:]


def truncated_blp(width: int, height: int) -> bytes:
    """A BLP texture without pixels; Pillow allocates the whole image for it."""
    header = struct.pack("<4sIBBBBII", b"BLP2", 1, 1, 0, 0, 0, width, height)
    return header + bytes(4 * 16) + struct.pack("<16I", *[width * height] * 16) + bytes(1024)


def jpeg_with_scans(num_scans: int, size: tuple[int, int] = (64, 64)) -> bytes:
    """A progressive JPEG whose last scan is repeated."""
    data = encode(Image.new("RGB", size, (120, 60, 200)), "JPEG", progressive=True)
    return with_last_scan(data, num_scans - data.count(b"\xff\xda") + 1)


def slow_jpeg(side: int = 7900, num_scans: int = 90) -> bytes:
    """A small file that takes a long time to decode: a grey progressive JPEG whose last scan is repeated."""
    return with_last_scan(encode(Image.new("L", (side, side), 90), "JPEG", progressive=True), num_scans)


SLOW_EXPRESSION = r"(?:\w|\w\w|.)*\d"  # takes longer than anybody waits to match a name of a layer


def slow_video(number: int = 30) -> bytes:
    """A video of `slow_jpeg`, two frames per second, that takes about a second per frame."""
    jpeg, file = slow_jpeg(), io.BytesIO()
    with av.open(file, "w", format="matroska") as container:
        stream = container.add_stream("mjpeg", rate=2, width=7900, height=7900, pix_fmt="yuvj420p")
        for i in range(number):
            packet = av.Packet(jpeg)
            packet.stream, packet.is_keyframe = stream, True
            packet.pts = packet.dts = i
            packet.time_base = Fraction(1, 2)
            container.mux(packet)
    return file.getvalue()


def with_samples(mp4: bytes, number: int) -> bytes:
    """An MP4 file whose index declares `number` samples of one byte each."""
    data = bytearray(mp4)
    for box, offset, values in (
        (b"stsz", 4, (1, number)),  # their size and number
        (b"stts", 8, (number, 512)),  # how many have this duration
        (b"stsc", 12, (number,)),  # how many are in the chunk
    ):
        struct.pack_into(f">{len(values)}I", data, data.index(box) + 4 + offset, *values)
    return bytes(data)


def with_last_scan(jpeg: bytes, number: int) -> bytes:
    """A progressive JPEG with this number of its last scan."""
    start = jpeg.rindex(b"\xff\xda")
    return jpeg[:start] + jpeg[start:-2] * number + b"\xff\xd9"


def jpeg_with(*segments: bytes) -> bytes:
    """A JPEG with more bytes after its first marker."""
    return SMALL_JPEG[:2] + b"".join(segments) + SMALL_JPEG[2:]


def jpeg_segment(marker: int, body: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(body) + 2) + body


def tiff_of_shared_strips(num_rows: int) -> bytes:
    """A grey TIFF whose strips, each a row, all refer to one deflate stream of a megabyte, nearly all of it empty."""
    row = zlib.compress(bytes(8))
    strip = row[:2] + b"\0\0\0\xff\xff" * 200_000 + row[2:]
    offsets, lengths = 8 + len(strip), 8 + len(strip) + 4 * num_rows
    tags = {256: 8, 257: num_rows, 258: 8, 259: 8, 262: 1, 273: offsets, 277: 1, 278: 1, 279: lengths}
    entries = b"".join(
        struct.pack("<HHII", tag, 4, num_rows if tag in (273, 279) else 1, value) for tag, value in tags.items()
    )
    lists = struct.pack("<I", 8) * num_rows + struct.pack("<I", len(strip)) * num_rows
    head = b"II*\0" + struct.pack("<I", lengths + 4 * num_rows)
    return head + strip + lists + struct.pack("<H", len(tags)) + entries + bytes(4)


def gif_with(*blocks: bytes, gif: bytes = SMALL_GIF) -> bytes:
    """A GIF with more blocks before its first frame."""
    start = 13 + (3 << (gif[10] & 7) + 1 if gif[10] & 128 else 0)
    return gif[:start] + b"".join(blocks) + gif[start:]


def gif_comment(num_blocks: int, block_size: int) -> bytes:
    return b"!\xfe" + (bytes([block_size]) + b"a" * block_size) * num_blocks + b"\0"


def overlapping_exif(num_entries: int, size: int, kind: int = 1, tag: int = 1000) -> bytes:
    """An EXIF block whose entries all have the same bytes."""
    entries = b"".join(struct.pack(">HHII", tag + i, kind, size, 8) for i in range(num_entries))
    return b"MM\0*\0\0\0\x08" + struct.pack(">H", num_entries) + entries + bytes(4 + 8 * size)


def ambiguous_schema(number: int) -> dict:
    """A JSON schema whose texts can be read in many ways."""
    array = {"type": "array", "items": {"$ref": "#/$defs/n"}, "minItems": 1}
    return {"$ref": "#/$defs/n", "$defs": {"n": {"anyOf": [array, {"type": "array", "items": False}] * number}}}
