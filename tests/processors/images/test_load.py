"""Any source of an image is loaded as upright RGB, or there is an ImageError with the source and the reason."""

import base64
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFile

from mmvllm.errors import ImageError
from mmvllm.processors.images import load as load_module
from mmvllm.processors.images.load import load_image
from tests.helpers.engine.requests import noise_image
from tests.helpers.media.images import PNG, RGB, encode, noise
from tests.helpers.media.loading import levels, png
from tests.helpers.needs import needs

# Forms


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """A home and working folder with the image under names that need escaping in URLs."""
    for name in ("plain.png", "with space.png", "50%.png", "a#b?c+d.png", "~tilde.png"):
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
    "tilde in name": lambda home: "~tilde.png",
    "percent in name": lambda home: "50%.png",
    "bytes": lambda home: PNG,
    "bytearray": lambda home: bytearray(PNG),
    "memoryview": lambda home: memoryview(PNG),
    "file": lambda home: (home / "plain.png").as_uri(),
    "file, escaped": lambda home: (home / "with space.png").as_uri(),
    "file, percent escaped": lambda home: (home / "50%.png").as_uri(),
    "file, percent": lambda home: f"file://{home}/50%.png",
    "file, reserved characters": lambda home: f"file://{home}/a#b?c+d.png",
    "file, host": lambda home: f"file://localhost{home}/plain.png",
    "file, one slash": lambda home: f"file:{home}/plain.png",
    "file, relative": lambda home: "file://plain.png",
    "file, upper case": lambda home: f"FILE://{home}/plain.png",
    "data": lambda home: "data:image/png;base64," + base64.b64encode(PNG).decode(),
    "data, upper case": lambda home: "DATA:image/png;BASE64," + base64.b64encode(PNG).decode(),
    "data, wrapped": lambda home: "data:image/png;base64,\n" + base64.encodebytes(PNG).decode(),
    "data, base64 for URLs": lambda home: "data:;base64," + base64.urlsafe_b64encode(PNG).decode().rstrip("="),
    "data, base64 escaped": lambda home: "data:;base64," + urllib.parse.quote(base64.b64encode(PNG), safe=""),
    "data, percent": lambda home: "data:image/png," + urllib.parse.quote_from_bytes(PNG),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_pixels(form, home):
    assert np.array_equal(levels(FORMS[form](home)), RGB)


RESPONSES = {
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
        status, headers, body = RESPONSES.get(self.path, (404, {}, b"no"))
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
@needs("network")
def site():
    """The URL of a local web server."""
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
        ("/page", "the image at http.*/page: not an image that Pillow can read"),
        ("/nothing", r"the image at http.*/nothing: is empty \(0 bytes\)"),
        ("/half.png", r"the image at http.*/half\.png: cannot be decoded, damaged or truncated"),
    ],
)
def test_an_invalid_response_is_named(path, message, site):
    with pytest.raises(ValueError, match=message):
        load_image(site + path)


def test_a_download_is_bounded(site, monkeypatch):
    monkeypatch.setattr(load_module, "MAX_DOWNLOAD_BYTES", len(PNG))
    assert np.array_equal(levels(site + "/plain.png"), RGB)
    monkeypatch.setattr(load_module, "MAX_DOWNLOAD_BYTES", len(PNG) - 1)
    with pytest.raises(ValueError, match=rf"/plain\.png: more than {len(PNG) - 1} bytes; fetch and shrink it first"):
        load_image(site + "/plain.png")


# Invalid input

JPEG = encode(noise_image(64, 48, seed=2), "JPEG")


@pytest.mark.parametrize(
    "source, message",
    [
        ("missing.png", r"^missing\.png: no such file$"),
        ("file:///no/such%20file.png", r"^/no/such file\.png: no such file$"),
        ("", "^'': no such file$"),
        (".", r"^\.: is a folder, not an image$"),
        ("file://plain.png/", r"^plain\.png/: cannot be read \(Not a directory\)$"),
        ("nul\0.png", r"is not a valid path \(embedded null byte\)"),
        ("empty.png", r"^empty\.png: is empty \(0 bytes\)$"),
        (b"", r"^the image of 0 bytes: is empty"),
        (
            b"\0\0\0\x18ftypmp42....",
            "^the image of 16 bytes: not an image that Pillow can read, but a video; give it as one$",
        ),
        (b"\x1aE\xdf\xa3....", "but a video; give it as one$"),
        ("text.jpg", r"^text\.jpg: not an image that Pillow can read$"),
        (b"hello", "^the image of 5 bytes: not an image that Pillow can read$"),
        (JPEG[: len(JPEG) // 2], r"^the image of \d+ bytes: cannot be decoded, damaged or truncated \("),
        (PNG[:20], "^the image of 20 bytes: cannot be decoded, damaged or truncated"),
        (Image.new("RGB", (0, 5)), "^the PIL image: has no pixels, it is 0x5$"),
        (Image.new("I", (5, 0)), "^the PIL image: has no pixels, it is 5x0$"),
        (png(0, 5, 8, 2, b""), r"^the image of \d+ bytes: "),
        (
            "data:image/png;base64",
            "^data URI without a comma: 'data:image/png;base64'; write data:image/png;base64,<data>",
        ),
        ("data:image/png;base64,", r"^the image in the data URI: is empty \(0 bytes\)"),
        ("data:image/png;base64,iVBO*Rw0", r"^data URI is not valid base64 \(.*\): 'data:image/png;base64,iVBO\*Rw0'"),
        ("data:image/png;base64,%41%41", r"^data URI is not valid base64 \("),
        (
            "data:image/png," + "%41" * 400_000,
            "^data URI must have at most 1,000,000 characters without base64, got 1,200,000: ",
        ),
        ("iVBORw0K" * 20, r"no such file; if it is base64, write data:image/\.\.\.;base64,<data>"),
        ("data:image/png,hello", "^the image in the data URI: not an image"),
        ("s3://bucket/a.png", "^cannot load an image from s3://bucket/a.png; give a PIL image, a path, bytes, "),
        ([PNG], "^cannot load an image from list; give a PIL image, a path, bytes, "),
    ],
)
def test_invalid_input_is_named(source, message, home):
    (home / "empty.png").touch()
    (home / "text.jpg").write_text("Dear Sir or Madam")
    with pytest.raises(ValueError, match=message):
        load_image(source)


@pytest.mark.parametrize(
    ("source", "name", "reason"),
    [
        ("missing.png", "missing.png", "no such file"),
        ("data:", "", "data URI without a comma: 'data:'; write data:image/png;base64,<data>"),
    ],
)
def test_an_error_has_source_and_reason(source, name, reason, home):
    with pytest.raises(ImageError) as raised:
        load_image(source)
    assert (raised.value.source, raised.value.reason) == (name, reason)
    assert str(raised.value) == (f"{name}: {reason}" if name else reason)


def test_a_closed_image_is_named(home):
    with Image.open(home / "plain.png") as image:
        pass
    with pytest.raises(ValueError, match=r"^the PIL image: cannot be decoded"):
        load_image(image)


def test_base64_in_place_of_a_path_does_not_flood_the_message():
    with pytest.raises(ValueError, match=r"cannot be read \(.*\); if it is base64, write data:image") as raised:
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


def test_a_huge_pil_image_is_refused(monkeypatch):
    monkeypatch.setattr(load_module, "MAX_SOURCE_PIXELS", 99)
    with pytest.raises(ValueError, match=r"the PIL image: too large to decode \(it is 10x10, more than \d+ pixels\)"):
        load_image(Image.new("RGB", (10, 10)))


def test_a_file_over_the_size_limit_is_refused_unread(tmp_path):
    with (tmp_path / "huge.png").open("wb") as file:
        file.truncate(load_module.MAX_FILE_BYTES + 1)  # takes no room on the disk
    with pytest.raises(
        ValueError, match=r"huge\.png: cannot be read \(it has 1073741825 bytes, more than 1073741824\)"
    ):
        load_image(tmp_path / "huge.png")
