"""ASGI middleware that checks API keys and content codings, and limits the size and duration of request bodies."""

import asyncio
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mmvllm.server.disconnects import ClientDisconnected
from mmvllm.server.errors import ApiError, out_of_memory
from mmvllm.utils.asgi import in_pieces

# How long, and how many bytes, a refused client may continue to send. If the connection closed at once, clients that
# send the whole body before they read would not see the response.
LINGER_SECONDS, LINGER_BYTES = 2.0, 4 * 1024 * 1024

PATHS_WITHOUT_KEY = frozenset(
    (
        *("/health", "/health/live", "/health/ready", "/ping", "/load", "/metrics", "/version"),
        *("/", "/favicon.ico", "/demo"),  # these redirect to the demo page
    )
)
SMALL_SHARE, RESERVE_SHARE = 4096, 4  # beyond a budget, small requests (1/4096 of it at most) share another 1/4 of it
MAX_IGNORED_BYTES = 64 * 1024  # of a body sent to a path of PATHS_WITHOUT_KEY, whose routes ignore it


class ByteBudget:
    """Limits the bytes of request bodies, and of fetched images and videos, that the server holds at a time.

    When the budget is used up, small requests take bytes from a reserve, so that large requests do not block them.
    """

    def __init__(self, capacity: int):
        self._capacity, self._num_reserved = capacity, 0
        self._num_small = 0  # bytes of the reserve
        self._lock = threading.RLock()  # other threads fetch images and videos

    @contextmanager
    def reservation(self) -> "Iterator[ByteReservation]":
        """Yield the reservation of one request, and release its bytes when the request ends."""
        reservation = ByteReservation(self)
        try:
            yield reservation
        finally:
            with self._lock:
                reservation.is_released = True
                self._num_reserved -= reservation.num_bytes
                self._num_small -= reservation.num_small

    def take(self, reservation: "ByteReservation", num_bytes: int) -> None:
        """Reserve bytes for a request; raises ApiError if not enough are left."""
        with self._lock:
            if reservation.is_released:  # a fetch may end a little later than its request
                return
            is_small = reservation.num_bytes + reservation.num_small + num_bytes <= self._capacity // SMALL_SHARE
            if self._num_reserved + num_bytes <= self._capacity:
                self.hold(reservation, num_bytes)
            elif is_small and self._num_small + num_bytes <= self._capacity // RESERVE_SHARE:
                reservation.num_small += num_bytes
                self._num_small += num_bytes
            elif num_bytes:
                message = "the server holds too many bytes of requests at the moment; try again later"
                raise ApiError(429, message, code="engine_busy", headers={"Retry-After": "1"})

    def hold(self, reservation: "ByteReservation", num_bytes: int) -> None:
        """Count bytes of a request without checking the limit."""
        with self._lock:
            reservation.num_bytes += num_bytes
            self._num_reserved += num_bytes


class ByteReservation:
    """The bytes of a budget that one request holds; `client` is the index of its API key, None if it needs no key."""

    def __init__(self, budget: ByteBudget):
        self._budget, self.num_bytes, self.num_small = budget, 0, 0
        self.client: int | None = None
        self.is_released = False

    def take(self, num_bytes: int) -> None:
        """Reserve more bytes; raises ApiError if the budget does not have enough left."""
        self._budget.take(self, num_bytes)

    def hold(self, num_bytes: int) -> None:
        """Count bytes that are in memory already; if they exceed the budget, later requests are refused."""
        self._budget.hold(self, num_bytes)


class AuthAndSizeLimitMiddleware:
    """Checks the API key, and reads the whole body within limits of size and time, before it calls the app.

    Refuses compressed bodies, and expectations other than 100-continue. The app finds the request's `ByteReservation`
    in `scope["state"]["reservation"]`. Paths that start with one of `open_paths` need no key, and the app reads their
    bodies itself.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_keys: Sequence[str],
        max_bytes: int,
        timeout: float,
        budget: ByteBudget,
        open_paths: Sequence[str] = (),
    ):
        self.app = app
        self._keys = [key.encode() for key in api_keys]
        self._max_bytes, self._timeout, self._budget = max_bytes, timeout, budget
        self._open_paths = tuple(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        try:
            _check_codings(scope)
        except ApiError as error:
            return await _refuse(error, scope, receive, send)
        if scope["path"].startswith(self._open_paths):
            return await self.app(scope, receive, send)
        send = in_pieces(send)
        with self._budget.reservation() as reservation:
            try:
                reservation.client = self._client(scope)
                body = await self._read(scope, receive, reservation)
            except ApiError as error:
                return await _refuse(error, scope, receive, send)
            except ClientDisconnected:
                return None
            scope.setdefault("state", {})["reservation"] = reservation
            await self.app(scope, _replay(body, receive), send)

    def _client(self, scope: Scope) -> int | None:
        """Return the index of a request's API key, or None if it needs no key; raises ApiError for a wrong key."""
        if not self._keys or scope["path"] in PATHS_WITHOUT_KEY:
            return None
        scheme, _, given = _header(scope, b"authorization").partition(b" ")
        # Every key is compared, so that the response time reveals nothing.
        matches = [secrets.compare_digest(given.strip(), key) for key in self._keys]
        if scheme.lower() != b"bearer" or not any(matches):
            message = "a valid API key is required, as the header Authorization: Bearer KEY"
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return matches.index(True)

    async def _read(self, scope: Scope, receive: Receive, reservation: ByteReservation) -> bytes:
        is_ignored = scope["path"] in PATHS_WITHOUT_KEY  # these paths respond even if the budget is used up
        most = min(self._max_bytes, MAX_IGNORED_BYTES) if is_ignored else self._max_bytes
        content_length = _header(scope, b"content-length")
        if content_length and int(content_length) > most:
            raise self._too_large(most)
        body = bytearray()
        try:
            async with asyncio.timeout(self._timeout):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnected
                    chunk = message.get("body", b"")
                    if len(body) + len(chunk) > most:
                        raise self._too_large(most)
                    if not is_ignored:
                        reservation.take(len(chunk))
                    body += chunk
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {self._timeout:g} seconds") from None
        except MemoryError:
            raise out_of_memory() from None

    def _too_large(self, most: int) -> ApiError:
        name = "max_body_bytes" if most == self._max_bytes else "on this path"
        return ApiError(413, f"the body is too large; at most {most} bytes are accepted ({name})")


def _check_codings(scope: Scope) -> None:
    if _elements(scope, b"expect") - {b"100-continue"}:
        raise ApiError(417, "the only expectation that can be met is 100-continue (Expect)")
    if _elements(scope, b"content-encoding") - {b"identity"}:
        message = "compressed bodies are not accepted; send the body as it is (Content-Encoding)"
        raise ApiError(415, message, headers={"Accept-Encoding": "identity"})


def _elements(scope: Scope, name: bytes) -> set[bytes]:
    """Return the comma-separated elements of a header, in lower case."""
    values = (value for key, value in scope["headers"] if key == name)
    return {element.strip().lower() for value in values for element in value.split(b",")} - {b""}


def _header(scope: Scope, name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key == name), b"")


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a receive function that returns the body as one message, and then the server's further messages."""
    pieces = [body]

    async def replayed() -> Message:
        if pieces:
            return {"type": "http.request", "body": pieces.pop(), "more_body": False}
        return await receive()

    return replayed


async def _refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Respond before the body is complete, discard more of it so that the client reads the response, and close."""
    response = error.response()
    response.headers["Connection"] = "close"
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    deadline, bytes_left = time.monotonic() + LINGER_SECONDS, LINGER_BYTES
    while bytes_left > 0:
        try:
            message = await asyncio.wait_for(receive(), max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            break
        bytes_left -= len(message.get("body", b""))
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            break
    await send({"type": "http.response.body", "body": b"", "more_body": False})
