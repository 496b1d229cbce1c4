"""Checks of requests to the page: who sends them, and whether gradio can handle them."""

import re

import httpx
from python_multipart.multipart import parse_options_header
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.types import Scope

from mmvllm.demo.uploads import MAX_PATH_LENGTH

MAX_NAME_LENGTH = 255  # bytes that file systems accept
MAX_BRACKETS, MAX_COMMAS = 5000, 25_000  # of JSON, outside strings; the page's largest events have half as many
# To read and to write a number takes a time quadratic in its digits; the largest float has 309 of them.
_LONG_NUMBER = re.compile(rb"(?<![0-9])[0-9]{400}")
# To the end where a string is not closed, so that each is looked at once.
_STRINGS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_HOST = re.compile(r"(?:[0-9A-Za-z._-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")
_RANGE = re.compile(r"bytes=[0-9]{0,15}-[0-9]{0,15}")  # gradio responds to others, such as several, with 500
_CONTROL = re.compile(r"[\0-\x1f\x7f]")
_SERVER = re.compile(r"https?://([^/]*)/?")


def is_foreign(method: str, headers: Headers, is_page: bool = False) -> bool:
    """Whether a browser sends the request for another page; `is_page` says that a link may lead to what it asks for.

    Browsers say it in `Sec-Fetch-Site`, through proxies too, if the page has been reached securely; otherwise they name
    the other page in `Origin` where it can read the response or sends data. A link to the page may be on any other.
    """
    if (site := headers.get("sec-fetch-site")) is None:
        origin = headers.get("origin")
        return origin is not None and origin.partition("://")[2].lower() != headers.get("host", "").lower()
    is_link = is_page and method == "GET" and headers.get("sec-fetch-mode") == "navigate"
    return site not in ("same-origin", "none") and not is_link


def is_logged_in(scope: Scope) -> bool:
    """Whether the sender has given a login that gradio's app demands, if it demands one."""
    app = scope.get("app")
    if getattr(app, "auth", None) is None:
        return True
    cookies = HTTPConnection(scope).cookies
    names = (f"access-token-{app.cookie_id}", f"access-token-unsecure-{app.cookie_id}")
    return any(app.tokens.get(cookies.get(name)) is not None for name in names)


def is_simple(body: bytes | bytearray) -> bool:
    """Whether JSON has so few lists, objects and items, and such short numbers, that parsing it takes little time."""
    if b"\0" in body:  # of UTF-16, whose bytes mean something else
        return False
    rest = _STRINGS.sub(b"", body)
    num_brackets = rest.count(b"[") + rest.count(b"{")
    return num_brackets <= MAX_BRACKETS and rest.count(b",") <= MAX_COMMAS and not _LONG_NUMBER.search(rest)


def is_unusable(path: str) -> bool:
    """Whether gradio would respond to a path with 500: the file system would refuse it, or it has control characters.

    A route also matches its path with a line feed at the end.
    """
    if _CONTROL.search(path):
        return True
    encoded = path.encode(errors="replace")
    return len(encoded) >= MAX_PATH_LENGTH or max(map(len, encoded.split(b"/"))) > MAX_NAME_LENGTH


def has_charset(scope: Scope) -> bool:
    """Whether a multipart form names a charset, with which gradio would decode a login, and may then fail."""
    kind, options = parse_options_header(Headers(scope=scope).get("content-type", ""))
    return kind == b"multipart/form-data" and b"charset" in options


def has_body(headers: Headers) -> bool:
    """Whether a body follows the headers of a request."""
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"


def content_length(scope: Scope) -> int | None:
    """The size of the body in bytes; None if it is not given in advance."""
    headers = dict(scope["headers"])
    length = headers.get(b"content-length", b"")
    return int(length) if length.isdigit() and b"transfer-encoding" not in headers else None


def clean_headers(scope: Scope) -> None:
    """Remove headers that gradio would fail with; instead of a range a server may respond with the whole file.

    To a range with an end, gradio responds with all headers of the request, the login included; the unit is written so
    that Starlette responds.
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
    """Whether gradio can make a URL of a host, perhaps with a port."""
    if not _HOST.fullmatch(value):
        return False
    try:
        httpx.URL(f"http://{value}")
    except httpx.InvalidURL:
        return False
    return True
