"""Odd, damaged and hostile image files, all generated here: `python -m tests.corpus.generate FOLDER` writes them.

Each group is a function that yields `CorpusFile`s. No file is copied from elsewhere, and all are the same every time,
except that libavif writes the time into animations.
"""

import io
import struct
import sys
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image, ImageCms, PngImagePlugin

from tests.helpers.media.hostile import gif_with, jpeg_segment, png_chunk, with_last_scan
from tests.helpers.media.images import encode, noise

# Pillow's name of a format -> the suffix of its files, for all formats that Pillow also writes.
SUFFIXES = {
    "PNG": ".png",
    "JPEG": ".jpg",
    "WEBP": ".webp",
    "GIF": ".gif",
    "AVIF": ".avif",
    "BMP": ".bmp",
    "TIFF": ".tiff",
    "JPEG2000": ".jp2",
    "ICO": ".ico",
    "TGA": ".tga",
    "PPM": ".ppm",
}
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "RGBa", "CMYK", "YCbCr", "LAB", "HSV", "I;16", "I", "F")
SIZES = ((1, 1), (1, 2), (2, 1), (1, 150), (150, 1), (3, 7), (27, 29), (199, 2), (8, 8), (65, 33))


@dataclass(frozen=True, slots=True)
class CorpusFile:
    """A file; one that `is_hostile` must be refused, and plain Pillow must not be tried on it."""

    name: str
    data: bytes
    is_hostile: bool = False


def corpus() -> list[CorpusFile]:
    """All files, with unique names."""
    groups = (
        modes,
        sizes,
        orientations,
        truncated,
        mutated,
        renamed,
        animations,
        profiles,
        jpegs,
        pngs,
        others,
        hostile,
    )
    return [file for group in groups for file in group()]


def write(folder: Path) -> list[CorpusFile]:
    """Write all files to a folder."""
    files = corpus()
    for file in files:
        (folder / file.name).write_bytes(file.data)
    return files


def photo(width: int = 64, height: int = 48) -> Image.Image:
    """A smooth image with some noise, which compresses as photographs do."""
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    smooth = np.stack((x, y, 255 - x), axis=-1)
    return Image.fromarray((smooth * 0.8 + noise(width, height) * 0.2).astype(np.uint8))


def modes() -> Iterator[CorpusFile]:
    """Every mode in every format that takes it."""
    for mode in MODES:
        image = photo().convert("L").convert(mode) if mode in ("I;16", "I", "F") else _in_mode(mode)
        for file_format, suffix in SUFFIXES.items():
            try:
                data = encode(image, file_format)
            except (OSError, ValueError, KeyError):
                continue  # Pillow does not write this mode in this format
            yield CorpusFile(f"mode-{mode.replace(';', '_')}-{file_format.lower()}{suffix}", data)


def _in_mode(mode: str) -> Image.Image:
    image = photo()
    if mode == "LAB":
        image = ImageCms.applyTransform(image, _to_lab())
        del image.info["icc_profile"]  # which contains the time
        return image
    return image.convert("LA").convert("PA") if mode == "PA" else image.convert("RGBA").convert(mode)


def _to_lab() -> ImageCms.ImageCmsTransform:
    return ImageCms.buildTransform(ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB"), "RGB", "LAB")


def sizes() -> Iterator[CorpusFile]:
    """Sizes of one pixel, of odd numbers, and long thin ones."""
    for width, height in SIZES:
        for file_format in ("PNG", "JPEG", "WEBP"):
            data = encode(photo(width, height), file_format)
            yield CorpusFile(f"size-{width}x{height}{SUFFIXES[file_format]}", data)


def orientations() -> Iterator[CorpusFile]:
    """EXIF orientations, also invalid ones, and damaged EXIF blocks."""
    for file_format in ("JPEG", "PNG", "WEBP", "TIFF"):
        for value in (1, 2, 3, 4, 5, 6, 7, 8, 0, 9, 65535):
            exif = Image.Exif()
            exif[ExifTags.Base.Orientation] = value
            yield CorpusFile(
                f"orientation-{value}{SUFFIXES[file_format]}", encode(photo(), file_format, exif=exif.tobytes())
            )
    blocks = {
        "empty": b"",
        "zeros": bytes(40),
        "text": b"Exif\0\0not a TIFF header",
        "far": b"Exif\0\0MM\0*\xff\xff\xff\xff",
    }
    blocks["loop"] = b"Exif\0\0II*\0" + struct.pack("<IHHHIII", 8, 1, 0x8769, 4, 1, 8, 8)  # EXIF's folder is itself
    for name, block in blocks.items():
        for file_format in ("JPEG", "PNG", "WEBP"):
            yield CorpusFile(f"exif-{name}{SUFFIXES[file_format]}", encode(photo(), file_format, exif=block))


def truncated() -> Iterator[CorpusFile]:
    """Files that end at every sixteenth of their length."""
    for name, suffix, data in _samples():
        for sixteenths in range(16):
            yield CorpusFile(f"truncated-{name}-{sixteenths:02}{suffix}", data[: len(data) * sixteenths // 16])


def mutated() -> Iterator[CorpusFile]:
    """Files with a few bytes changed, or with a piece cut out or doubled."""
    random = np.random.default_rng(12)
    for name, suffix, data in _samples():
        for number in range(3):
            changed = np.frombuffer(data, np.uint8).copy()
            changed[random.integers(0, len(data), 8)] = random.integers(0, 256, 8)
            yield CorpusFile(f"changed-{name}-{number}{suffix}", changed.tobytes())
        third = len(data) // 3
        yield CorpusFile(f"cut-{name}{suffix}", data[:third] + data[2 * third :])
        yield CorpusFile(f"doubled-{name}{suffix}", data[: 2 * third] + data[third:])
        yield CorpusFile(f"followed-{name}{suffix}", data + noise(64, 64).tobytes())


def _samples() -> list[tuple[str, str, bytes]]:
    samples = [(name.lower(), suffix, encode(photo(), name)) for name, suffix in SUFFIXES.items()]
    return [*samples, ("progressive", ".jpg", encode(photo(), "JPEG", progressive=True))]


def renamed() -> Iterator[CorpusFile]:
    """Images with the suffix of another format, in capitals, and names that are hard to handle."""
    png, jpeg = encode(photo()), encode(photo(), "JPEG")
    yield CorpusFile("png-as.jpg", png)
    yield CorpusFile("jpeg-as.png", jpeg)
    yield CorpusFile("jpeg-as.webp", jpeg)
    yield CorpusFile("gif-as.png", encode(photo(), "GIF"))
    yield CorpusFile("avif-as.jpg", encode(photo(), "AVIF"))
    yield CorpusFile("CAPITALS.PNG", png)
    yield CorpusFile("two.suffixes.jpg.png", png)
    yield CorpusFile("spaces and [brackets] * ?.png", png)
    yield CorpusFile("ünïcödé 画像 \U0001f5bc.png", png)
    yield CorpusFile("line\nbreak.png", png)
    yield CorpusFile("-dash.png", png)
    yield CorpusFile("percent%20 #hash.png", png)


def animations() -> Iterator[CorpusFile]:
    """Animations, also with one frame, with frames of different sizes, and truncated after the first frame."""
    frames = [Image.fromarray(noise(32, 24, seed=seed)) for seed in range(4)]
    for file_format in ("GIF", "PNG", "WEBP", "AVIF", "TIFF"):
        data = encode(frames[0], file_format, save_all=True, append_images=frames[1:])
        yield CorpusFile(f"animation{SUFFIXES[file_format]}", data)
        yield CorpusFile(f"animation-truncated{SUFFIXES[file_format]}", data[: len(data) * 3 // 4])
        yield CorpusFile(
            f"animation-of-one{SUFFIXES[file_format]}", encode(frames[0], file_format, save_all=True, append_images=[])
        )
    icons = encode(photo(64, 64), "ICO", sizes=[(16, 16), (64, 64)])
    yield CorpusFile("two-sizes.ico", icons)


def profiles() -> Iterator[CorpusFile]:
    """ICC profiles: valid, of another colour space, damaged and large."""
    srgb, lab = _profile("sRGB"), _profile("LAB")
    blocks = {"srgb": srgb, "lab": lab, "cut": srgb[:100], "noise": noise(20, 20).tobytes(), "large": bytes(500_000)}
    for name, block in blocks.items():
        for file_format in ("JPEG", "PNG", "WEBP", "TIFF"):
            yield CorpusFile(f"profile-{name}{SUFFIXES[file_format]}", encode(photo(), file_format, icc_profile=block))


def _profile(space: str) -> bytes:
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile(space)).tobytes()
    return profile[:24] + bytes(12) + profile[36:]  # without the time of its creation


def jpegs() -> Iterator[CorpusFile]:
    """JPEGs with unusual segments."""
    jpeg = encode(photo(), "JPEG")
    for name, subsampling in (("444", 0), ("422", 1), ("420", 2)):
        yield CorpusFile(f"subsampling-{name}.jpg", encode(photo(), "JPEG", subsampling=subsampling))
    yield CorpusFile("restart-markers.jpg", encode(photo(), "JPEG", restart_marker_blocks=1))
    yield CorpusFile("quality-1.jpg", encode(photo(), "JPEG", quality=1))
    yield CorpusFile("quality-100.jpg", encode(photo(), "JPEG", quality=100))
    yield CorpusFile("adobe-cmyk.jpg", encode(_in_mode("CMYK"), "JPEG"))
    yield CorpusFile("comments.jpg", jpeg[:2] + jpeg_segment(0xFE, b"comment" * 1000) * 20 + jpeg[2:])
    yield CorpusFile("fill-bytes.jpg", jpeg[:2] + b"\xff" * 1000 + jpeg[2:])
    yield CorpusFile("two-images.jpg", jpeg + jpeg)
    yield CorpusFile("no-end.jpg", jpeg[:-2])
    yield CorpusFile("no-tables.jpg", jpeg[:2] + jpeg[jpeg.index(b"\xff\xc0") :])
    yield CorpusFile("no-scan.jpg", jpeg[: jpeg.index(b"\xff\xda")] + b"\xff\xd9")
    yield CorpusFile("segment-of-no-length.jpg", jpeg[:2] + b"\xff\xe1\x00\x00" + jpeg[2:])
    yield CorpusFile("segment-past-end.jpg", jpeg[:2] + b"\xff\xe1\xff\xff")
    yield CorpusFile("zero-height.jpg", _with_size(jpeg, 64, 0))
    yield CorpusFile("ten-scans.jpg", encode(photo(256, 256), "JPEG", progressive=True))


def _with_size(jpeg: bytes, width: int, height: int) -> bytes:
    """The JPEG with another size in its frame header."""
    start = next(at for marker in (b"\xff\xc0", b"\xff\xc2") if (at := jpeg.find(marker)) > 0)
    return jpeg[: start + 5] + struct.pack(">HH", height, width) + jpeg[start + 9 :]


def pngs() -> Iterator[CorpusFile]:
    """PNGs with unusual chunks."""
    png, ihdr = encode(photo()), struct.pack(">IIBBBBB", 64, 48, 8, 2, 0, 0, 0)
    pixels = zlib.compress(b"".join(b"\0" + row.tobytes() for row in np.asarray(photo())))
    yield CorpusFile("no-end.png", png[:-12])
    yield CorpusFile("wrong-checksum.png", png[:29] + bytes(4) + png[33:])
    yield CorpusFile("no-pixels.png", _png((b"IHDR", ihdr)))
    yield CorpusFile("empty-pixels.png", _png((b"IHDR", ihdr), (b"IDAT", b"")))
    yield CorpusFile("not-deflate.png", _png((b"IHDR", ihdr), (b"IDAT", b"not compressed")))
    yield CorpusFile("tiny-chunks.png", _png((b"IHDR", ihdr), *((b"IDAT", bytes([byte])) for byte in pixels)))
    yield CorpusFile("unknown-chunks.png", _png((b"IHDR", ihdr), (b"abCd", bytes(100)), (b"IDAT", pixels)))
    yield CorpusFile("critical-chunk.png", _png((b"IHDR", ihdr), (b"ABCD", bytes(100)), (b"IDAT", pixels)))
    yield CorpusFile("two-headers.png", _png((b"IHDR", ihdr), (b"IHDR", ihdr), (b"IDAT", pixels)))
    yield CorpusFile(
        "no-palette.png", _png((b"IHDR", struct.pack(">IIBBBBB", 64, 48, 8, 3, 0, 0, 0)), (b"IDAT", pixels))
    )
    yield CorpusFile(
        "bad-depth.png", _png((b"IHDR", struct.pack(">IIBBBBB", 64, 48, 7, 2, 0, 0, 0)), (b"IDAT", pixels))
    )
    yield CorpusFile("no-size.png", _png((b"IHDR", struct.pack(">IIBBBBB", 0, 0, 8, 2, 0, 0, 0)), (b"IDAT", pixels)))
    yield CorpusFile(
        "bits-16.png", _png((b"IHDR", struct.pack(">IIBBBBB", 4, 2, 16, 2, 0, 0, 0)), (b"IDAT", _zeros(50)))
    )
    yield CorpusFile(
        "interlaced.png", _png((b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 1)), (b"IDAT", _zeros(4)))
    )
    text = PngImagePlugin.PngInfo()
    text.add_text("Description", "a text " * 1000, zip=True)
    text.add_itxt("Titel", "Übergröße", "de", zip=True)
    yield CorpusFile("texts.png", encode(photo(), pnginfo=text))
    bomb = PngImagePlugin.PngInfo()
    bomb.add(b"zTXt", b"bomb\0\0" + _zeros(80_000_000))
    yield CorpusFile("text-bomb.png", encode(photo(), pnginfo=bomb))
    yield CorpusFile("optimized-palette.png", encode(photo().quantize(3), bits=2))
    yield CorpusFile("transparent-colour.png", encode(photo(), transparency=(0, 0, 255)))


def _png(*chunks: tuple[bytes, bytes]) -> bytes:
    parts = [png_chunk(kind, data) for kind, data in (*chunks, (b"IEND", b""))]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def _zeros(number: int) -> bytes:
    return zlib.compress(bytes(number))


def others() -> Iterator[CorpusFile]:
    """Files that are no images, and images of formats that need an external program."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as file:
        file.writestr(zipfile.ZipInfo("image.png"), encode(photo()))
    contents = {
        "empty": b"",
        "one-byte": b"\x89",
        "zeros": bytes(10_000),
        "noise": noise(60, 60).tobytes(),
        "text": b"This is not an image.\n",
        "html": b"<!DOCTYPE html><title>404</title><p>Not found",
        "svg": b'<svg xmlns="http://www.w3.org/2000/svg" width="10" height="10"><rect width="10" height="10"/></svg>',
        "pdf": b"%PDF-1.4\n1 0 obj<</Type/Catalog>>endobj\ntrailer<</Root 1 0 R>>\n%%EOF",
        "postscript": encode(photo(), "EPS"),
        "zip": packed.getvalue(),
        "lfs-pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n",
        "png-signature": b"\x89PNG\r\n\x1a\n",
        "jpeg-signature": b"\xff\xd8\xff",
        "gif-signature": b"GIF89a",
        "webp-signature": b"RIFF\x10\0\0\0WEBP",
        "mp4": b"\0\0\0\x18ftypisom\0\0\x02\0isomiso2" + bytes(100),
    }
    for name, data in contents.items():
        yield CorpusFile(f"{name}-as.png", data)
        yield CorpusFile(f"{name}-as.jpg", data)


def hostile() -> Iterator[CorpusFile]:
    """Small files that would take much memory or time to decode."""
    for name, (width, height) in {"large": (60_000, 60_000), "wide": (2**31 - 1, 1), "tall": (1, 2**31 - 1)}.items():
        ihdr = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)
        yield CorpusFile(f"bomb-{name}.png", _png((b"IHDR", ihdr), (b"IDAT", _zeros(1000))), True)
    for name, colour, side in (("rgba", 6, 8000), ("rgb", 2, 13_000), ("grey-16", 0, 13_000)):
        ihdr = struct.pack(">IIBBBBB", side, side, 16 if "16" in name else 8, colour, 0, 0, 0)
        yield CorpusFile(f"truncated-{name}-{side}.png", _png((b"IHDR", ihdr), (b"IDAT", _zeros(100_000)[:-20])), True)
    jpeg, progressive = encode(photo(), "JPEG"), encode(Image.new("L", (4000, 4000)), "JPEG", progressive=True)
    yield CorpusFile("bomb.jpg", _with_size(jpeg, 65_000, 65_000), True)
    yield CorpusFile("scans-3000.jpg", with_last_scan(progressive, 3000), True)
    bmp = encode(photo(), "BMP")
    yield CorpusFile("bomb.bmp", bmp[:18] + struct.pack("<ii", 60_000, 60_000) + bmp[26:], True)
    gif = encode(photo(), "GIF")
    yield CorpusFile("bomb.gif", gif[:6] + struct.pack("<HH", 65_535, 65_535) + gif[10:], True)
    comment = b"\x21\xfe" + (b"\xff" + bytes(255)) * 4 + b"\0"
    yield CorpusFile("comments-20-mb.gif", gif_with(comment * 20_000, gif=gif), True)
    yield CorpusFile("bomb.tiff", _tiff(60_000, 60_000), True)
    blp = b"BLP2" + struct.pack("<IBBBBII", 1, 1, 0, 0, 0, 13_000, 13_000) + bytes(256)
    yield CorpusFile("bomb-as.png", blp, True)
    pam = b"P6 60000 60000 255\n"
    yield CorpusFile("bomb.ppm", pam, True)


def _tiff(width: int, height: int) -> bytes:
    tags = (
        (256, 4, width),
        (257, 4, height),
        (258, 3, 8),
        (259, 3, 1),
        (262, 3, 1),
        (273, 4, 8),
        (278, 4, height),
        (279, 4, 9),
    )
    entries = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in tags)
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    print(f"{len(write(target))} files in {target}")
