"""Compresses each static file of gradio's page once and caches it (pure ASGI).

Gradio's middleware compresses every response in the event loop, which takes tens of milliseconds per MB, and seconds
for a text of random letters. It skips responses that already have a content encoding.
"""

import asyncio
import gzip
import re

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# Paths of gradio's static files. Exactly one path of each file matches, so it is cached once.
_FILES = re.compile(r".*/(?:assets|static)(?:/\w[\w.-]*)+\.(?:js|css|svg|json)", re.ASCII)
MAX_BYTES = 64 * 1024 * 1024  # compressed size of all cached files; gradio 6 has 6 MB
LEVEL = 6  # of gzip; level 9 takes longer and saves one percent


def is_file(path: str) -> bool:
    """Return whether this is the path of one of gradio's static files."""
    return _FILES.fullmatch(path) is not None


def as_it_is(send: Send) -> Send:
    """Mark responses without a content encoding as "identity", which exempts them from compression."""

    async def send_marked(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(raw=message["headers"]).setdefault("content-encoding", "identity")
        await send(message)

    return send_marked


class CompressedFiles:
    """Requests each file from the application once, and sends it compressed to clients that accept gzip."""

    def __init__(self) -> None:
        self._made: dict[str, list[Message]] = {}
        self._num_bytes = 0
        self._lock = asyncio.Lock()

    async def respond(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to a request for a static file."""
        headers = Headers(scope=scope)
        if scope["method"] != "GET" or "range" in headers or "gzip" not in headers.get("accept-encoding", ""):
            return await app(scope, receive, send)
        if (made := self._made.get(scope["path"])) is None:
            async with self._lock:  # concurrent requests for the file wait, then find it cached
                made = self._made.get(scope["path"]) or await self._make(app, scope, receive)
        start, *body = made
        await send({**start, "headers": list(start["headers"])})  # a copy: other middleware adds headers
        for message in body:
            await send(message)

    async def _make(self, app: ASGIApp, scope: Scope, receive: Receive) -> list[Message]:
        made: list[Message] = []

        async def keep(message: Message) -> None:
            made.append(message)

        await app(scope, receive, keep)
        start = made[0]
        if start["status"] != 200:
            return made
        whole = b"".join(message.get("body", b"") for message in made[1:])
        body = await asyncio.to_thread(gzip.compress, whole, LEVEL)
        headers = MutableHeaders(raw=start["headers"])
        headers["content-encoding"], headers["content-length"] = "gzip", str(len(body))
        # The ETag identifies the uncompressed bytes, so it becomes weak. Byte ranges would not match them either.
        if "etag" in headers:
            headers["etag"] = f"W/{headers['etag'].removeprefix('W/')}"
        del headers["accept-ranges"]
        headers.add_vary_header("accept-encoding")
        made = [start, {"type": "http.response.body", "body": body}]
        if self._num_bytes + len(body) <= MAX_BYTES:
            self._made[scope["path"]], self._num_bytes = made, self._num_bytes + len(body)
        return made
