"""Checks who sends a request to the page, and whether gradio can handle it."""

import re

import httpx
from python_multipart.multipart import parse_options_header
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.types import Scope

from mmvllm.demo.uploads import MAX_PATH_LENGTH

MAX_NAME_LENGTH = 255  # bytes of a file name that file systems accept
MAX_BRACKETS, MAX_COMMAS = 5000, 25_000  # in JSON outside strings; the page's largest events have half as many
# Parsing and formatting a number take time quadratic in its digits; the largest float has 309 digits.
_LONG_NUMBER = re.compile(rb"(?<![0-9])[0-9]{400}")
# An unclosed string extends to the end, so each byte is scanned once.
_STRINGS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_HOST = re.compile(r"(?:[0-9A-Za-z._-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")
_RANGE = re.compile(r"bytes=[0-9]{0,15}-[0-9]{0,15}")  # gradio answers others, such as lists of ranges, with 500
_CONTROL = re.compile(r"[\0-\x1f\x7f]")
_SERVER = re.compile(r"https?://([^/]*)/?")


def is_foreign(method: str, headers: Headers, is_page: bool = False) -> bool:
    """Return whether a browser sends the request on behalf of another site.

    Browsers report this in `Sec-Fetch-Site`, also through proxies, if they reached the page securely. Otherwise they
    name the other site in `Origin` if it can read the response or sends data. With `is_page`, any site may link here.
    """
    if (site := headers.get("sec-fetch-site")) is None:
        origin = headers.get("origin")
        return origin is not None and origin.partition("://")[2].lower() != headers.get("host", "").lower()
    is_link = is_page and method == "GET" and headers.get("sec-fetch-mode") == "navigate"
    return site not in ("same-origin", "none") and not is_link


def is_logged_in(scope: Scope) -> bool:
    """Return whether the sender is logged in, or gradio's app requires no login."""
    app = scope.get("app")
    if getattr(app, "auth", None) is None:
        return True
    cookies = HTTPConnection(scope).cookies
    names = (f"access-token-{app.cookie_id}", f"access-token-unsecure-{app.cookie_id}")
    return any(app.tokens.get(cookies.get(name)) is not None for name in names)


def is_simple(body: bytes | bytearray) -> bool:
    """Return whether JSON parses quickly: it has few lists, objects and items, and no long numbers."""
    if b"\0" in body:  # UTF-16, whose bytes have other meanings
        return False
    rest = _STRINGS.sub(b"", body)
    num_brackets = rest.count(b"[") + rest.count(b"{")
    return num_brackets <= MAX_BRACKETS and rest.count(b",") <= MAX_COMMAS and not _LONG_NUMBER.search(rest)


def is_unusable(path: str) -> bool:
    """Return whether gradio would answer a path with 500: the file system refuses it, or it has control characters.

    Routes also match their path with a trailing line feed.
    """
    if _CONTROL.search(path):
        return True
    encoded = path.encode(errors="replace")
    return len(encoded) >= MAX_PATH_LENGTH or max(map(len, encoded.split(b"/"))) > MAX_NAME_LENGTH


def has_charset(scope: Scope) -> bool:
    """Return whether a multipart form names a charset; gradio would decode a login with it and may fail."""
    kind, options = parse_options_header(Headers(scope=scope).get("content-type", ""))
    return kind == b"multipart/form-data" and b"charset" in options


def has_body(headers: Headers) -> bool:
    """Return whether the request has a body."""
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"


def content_length(scope: Scope) -> int | None:
    """Return the size of the body in bytes; None if the headers do not announce it."""
    headers = dict(scope["headers"])
    length = headers.get(b"content-length", b"")
    return int(length) if length.isdigit() and b"transfer-encoding" not in headers else None


def clean_headers(scope: Scope) -> None:
    """Remove headers on which gradio would fail; without its range, a request gets the whole file.

    To a range that has an end, gradio responds with all request headers, the login included. Written with the unit
    "Bytes", ranges are left to Starlette.
    """
    headers = MutableHeaders(scope=scope)
    if (given := headers.get("range")) is not None:
        del headers["range"]
        if _RANGE.fullmatch(given):
            headers["range"] = given.replace("bytes", "Bytes")
    if not is_host(headers.get("x-forwarded-host", "").partition(",")[0].rstrip()):
        del headers["x-forwarded-host"]
    server = _SERVER.fullmatch(headers.get("x-gradio-server", ""))
    if server is None or not is_host(server[1]):
        del headers["x-gradio-server"]


def is_host(value: str) -> bool:
    """Return whether gradio can build a URL from a host, which may include a port."""
    if not _HOST.fullmatch(value):
        return False
    try:
        httpx.URL(f"http://{value}")
    except httpx.InvalidURL:
        return False
    return True
