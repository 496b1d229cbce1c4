"""Limits for untrusted media: where images and videos may be fetched from, and how large they may be."""

import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from PIL import Image

from mmvllm.errors import ArgumentError
from mmvllm.processors.budget import DECODING, VIDEO_DECODING
from mmvllm.processors.images.decode import Reserve
from mmvllm.processors.images.draft import Draft
from mmvllm.processors.images.load import MAX_SOURCE_PIXELS, load_image
from mmvllm.processors.videos.clip import Clip
from mmvllm.processors.videos.limits import VideoLimits
from mmvllm.utils.text import with_article

MAX_URL_LENGTH = 8192  # characters; data URIs are exempt

if TYPE_CHECKING:
    from mmvllm.processors.videos.processor import ClipPlan

# The formats that browsers, clients and phones use; HEIF needs the extra `heif`. Pillow reads more formats, but some in
# slow Python loops that a few bytes of input can keep running for a long time.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "AVIF", "HEIF")

# FFmpeg's names of the containers that phones, cameras, browsers and screen recorders write, and of decoders for them.
# FFmpeg runs no other code on untrusted bytes. Videos may also be animated images in one of `FORMATS`.
VIDEO_CONTAINERS = ("mp4", "mov", "matroska", "webm", "avi")
VIDEO_CODECS = ("h264", "hevc", "vp8", "vp9", "libdav1d", "av1", "mpeg4", "mjpeg")

Kind = Literal["image", "video"]

_DOMAIN = re.compile(r"\*|(\*\.)?([a-z0-9_-]{1,63}\.)*[a-z0-9_-]{1,63}", re.IGNORECASE | re.ASCII)


class MediaError(ValueError):
    """Media that the policy does not allow or that could not be fetched; the message is meant for the client.

    Args:
        reason: what is wrong, and what the client can do.
        field: the field of the policy that would allow it, if there is one.
    """

    def __init__(self, reason: str, field: str | None = None):
        super().__init__(reason, field)
        self.reason, self.field = reason, field

    def __str__(self) -> str:
        return self.format({})

    def format(self, names: Mapping[str, str]) -> str:
        """Return the message with other names for the policy's fields, such as a command's options."""
        return self.reason + (f" (see {names.get(self.field, self.field)})" if self.field else "")

    def after(self, text: str) -> "MediaError":
        """Return this error with `text` prepended to the reason."""
        return MediaError(f"{text}{self.reason}", self.field)


@dataclass(frozen=True, slots=True)
class MediaPolicy:
    """Where media may be fetched from, and how large they may be. By default only data URIs are accepted.

    Args:
        allowed_domains: hosts to fetch images and videos from: example.org, *.example.org for all hosts below it, or *
            for any host with a public address; by default none, and media are sent as data: URIs. Redirects may only
            lead to allowed hosts.
        allowed_networks: private networks in which these hosts may be, such as 10.1.0.0/16.
        allowed_local_path: folder in and below which clients may read images and videos with file:// URLs.
        max_bytes: maximum size of an encoded image.
        max_pixels: maximum number of pixels of an image, or of a frame, as it is sent; larger ones are refused before
            they are decoded.
        max_redirects: maximum number of redirects for one image or video; each is checked like the first URL.
        connect_timeout: timeout in seconds for looking up a host, and again for connecting to it.
        read_timeout: timeout in seconds for receiving the next bytes.
        total_timeout: timeout in seconds for one image or video, redirects included.
        image_timeout: seconds for decoding an image in a worker process, which is ended after that.
        max_video_bytes: maximum size of an encoded video.
        max_video_seconds: maximum duration of a video in seconds.
        max_video_pixels: maximum number of pixels of all frames sampled from a video, before they are resized.
        video_timeout: seconds for decoding the frames of a video in a worker process, which is ended after that.

    Raises ArgumentError, which names the argument, for an invalid domain, network, folder or limit.
    """

    allowed_domains: tuple[str, ...] = field(default=(), metadata={"metavar": "HOST,HOST"})
    allowed_networks: tuple[str, ...] = field(default=(), metadata={"metavar": "CIDR,CIDR"})
    allowed_local_path: Path | None = field(default=None, metadata={"metavar": "DIR"})
    max_bytes: int = 20 * 1024 * 1024
    max_pixels: int = 64_000_000
    max_redirects: int = 3
    connect_timeout: float = 5.0
    read_timeout: float = 10.0
    total_timeout: float = 30.0
    image_timeout: float = 10.0
    max_video_bytes: int = 256 * 1024 * 1024
    max_video_seconds: float = 3600.0
    max_video_pixels: int = 2_000_000_000
    video_timeout: float = 60.0

    def __post_init__(self):
        for name in ("allowed_domains", "allowed_networks"):
            if isinstance(getattr(self, name), str):
                raise _wrong(name, "must be a tuple of strings, got one string, {value!r}", value=getattr(self, name))
        for name in _ABOVE_0:
            if not getattr(self, name) > 0:
                raise _wrong(name, "must be above 0, got {value!r}", value=getattr(self, name))
        if self.max_redirects < 0:
            raise _wrong("max_redirects", "must be at least 0, got {value!r}", value=self.max_redirects)
        for domain in self.allowed_domains:
            _check_domain(domain)
        for network in self.allowed_networks:
            _check_network(network)
        if self.allowed_local_path is not None and not os.path.isdir(self.allowed_local_path):
            raise ArgumentError("{allowed_local_path}: {path} is not a folder", path=self.allowed_local_path)
        if not 1 <= self.max_pixels <= MAX_SOURCE_PIXELS:
            raise _wrong(
                "max_pixels", "must be from 1 to {most}, got {value}", value=self.max_pixels, most=MAX_SOURCE_PIXELS
            )

    def load(self, data: bytes, draft: Draft | None = None, reserve: Reserve = DECODING.reserve) -> Image.Image:
        """Decode an encoded image to upright 8-bit RGB in the calling thread, without `MediaDecoder`'s time limit.

        Raises MediaError if `data` is not bytes (a path could have been chosen by a client) or exceeds the limits, and
        ValueError if it is not an image in one of `FORMATS`.
        """
        self.check("image", data)
        return load_image(data, draft, max_source_pixels=self.max_pixels, formats=FORMATS, reserve=reserve)

    def load_video(
        self, data: bytes | list[bytes], plan: "ClipPlan", reserve: Reserve = VIDEO_DECODING.reserve
    ) -> Clip:
        """Decode the frames that `plan` selects from an encoded video or encoded frames, in the calling thread.

        Raises MediaError as `load` does, VideoError for a video that exceeds the limits or is not in
        `VIDEO_CONTAINERS`, `VIDEO_CODECS` or `FORMATS`, and RequestError as the plan does.
        """
        from mmvllm.processors.videos.frame_list import clip_of  # imports torch, which image workers do not need
        from mmvllm.processors.videos.load import load_video

        self.check("video", data)
        if isinstance(data, list):
            return clip_of(data, plan, lambda frame: self.load(frame, reserve=reserve), self.video_limits)
        return load_video(data, plan, self.video_limits, reserve)

    @property
    def video_limits(self) -> VideoLimits:
        """The limits of encoded videos, for `mmvllm.processors.videos.load`."""
        return VideoLimits(
            VIDEO_CONTAINERS, VIDEO_CODECS, FORMATS, self.max_pixels, self.max_video_pixels, self.max_video_seconds
        )

    def check(self, kind: Kind, data: Any) -> None:
        """Raise MediaError if `data` is not bytes or is too large; a video may also be a list of encoded frames."""
        if kind == "video" and isinstance(data, list):
            for frame in data:
                self.check("image", frame)
            return
        if not isinstance(data, bytes):
            raise MediaError(f"{with_article(kind)} must be given as bytes, not as {type(data).__name__}")
        if len(data) > self.most_bytes(kind):
            raise self.too_large(kind).after(f"the {kind} of {len(data)} bytes: ")

    def most_bytes(self, kind: Kind) -> int:
        """Return the maximum size of an encoded image or video in bytes."""
        return self.max_bytes if kind == "image" else self.max_video_bytes

    def too_large(self, kind: Kind = "image") -> MediaError:
        """Return the error for an encoded image over `max_bytes`, or a video over `max_video_bytes`."""
        field = "max_bytes" if kind == "image" else "max_video_bytes"
        return MediaError(f"too large; at most {self.most_bytes(kind)} bytes are accepted; shrink it", field)


_ABOVE_0 = (
    *("max_bytes", "connect_timeout", "read_timeout", "total_timeout", "image_timeout"),
    *("max_video_bytes", "max_video_seconds", "max_video_pixels", "video_timeout"),
)


def _wrong(name: str, reason: str, **values: object) -> ArgumentError:
    return ArgumentError(f"{{{name}}} {reason}", **values)


def _check_domain(domain: str) -> None:
    try:
        canonical = str(ipaddress.ip_address(domain))
    except ValueError:
        canonical = domain.lower() if _DOMAIN.fullmatch(domain) else "example.org, *.example.org, or * for all"
    if domain.lower() != canonical:
        raise ArgumentError(
            "{allowed_domains}: {domain!r} is not a host in canonical form; write {canonical}",
            domain=domain,
            canonical=canonical,
        )


def _check_network(network: str) -> None:
    try:
        ipaddress.ip_network(network)
    except ValueError as error:
        raise ArgumentError("{allowed_networks}: {error}; write a network such as 10.1.0.0/16", error=error) from None
