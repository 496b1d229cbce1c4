"""Download URLs from callers of the library, within limits of size and time.

`mmvllm/media/http_fetching.py` fetches the URLs of a server's clients.
"""

import base64
import http.client
import re
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import Any, BinaryIO

from mmvllm.errors import MediaFileError
from mmvllm.utils.text import beginning_of
from mmvllm.utils.time_limit import shut_down

SILENCE_SECONDS = 20.0  # without receiving a byte
MAX_REASON = 300  # characters; the regular expression that removes logins takes quadratic time
DOWNLOAD_SECONDS = 60.0  # in total, plus a second for every megabyte received
BYTES_PER_SECOND = 1_000_000

_SCHEME = r"^([^:/?#]+://)"
_LOGIN = re.compile(_SCHEME + r"([^/?#]*)@")  # USER:PASSWORD@
# Also matches passwords that contain a slash, and a mistyped `http:` without both slashes.
_SECRET = re.compile(r"^((?i:https?):[/\\]*+|[^:/?#]+://)([^/?#]*|[^/?#:@\[]*:(?!\d*([/?#]|$)).*)@")


def without_login(url: str) -> str:
    """Return a URL for messages, without its user and password."""
    return _SECRET.sub(r"\1", url)


def download(url: str, file: BinaryIO, max_bytes: int, error_class: type[MediaFileError]) -> None:
    """Download a URL to a file; raises `error_class` for failures, more than `max_bytes`, and too long a time.

    A user and a password in the URL are sent as Basic authentication, but not to another host after a redirect; no
    message shows them.
    """
    name = without_login(url)
    limit = _TimeLimit()
    opener = urllib.request.build_opener(_handler("http", limit), _handler("https", limit), _Redirects(), _NoFTP())
    try:
        with opener.open(_request(url), timeout=SILENCE_SECONDS) as response:
            while file.tell() <= max_bytes and (data := response.read1(min(1 << 20, max_bytes + 1 - file.tell()))):
                file.write(data)
                limit.extend(len(data) / BYTES_PER_SECOND)
            if response.length and file.tell() <= max_bytes:
                raise OSError(f"the connection ended after {file.tell()} bytes, short of the announced length")
        limit.check()
    except (OSError, ValueError, http.client.HTTPException) as error:
        is_about_url = isinstance(error, http.client.InvalidURL) or "nonnumeric port" in str(error)
        reason = "the URL or the proxy's URL is not valid" if is_about_url else _shown(error)
        raise error_class(name, f"cannot be fetched ({limit.reason or reason})") from None
    finally:
        limit.end()
    if file.tell() > max_bytes:
        raise error_class(name, f"more than {max_bytes} bytes; fetch and shrink it first")


def _shown(error: Exception) -> str:
    """Return the reason for a message, without logins, and without text from a host or proxy that may repeat them."""
    if isinstance(error, urllib.error.HTTPError):
        loops = " (too many redirects, or a redirect to an unsupported URL)" if 300 <= error.code < 400 else ""
        return f"HTTP Error {error.code}: {http.client.responses.get(error.code, 'unknown')}{loops}"
    if isinstance(error, http.client.BadStatusLine) and not isinstance(error, http.client.RemoteDisconnected):
        return "its answer is not HTTP"
    text = beginning_of(str(error.reason if isinstance(error, urllib.error.URLError) else error), MAX_REASON)
    text = re.sub(r"(Tunnel connection failed: \d+).*", r"\1", text, flags=re.DOTALL)
    return re.sub(r"\S*@", "***@", text)


def _request(url: str) -> urllib.request.Request:
    plain = _LOGIN.sub(r"\1", url)
    if plain != without_login(url):
        raise ValueError("the characters / ? # of a password must be percent-encoded")
    quoted = urllib.parse.quote(plain, safe="%/:=&?~#+!$,;'@()*[]")  # keeps existing escapes
    # Some sites refuse urllib's default user agent.
    request = urllib.request.Request(quoted, headers={"User-Agent": "mmvllm"})
    if found := _LOGIN.search(url):
        user, _, password = found[2].partition(":")
        login = base64.b64encode(urllib.parse.unquote_to_bytes(f"{user}:{password}")).decode()
        request.add_unredirected_header("Authorization", f"Basic {login}")
    return request


class _TimeLimit:
    """Ends the connections of a download when its time is over, whatever they wait for.

    A socket timeout is not enough, because a host that sends a byte now and then never exceeds it. TLS handshakes are
    the exception: Python bounds each of them by the socket timeout as a whole.
    """

    def __init__(self):
        self.reason: str | None = None
        self._until = time.monotonic() + DOWNLOAD_SECONDS
        self._sockets: list[socket.socket] = []
        self._is_done, self._lock = threading.Event(), threading.Lock()
        threading.Thread(target=self._watch, name="mmvllm-download", daemon=True).start()

    def connect(self, address: tuple[str, int], timeout: float, *others: Any) -> socket.socket:
        """Connect to the first address of a host that answers; all attempts share the remaining time."""
        error: OSError = OSError("its name has no address")
        for *_, found in socket.getaddrinfo(*address, type=socket.SOCK_STREAM):
            seconds = self._until - time.monotonic()
            try:
                connection = socket.create_connection(found[:2], max(0.001, min(timeout, seconds)), *others)
            except OSError as failed:
                self.check()
                error = failed
            else:
                connection.settimeout(timeout)
                self.add(connection)
                return connection
        raise error

    def add(self, connection: socket.socket) -> None:
        with self._lock:
            self._sockets.append(connection)
            self.check()

    def extend(self, seconds: float) -> None:
        self._until += seconds

    def check(self) -> None:
        """Raise TimeoutError if the time is over: what has been read may be incomplete."""
        if self.reason is not None:
            raise TimeoutError(self.reason)

    def end(self) -> None:
        self._is_done.set()

    def _watch(self) -> None:
        while (seconds := self._until - time.monotonic()) > 0:
            if self._is_done.wait(seconds):
                return
        with self._lock:
            self.reason = f"not complete after {DOWNLOAD_SECONDS:g} s plus a second for each megabyte"
            shut_down(self._sockets)


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects without reading their bodies, which urllib would read in full, however long they are.

    The login is resent only to the same scheme, host and port, and a proxy's login only to a proxy.
    """

    def http_error_302(self, request: urllib.request.Request, response: Any, *others: Any) -> Any:
        response.read = bytes
        return super().http_error_302(request, response, *others)

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302

    def redirect_request(self, request: urllib.request.Request, *others: Any) -> urllib.request.Request | None:
        redirected = super().redirect_request(request, *others)
        if redirected is not None:
            redirected.remove_header("Proxy-authorization")  # urllib adds it again where there is a proxy
            if (login := request.unredirected_hdrs.get("Authorization")) and _origin(redirected) == _origin(request):
                redirected.add_unredirected_header("Authorization", login)
        return redirected


def _origin(request: urllib.request.Request) -> tuple[str, str]:
    parts = urllib.parse.urlsplit(request.full_url)
    return parts.scheme, parts.netloc.lower()


class _NoFTP(urllib.request.FTPHandler):
    """Refuses redirects to ftp:// URLs, whose connections would have no time limit."""

    def ftp_open(self, request: urllib.request.Request) -> None:
        raise OSError("a redirect to an ftp:// URL is not followed")


def _handler(scheme: str, limit: _TimeLimit) -> urllib.request.BaseHandler:
    """Return a urllib handler whose connections end when the time limit is over."""
    base, connection_class = {
        "http": (urllib.request.HTTPHandler, http.client.HTTPConnection),
        "https": (urllib.request.HTTPSHandler, http.client.HTTPSConnection),
    }[scheme]

    class Connection(connection_class):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            self._create_connection = limit.connect  # a proxy answers before `connect` returns

        def connect(self) -> None:
            super().connect()
            limit.add(self.sock)  # HTTPS wraps the socket in another one

    class Handler(base):
        def do_open(self, _connection_class: type, request: urllib.request.Request, **kwargs: Any) -> Any:
            return super().do_open(Connection, request, **kwargs)

    return Handler()
