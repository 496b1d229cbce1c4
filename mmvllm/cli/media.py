"""Options that say where pictures may come from, and how large they may be."""

import argparse
from pathlib import Path

from mmvllm.cli.common import at_least_one
from mmvllm.media import MediaPolicy


def add_source_arguments(parser: argparse._ArgumentGroup) -> None:
    """Where pictures may come from."""
    parser.add_argument(
        "--allowed-media-domains",
        type=_names,
        default=(),
        metavar="HOST,HOST",
        help="hosts to fetch pictures from, with commas between them: example.org, *.example.org for all below it, or "
        "* for any host with a public address (default: none, pictures come as data: URIs)",
    )
    parser.add_argument(
        "--allowed-media-networks",
        type=_names,
        default=(),
        metavar="CIDR,CIDR",
        help="private networks in which these hosts may be, with commas between them, such as 10.1.0.0/16 "
        "(default: none)",
    )
    parser.add_argument(
        "--allowed-local-media-path",
        type=Path,
        metavar="DIR",
        help="let clients read pictures in and below this folder with file:// URLs (default: none)",
    )


def add_picture_arguments(parser: argparse._ArgumentGroup) -> None:
    """How large one may be."""
    default = MediaPolicy()
    parser.add_argument(
        "--max-image-bytes",
        type=at_least_one,
        default=default.max_bytes,
        metavar="N",
        help="largest encoded picture (default: %(default)s)",
    )
    parser.add_argument(
        "--max-image-pixels",
        type=at_least_one,
        default=default.max_pixels,
        metavar="N",
        help="largest picture as it comes; larger ones are refused undecoded (default: %(default)s)",
    )


def media_policy(args: argparse.Namespace) -> MediaPolicy:
    """What the options of both say; raises ValueError for what cannot be."""
    return MediaPolicy(
        allowed_domains=args.allowed_media_domains,
        allowed_networks=args.allowed_media_networks,
        allowed_local_path=args.allowed_local_media_path,
        max_bytes=args.max_image_bytes,
        max_pixels=args.max_image_pixels,
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())
