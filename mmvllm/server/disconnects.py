"""Cancels the work for a request when its client disconnects."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.types import Receive

T = TypeVar("T")
CLIENT_DISCONNECTED = 499  # nginx's status, in metrics and the log


class ClientDisconnected(Exception):
    """The client closed the connection before the response was complete."""


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """Await the work, after the body was read; if the client disconnects, cancel it and raise ClientDisconnected."""
    task, disconnected = asyncio.ensure_future(work), asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((task, disconnected), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return task.result()
    finally:
        task.cancel()
        disconnected.cancel()
        await asyncio.gather(task, disconnected, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
