"""Untrusted media is limited in size, formats and origin; invalid limits and options are refused by name."""

import argparse
import pickle
import struct
import zlib
from pathlib import Path

import pytest

from mmvllm.cli.media import OPTIONS, add_media_options, media_policy
from mmvllm.errors import ArgumentError
from mmvllm.media.policy import MediaError, MediaPolicy
from tests.helpers.engine.requests import noise_image
from tests.helpers.media.images import encode
from tests.helpers.serving.web import PNG

# Loading


def bomb(width: int, height: int) -> bytes:
    """A PNG that claims a size and has no pixels."""
    chunks = [b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0), b"IDAT"]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk)) for chunk in chunks
    )


def test_an_image_over_the_pixel_limit_is_refused_undecoded():
    with pytest.raises(ValueError, match=r"too large to decode \(.*\); shrink it first"):
        MediaPolicy().load(bomb(50_000, 50_000))
    with pytest.raises(ValueError, match=r"too large to decode \(it is 8001x8000, more than 64000000 pixels\)"):
        MediaPolicy().load(bomb(8001, 8000))
    with pytest.raises(ValueError, match="truncated"):
        MediaPolicy().load(bomb(8000, 8000))  # allowed, so it is decoded


def test_the_pixel_limit_itself_is_allowed():
    assert MediaPolicy(max_pixels=13 * 7).load(PNG).tobytes() == noise_image(13, 7, seed=0).tobytes()
    with pytest.raises(ValueError, match="13x7"):
        MediaPolicy(max_pixels=13 * 7 - 1).load(PNG)


@pytest.mark.parametrize("file_format", ["PNG", "JPEG", "WEBP", "GIF"])
def test_formats_of_the_web_are_loaded(file_format):
    assert MediaPolicy().load(encode(noise_image(20, 10, seed=1), file_format)).size == (20, 10)


@pytest.mark.parametrize("file_format", ["BMP", "TIFF", "ICO", "PPM", "EPS", "TGA"])
def test_other_formats_are_refused_and_the_accepted_ones_listed(file_format):
    with pytest.raises(ValueError, match="not an image in PNG, JPEG"):
        MediaPolicy().load(encode(noise_image(20, 10, seed=1), file_format))


def test_bytes_over_the_limit_are_refused():
    with pytest.raises(MediaError, match=f"at most {len(PNG) - 1} bytes"):
        MediaPolicy(max_bytes=len(PNG) - 1).load(PNG)


@pytest.mark.parametrize("source", [Path(__file__), __file__, f"file://{__file__}", "http://127.0.0.1/a.png", 7])
def test_a_path_that_a_client_may_have_chosen_is_never_read(source):
    with pytest.raises(MediaError, match="must be given as bytes, not as"):
        MediaPolicy().load(source)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"allowed_domains": "example.org"}, "allowed_domains must be a tuple of strings, got one string"),
        ({"allowed_networks": "10.0.0.0/8"}, "allowed_networks must be a tuple of strings, got one string"),
        ({"max_bytes": 0}, "max_bytes must be above 0, got 0"),
        ({"total_timeout": -1}, "total_timeout must be above 0, got -1"),
        ({"image_timeout": 0}, "image_timeout must be above 0, got 0"),
        ({"max_redirects": -1}, "max_redirects must be at least 0, got -1"),
    ],
)
def test_invalid_limits_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        MediaPolicy(**given)


def test_errors_name_arguments_of_python():
    with pytest.raises(ArgumentError, match=r"^allowed_domains: 'a:80' is not a host in canonical form; write example"):
        MediaPolicy(allowed_domains=("a:80",))
    with pytest.raises(ArgumentError, match=r"^max_pixels must be from 1 to.*, got 0"):
        MediaPolicy(max_pixels=0)


def test_a_media_error_has_its_field_and_another_name_for_it():
    error = MediaPolicy(max_bytes=1).too_large().after("a.png: ")
    assert (error.reason, error.field) == ("a.png: too large; at most 1 bytes are accepted; shrink it", "max_bytes")
    assert str(error) == f"{error.reason} (see max_bytes)"
    assert error.format(OPTIONS) == f"{error.reason} (see --max-image-bytes)"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert str(MediaError("not an image {max_bytes}")) == "not an image {max_bytes}"


# Options


def parsed(*arguments: str) -> MediaPolicy:
    parser = argparse.ArgumentParser()
    add_media_options(parser)
    return media_policy(parser.parse_args(arguments))


def test_options_make_the_policy(tmp_path):
    assert parsed() == MediaPolicy()
    options = ("--allowed-media-domains", "a.example, *.b.example", "--allowed-media-networks", "10.1.0.0/16,fd00::/8")
    limits = ("--max-image-bytes", "10", "--max-image-pixels", "20", "--allowed-local-media-path", str(tmp_path))
    limits += ("--image-timeout", "2.5")
    assert parsed(*options, *limits) == MediaPolicy(
        ("a.example", "*.b.example"),
        ("10.1.0.0/16", "fd00::/8"),
        tmp_path,
        max_bytes=10,
        max_pixels=20,
        image_timeout=2.5,
    )


@pytest.mark.parametrize(
    "option, value",
    [
        *(
            ("--allowed-media-domains", one)
            for one in ("https://a.example", "a.example:80", "a*.example", "[::1]", "::01")
        ),
        *(("--allowed-media-networks", one) for one in ("a.example", "10.0.0.1/8", "10.0.0.0/33")),
        ("--allowed-local-media-path", "/no/such/folder"),
        ("--max-image-pixels", "1000000000"),
    ],
)
def test_an_invalid_option_is_named(option, value):
    with pytest.raises(ValueError, match=option):
        parsed(option, value)
