"""What is let through to gradio: what the page asks for, and no more than there is room for. Pure ASGI."""

import asyncio
from contextlib import suppress

from starlette.requests import ClientDisconnect
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mmvllm.demo.session import Sessions

API = "/gradio_api/"
# Gradio has more, which would fetch URLs for strangers, or write files that belong to nobody.
ROUTES = frozenset(
    {"app_id", "cancel", "info", "login_check", "queue/data", "queue/join", "reset", "startup-events", "theme.css"}
    | {"token", "upload", "upload_progress", "user"}
)
HEARTBEAT = "heartbeat/"  # and the session: the page has this request open as long as it is open itself
ROUTES_WITH_NAMES = ("file=/", HEARTBEAT, "run/")
MAX_BODY_BYTES = 2**20  # of what is no upload, and of what an upload has beside its pictures
UPLOAD_SECONDS = 300.0


class Gate:
    """Answers 404, 408, 411, 413 or 507 to what gradio shall not see, and tells the sessions which tabs are open."""

    def __init__(self, app: ASGIApp, sessions: Sessions):
        self.app, self._sessions, self._uploads = app, sessions, sessions.uploads
        self._settings = sessions.settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        self._sessions.sweep_regularly()
        route = scope["path"].partition(API)[2]
        num_bytes = 0 if scope["method"] in ("GET", "HEAD", "OPTIONS") else _announced(scope)
        if (refusal := self._refusal(route, num_bytes)) is not None:
            return await refusal(scope, receive, send)
        with suppress(ClientDisconnect):  # who hangs up while sending is no news
            if route == "upload":
                await self._upload(num_bytes, scope, receive, send)
            elif route.startswith(HEARTBEAT):
                with self._sessions.open_tab(route.removeprefix(HEARTBEAT)):
                    await self.app(scope, receive, send)
            else:
                await self.app(scope, receive, send)

    def _refusal(self, route: str, num_bytes: int | None) -> PlainTextResponse | None:
        if route and route not in ROUTES and not route.startswith(ROUTES_WITH_NAMES):
            return PlainTextResponse("There is nothing here", 404)
        if num_bytes is None:  # it could be of any length
            return PlainTextResponse("Send a Content-Length", 411)
        num_images, size = self._settings.max_images, self._settings.policy.max_bytes
        if route == "upload" and num_bytes > num_images * size + MAX_BODY_BYTES:
            message = f"Too much for one question; at most {num_images} pictures of {size:,} bytes go into it"
            return PlainTextResponse(message, 413)
        if route != "upload" and num_bytes > MAX_BODY_BYTES:
            return PlainTextResponse("This is too long", 413)
        return None

    async def _upload(self, num_bytes: int, scope: Scope, receive: Receive, send: Send) -> None:
        with self._uploads.coming(num_bytes) as num_coming:
            if await asyncio.to_thread(self._uploads.has_room, num_coming):
                return await self._in_time(scope, receive, send)
        message = "There is no room for more pictures right now; try again later"
        await PlainTextResponse(message, 507)(scope, receive, send)

    async def _in_time(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def watched(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            async with asyncio.timeout(UPLOAD_SECONDS):
                await self.app(scope, receive, watched)
        except TimeoutError:
            if not has_begun:
                message = "The pictures took too long to arrive; try again"
                await PlainTextResponse(message, 408, {"Connection": "close"})(scope, receive, send)


def _announced(scope: Scope) -> int | None:
    """The bytes of the body; None if only its end will tell."""
    headers = dict(scope["headers"])
    length = headers.get(b"content-length", b"")
    return int(length) if length.isdigit() and b"transfer-encoding" not in headers else None
