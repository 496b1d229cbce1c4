"""Where pictures that strangers name may come from, and how large they may be: what is not allowed is refused."""

import argparse
import asyncio
import errno
import ipaddress
import os
import re
import stat
import urllib.parse
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from PIL import Image

from mmvllm.cli.common import at_least_one
from mmvllm.processors.load import MAX_SOURCE_PIXELS, decode_data_uri, load_image

# What browsers show and clients send. Pillow reads more, some of it in Python loops that few bytes keep busy for long.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "AVIF")

_DOMAIN = re.compile(r"\*|(\*\.)?([a-z0-9_-]{1,63}\.)*[a-z0-9_-]{1,63}", re.IGNORECASE | re.ASCII)


class MediaError(ValueError):
    """A picture may not be had from where the client says, or could not be; the text is for that client."""


@dataclass(frozen=True, slots=True)
class MediaPolicy:
    """Where pictures may come from, and how large they may be. By default only data URIs are taken.

    Args:
        allowed_domains: hosts to fetch from: "example.org" itself, "*.example.org" all below it, "*" any host with a
            public address. Redirects may only lead to these too.
        allowed_networks: private addresses that may be reached all the same, as CIDR networks: "10.1.0.0/16".
        allowed_local_path: folder below which file:// URLs may be read.
        max_bytes: of one encoded picture.
        max_pixels: of one picture, checked before it is decoded.
        max_redirects: of one picture; each is checked like the first URL.
        connect_timeout: seconds to find and reach a host.
        read_timeout: seconds without a byte.
        total_timeout: seconds for one picture, redirects included.

    Raises ValueError that names the option for a domain, network, folder or limit that cannot be.
    """

    allowed_domains: tuple[str, ...] = ()
    allowed_networks: tuple[str, ...] = ()
    allowed_local_path: Path | None = None
    max_bytes: int = 20 * 1024 * 1024
    max_pixels: int = 64_000_000
    max_redirects: int = 3
    connect_timeout: float = 5.0
    read_timeout: float = 10.0
    total_timeout: float = 30.0

    def __post_init__(self):
        for domain in self.allowed_domains:
            _check_domain(domain)
        for network in self.allowed_networks:
            _check_network(network)
        if self.allowed_local_path is not None and not os.path.isdir(self.allowed_local_path):
            raise ValueError(f"--allowed-local-media-path: {self.allowed_local_path} is not a folder")
        if not 1 <= self.max_pixels <= MAX_SOURCE_PIXELS:
            raise ValueError(f"--max-image-pixels is {self.max_pixels}, must be from 1 to {MAX_SOURCE_PIXELS}")

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> "MediaPolicy":
        """The policy that the options of `add_arguments` say."""
        return cls(
            allowed_domains=args.allowed_media_domains,
            allowed_networks=args.allowed_media_networks,
            allowed_local_path=args.allowed_local_media_path,
            max_bytes=args.max_image_bytes,
            max_pixels=args.max_image_pixels,
        )

    async def fetch(self, url: str) -> bytes:
        """The encoded picture behind an http(s), data or file URL.

        Raises MediaError that says what came, why it was refused and which option would allow it.
        """
        try:
            async with asyncio.timeout(self.total_timeout):
                return await self._fetch(url)
        except MediaError as error:
            raise MediaError(f"{_shown(url)}: {error}") from None
        except TimeoutError:
            raise MediaError(f"{_shown(url)}: took longer than {self.total_timeout:g} s") from None

    def load(self, source: bytes | str | Path) -> Image.Image:
        """Decode a picture, given as its bytes or a path, to upright 8-bit RGB; a string is a path, never a URL.

        A path is read wherever it leads: give only those of files that were made here, uploads for one. Raises
        MediaError for what is over the limits or cannot be read, ValueError for what is no picture.
        """
        data = source if isinstance(source, bytes) else self._read_upload(source)
        if len(data) > self.max_bytes:
            raise MediaError(f"the picture of {len(data)} bytes: {self._too_large()}")
        return load_image(data, max_source_pixels=self.max_pixels, formats=FORMATS)

    async def _fetch(self, url: str) -> bytes:
        match url[:10].partition(":")[0].lower():
            case "http" | "https":
                if not self.allowed_domains:
                    raise MediaError(
                        "this server fetches no URLs; send the picture as a data: URI "
                        "(--allowed-media-domains allows hosts)"
                    )
                from mmvllm.fetching import fetch  # only who allows hosts needs an HTTP client

                return await fetch(url, self)
            case "data":
                return await asyncio.to_thread(self._read_data, url)
            case "file":
                return await asyncio.to_thread(self._read_allowed, url)
        raise MediaError("not a URL that a picture can come from; give an http(s):// URL or a data: URI")

    def _read_data(self, uri: str) -> bytes:
        header, _, payload = uri.partition(",")
        if not header.lower().endswith(";base64") or "%" in payload:  # escapes take a hundred times their size to undo
            raise MediaError("must be plain base64; write data:image/png;base64,<data>")
        if len(payload) > -(-self.max_bytes // 3) * 4:
            raise MediaError(self._too_large())
        try:
            return decode_data_uri(uri)
        except ValueError as error:
            raise MediaError(str(error)) from None

    def _read_allowed(self, url: str) -> bytes:
        if self.allowed_local_path is None:
            raise MediaError(
                "this server reads no file:// URLs; send the picture as a data: URI "
                "(--allowed-local-media-path allows a folder)"
            )
        path = urllib.parse.unquote(re.sub("^//(localhost(?=/))?", "", url[len("file:") :]))
        try:
            with open(path, "rb", opener=partial(_open_below, self.allowed_local_path)) as file:
                return self._read(file)
        except (OSError, ValueError) as error:
            reason = error if isinstance(error, MediaError) else "no such file in the allowed folder"
            raise MediaError(str(reason)) from None

    def _read_upload(self, path: str | Path) -> bytes:
        name = f"{Path(path).name:.100}"
        try:
            with open(path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
                return self._read(file)
        except MediaError as error:
            raise MediaError(f"{name}: {error}") from None
        except (OSError, ValueError):
            raise MediaError(f"{name}: cannot be read") from None

    def _read(self, file) -> bytes:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):  # reading a pipe or a device might never end
            raise OSError(errno.EINVAL, "not a file")
        data = file.read(self.max_bytes + 1) if status.st_size <= self.max_bytes else None
        if data is None or len(data) > self.max_bytes:
            raise MediaError(self._too_large())
        return data

    def _too_large(self) -> str:
        return f"too large, at most {self.max_bytes} bytes are taken; shrink it (--max-image-bytes)"


def add_arguments(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """The options that `MediaPolicy.from_args` reads."""
    default = MediaPolicy()
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


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _check_domain(domain: str) -> None:
    try:
        usual = str(ipaddress.ip_address(domain))
    except ValueError:
        usual = domain.lower() if _DOMAIN.fullmatch(domain) else "example.org, *.example.org, or * for all"
    if domain.lower() != usual:
        raise ValueError(f"--allowed-media-domains: {domain!r} is not a host as it is usually written; write {usual}")


def _check_network(network: str) -> None:
    try:
        ipaddress.ip_network(network)
    except ValueError as error:
        raise ValueError(f"--allowed-media-networks: {error}; write a network such as 10.1.0.0/16") from None


def _shown(url: str) -> str:
    return "the data URI" if url[:5].lower() == "data:" else repr(url if len(url) <= 200 else url[:200] + "...")


def _open_below(folder: Path, path: str, flags: int) -> int:
    """An opener for a file in or below a folder; raises OSError or ValueError.

    Symbolic links are resolved and must end inside. What then is opened is reached from the folder step by step and
    without links, so that none can be put in between.
    """
    root = os.path.realpath(folder)
    if ".." in path.split("/") or not any(Path(path).is_relative_to(one) for one in (root, os.path.abspath(folder))):
        raise ValueError(path)  # whether there are files and links elsewhere is not told
    *parents, name = Path(os.path.realpath(path)).relative_to(root).parts
    at = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for parent in parents:
            inner = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
            os.close(at)
            at = inner
        return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=at)
    finally:
        os.close(at)
