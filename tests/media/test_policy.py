"""Untrusted media is limited in size, formats and origin; invalid limits and options are refused by name."""

import argparse
import pickle
from pathlib import Path

import pytest

from mmvllm.cli.media import OPTIONS, add_media_options, media_policy
from mmvllm.errors import ArgumentError, VideoError
from mmvllm.media.policy import MediaError, MediaPolicy
from tests.helpers.engine.requests import noise_image
from tests.helpers.media.images import encode
from tests.helpers.media.loading import png
from tests.helpers.media.videos import FramesAt, make_clip
from tests.helpers.serving.web import PNG

# Loading


def test_an_image_over_the_default_pixel_limit_is_refused_undecoded():
    with pytest.raises(ValueError, match=r"too large to decode \(it is 8001x8000, more than 64000000 pixels\)"):
        MediaPolicy().load(png(8001, 8000, 8, 2, b""))
    with pytest.raises(ValueError, match="truncated"):
        MediaPolicy().load(png(8000, 8000, 8, 2, b""))  # allowed, so it is decoded


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


def test_videos_have_the_limits_of_the_policy(tmp_path):
    data = make_clip(tmp_path / "a.mp4").read_bytes()
    for limits, message in (
        ({"max_pixels": 6143}, "has frames of 96x64, more than 6143 pixels"),
        ({"max_video_pixels": 1000}, "24 frames of 96x64 are more than 1000 pixels"),
        ({"max_video_seconds": 2}, "lasts 3 s, more than 2 s"),
    ):
        with pytest.raises(VideoError, match=f"the video of {len(data)} bytes: {message}"):
            MediaPolicy(**limits).load_video(data, FramesAt())


@pytest.mark.parametrize("source", [Path(__file__), __file__, f"file://{__file__}", "http://127.0.0.1/a.png", 7])
def test_a_path_that_a_client_may_have_chosen_is_never_read(source):
    with pytest.raises(MediaError, match="must be given as bytes, not as"):
        MediaPolicy().load(source)


ABOVE_0 = (
    *("max_bytes", "connect_timeout", "read_timeout", "total_timeout", "image_timeout"),
    *("max_video_bytes", "max_video_seconds", "max_video_pixels", "video_timeout"),
)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"allowed_domains": "example.org"}, "allowed_domains must be a tuple of strings, got one string"),
        ({"allowed_networks": "10.0.0.0/8"}, "allowed_networks must be a tuple of strings, got one string"),
        ({"total_timeout": -1}, "total_timeout must be above 0, got -1"),
        *(({name: 0}, f"^{name} must be above 0, got 0") for name in ABOVE_0),
        ({"max_redirects": -1}, "max_redirects must be at least 0, got -1"),
        ({"max_pixels": 0}, "^max_pixels must be from 1 to.*, got 0"),
        ({"allowed_domains": ("a:80",)}, "^allowed_domains: 'a:80' is not a host in canonical form; write example"),
    ],
)
def test_invalid_limits_are_refused(given, message):
    with pytest.raises(ArgumentError, match=message):
        MediaPolicy(**given)


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
