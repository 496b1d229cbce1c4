"""Fetches untrusted images and videos from http(s), data and file URLs, within the limits of a MediaPolicy."""

import asyncio
import errno
import os
import re
import stat
import urllib.parse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import BinaryIO

from mmvllm.media.policy import MAX_URL_LENGTH, Kind, MediaError, MediaPolicy
from mmvllm.processors.download import without_login
from mmvllm.processors.images.load import decode_data_uri
from mmvllm.utils.text import with_article

_EXAMPLES = {"image": "image/png", "video": "video/mp4"}


async def fetch(
    url: str, policy: MediaPolicy, kind: Kind = "image", count: Callable[[int], None] = lambda num_bytes: None
) -> bytes:
    """Fetch the encoded image or video behind an http(s), data or file URL, within the policy's size limit.

    `count` receives numbers of bytes: over HTTP as they arrive, from another thread; otherwise the total at the end.
    An exception from `count` aborts the fetch.

    Raises MediaError with the URL, the reason, and the policy field that would allow it.
    """
    if len(url) > MAX_URL_LENGTH and _scheme(url) in ("http", "https", "file"):
        raise MediaError(f"the URL must have at most {MAX_URL_LENGTH} characters, got {len(url)}")
    try:
        async with asyncio.timeout(policy.total_timeout):
            return await _fetch(url, policy, kind, count)
    except MediaError as error:
        raise error.after(f"{_shown(url)}: ") from None
    except TimeoutError:
        raise MediaError(f"{_shown(url)}: took longer than {policy.total_timeout:g} s") from None


def _scheme(url: str) -> str:
    return url[:10].partition(":")[0].lower()


async def _fetch(url: str, policy: MediaPolicy, kind: Kind, count: Callable[[int], None]) -> bytes:
    match _scheme(url):
        case "http" | "https":
            return await _fetch_http(url, policy, kind, count)
        case "data":
            data = await asyncio.to_thread(_read_data, url, policy, kind)
        case "file":
            data = await asyncio.to_thread(_read_allowed, url, policy, kind)
        case _:
            accepted = f"an http(s):// URL, or base64 as data:{_EXAMPLES[kind]};base64,<data>"
            raise MediaError(f"not a URL of {with_article(kind)}; give {accepted}")
    count(len(data))
    return data


async def _fetch_http(url: str, policy: MediaPolicy, kind: Kind, count: Callable[[int], None]) -> bytes:
    if not policy.allowed_domains:
        raise MediaError(f"this server fetches no URLs; send the {kind} as a data: URI", "allowed_domains")
    from mmvllm.media.http_fetching import fetch_http  # needs an optional package, the HTTP client

    return await fetch_http(url, policy, kind, count)


def _read_data(uri: str, policy: MediaPolicy, kind: Kind) -> bytes:
    header, _, payload = uri.partition(",")
    # Decoding percent escapes would take a hundred times the payload's size in memory.
    if not header.lower().endswith(";base64") or "%" in payload:
        raise MediaError(f"must be plain base64; write data:{_EXAMPLES[kind]};base64,<data>")
    if len(payload) > -(-policy.most_bytes(kind) // 3) * 4:
        raise policy.too_large(kind)
    try:
        return decode_data_uri(uri, _EXAMPLES[kind])
    except ValueError as error:
        raise MediaError(str(error)) from None


def _read_allowed(url: str, policy: MediaPolicy, kind: Kind) -> bytes:
    if policy.allowed_local_path is None:
        raise MediaError(f"this server reads no file:// URLs; send the {kind} as a data: URI", "allowed_local_path")
    try:
        with open(_path(url), "rb", opener=partial(_open_below, policy.allowed_local_path)) as file:
            return _read(file, policy, kind)
    except MediaError:
        raise
    except (OSError, ValueError):
        raise MediaError("no such file in the allowed folder") from None


def _path(url: str) -> str:
    return urllib.parse.unquote(re.sub("^//(localhost(?=/))?", "", url[len("file:") :]))


def _read(file: BinaryIO, policy: MediaPolicy, kind: Kind) -> bytes:
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode):  # reading a pipe or a device might block forever
        raise OSError(errno.EINVAL, "not a file")
    most = policy.most_bytes(kind)
    data = file.read(most + 1) if status.st_size <= most else None
    if data is None or len(data) > most:
        raise policy.too_large(kind)
    return data


def _shown(url: str) -> str:
    if url[:5].lower() == "data:":
        return "the data URI"
    url = without_login(url[:MAX_URL_LENGTH])
    return repr(url if len(url) <= 200 else url[:200] + "...")


def _open_below(folder: Path, path: str, flags: int) -> int:
    """Open a file in or below a folder, as an `opener` for `open`; raises OSError or ValueError.

    Symbolic links are resolved and must end inside the folder. The resolved path is then opened component by component
    without following links, so a link created in the meantime has no effect.
    """
    root = os.path.realpath(folder)
    names = path.replace(os.sep, "/").split("/")
    is_below = any(Path(path).is_relative_to(one) for one in (root, os.path.abspath(folder)))
    # A trailing slash denotes a folder, but `Path` drops it.
    if ".." in names or names[-1] in ("", ".") or not is_below:
        raise ValueError(path)  # the message must not reveal which files and links exist elsewhere
    real = os.path.realpath(path)
    *parents, name = Path(real).relative_to(root).parts
    at = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for parent in parents:
            inner = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
            os.close(at)
            at = inner
        return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=at)
    finally:
        os.close(at)
