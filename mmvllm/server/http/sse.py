"""Server-sent events."""

import asyncio
import json
from contextlib import nullcontext
from typing import Any

from starlette.types import Send

PING_SECONDS = 15.0  # proxies typically close a connection after a minute without data
HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class EventStream:
    """An event stream response, which sends a comment after each pause of `PING_SECONDS` and ends with `async with`.

    The response starts, with status 200, when the first event or comment is sent.
    """

    def __init__(self, send: Send):
        self._send = send
        self._turn = asyncio.Lock()  # nothing may be sent between the pieces of a long event
        self.is_open = False  # whether the response has started

    async def __aenter__(self) -> "EventStream":
        self._last_sent = asyncio.get_running_loop().time()
        self._pings = asyncio.create_task(self._ping_when_idle())
        return self

    async def __aexit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        async with self._turn if error is None else nullcontext():
            self._pings.cancel()
            if error is None:
                await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def data(self, payload: dict | str) -> None:
        """Send an event; see `event_text`."""
        await self.write(event_text(payload).encode())

    async def _ping_when_idle(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(max(0.0, self._last_sent + PING_SECONDS - loop.time()))
            async with self._turn:  # waits while an event is sent slowly
                if loop.time() >= self._last_sent + PING_SECONDS:
                    await self._write(b": ping\n\n")

    async def write(self, event: bytes) -> None:
        """Send an encoded event."""
        async with self._turn:
            await self._write(event)

    async def _write(self, event: bytes) -> None:
        if not self.is_open:
            self.is_open = True
            await self._send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})
        await self._send({"type": "http.response.body", "body": event, "more_body": True})
        self._last_sent = asyncio.get_running_loop().time()


def event_text(payload: dict | str) -> str:
    """Format an event whose data is a string or a JSON object; `type` of the object becomes the name of the event."""
    if isinstance(payload, str):
        return f"data: {payload}\n\n"
    name = f"event: {payload['type']}\n" if "type" in payload else ""
    return f"{name}data: {_json(payload)}\n\n"


def _json(payload: dict) -> str:
    text = json.dumps(payload, ensure_ascii=False, separators=(",", ":"))
    try:
        text.encode()
    except UnicodeEncodeError:  # an error's message may quote a lone surrogate
        return json.dumps(payload, separators=(",", ":"))
    return text
