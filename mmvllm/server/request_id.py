"""A name for every request, as OpenAI gives one: clients show it in their errors."""

import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class RequestIdMiddleware:
    """Adds the header `x-request-id` to every response."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        header = (b"x-request-id", f"req_{uuid.uuid4().hex}".encode())

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = message | {"headers": [*message.get("headers", ()), header]}
            await send(message)

        await self.app(scope, receive, named)
