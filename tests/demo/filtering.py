"""Requests to the filter of the page's routes, without a server."""

import asyncio
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

from starlette.types import Receive, Scope

from mmvllm.demo.route_filter import DemoRouteFilter
from mmvllm.demo.session import Sessions
from mmvllm.demo.settings import DemoSettings
from mmvllm.demo.uploads import Uploads
from mmvllm.media.policy import MediaPolicy

JOIN, UPLOAD = "/gradio_api/queue/join", "/gradio_api/upload"
RESULTS = {
    "num_unread": lambda session: 0,
    "has_results": lambda session: True,
    "count_event_bytes": lambda: 0,
    "forget_upload": lambda upload_id: None,
    "being_sent": lambda session, num_bytes: nullcontext(),
}


async def app(scope, receive, send):
    """A page that accepts every request."""
    await send({"type": "http.response.start", "status": 200, "headers": []})


def filter_of(uploads: Path, settings: DemoSettings | None = None, **results) -> DemoRouteFilter:
    """The filter in front of `app`, whose only event has the number 5."""
    sessions = Sessions(None, Uploads(uploads), settings or DemoSettings(MediaPolicy()))
    return DemoRouteFilter(app, sessions, {5}, SimpleNamespace(**RESULTS | results))


def scope_of(path: str = "/", method: str = "GET", query: bytes = b"", page: object = None, **headers) -> Scope:
    raw = [(name.replace("_", "-").encode(), str(value).encode()) for name, value in headers.items()]
    return {"type": "http", "method": method, "path": path, "headers": raw, "query_string": query, "app": page}


def post(path: str, body: bytes, **headers) -> Scope:
    return scope_of(path, "POST", content_length=len(body), **headers)


def client(body: bytes = b"", leaves_after: float = 3600) -> Receive:
    """The `receive` of a client that sends a body and waits for the response."""
    pieces = [{"type": "http.request", "body": body}]

    async def receive():
        if not pieces:
            await asyncio.sleep(leaves_after)
        return pieces.pop() if pieces else {"type": "http.disconnect"}

    return receive


class Sent(list):
    """The `send` of a client that keeps the messages of its responses."""

    async def __call__(self, message) -> None:
        self.append(message)

    @property
    def statuses(self) -> list[int]:
        return [message["status"] for message in self if "status" in message]
