"""Options of the media policy: the sources of media, their maximum sizes, and the timeouts of decoding."""

import argparse
from collections.abc import Collection

from mmvllm.cli.common import option_name
from mmvllm.cli.options import add_options, given_options
from mmvllm.errors import ArgumentError
from mmvllm.media.policy import MediaPolicy

# Arguments of fields of MediaPolicy.
NAMES = {
    "allowed_domains": "allowed_media_domains",
    "allowed_networks": "allowed_media_networks",
    "allowed_local_path": "allowed_local_media_path",
    "max_bytes": "max_image_bytes",
    "max_pixels": "max_image_pixels",
}
SOURCES = ("allowed_domains", "allowed_networks", "allowed_local_path")
LIMITS = (
    *("max_bytes", "max_pixels", "image_timeout"),
    *("max_video_bytes", "max_video_seconds", "max_video_pixels", "video_timeout"),
)
OPTIONS = {name: option_name(NAMES.get(name, name)) for name in SOURCES + LIMITS}


def add_media_options(group: argparse._ArgumentGroup, only: Collection[str] = SOURCES + LIMITS) -> None:
    """Add options for fields of the media policy."""
    add_options(group, MediaPolicy, only, names=NAMES)


def media_policy(args: argparse.Namespace) -> MediaPolicy:
    """Return the policy for the parsed options; raise ValueError that names an option with an invalid value."""
    try:
        return MediaPolicy(**given_options(args, MediaPolicy, OPTIONS, names=NAMES))
    except ArgumentError as error:
        raise ValueError(error.format(OPTIONS.get)) from None
