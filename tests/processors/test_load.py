"""Any form of picture is loaded as upright RGB, or there is a ValueError that says why not."""

import base64
import io
import struct
import threading
import urllib.parse
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from PIL import Image, ImageFile, ImageSequence, features

from mmvllm.processors import load as load_module
from mmvllm.processors.load import load_image
from tests.helpers.images import PNG, RGB, encode, noise
from tests.helpers.requests import noise_image

steady = settings(derandomize=True, deadline=None)


def levels(source) -> np.ndarray:
    """(height, width, 3) of what is loaded."""
    loaded = load_image(source)
    assert loaded.mode == "RGB"
    return np.asarray(loaded)


# Forms


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """A home and working folder with the picture under names that paths and URLs trip over."""
    for name in ("plain.png", "with space.png", "50%.png", "a#b.png", "a?b.png", "Bär.png", "~tilde.png", "a+b.png"):
        (tmp_path / name).write_bytes(PNG)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


FORMS = {
    "PIL": lambda home: Image.fromarray(RGB),
    "PIL, lazily opened": lambda home: Image.open(home / "plain.png"),
    "str": lambda home: str(home / "plain.png"),
    "Path": lambda home: home / "plain.png",
    "relative": lambda home: "with space.png",
    "home": lambda home: "~/plain.png",
    "Path at home": lambda home: Path("~/plain.png"),
    "tilde in name": lambda home: "~tilde.png",
    "percent in name": lambda home: "50%.png",
    "bytes": lambda home: PNG,
    "bytearray": lambda home: bytearray(PNG),
    "memoryview": lambda home: memoryview(PNG),
    "file": lambda home: (home / "plain.png").as_uri(),
    "file, escaped": lambda home: (home / "with space.png").as_uri(),
    "file, umlaut escaped": lambda home: (home / "Bär.png").as_uri(),
    "file, percent escaped": lambda home: (home / "50%.png").as_uri(),
    "file, space": lambda home: f"file://{home}/with space.png",
    "file, percent": lambda home: f"file://{home}/50%.png",
    "file, hash": lambda home: f"file://{home}/a#b.png",
    "file, question mark": lambda home: f"file://{home}/a?b.png",
    "file, plus": lambda home: f"file://{home}/a+b.png",
    "file, host": lambda home: f"file://localhost{home}/plain.png",
    "file, one slash": lambda home: f"file:{home}/plain.png",
    "file, relative": lambda home: "file://plain.png",
    "file, upper case": lambda home: f"FILE://{home}/plain.png",
    "data": lambda home: "data:image/png;base64," + base64.b64encode(PNG).decode(),
    "data, no subtype": lambda home: "data:image;base64," + base64.b64encode(PNG).decode(),
    "data, upper case": lambda home: "DATA:image/png;BASE64," + base64.b64encode(PNG).decode(),
    "data, wrapped": lambda home: "data:image/png;base64,\n" + base64.encodebytes(PNG).decode(),
    "data, base64 escaped": lambda home: "data:;base64," + urllib.parse.quote(base64.b64encode(PNG), safe=""),
    "data, percent": lambda home: "data:image/png," + urllib.parse.quote_from_bytes(PNG),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_pixels(form, home):
    assert np.array_equal(levels(FORMS[form](home)), RGB)


ANSWERS = {
    "/plain.png": (200, {}, PNG),
    "/with%20space.png?size=1&name=a%26b": (200, {}, PNG),
    "/B%C3%A4r.png": (200, {}, PNG),
    "/moved.png": (302, {"Location": "/plain.png"}, b""),
    "/page": (200, {"Content-Type": "text/html"}, b"<html>sign in first</html>"),
    "/nothing": (200, {}, b""),
    "/half.png": (200, {}, PNG[: len(PNG) // 2]),
}


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/nonsense":
            self.wfile.write(b"this is not HTTP\r\n\r\n")
            return
        if "urllib" in self.headers["User-Agent"].lower():  # as some large sites do
            self.send_error(403)
            return
        status, headers, body = ANSWERS.get(self.path, (404, {}, b"no"))
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def site():
    """The address of a web server on this machine."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("no_proxy", "*")
        yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    "path",
    [
        "/plain.png",
        "/plain.png#top",
        "/with%20space.png?size=1&name=a%26b",
        "/with space.png?size=1&name=a%26b",
        "/Bär.png",
        "/moved.png",
    ],
)
def test_a_url_gives_the_same_pixels(path, site):
    assert np.array_equal(levels(site + path), RGB)
    assert np.array_equal(levels(site.replace("http", "HTTP") + path), RGB)


@pytest.mark.parametrize(
    "path, message",
    [
        ("/missing.png", r"/missing\.png: cannot be fetched \(HTTP Error 404"),
        ("/nonsense", r"/nonsense: cannot be fetched \("),
        ("/page", "the picture at http.*/page: not a picture that Pillow can read"),
        ("/nothing", r"the picture at http.*/nothing: is empty \(0 bytes\)"),
        ("/half.png", r"the picture at http.*/half\.png: cannot be decoded, damaged or truncated"),
    ],
)
def test_a_bad_answer_is_named(path, message, site):
    with pytest.raises(ValueError, match=message):
        load_image(site + path)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:1/a.png", "http:///a.png", "http://127.0.0.1:port/a.png", "http://[::1/a.png"]
)
def test_a_url_that_leads_nowhere_is_named(url, site):
    with pytest.raises(ValueError, match=r"a\.png: cannot be fetched \(.+\)"):
        load_image(url)


def test_a_download_is_bounded(site, monkeypatch):
    monkeypatch.setattr(load_module, "MAX_DOWNLOAD_BYTES", len(PNG))
    assert np.array_equal(levels(site + "/plain.png"), RGB)
    monkeypatch.setattr(load_module, "MAX_DOWNLOAD_BYTES", len(PNG) - 1)
    with pytest.raises(ValueError, match=rf"/plain\.png: more than {len(PNG) - 1} bytes; fetch and shrink it first"):
        load_image(site + "/plain.png")


# What is in the file


def exif(*tags: tuple[int, int, bytes]) -> bytes:
    """An EXIF block of (tag, type, 4 bytes)."""
    entries = b"".join(struct.pack("<HHI", tag, kind, 1) + value for tag, kind, value in sorted(tags))
    return b"Exif\0\0II*\0\x08\0\0\0" + struct.pack("<H", len(tags)) + entries + bytes(4)


def rotated(orientation: int) -> tuple[int, int, bytes]:
    return 0x0112, 3, struct.pack("<I", orientation)


# What a viewer has to do to the stored (height, width, 3), by the EXIF standard's definition of each orientation.
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


@pytest.mark.parametrize("orientation", UPRIGHT)
@pytest.mark.parametrize("file_format", ["PNG", "WEBP", "TIFF", "JPEG"])
def test_exif_rotation_is_applied_once(file_format, orientation, tmp_path):
    options = {"WEBP": {"lossless": True}, "JPEG": {"quality": 95}}.get(file_format, {})
    block = Image.Exif()
    block[0x0112] = orientation
    stored = Image.fromarray(RGB)
    plain = levels(encode(stored, file_format, **options))
    turned = encode(stored, file_format, exif=block, **options)
    assert np.array_equal(levels(turned), UPRIGHT[orientation](plain))
    lazy = Image.open(io.BytesIO(turned))
    for _ in range(2):
        assert np.array_equal(levels(lazy), UPRIGHT[orientation](plain))


@pytest.mark.filterwarnings("ignore:Truncated File Read")
@pytest.mark.parametrize("tag", [(0x0100, 2, b"abc\0"), (0x011A, 7, b"abc\0"), (0x0102, 4, b"\xff\xff\xff\xff")])
def test_other_damage_in_exif_does_not_cost_the_picture(tag):
    stored = Image.fromarray(RGB)
    loaded = levels(encode(stored, "JPEG", exif=exif(rotated(6), tag)))
    assert np.array_equal(loaded, UPRIGHT[6](levels(encode(stored, "JPEG"))))


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
@pytest.mark.parametrize(
    "block", [b"Exif\0\0", b"Exif\0\0garbage", b"Exif\0\0II*\0", exif(rotated(0)), exif(rotated(9))]
)
def test_without_a_usable_orientation_the_picture_stays_as_it_is(block):
    stored = Image.fromarray(RGB)
    assert np.array_equal(levels(encode(stored, "JPEG", exif=block)), levels(encode(stored, "JPEG")))


def over_white(rgb: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    """What pasting on white with the alpha as mask gives, in 8-bit arithmetic: round(a * rgb + (1 - a) * 255)."""
    alpha = alpha.astype(np.float64)[:, :, None] / 255
    return np.rint(alpha * rgb + (1 - alpha) * 255).astype(np.uint8)


GREY, ALPHA = noise(13, 7, 1, seed=1)[:, :, 0], noise(13, 7, 1, seed=2)[:, :, 0]
GREYS = np.repeat(GREY[:, :, None], 3, axis=2)
RGBA = np.dstack([RGB, ALPHA])


@pytest.mark.parametrize("file_format", ["PIL", "PNG", "TIFF", "WEBP"])
def test_alpha_is_laid_over_white(file_format):
    image = Image.fromarray(RGBA)
    source = image if file_format == "PIL" else encode(image, file_format, lossless=True, exact=True)
    assert np.array_equal(levels(source), over_white(RGB, ALPHA))


def test_alpha_over_white_is_qwen_vl_utils_rule():
    image = Image.fromarray(RGBA)
    white = Image.new("RGB", image.size, (255, 255, 255))
    white.paste(image, mask=image.split()[3])
    assert np.array_equal(levels(image), np.asarray(white))


@pytest.mark.parametrize("as_file", [False, True], ids=["PIL", "PNG"])
def test_grey_with_alpha_is_laid_over_white(as_file):
    image = Image.fromarray(np.dstack([GREY, ALPHA]))
    assert image.mode == "LA"
    assert np.array_equal(levels(encode(image) if as_file else image), over_white(GREYS, ALPHA))


def test_a_palette_with_alpha_is_laid_over_white():
    palette = noise(1, 256, 3, seed=3)[:, 0]
    image = Image.merge("LA", [Image.fromarray(GREY), Image.fromarray(ALPHA)])
    image = Image.merge("PA", image.split())
    image.putpalette(palette.tobytes())
    assert np.array_equal(levels(image), over_white(palette[GREY], ALPHA))


@pytest.mark.parametrize("form", ["PIL", "PNG", "GIF"])
def test_a_transparent_palette_entry_becomes_white(form):
    palette = noise(1, 256, 3, seed=3)[:, 0]
    image = Image.fromarray(GREY).convert("P")
    image.putpalette(palette.tobytes())
    image.info["transparency"] = 9
    image.putpixel((2, 3), 9)
    indices = np.asarray(image)
    source = image if form == "PIL" else encode(image, form, transparency=9, optimize=False)
    assert (levels(source)[3, 2] == 255).all()
    assert np.array_equal(levels(source), over_white(palette[indices], np.where(indices == 9, 0, 255)))


def test_palette_entries_may_be_half_transparent():
    palette, alphas = noise(1, 256, 3, seed=3)[:, 0], noise(1, 256, 1, seed=4)[:, 0, 0]
    image = Image.fromarray(GREY).convert("P")
    image.putpalette(palette.tobytes())
    assert np.array_equal(levels(encode(image, transparency=alphas.tobytes())), over_white(palette[GREY], alphas[GREY]))


def test_a_transparent_colour_becomes_white():
    stored = RGB.copy()
    stored[2, 5] = stored[6, 1] = 10, 20, 30
    want = stored.copy()
    want[2, 5] = want[6, 1] = 255
    assert np.array_equal(levels(encode(Image.fromarray(stored), transparency=(10, 20, 30))), want)


def test_a_transparent_grey_becomes_white():
    stored = np.where(GREY == 7, 8, GREY)
    stored[2, 5] = 7
    want = np.repeat(stored[:, :, None], 3, axis=2)
    want[2, 5] = 255
    assert np.array_equal(levels(encode(Image.fromarray(stored), transparency=7)), want)


def png(width: int, height: int, depth: int, colour_type: int, rows: bytes) -> bytes:
    """A PNG by the book: 0 is grey, 2 RGB, 6 RGBA; `rows` is packed, without filter bytes."""
    stride = len(rows) // height if height else 0
    filtered = b"".join(b"\0" + rows[i * stride : (i + 1) * stride] for i in range(height if rows else 0))
    header = struct.pack(">IIBBBBB", width, height, depth, colour_type, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(filtered)), (b"IEND", b""))
    framed = (struct.pack(">I", len(body)) + kind + body for kind, body in chunks)
    checks = (struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(a + b for a, b in zip(framed, checks, strict=True))


DEEP = np.random.default_rng(5).integers(0, 65536, (7, 13, 4)).astype(np.uint16)


@pytest.mark.parametrize("top", [65535, 300, 255, 0])
def test_16_bit_grey_is_scaled_however_dark_it_is(top):
    stored = np.minimum(DEEP[:, :, 0], top)
    want = np.repeat((stored // 256).astype(np.uint8)[:, :, None], 3, axis=2)
    assert np.array_equal(levels(png(13, 7, 16, 0, stored.astype(">u2").tobytes())), want)
    assert np.array_equal(levels(Image.fromarray(stored)), want)
    assert np.array_equal(levels(encode(Image.fromarray(stored), "TIFF")), want)


def test_16_bit_colours_are_scaled():
    stored = DEEP[:, :, :3]
    assert np.array_equal(levels(png(13, 7, 16, 2, stored.astype(">u2").tobytes())), stored // 256)


def test_16_bit_alpha_is_laid_over_white():
    want = over_white(DEEP[:, :, :3] // 256, DEEP[:, :, 3] // 256)
    assert np.array_equal(levels(png(13, 7, 16, 6, DEEP.astype(">u2").tobytes())), want)


@pytest.mark.parametrize("as_file", [False, True], ids=["PIL", "TIFF"])
@pytest.mark.parametrize(
    "dtype, white", [(np.int32, 255), (np.int32, 65535), (np.float32, 1), (np.float32, 255), (np.float32, 65535)]
)
def test_32_bit_grey_keeps_all_256_levels(dtype, white, as_file):
    ramp = np.arange(256).reshape(16, 16)
    image = Image.fromarray((ramp * (white / 255)).astype(dtype))
    assert image.mode in ("I", "F")
    loaded = levels(encode(image, "TIFF") if as_file else image)
    assert np.array_equal(loaded, np.repeat(ramp[:, :, None], 3, axis=2))


def test_levels_that_are_no_numbers_spoil_no_others():
    stored = np.array([[0.0, 0.5, 1.0, np.nan, np.inf, -np.inf, -0.5]], dtype=np.float32)
    assert levels(Image.fromarray(stored))[0, :, 0].tolist() == [0, 128, 255, 0, 255, 0, 0]


def test_one_bit_is_black_and_white():
    bits = GREY > 127
    want = np.repeat(np.where(bits, 255, 0)[:, :, None], 3, axis=2)
    image = Image.fromarray(bits)
    assert image.mode == "1"
    for source in (image, encode(image), encode(image, "TIFF"), encode(image, "BMP"), encode(image, "PPM")):
        assert np.array_equal(levels(source), want)


def test_grey_and_palette_become_colours():
    assert np.array_equal(levels(encode(Image.fromarray(GREY))), GREYS)
    palette = Image.fromarray(RGB).quantize(91)
    assert np.array_equal(levels(encode(palette)), np.asarray(palette.convert("RGB")))


@pytest.mark.parametrize("mode", ["CMYK", "YCbCr", "HSV", "LAB", "RGBX", "RGBa", "PA"])
def test_any_mode_of_pil_becomes_rgb(mode):
    image = Image.new("LAB", (13, 7), 90) if mode == "LAB" else Image.fromarray(RGB).convert(mode, palette=1)
    assert image.mode == mode
    assert np.array_equal(levels(image), np.asarray(image.convert("RGB")))


def test_a_cmyk_jpeg_has_its_colours():
    flat = np.broadcast_to(np.array([200, 90, 30], dtype=np.uint8), (16, 16, 3))
    loaded = levels(encode(Image.fromarray(flat).convert("CMYK"), "JPEG", quality=95))
    assert np.abs(loaded.astype(int) - flat).max() <= 4


def test_a_progressive_jpeg_is_the_baseline_one():
    smooth = noise_image(67, 45, seed=1)
    assert np.array_equal(levels(encode(smooth, "JPEG", progressive=True)), levels(encode(smooth, "JPEG")))


LARGE_JPEG = encode(noise_image(640, 480, seed=6), "JPEG", quality=95)


@pytest.mark.parametrize(
    "draft, size",
    [
        (1, (80, 60)),
        (60, (80, 60)),
        (61, (160, 120)),
        (120, (160, 120)),
        (160, (320, 240)),
        (241, (640, 480)),
        (9999, (640, 480)),
    ],
)
def test_a_draft_is_the_smallest_jpeg_scale_that_is_large_enough(draft, size):
    small = load_image(LARGE_JPEG, draft=draft)
    assert small.size == size
    want = np.asarray(load_image(LARGE_JPEG).resize(size, Image.Resampling.BOX)).astype(int)
    assert np.abs(np.asarray(small) - want).mean() < 4


@pytest.mark.parametrize("orientation", UPRIGHT)
def test_a_draft_is_upright(orientation):
    turned = encode(Image.open(io.BytesIO(LARGE_JPEG)), "JPEG", quality=95, exif=exif(rotated(orientation)))
    stored = np.asarray(load_image(encode(Image.open(io.BytesIO(LARGE_JPEG)), "JPEG", quality=95), draft=100))
    assert np.array_equal(np.asarray(load_image(turned, draft=100)), UPRIGHT[orientation](stored))


@pytest.mark.parametrize("file_format", ["PNG", "GIF", "TIFF", "WEBP", "BMP"])
def test_a_draft_changes_nothing_but_a_jpeg(file_format):
    data = encode(noise_image(320, 240, seed=7), file_format)
    assert np.array_equal(np.asarray(load_image(data, draft=10)), levels(data))


def test_a_draft_leaves_the_callers_image_alone():
    lazy = Image.open(io.BytesIO(LARGE_JPEG))
    assert load_image(lazy, draft=10).size == lazy.size == (640, 480)


@pytest.mark.parametrize("file_format", ["GIF", "WEBP", "PNG"])
def test_of_an_animation_the_first_frame_is_taken(file_format):
    colours = ("red", "lime", "blue")
    frames = [Image.new("RGB", (20, 10), colour) for colour in colours]
    data = encode(frames[0], file_format, save_all=True, append_images=frames[1:], lossless=True, duration=50)
    animation = Image.open(io.BytesIO(data))
    assert animation.n_frames == 3
    assert np.array_equal(levels(data), np.asarray(frames[0]))
    for frame, want in zip(ImageSequence.Iterator(animation), frames, strict=True):
        assert np.array_equal(levels(frame), np.asarray(want))


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P", "I;16", "F", "CMYK", "rotated", "transparent"])
def test_the_callers_image_is_never_modified(mode):
    image = Image.fromarray(RGB)
    if mode == "rotated":
        image = Image.open(io.BytesIO(encode(image, exif=exif(rotated(6)))))
        image.load()
    elif mode == "transparent":
        image = image.quantize(8)
        image.info["transparency"] = 3
    else:
        image = image.convert("I").convert(mode) if mode == "I;16" else image.convert(mode)
    before = image.mode, image.size, image.tobytes(), dict(image.info), dict(image.getexif())
    loaded = load_image(image)
    loaded.paste((1, 2, 3), (0, 0, *loaded.size))
    assert (image.mode, image.size, image.tobytes(), dict(image.info), dict(image.getexif())) == before


@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "TIFF", "GIF"])
def test_threads_may_share_a_lazily_opened_image(file_format):
    data = encode(
        noise_image(160, 120, seed=4), file_format, **({} if file_format == "GIF" else {"exif": exif(rotated(6))})
    )
    want = levels(data)
    with ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            shared, together = Image.open(io.BytesIO(data)), threading.Barrier(8)
            loaded = list(pool.map(lambda _: (together.wait(), levels(shared))[1], range(8)))  # noqa: B023
            assert all(np.array_equal(one, want) for one in loaded)


# Bad input

JPEG = encode(noise_image(64, 48, seed=2), "JPEG")
LARGE_PNG = encode(Image.fromarray(noise(64, 48)))


@pytest.mark.parametrize(
    "source, message",
    [
        ("missing.png", r"^missing\.png: no such file$"),
        (Path("no/such/folder/a.png"), r"^no/such/folder/a\.png: no such file$"),
        ("file:///no/such%20file.png", r"^/no/such file\.png: no such file$"),
        ("", "^'': no such file$"),
        (".", r"^\.: is a folder, not a picture$"),
        ("folder", "^folder: is a folder, not a picture$"),
        ("plain.png/inside", r"^plain\.png/inside: cannot be read \(Not a directory\)$"),
        ("nul\0.png", r"is not a path \(embedded null byte\)"),
        ("empty.png", r"^empty\.png: is empty \(0 bytes\)$"),
        (b"", r"^the picture of 0 bytes: is empty"),
        ("text.jpg", r"^text\.jpg: not a picture that Pillow can read$"),
        (b"hello", "^the picture of 5 bytes: not a picture that Pillow can read$"),
        (JPEG[: len(JPEG) // 2], r"^the picture of \d+ bytes: cannot be decoded, damaged or truncated \("),
        (LARGE_PNG[: len(LARGE_PNG) // 2], r"^the picture of \d+ bytes: cannot be decoded, damaged or truncated \("),
        (PNG[:20], "^the picture of 20 bytes: cannot be decoded, damaged or truncated"),
        (Image.new("RGB", (0, 5)), "^the PIL image: has no pixels, it is 0x5$"),
        (Image.new("I", (5, 0)), "^the PIL image: has no pixels, it is 5x0$"),
        (Image.new("RGBA", (0, 0)), "^the PIL image: has no pixels, it is 0x0$"),
        (png(0, 5, 8, 2, b""), r"^the picture of \d+ bytes: "),
        (
            "data:image/png;base64",
            "^data URI without a comma: 'data:image/png;base64'; write data:image/png;base64,<data>",
        ),
        ("data:image/png;base64,", r"^the picture in the data URI: is empty \(0 bytes\)"),
        ("data:image/png;base64,iVBO*Rw0", r"^data URI is not valid base64 \(.*\): 'data:image/png;base64,iVBO\*Rw0'"),
        ("data:image/png;base64,iVBOR", r"^data URI is not valid base64 \("),
        ("data:image/png;base64,iVBORw0K", "^the picture in the data URI: not a picture"),
        ("data:image/png,hello", "^the picture in the data URI: not a picture"),
        ("s3://bucket/a.png", "^cannot load a picture from s3://bucket/a.png; give a PIL image, a path, bytes, "),
        (None, "^cannot load a picture from NoneType; give a PIL image, a path, bytes, "),
        (7, "^cannot load a picture from int; give"),
        ([PNG], "^cannot load a picture from list; give"),
        (RGB, "^cannot load a picture from ndarray; give"),
    ],
)
def test_bad_input_is_named(source, message, home):
    (home / "empty.png").touch()
    (home / "text.jpg").write_text("Dear Sir or Madam")
    (home / "folder").mkdir()
    with pytest.raises(ValueError, match=message):
        load_image(source)


def test_a_closed_image_is_named(home):
    with Image.open(home / "plain.png") as image:
        pass
    with pytest.raises(ValueError, match=r"^the PIL image: cannot be decoded"):
        load_image(image)


def test_base64_in_place_of_a_path_does_not_flood_the_message():
    with pytest.raises(ValueError, match="cannot be read") as raised:
        load_image(base64.b64encode(noise(64, 64).tobytes()).decode())
    assert len(str(raised.value)) < 300


def test_a_file_that_may_not_be_read_is_named(home, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(load_module, "open", refuse, raising=False)  # root may read anything
    with pytest.raises(ValueError, match=r"^plain\.png: cannot be read \(Permission denied\)$"):
        load_image("plain.png")


@pytest.mark.parametrize("pillow_limit", [Image.MAX_IMAGE_PIXELS, None])
def test_a_huge_declared_size_is_refused_undecoded(pillow_limit, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", pillow_limit)
    decoded = []
    monkeypatch.setattr(ImageFile.ImageFile, "load", decoded.append)
    with pytest.raises(ValueError, match=r"too large to decode \(.*\); shrink it first"):
        load_image(png(20000, 20000, 8, 2, b""))
    assert decoded == []


def test_a_huge_image_of_the_caller_is_refused(monkeypatch):
    monkeypatch.setattr(load_module, "MAX_SOURCE_PIXELS", 99)
    with pytest.raises(ValueError, match=r"the PIL image: too large to decode \(it is 10x10, more than \d+ pixels\)"):
        load_image(Image.new("RGB", (10, 10)))


FUZZED = {
    "PNG": {},
    "JPEG": {"exif": exif(rotated(6), (0x011A, 2, b"abc\0"), (0x8825, 4, b"\x08\0\0\0"))},
    "GIF": {},
    "WEBP": {},
    "TIFF": {},
    "BMP": {},
    "JPEG2000": {},
    "TGA": {},
    "PPM": {},
    **({"AVIF": {}} if features.check("avif") else {}),
}


@pytest.mark.parametrize("file_format", FUZZED)
def test_flipped_bytes_give_a_picture_or_a_value_error(file_format, monkeypatch):
    monkeypatch.setattr(load_module, "MAX_SOURCE_PIXELS", 10**6)  # a flipped size may ask for gigabytes
    good = encode(noise_image(40, 30, seed=3), file_format, **FUZZED[file_format])
    random, outcomes = np.random.default_rng(0), {"picture": 0, "error": 0}
    for i in range(250):
        data = np.frombuffer(good, dtype=np.uint8).copy()
        # Headers are short and the most dangerous place.
        at = random.integers(0, min(len(data), 120) if i % 2 else len(data), random.integers(1, 5))
        data[at] = random.integers(0, 256, len(at))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outcomes[_outcome(data[: random.integers(1, len(data))] if i % 5 == 0 else data)] += 1
    assert min(outcomes.values()) > 0, outcomes


def _outcome(data: np.ndarray) -> str:
    try:
        assert load_image(data.tobytes()).mode == "RGB"
    except ValueError:
        return "error"
    return "picture"


def test_a_file_too_large_to_hold_is_refused_unread(tmp_path):
    with (tmp_path / "huge.png").open("wb") as file:
        file.truncate(load_module.MAX_FILE_BYTES + 1)  # takes no room on the disk
    with pytest.raises(
        ValueError, match=r"huge\.png: cannot be read \(it has 1073741825 bytes, more than 1073741824\)"
    ):
        load_image(tmp_path / "huge.png")
