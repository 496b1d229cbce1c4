"""Fetches images and videos over HTTP from the hosts that a MediaPolicy allows.

The host name and the addresses of every redirect are checked, and the connection goes to the checked address. This
module fetches URLs from a server's clients; `processors/download.py` fetches URLs from callers of `LLM`.
"""

import asyncio
import io
import ipaddress
import re
import socket
import threading
import urllib.parse
from collections.abc import AsyncIterable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from ssl import SSLContext

import httpcore2

from mmvllm.media.policy import MAX_URL_LENGTH, Kind, MediaError, MediaPolicy

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

MAX_ADDRESSES = 4  # per host, tried one after the other
SMALL_CHUNK_BYTES, MAX_SMALL_CHUNKS = 64, 4096  # a body may have at most 4096 chunks of fewer than 64 bytes
MAX_HEAD_BYTES = 256 * 1024  # of the response head, including interim responses such as 103

# Not the event loop's threads, which decode data URIs: an unresponsive name server blocks a thread for seconds.
_RESOLVERS = ThreadPoolExecutor(32, thread_name_prefix="mmvllm-resolve")

_REDIRECTS = (301, 302, 303, 307, 308)
_URL = re.compile(
    r"(?P<scheme>https?)://(?P<host>\[[^\[\]/?#@]*\]|[^\[\]/?#@:]*)(:(?P<port>[0-9]{1,5}))?(?P<target>([/?][^#]*)?)(#.*)?",
    re.IGNORECASE | re.ASCII,
)
_FORBIDDEN = re.compile(r"[\0-\x20\x7f\\]")
_NAME = re.compile(r"([a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?\.)*[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")

# Listed here because `is_global` differs between versions of Python.
_PUBLIC = (ipaddress.ip_network("0.0.0.0/0"), ipaddress.ip_network("2000::/3"))
_NOT_PUBLIC = tuple(
    ipaddress.ip_network(network)
    for network in (
        *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12"),
        *("192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24"),
        *("203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4"),
        "168.63.129.16/32",  # Azure's internal services
        *("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20"),  # including Teredo and 6to4
    )
)
_NAT64 = ipaddress.ip_network("64:ff9b::/96")

_FAILURES = {
    httpcore2.ConnectTimeout: "its host did not answer in time",
    httpcore2.TimeoutException: "its host stopped answering",
    httpcore2.ConnectError: "its host cannot be reached, or not with a valid certificate",
    httpcore2.ProtocolError: "its host does not answer in HTTP",
    httpcore2.NetworkError: "the connection was lost",
    OSError: "the connection was lost",
}


async def look_up(host: str, port: int) -> list[tuple]:
    """Call `socket.getaddrinfo` in a resolver thread."""
    find = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    return await asyncio.get_running_loop().run_in_executor(_RESOLVERS, find)


async def fetch_http(url: str, policy: MediaPolicy, kind: Kind, count: Callable[[int], None]) -> bytes:
    """Fetch the body behind an http(s) URL in the event loop of a separate thread, which also calls `count`.

    A host that sends tiny chunks or endless interim responses keeps only this loop busy.

    Raises MediaError with the reason, which never reveals the target of a redirect or the address of a host.
    """
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_Download(policy, kind, count).run(url), _loop()))


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="mmvllm-fetch", daemon=True).start()
    return loop


@dataclass(frozen=True, slots=True)
class _Download:
    """A download within the limits of a policy; `count` is called with the size of each chunk."""

    policy: MediaPolicy
    kind: Kind
    count: Callable[[int], None]

    async def run(self, url: str) -> bytes:
        """Return the body behind a URL, following redirects."""
        prefix = ""
        for _ in range(self.policy.max_redirects + 1):
            try:
                response = await self._get(_parse(url, self.policy))
                if isinstance(response, bytes):
                    return response
                url, prefix = _joined(url, response), "after a redirect: "
            except MediaError as error:
                raise error.after(prefix) from None
            except tuple(_FAILURES) as error:
                reason = next(text for kind, text in _FAILURES.items() if isinstance(error, kind))
                raise MediaError(f"{prefix}{reason}") from None
        raise MediaError(f"redirects more than {self.policy.max_redirects} times")

    async def _get(self, url: httpcore2.URL) -> bytes | str:
        """Return the body, or the location of a redirect as a string."""
        host = f"[{url.host.decode()}]" if b":" in url.host else url.host.decode()
        headers = {
            "Host": host if url.port is None else f"{host}:{url.port}",
            "User-Agent": "mmvllm",
            "Accept": f"{self.kind}/*, */*;q=0.5",
            "Accept-Encoding": "identity",
            "Connection": "close",
        }
        policy = self.policy
        timeouts = {"connect": policy.connect_timeout, "read": policy.read_timeout, "write": policy.read_timeout}
        async with (
            httpcore2.AsyncHTTPConnection(url.origin, _tls(), network_backend=_CheckedBackend(policy)) as connection,
            connection.stream("GET", url, headers=headers, extensions={"timeout": timeouts}) as response,
        ):
            fields = {name.lower(): value.decode(errors="replace") for name, value in response.headers}
            if response.status in _REDIRECTS and b"location" in fields:
                return fields[b"location"]
            if response.status != 200:
                raise MediaError(f"its host answered with status {response.status}")
            # Twice the size of the data, since chunks have headers.
            response.extensions["network_stream"].limit += 2 * policy.most_bytes(self.kind)
            return await self._body(fields, response.aiter_stream())

    async def _body(self, fields: dict[bytes, str], chunks: AsyncIterable[bytes]) -> bytes:
        if (encoding := fields.get(b"content-encoding", "identity").strip().lower()) not in ("", "identity"):
            raise MediaError(f"is compressed ({encoding:.20}) although no compression was requested")
        most = self.policy.most_bytes(self.kind)
        if int(fields.get(b"content-length", 0)) > most:
            raise self.policy.too_large(self.kind)
        body, num_small = io.BytesIO(), 0  # BytesIO returns its bytes without a copy, unlike bytearray
        async for chunk in chunks:
            self.count(len(chunk))
            body.write(chunk)
            num_small += len(chunk) < SMALL_CHUNK_BYTES
            if num_small > MAX_SMALL_CHUNKS:
                raise MediaError(f"comes in more than {MAX_SMALL_CHUNKS} chunks of less than {SMALL_CHUNK_BYTES} bytes")
            if body.tell() > most:
                raise self.policy.too_large(self.kind)
        return body.getvalue()


def is_allowed(address: Address, policy: MediaPolicy) -> bool:
    """Return whether an address is public or in an allowed network; checks an IPv4 address embedded in an IPv6 one."""
    if isinstance(address, ipaddress.IPv6Address):
        address = address.ipv4_mapped or address
        if address in _NAT64:
            address = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    if any(address in ipaddress.ip_network(network) for network in policy.allowed_networks):
        return True
    return any(address in network for network in _PUBLIC) and not any(address in network for network in _NOT_PUBLIC)


def _parse(url: str, policy: MediaPolicy) -> httpcore2.URL:
    """Parse a URL strictly, refusing URLs in which parsers could disagree on the host."""
    if len(url) > MAX_URL_LENGTH:
        raise MediaError(f"the URL must have at most {MAX_URL_LENGTH} characters, got {len(url)}")
    if _FORBIDDEN.search(url):
        raise MediaError("contains a space, a control character or a backslash; percent-encode them")
    if (match := _URL.fullmatch(url)) is None or not 0 < (port := int(match["port"] or 80)) < 65536:
        raise MediaError(
            "not a URL to fetch from; write http(s)://host/path or http(s)://host:port/path, no user names"
        )
    host = _host(match["host"])
    if not any(_matches(host, domain) for domain in policy.allowed_domains):
        raise MediaError("this server does not fetch from its host", "allowed_domains")
    try:
        target = urllib.parse.quote(match["target"], safe="%/:=&?~+!$,;'@()*[]")  # keeps existing escapes
    except UnicodeEncodeError:
        raise MediaError("is not valid Unicode") from None
    target = target if target.startswith("/") else f"/{target}"
    return httpcore2.URL(scheme=match["scheme"].lower(), host=host, port=match["port"] and port, target=target)


def _host(text: str) -> str:
    """Return a host name or canonical address; refuse other notations that C libraries accept as addresses."""
    if not text.isascii():  # lower() maps some non-ASCII letters to ASCII ones
        raise MediaError("its host must be in ASCII; write it in its xn-- form")
    text = text.lower()
    try:
        if text.startswith("[") and "%" not in text:
            return str(ipaddress.IPv6Address(text[1:-1]))
        if _NUMBER.fullmatch(text.rpartition(".")[2]):
            return str(ipaddress.IPv4Address(text))
    except ValueError:
        raise MediaError(
            "its host is not an address in the usual notation, such as 192.0.2.1 or [2001:db8::1]"
        ) from None
    if len(text) > 253 or not _NAME.fullmatch(text):
        raise MediaError("its host is not a valid name; use letters, digits, '-' and '.'")
    return text


def _matches(host: str, domain: str) -> bool:
    if domain.startswith("*."):
        return host.endswith(domain[1:].lower())
    return domain == "*" or host == domain.lower()


def _joined(url: str, location: str) -> str:
    try:
        return urllib.parse.urljoin(url, location)
    except ValueError:
        raise MediaError("redirects to something that is not a URL") from None


@cache
def _tls() -> SSLContext:
    return httpcore2.default_ssl_context()


class _LimitedStream(httpcore2.AsyncNetworkStream):
    """A connection that fails after receiving `limit` bytes: `MAX_HEAD_BYTES` until the head has been read.

    The HTTP client limits neither the number of interim responses nor the extensions of chunks.
    """

    def __init__(self, stream: httpcore2.AsyncNetworkStream):
        self._stream, self._num_read, self.limit = stream, 0, MAX_HEAD_BYTES

    async def read(self, max_bytes, timeout=None):
        data = await self._stream.read(max_bytes, timeout)
        self._num_read += len(data)
        if self._num_read > self.limit:
            raise MediaError(f"its host sends more than {self.limit} bytes, most of which are not data")
        return data

    async def write(self, buffer, timeout=None):
        await self._stream.write(buffer, timeout)

    async def aclose(self):
        await self._stream.aclose()

    async def start_tls(self, ssl_context, server_hostname=None, timeout=None):
        return _LimitedStream(await self._stream.start_tls(ssl_context, server_hostname, timeout))

    def get_extra_info(self, info):
        return self._stream.get_extra_info(info)


class _CheckedBackend(httpcore2.AnyIOBackend):
    """Resolves a name once, checks the addresses and connects to them; TLS and the Host header use the name."""

    def __init__(self, policy: MediaPolicy):
        self._policy = policy

    async def connect_tcp(self, host, port, timeout=None, local_address=None, socket_options=None):
        try:
            async with asyncio.timeout(timeout):
                addresses = await self._resolve(host, port)
        except TimeoutError:
            raise httpcore2.ConnectTimeout from None
        share, failure = timeout / len(addresses), httpcore2.ConnectError()
        for address in addresses:
            try:
                stream = await super().connect_tcp(address, port, share, local_address, socket_options)
                return _LimitedStream(stream)
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
                failure = error
        raise failure

    async def _resolve(self, host: str, port: int) -> list[str]:
        try:
            found = await look_up(host, port)
            addresses = [ipaddress.ip_address(place[0]) for *_, place in found]
        except (OSError, ValueError):
            addresses = []
        # The same message for both: it must not reveal which names exist in a private network.
        if not addresses or not all(is_allowed(address, self._policy) for address in addresses):
            raise MediaError("its host has no public address", "allowed_networks")
        return [str(address) for address in dict.fromkeys(addresses)][:MAX_ADDRESSES]
