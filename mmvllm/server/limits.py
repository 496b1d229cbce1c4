"""What reaches the app: bodies that are small enough and come in time, from those who may ask. Pure ASGI."""

import asyncio
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mmvllm.server.errors import ApiError

# How long, and how much, a client that was refused may go on sending: one that is cut off sees no answer.
LINGER_SECONDS, LINGER_BYTES = 2.0, 4 * 1024 * 1024


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


class ByteBudget:
    """Bytes of bodies and pictures that may be held at once."""

    def __init__(self, capacity: int):
        self._capacity, self._held = capacity, 0

    @contextmanager
    def holding(self) -> "Iterator[Held]":
        """Bytes that are given back together, at the end of a request."""
        held = Held(self)
        try:
            yield held
        finally:
            self._held -= held.num_bytes

    def take(self, num_bytes: int) -> None:
        if self._held + num_bytes > self._capacity:
            message = "the server holds as many bytes of requests as it may; try again later"
            raise ApiError(429, message, code="engine_busy", headers={"Retry-After": "1"})
        self._held += num_bytes


class Held:
    """What one request holds of a budget."""

    def __init__(self, budget: ByteBudget):
        self._budget, self.num_bytes = budget, 0

    def take(self, num_bytes: int) -> None:
        """Raises ApiError where there is not so much left."""
        self._budget.take(num_bytes)
        self.num_bytes += num_bytes


class Gate:
    """Asks for a key, reads the whole body within bounds of size and time, and only then calls the app.

    The app finds what the request holds of the budget in `scope["state"]["held"]`. Paths below `open_paths` pass.
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
        if scope["type"] != "http" or scope["path"].startswith(self._open_paths):
            return await self.app(scope, receive, send)
        with self._budget.holding() as held:
            try:
                self._check_key(scope)
                body = await self._read(scope, receive, held)
            except ApiError as error:
                return await _refuse(error, scope, receive, send)
            except ClientGone:
                return None
            scope.setdefault("state", {})["held"] = held
            await self.app(scope, _replay(body, receive), send)

    def _check_key(self, scope: Scope) -> None:
        if not self._keys or not scope["path"].startswith("/v1/"):
            return
        scheme, _, given = _header(scope, b"authorization").partition(b" ")
        # Every key is compared, so that the time tells nothing.
        matches = [secrets.compare_digest(given.strip(), key) for key in self._keys]
        if scheme.lower() != b"bearer" or not any(matches):
            message = "a valid API key is needed, as the header Authorization: Bearer KEY"
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    async def _read(self, scope: Scope, receive: Receive, held: Held) -> bytes:
        announced = _header(scope, b"content-length")
        if announced and int(announced) > self._max_bytes:
            raise self._too_large()
        body = bytearray()
        try:
            async with asyncio.timeout(self._timeout):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    chunk = message.get("body", b"")
                    if len(body) + len(chunk) > self._max_bytes:
                        raise self._too_large()
                    held.take(len(chunk))
                    body += chunk
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {self._timeout:g} seconds") from None

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is too large, at most {self._max_bytes} bytes are taken (--max-body-bytes)")


def _header(scope: Scope, name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key == name), b"")


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body in one piece, and then what comes from the server."""
    pieces = [body]

    async def replayed() -> Message:
        if pieces:
            return {"type": "http.request", "body": pieces.pop(), "more_body": False}
        return await receive()

    return replayed


async def _refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer before the body is read, let the client send on for a moment so that it sees this, then hang up."""
    response = error.response()
    response.headers["Connection"] = "close"
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    end, left = time.monotonic() + LINGER_SECONDS, LINGER_BYTES
    while left > 0:
        try:
            message = await asyncio.wait_for(receive(), max(0.0, end - time.monotonic()))
        except TimeoutError:
            break
        left -= len(message.get("body", b""))
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            break
    await send({"type": "http.response.body", "body": b"", "more_body": False})
