"""Where pictures that strangers name may come from, and how large they may be: what is not allowed is refused."""

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
        connect_timeout: seconds to look a host up, and as many to reach it.
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
        for name in ("allowed_domains", "allowed_networks"):
            if isinstance(getattr(self, name), str):
                raise ValueError(f"{name} is one string, {getattr(self, name)!r}; give a tuple of them")
        for name in ("max_bytes", "connect_timeout", "read_timeout", "total_timeout"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)!r}, must be above 0")
        if self.max_redirects < 0:
            raise ValueError(f"max_redirects is {self.max_redirects!r}, must be at least 0")
        for domain in self.allowed_domains:
            _check_domain(domain)
        for network in self.allowed_networks:
            _check_network(network)
        if self.allowed_local_path is not None and not os.path.isdir(self.allowed_local_path):
            raise ValueError(f"--allowed-local-media-path: {self.allowed_local_path} is not a folder")
        if not 1 <= self.max_pixels <= MAX_SOURCE_PIXELS:
            raise ValueError(f"--max-image-pixels is {self.max_pixels}, must be from 1 to {MAX_SOURCE_PIXELS}")

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

    def load(self, data: bytes) -> Image.Image:
        """Decode a picture, given as its bytes, to upright 8-bit RGB.

        Raises MediaError for what is no bytes (a path, say, which a stranger might have chosen) or over the limits,
        ValueError for what is no picture.
        """
        if not isinstance(data, bytes):
            raise MediaError(f"a picture must come as its bytes, not as {type(data).__name__}")
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
