"""The files of gradio's page, compressed once. Pure ASGI.

Gradio's middleware compresses every response in the event loop: tens of milliseconds per MB, and seconds for a text of
random letters. It does not touch a response that has an encoding.
"""

import asyncio
import gzip
import re

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# Paths of gradio's files. Each file has one path that matches, so it is kept once.
_FILES = re.compile(r".*/(?:assets|static)(?:/\w[\w.-]*)+\.(?:js|css|svg|json)", re.ASCII)
MAX_BYTES = 64 * 1024 * 1024  # compressed, of all files; gradio 6 has 6 MB of them
LEVEL = 6  # of gzip: 9 takes longer for a percent


def is_file(path: str) -> bool:
    """Whether this is the path of such a file."""
    return _FILES.fullmatch(path) is not None


def as_it_is(send: Send) -> Send:
    """Send responses without an encoding as those that are not to be compressed."""

    async def send_marked(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(raw=message["headers"]).setdefault("content-encoding", "identity")
        await send(message)

    return send_marked


class CompressedFiles:
    """Has an application make each file once, and sends it compressed to clients that accept that."""

    def __init__(self) -> None:
        self._made: dict[str, list[Message]] = {}
        self._num_bytes = 0
        self._lock = asyncio.Lock()

    async def respond(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to a request for a file."""
        headers = Headers(scope=scope)
        if scope["method"] != "GET" or "range" in headers or "gzip" not in headers.get("accept-encoding", ""):
            return await app(scope, receive, send)
        if (made := self._made.get(scope["path"])) is None:
            async with self._lock:  # others that want the same file find it then
                made = self._made.get(scope["path"]) or await self._make(app, scope, receive)
        start, *body = made
        await send({**start, "headers": list(start["headers"])})  # to which other middleware adds its own
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
        # The tag names the bytes before compression; a weak one says so. Ranges of the two differ.
        if "etag" in headers:
            headers["etag"] = f"W/{headers['etag'].removeprefix('W/')}"
        del headers["accept-ranges"]
        headers.add_vary_header("accept-encoding")
        made = [start, {"type": "http.response.body", "body": body}]
        if self._num_bytes + len(body) <= MAX_BYTES:
            self._made[scope["path"]], self._num_bytes = made, self._num_bytes + len(body)
        return made
