"""Options of the media policy: the sources of media, their maximum sizes, and the timeouts of decoding."""

import argparse
from pathlib import Path

from mmvllm.cli.common import at_least_one, option_name, seconds
from mmvllm.errors import ArgumentError
from mmvllm.media.policy import MediaPolicy

# Field of MediaPolicy -> parsed argument.
DESTS = {
    "allowed_domains": "allowed_media_domains",
    "allowed_networks": "allowed_media_networks",
    "allowed_local_path": "allowed_local_media_path",
    "max_bytes": "max_image_bytes",
    "max_pixels": "max_image_pixels",
    "image_timeout": "image_timeout",
    "max_video_bytes": "max_video_bytes",
    "max_video_seconds": "max_video_seconds",
    "max_video_pixels": "max_video_pixels",
    "video_timeout": "video_timeout",
}
OPTIONS = {name: option_name(dest) for name, dest in DESTS.items()}


def add_source_arguments(parser: argparse._ArgumentGroup) -> None:
    """Add the options for where images and videos may be fetched from."""
    parser.add_argument(
        "--allowed-media-domains",
        type=_names,
        default=(),
        metavar="HOST,HOST",
        help="comma-separated hosts to fetch images and videos from: example.org, *.example.org for all hosts below "
        "it, or * for any host with a public address (default: none; they are sent as data: URIs)",
    )
    parser.add_argument(
        "--allowed-media-networks",
        type=_names,
        default=(),
        metavar="CIDR,CIDR",
        help="comma-separated private networks in which these hosts may be, such as 10.1.0.0/16 (default: none)",
    )
    parser.add_argument(
        "--allowed-local-media-path",
        type=Path,
        metavar="DIR",
        help="allow clients to read images and videos in and below this folder with file:// URLs (default: none)",
    )


def add_image_arguments(parser: argparse._ArgumentGroup) -> None:
    """Add the options for the maximum size of an image, and the time to decode it."""
    default = MediaPolicy()
    parser.add_argument(
        "--max-image-bytes",
        type=at_least_one,
        default=default.max_bytes,
        metavar="N",
        help="maximum size of an encoded image (default: %(default)s)",
    )
    parser.add_argument(
        "--max-image-pixels",
        type=at_least_one,
        default=default.max_pixels,
        metavar="N",
        help="maximum number of pixels of an image as it is sent; larger ones are refused before they are decoded "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--image-timeout",
        type=seconds,
        default=default.image_timeout,
        metavar="S",
        help="seconds for decoding an image in a worker process, which is ended after that (default: %(default)g)",
    )


def add_video_arguments(parser: argparse._ArgumentGroup) -> None:
    """Add the options for the maximum size and duration of a video, and the time to decode it."""
    default = MediaPolicy()
    parser.add_argument(
        "--max-video-bytes",
        type=at_least_one,
        default=default.max_video_bytes,
        metavar="N",
        help="maximum size of an encoded video (default: %(default)s)",
    )
    parser.add_argument(
        "--max-video-seconds",
        type=seconds,
        default=default.max_video_seconds,
        metavar="S",
        help="maximum duration of a video in seconds (default: %(default)g)",
    )
    parser.add_argument(
        "--max-video-pixels",
        type=at_least_one,
        default=default.max_video_pixels,
        metavar="N",
        help="maximum number of pixels of all sampled frames of a video, before they are resized "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--video-timeout",
        type=seconds,
        default=default.video_timeout,
        metavar="S",
        help="seconds for decoding the frames of a video in a worker process, which is ended after that "
        "(default: %(default)g)",
    )


def media_policy(args: argparse.Namespace) -> MediaPolicy:
    """Return the policy for the parsed options; raise ValueError that names an option with an invalid value."""
    try:
        return MediaPolicy(**{name: getattr(args, dest) for name, dest in DESTS.items() if hasattr(args, dest)})
    except ArgumentError as error:
        raise ValueError(error.format(OPTIONS.get)) from None


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())
