"""Routes a path that ends with a slash like the path without it."""

from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send


class TrailingSlashMiddleware:
    """Removes the slash at the end of paths; many clients do not follow a redirect of a request with a body.

    Leaves paths that start with one of `but` unchanged.
    """

    def __init__(self, app: ASGIApp, but: Sequence[str] = ()):
        self.app, self._but = app, tuple(but)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"] if scope["type"] == "http" else ""
        if path.endswith("/") and path != "/" and not path.startswith(self._but):
            scope = {**scope, "path": path.rstrip("/") or "/"}
        await self.app(scope, receive, send)
