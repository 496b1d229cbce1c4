"""What is let through to gradio: what the page asks for, and no more than there is room for. Pure ASGI."""

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from mmvllm.demo.uploads import Uploads

API = "/gradio_api/"
# Gradio has more, which would fetch URLs for strangers, or write files that belong to nobody.
ROUTES = frozenset(
    {"app_id", "cancel", "info", "login_check", "queue/data", "queue/join", "reset", "startup-events", "theme.css"}
    | {"token", "upload", "upload_progress", "user"}
)
ROUTES_WITH_NAMES = ("file=/", "heartbeat/", "run/")
MAX_BODY_BYTES = 2**20  # of what is no upload


class Gate:
    """Answers 404, 411, 413 or 507 to what gradio shall not see."""

    def __init__(self, app: ASGIApp, uploads: Uploads):
        self.app, self._uploads = app, uploads

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        route = scope["path"].partition(API)[2]
        num_bytes = 0 if scope["method"] in ("GET", "HEAD", "OPTIONS") else _announced(scope)
        if route and route not in ROUTES and not route.startswith(ROUTES_WITH_NAMES):
            return await PlainTextResponse("There is nothing here", 404)(scope, receive, send)
        if num_bytes is None:  # it could be of any length
            return await PlainTextResponse("Send a Content-Length", 411)(scope, receive, send)
        if route == "upload":
            return await self._upload(num_bytes, scope, receive, send)
        if num_bytes > MAX_BODY_BYTES:
            return await PlainTextResponse("This is too long", 413)(scope, receive, send)
        await self.app(scope, receive, send)

    async def _upload(self, num_bytes: int, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._uploads.has_room(num_bytes):
            message = "There is no room for more pictures right now; try again later"
            return await PlainTextResponse(message, 507)(scope, receive, send)
        with self._uploads.coming(num_bytes):
            await self.app(scope, receive, send)


def _announced(scope: Scope) -> int | None:
    """The bytes of the body; None if only its end will tell."""
    headers = dict(scope["headers"])
    length = headers.get(b"content-length", b"")
    return int(length) if length.isdigit() and b"transfer-encoding" not in headers else None
