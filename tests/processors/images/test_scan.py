"""Images that would keep Pillow busy are refused before they are opened; all others pass, quickly."""

import io
import struct
import time
import tracemalloc
import warnings
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, features

from mmvllm.errors import ImageError
from mmvllm.processors.images import scan as scan_module
from mmvllm.processors.images.load import decode_data_uri, load_image
from mmvllm.processors.images.scan import RefusedImage, needs_limits, scan, scan_exif
from tests.helpers.engine.requests import noise_image
from tests.helpers.media.hostile import (
    SMALL_GIF,
    SMALL_JPEG,
    SMALL_PNG,
    gif_comment,
    gif_with,
    jpeg_segment,
    jpeg_with,
    jpeg_with_scans,
    overlapping_exif,
    png_chunk,
    png_with,
    run_length_bitmap,
)
from tests.helpers.media.images import encode, noise
from tests.helpers.media.loading import exif, rotated

EXIF_SEGMENT = jpeg_segment(0xE1, b"Exif\0\0II*\0\x08\0\0\0\0\0\0\0\0\0")

HOSTILE = {
    "is a progressive JPEG with 3,000 scans; at most 100 are accepted": lambda: jpeg_with_scans(3000, (2000, 2000)),
    "is a JPEG with more than 1,024 segments": lambda: jpeg_with(EXIF_SEGMENT * 200_000),
    "is a JPEG with more than 65,536 bytes before or between": lambda: jpeg_with(b"\xff" * 5_000_000),
    "JPEG with more than 65,536 bytes before or between its": lambda: jpeg_with(b"\xff\0" * 2_000_000),
    "is a PNG of more than": lambda: png_with(png_chunk(b"prIv", b"") * 500_000),
    "it is 600000x1, more than 500000 pixels on a side": lambda: encode(Image.new("L", (600_000, 1))),
    "it is 1x600000, more than 500000 pixels on a": lambda: encode(Image.new("L", (1, 600_000)), "BMP"),
    "JPEG with more than 65,536 bytes before or between": lambda: b"\xff\xd8\xff\xe0\0\x02" + bytes(20_000_000),
    "JPEG with more than 65,536 bytes before or": lambda: b"\xff\xd8\xff\xd9" + b"\xff\xd9a" * 5_000_000,
    "GIF with more than 65,536 bytes before or between": lambda: gif_with(bytes(20_000_000)),
    "GIF with more than 65,536 bytes before or": lambda: gif_with(b"".join([b"\0" * 60_000 + b"!\xff\0"] * 200)),
    "GIF with more than 65,536 bytes": lambda: SMALL_GIF[:13] + bytes(20_000_000),
    "is a GIF with more than 1,048,576 bytes of comments": lambda: gif_with(gif_comment(80_000, 255)),
    "is a GIF with more than 100,000 blocks": lambda: gif_with(gif_comment(4_000_000, 1)),
    "a GIF with more than 100,000 blocks": lambda: gif_with(gif_comment(1, 1) * 1_000_000),
    "GIF with more than 100,000 blocks": lambda: gif_with(b"!\x01\0" + b"\x01a" * 4_000_000 + b"\0"),
    # Pillow reads on after these empty blocks, which end the extension by the format.
    "GIF with more than 1,048,576 bytes of comments": lambda: gif_with(b"!\x01\0\x05,aaaa\0", gif_comment(80_000, 255)),
    "GIF with more than 1,048,576 bytes of": lambda: gif_with(
        b"!\xff\x0bNETSCAPE2.0\0\x05,aaaa\0", gif_comment(80_000, 255)
    ),
    "an EXIF block that begins 500,001 times": lambda: png_with(png_chunk(b"eXIf", b"Exif\0\0" * 500_000)),
    "has an EXIF directory whose entries declare": lambda: png_with(
        png_chunk(b"eXIf", overlapping_exif(20_000, 100_000))
    ),
    "an EXIF directory whose entries declare": lambda: jpeg_with(
        *(jpeg_segment(0xE1, b"Exif\0\0" + part) for part in chunked(overlapping_exif(20_000, 60_000)))
    ),
    "has a directory of images whose entries declare": lambda: jpeg_with(
        jpeg_segment(0xE2, b"MPF\0" + overlapping_exif(2000, 2500, kind=3))
    ),
    "has a TIFF directory whose entries declare": lambda: overlapping_exif(20_000, 100_000),
    "is a TIFF of 400,000 rows in a fax compression": lambda: tiff("<", 400_000, 2),
    "a TIFF of 400,000 rows in a fax compression": lambda: tiff(">", 400_000, 3),
    "TIFF of 400,000 rows in a fax compression": lambda: tiff("<", 400_000, 4, is_big=True),
    "has a list of 400,000 values in a TIFF directory": lambda: overlapping_exif(1, 400_000, kind=1, tag=273),
    "has a list of 400,000 values in an EXIF directory": lambda: png_with(
        png_chunk(b"eXIf", overlapping_exif(1, 400_000, kind=3, tag=0x0112))
    ),
    "has a list of 2,000,000 rationals in an EXIF directory": lambda: png_with(
        png_chunk(b"eXIf", overlapping_exif(1, 2_000_000, kind=5, tag=0x0112))
    ),
}


def tiff(order: str, num_rows: int, compression: int, is_big: bool = False) -> bytes:
    """A bilevel TIFF that is one column wide, with damaged rows."""
    data = np.random.default_rng(0).bytes(20_000)
    start = 16 if is_big else 8
    tags = {256: 1, 257: num_rows, 258: 1, 259: compression, 262: 0, 273: start, 277: 1, 278: num_rows, 279: len(data)}
    entries = b"".join(struct.pack(f"{order}HH{'QQ' if is_big else 'II'}", tag, 4, 1, tags[tag]) for tag in tags)
    magic = (b"II" if order == "<" else b"MM") + struct.pack(f"{order}H", 43 if is_big else 42)
    if is_big:
        head = magic + struct.pack(f"{order}HHQ", 8, 0, start + len(data))
        return head + data + struct.pack(f"{order}Q", len(tags)) + entries + bytes(8)
    return magic + struct.pack(f"{order}I", start + len(data)) + data + struct.pack(f"{order}H", len(tags)) + entries


def chunked(data: bytes, size: int = 60_000) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


@pytest.mark.parametrize("message", HOSTILE)
def test_a_hostile_image_is_refused_at_once(message):
    data = HOSTILE[message]()
    start = time.process_time()
    with pytest.raises(ImageError, match=message):
        load_image(data)
    assert time.process_time() - start < 1.5  # undetected they take 4 to 3,600 s


def test_bytes_that_a_decoder_leaves_take_linear_time():
    data = jpeg_with_scans(1)[:-2] + b"\xff" * 40_000_000
    start = time.process_time()
    with pytest.raises(ImageError, match="damaged or truncated"):
        load_image(data)
    assert time.process_time() - start < 3  # copied for each 64 KiB they take 12 s


def test_a_long_text_is_not_read_as_exif():
    text = b"\nexif\n    4\n" + b"00\n" * 5_000_000
    data = png_with(png_chunk(b"tEXt", b"Raw profile type exif\0" + text))
    tracemalloc.start()
    assert load_image(data).size == (8, 8)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 100_000_000  # split into lines it takes 400 MB


def test_as_many_scans_as_are_accepted_are_decoded():
    data = jpeg_with_scans(scan_module.MAX_JPEG_SCANS)
    assert np.array_equal(np.asarray(load_image(data)), np.asarray(Image.open(io.BytesIO(data))))
    with pytest.raises(ImageError, match="with 101 scans"):
        load_image(jpeg_with_scans(scan_module.MAX_JPEG_SCANS + 1))


def test_markers_of_scans_outside_the_image_are_not_counted():
    thumbnail = jpeg_segment(0xE2, b"\xff\xda" * 1000)
    load_image(jpeg_with(thumbnail) + b"\xff\xda" * 1000)


REAL = {
    "JPEG": lambda image: encode(image, "JPEG", quality=95, exif=exif(rotated(6))),
    "progressive": lambda image: encode(image, "JPEG", progressive=True, optimize=True, comment=b"\xff\xda!," * 99),
    "restarts": lambda image: encode(image, "JPEG", restart_marker_blocks=1),
    "profile": lambda image: encode(image, "JPEG", icc_profile=noise(400, 400).tobytes()),
    "MPO": lambda image: encode(image, "MPO", save_all=True, append_images=[image] * 5),
    "PNG": lambda image: encode(image, "PNG", icc_profile=b"profile" * 99),
    "APNG": lambda image: encode(image, "PNG", save_all=True, append_images=[image.rotate(a) for a in range(1, 15)]),
    "GIF": lambda image: encode(image, "GIF", comment=b"a comment" * 50, save_all=True, append_images=[image] * 3),
    "TIFF": lambda image: encode(image, "TIFF", compression="tiff_lzw", icc_profile=noise(99, 99).tobytes()),
    "fax": lambda image: encode(image.convert("1"), "TIFF", compression="group4"),
    "BigTIFF": lambda image: encode(image, "TIFF", big_tiff=True),
    "WEBP": lambda image: encode(image, "WEBP", exif=exif(rotated(6))),
    **({"AVIF": lambda image: encode(image, "AVIF")} if features.check("avif") else {}),
}


TIFFS = ("TIFF", "fax", "BigTIFF")

UNLIMITED = {
    "JPEG 2000": lambda image: encode(image, "JPEG2000"),
    "its codestream": lambda image: encode(image, "JPEG2000", no_jp2=True),
    "a BMP of run lengths": lambda image: run_length_bitmap(8, 4),
    "a DIB of run lengths": lambda image: run_length_bitmap(8, 4)[14:],
    "a plain PPM": lambda image: b"P3 1 1 255 1 2 3",
    "a plain bitmap": lambda image: b"P1 1 1 1",
    **{name: lambda image, name=name: name.encode() + b" 1 1 15" for name in ("PyRGBA", "Pf")},
    "a PPM of other levels": lambda image: b"P6 1 1 254\n123",
    "a PGM of other levels": lambda image: b"P5 1 1 1000\n12",
    "a PPM with a comment": lambda image: b"P6\n#\n1 1 255\n123",
    "QOI": lambda image: encode(image, "QOI"),
    "a big-endian TIFF": lambda image: tiff(">", 8, 5),
    **{name: REAL[name] for name in TIFFS},
    "lossless WebP": lambda image: encode(image, "WEBP", lossless=True),
    "lossless WebP with EXIF": lambda image: encode(image, "WEBP", lossless=True, exif=exif(rotated(6))),
    "WebP with an alpha channel": lambda image: encode(with_alpha(image), "WEBP"),
    "AVIF": REAL.get("AVIF", lambda image: b"\0\0\0\x1cftypavif"),
    "HEIC": lambda image: b"\0\0\0\x18ftypheic",
}


def with_alpha(image: Image.Image) -> Image.Image:
    made = image.convert("RGBA")
    made.putalpha(image.convert("L"))
    return made


@pytest.mark.parametrize("kind", UNLIMITED)
def test_an_image_whose_memory_or_time_is_not_in_its_size_is_recognized(kind):
    assert needs_limits(UNLIMITED[kind](noise_image(60, 40)))


LIMITED = REAL | {
    "BMP": lambda image: encode(image, "BMP"),
    "DIB": lambda image: encode(image, "DIB"),
    "PPM": lambda image: encode(image, "PPM"),
    "PGM": lambda image: encode(image.convert("L"), "PPM"),
    "PGM of 16 bits": lambda image: encode(image.convert("I;16"), "PPM"),
    "PBM": lambda image: encode(image.convert("1"), "PPM"),
    "TGA": lambda image: encode(image, "TGA"),
}


@pytest.mark.parametrize("kind", sorted(LIMITED.keys() - {"AVIF", *TIFFS}))
def test_an_image_whose_size_tells_all_needs_no_limits(kind):
    assert not needs_limits(LIMITED[kind](noise_image(60, 40)))


@pytest.mark.parametrize("kind", REAL)
def test_a_real_image_passes(kind):
    data = REAL[kind](noise_image(300, 200, seed=5))
    scan(data)
    load_image(data)


def test_a_directory_behind_the_end_of_the_file_is_left_to_pillow():
    scan(b"II+\0" + bytes(4) + b"\xff" * 8)


def test_a_png_may_have_one_byte_per_chunk():
    header, rest = SMALL_PNG[:33], SMALL_PNG[33:]
    (length,) = struct.unpack_from(">I", rest)
    body = rest[8 : 8 + length]
    data = header + b"".join(png_chunk(b"IDAT", bytes([byte])) for byte in body) + rest[12 + length :]
    assert load_image(data).tobytes() == load_image(SMALL_PNG).tobytes()


def test_a_large_jpeg_is_scanned_in_a_millisecond():
    data = encode(Image.fromarray(noise(2000, 1800)), "JPEG", quality=90)
    assert len(data) > 3_000_000
    assert min(_seconds(lambda: scan(data)) for _ in range(20)) < 0.005  # 0.6 ms


def _seconds(call) -> float:
    start = time.thread_time()
    call()
    return time.thread_time() - start


# Random input. `few` runs by default, `many` with the marker `slow`.

SEEDED = [*(LIMITED | REAL).values(), UNLIMITED["JPEG 2000"]]
SEEDS = [*(make(noise_image(40, 30, seed=7)) for make in SEEDED), SMALL_GIF, SMALL_JPEG, jpeg_with_scans(20)]
MAGIC = st.sampled_from([b"", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"II*\0", b"MM\0*", b"II+\0", b"MM*\0"])
TOKENS = st.sampled_from(
    [b"\xff\xda", b"\xff\xe1", b"Exif\0\0", b"!\xfe", b"!\xff\x0bNETSCAPE2.0", b",", b"\0", b"\xff"]
)
random_files = st.builds(bytes.__add__, MAGIC, st.lists(TOKENS | st.binary(max_size=40), max_size=40).map(b"".join))


@st.composite
def mutated_files(draw) -> bytes:
    data = bytearray(draw(st.sampled_from(SEEDS)))
    for _ in range(draw(st.integers(0, 6))):
        at = draw(st.integers(0, min(len(data), draw(st.sampled_from([40, 10**6]))) - 1))
        data[at : at + draw(st.integers(0, 4))] = draw(st.binary(max_size=4) | TOKENS)
        data = data or bytearray(b"\0")
    return bytes(data[: draw(st.just(len(data)) | st.integers(1, len(data)))])


@st.composite
def flipped_files(draw) -> bytes:
    """Whole files with some other bytes, often in the header, which is short and the most sensitive part."""
    data = bytearray(draw(st.sampled_from(SEEDS)))
    for _ in range(draw(st.integers(1, 4))):
        most = min(len(data), draw(st.sampled_from([120, 10**6])))
        data[draw(st.integers(0, most - 1))] = draw(st.integers(0, 255))
    return bytes(data)


def check_file(data: bytes) -> None:
    """Scanning raises nothing but the refusal, loading nothing but ImageError, and neither takes long."""
    start = time.process_time()
    with suppress(RefusedImage):
        scan(data)
    assert time.process_time() - start < 0.2
    check_source(data)


def check_source(source) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            assert load_image(source, max_source_pixels=10**6).mode == "RGB"
        except ImageError as error:
            assert error.__context__ is None


def check_exif(block: bytes) -> None:
    with suppress(RefusedImage):
        scan_exif(block)
    image = Image.new("RGB", (4, 3))
    image.info["exif"] = block
    check_source(image)


def check_data_uri(uri: str) -> None:
    try:
        assert isinstance(decode_data_uri(uri), bytes)
    except ImageError as error:
        assert len(str(error)) < 400
    check_source(uri)


entries = st.builds(
    struct.Struct("<HHII").pack,
    st.sampled_from([0x0112, 0x011A]) | st.integers(0, 65535),
    st.integers(0, 20),
    st.sampled_from([0, 1, 2, 60, 2**31, 2**32 - 1]),
    st.sampled_from([0, 1, 6, 8, 2**32 - 1]),
)
exif_blocks = st.builds(
    lambda prefix, count, entries, rest: prefix + b"II*\0\x08\0\0\0" + struct.pack("<H", count) + entries + rest,
    st.sampled_from([b"", b"Exif\0\0", b"Exif\0\0" * 9]),
    st.integers(0, 65535),
    st.lists(entries, max_size=10).map(b"".join),
    st.binary(max_size=99),
)
data_uris = st.builds(
    "{}{}{}".format,
    st.sampled_from(["data:", "DATA:image/png;base64,", "data:;base64,", "data:image/gif,", "data:,"]),
    st.text(max_size=60) | st.binary(max_size=60).map(bytes.hex) | st.just("iVBORw0KGgo="),
    st.sampled_from(["", "=", "==", "\n", "%3D", "%"]),
)

FUZZ = {
    "random files": (check_file, random_files),
    "changed files": (check_file, mutated_files()),
    "flipped bytes": (check_file, flipped_files()),
    "EXIF blocks": (check_exif, exif_blocks | st.binary(max_size=200)),
    "data URIs": (check_data_uri, data_uris),
}
EXAMPLES = [pytest.param(1000, id="few"), pytest.param(10_000, id="many", marks=pytest.mark.slow)]


@pytest.mark.parametrize("num_examples", EXAMPLES)
@pytest.mark.parametrize("name", FUZZ)
def test_random_input_gives_an_image_or_an_image_error(name, num_examples):
    check, strategy = FUZZ[name]
    settings(max_examples=num_examples)(given(strategy)(check))()
