"""PNGs: checksums of pixel data are verified, and no chunk without pixels decides whether an image can be read."""

import io
import struct
import time
import tracemalloc
import zlib
from collections.abc import Iterator

import numpy as np
import pytest
from PIL import Image, ImageOps

from mmvllm.errors import ImageError
from mmvllm.processors.images import png as png_module
from mmvllm.processors.images.load import load_image
from tests.helpers.engine.requests import noise_image
from tests.helpers.media.hostile import SMALL_PNG, png_chunk, png_with
from tests.helpers.media.images import encode
from tests.helpers.media.loading import exif, rotated

IMAGE = noise_image(60, 40, seed=3)
PALETTE = encode(IMAGE.quantize(16))
PNG = encode(IMAGE)
ANIMATION = encode(IMAGE, "PNG", save_all=True, append_images=[IMAGE.rotate(90), IMAGE.rotate(180)])


def chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """(type, start, end) of each chunk."""
    at = 8
    while at < len(data):
        length, kind = struct.unpack_from(">I4s", data, at)
        yield kind, at, at + 12 + length
        at += 12 + length


def with_wrong_checksum(data: bytes, kind: bytes, number: int = 0) -> bytes:
    end = [end for own, _, end in chunks(data) if own == kind][number]
    return data[: end - 1] + bytes([data[end - 1] ^ 1]) + data[end:]


def with_pixels_in_pieces(data: bytes) -> bytes:
    """The PNG with its pixel data in three chunks."""
    ((start, end),) = [(start, end) for kind, start, end in chunks(data) if kind == b"IDAT"]
    body = data[start + 8 : end - 4]
    third = len(body) // 3
    pieces = body[:third], body[third : 2 * third], body[2 * third :]
    return data[:start] + b"".join(png_chunk(b"IDAT", piece) for piece in pieces) + data[end:]


def after_pixels(data: bytes, *others: bytes) -> bytes:
    return data[:-12] + b"".join(others) + data[-12:]


def before_pixels(data: bytes, *others: bytes) -> bytes:
    return data[:33] + b"".join(others) + data[33:]


@pytest.mark.parametrize(
    ("data", "kind", "number"),
    [
        (PNG, b"IHDR", 0),
        (PALETTE, b"PLTE", 0),
        (PNG, b"IDAT", 0),
        (with_pixels_in_pieces(PNG), b"IDAT", 1),
        (with_pixels_in_pieces(PALETTE), b"IDAT", 2),
        (ANIMATION, b"IDAT", 0),
        (PNG, b"IEND", 0),
    ],
)
def test_a_critical_chunk_with_a_wrong_checksum_is_refused(data, kind, number):
    assert load_image(data).size == (60, 40)
    with pytest.raises(ImageError, match=rf"damaged or truncated \(its {kind.decode()} chunk has a wrong checksum\)"):
        load_image(with_wrong_checksum(data, kind, number))


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "1", "I;16"])
@pytest.mark.parametrize("share", [0.3, 0.9, 0.999])
def test_a_file_whose_end_was_never_written_is_refused(mode, share):
    data = encode(IMAGE.convert("I").convert("I;16") if mode == "I;16" else IMAGE.convert(mode))
    written = int(share * len(data))
    with pytest.raises(ImageError, match="damaged or truncated"):
        load_image(data[:written] + bytes(len(data) - written))


LARGE = zlib.compress(np.random.default_rng(0).bytes(3_000_000))
WITHOUT_PIXELS = {
    "profile": png_chunk(b"iCCP", b"x\0\0" + zlib.compress(bytes(2_000_000))),
    "profile that is not compressed": png_chunk(b"iCCP", b"x\0\0nonsense"),
    "text": png_chunk(b"tEXt", b"workflow\0" + b"a" * 20_000_000),
    "compressed text": png_chunk(b"zTXt", b"prompt\0\0" + LARGE),
    "international text": png_chunk(b"iTXt", b"workflow\0\0\0\0\0" + "ü".encode() * 10_000_000),
    "compressed international text": png_chunk(b"iTXt", b"workflow\0\1\0\0\0" + LARGE),
    "text without a keyword": png_chunk(b"tEXt", b"\0" * 9),
    "many profiles": png_chunk(b"iCCP", b"x\0\0" + zlib.compress(bytes(900_000))) * 100,
    "many texts": png_chunk(b"iTXt", b"k\0\0\0\0\0" + bytes(200_000)) * 100,
    "empty gamma": png_chunk(b"gAMA", b""),
    "resolution of three bytes": png_chunk(b"pHYs", b"abc"),
    "resolution": png_chunk(b"pHYs", struct.pack(">IIB", 3000, 3000, 1)),
    "animation control without frames": png_chunk(b"acTL", struct.pack(">II", 9, 0)),
    "private": png_chunk(b"prIv", b"x" * 100),
    "large EXIF in a text": png_chunk(b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(bytes(9_000_000))),
    "EXIF in a damaged text": png_chunk(b"zTXt", b"Raw profile type exif\0\0nonsense"),
    "large XMP": png_chunk(b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + zlib.compress(bytes(9_000_000))),
    "damaged EXIF": png_chunk(b"eXIf", b"nonsense"),
}


@pytest.mark.parametrize("place", [before_pixels, after_pixels])
@pytest.mark.parametrize("name", WITHOUT_PIXELS)
def test_a_chunk_without_pixels_changes_nothing(name, place):
    chunk = WITHOUT_PIXELS[name]
    expected = load_image(PNG).tobytes()
    assert load_image(place(PNG, chunk)).tobytes() == expected
    damaged = chunk[:-1] + bytes([chunk[-1] ^ 1])
    assert load_image(place(PNG, damaged)).tobytes() == expected
    assert load_image(place(ANIMATION, chunk)).tobytes() == expected


@pytest.mark.parametrize("kind", [b"acTL", b"fcTL", b"fdAT"])
def test_a_damaged_chunk_of_an_animation_does_not_matter_to_its_first_frame(kind):
    assert load_image(with_wrong_checksum(ANIMATION, kind)).tobytes() == load_image(PNG).tobytes()


def test_a_cut_after_the_pixels_does_not_matter():
    data = after_pixels(PNG, png_chunk(b"tEXt", b"Comment\0" + b"a" * 100))
    assert load_image(data[:-60]).tobytes() == load_image(PNG).tobytes()
    assert load_image(PNG[:-12]).tobytes() == load_image(PNG).tobytes()


@pytest.mark.parametrize("name", ["EXIF", "text", "compressed text", "XMP"])
def test_a_cut_in_a_chunk_with_the_orientation_does_not_matter(name):
    data = PNG[:-12] + ORIENTATION[name]
    assert load_image(data[:-7]).tobytes() == load_image(PNG).tobytes()


def test_transparency_is_kept_if_its_checksum_is_right():
    image = Image.new("L", (8, 8), 7)
    data = encode(image, "PNG", transparency=7)
    assert load_image(data).getpixel((0, 0)) == (255, 255, 255)
    assert load_image(with_wrong_checksum(data, b"tRNS")).getpixel((0, 0)) == (7, 7, 7)


BLOCK = exif(rotated(6)).removeprefix(b"Exif\0\0")
RAW = b"\nexif\n%8d\n" % len(BLOCK) + BLOCK.hex().encode() + b"\n"
XMP = b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
ORIENTATION = {
    "EXIF": png_chunk(b"eXIf", BLOCK),
    "text": png_chunk(b"tEXt", b"Raw profile type exif\0" + RAW),
    "compressed text": png_chunk(b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(RAW)),
    "XMP": png_chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + XMP),
    "compressed XMP": png_chunk(b"iTXt", b"XML:com.adobe.xmp\0\1\0de\0key\0" + zlib.compress(XMP)),
}


@pytest.mark.parametrize("place", [before_pixels, after_pixels])
@pytest.mark.parametrize("name", ORIENTATION)
def test_the_orientation_is_kept_wherever_pillow_finds_it(name, place):
    data = place(PNG, png_chunk(b"tEXt", b"Comment\0x"), ORIENTATION[name])
    image = Image.open(io.BytesIO(data))
    image.load()  # reads the chunks after the pixels
    assert load_image(data).tobytes() == ImageOps.exif_transpose(image).tobytes() != load_image(PNG).tobytes()


def test_compressed_chunks_take_neither_time_nor_memory():
    bomb = zlib.compress(bytes(100_000_000), 9)
    texts = [png_chunk(b"zTXt", b"Raw profile type exif\0\0" + bomb) for _ in range(100)]
    data = png_with(*texts, *[png_chunk(b"iCCP", b"x\0\0" + bomb)] * 100)
    start = time.process_time()
    tracemalloc.start()
    assert load_image(data).tobytes() == load_image(SMALL_PNG).tobytes()
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 10_000_000 and time.process_time() - start < 1


def test_too_many_chunks_are_refused(monkeypatch):
    monkeypatch.setattr(png_module, "MAX_CHUNKS", 100)
    few = png_chunk(b"prIv", b"")
    assert load_image(png_with(*[few] * 90)).tobytes() == load_image(SMALL_PNG).tobytes()
    with pytest.raises(ImageError, match="is a PNG of more than 102 chunks; save it again with larger ones"):
        load_image(png_with(*[few] * 200))


def test_a_png_without_further_chunks_is_not_copied():
    assert png_module.essential_chunks(PNG) is PNG
