"""Gives each request an id, the client's or a new one; as in OpenAI's API, clients show it in their errors."""

import logging
import re
import uuid
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)
ACCEPTED = re.compile(rb"[!-~]{1,128}")  # ids that clients may send; the log shows them
HEADER = b"x-request-id"


def new_request_id() -> str:
    return f"req_{uuid.uuid4().hex}"


def _request_id(scope: Scope) -> str:
    given = next((value for name, value in scope["headers"] if name == HEADER), b"")
    return given.decode() if ACCEPTED.fullmatch(given) else new_request_id()


class RequestIdMiddleware:
    """Adds the header `x-request-id` to every response, and logs the id of requests that raised an exception.

    The app finds the id in `scope["state"]["request_id"]`.
    """

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        request_id = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id
        header = (HEADER, request_id.encode())

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = message | {"headers": [*message.get("headers", ()), header]}
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except Exception:  # uvicorn prints the traceback
            logger.error("request %s failed: %s %s", request_id, scope["method"], quote(scope["path"]))
            raise
