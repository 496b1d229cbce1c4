"""uvicorn, with a shutdown that finishes what was begun."""

import asyncio
import logging
import socket
import sys
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI

from mmvllm.async_llm import AsyncLLM
from mmvllm.server.connection import Protocol

SEND_SECONDS = 5.0  # for answers to be sent whose requests have ended


class Server(uvicorn.Server):
    """Drains on the first SIGINT or SIGTERM, ends what is in flight on the second; neither is an error."""

    def __init__(self, config: uvicorn.Config, engine: AsyncLLM, drain_seconds: float, on_ready: Callable[[str], None]):
        super().__init__(config)
        self._engine, self._drain_seconds, self._on_ready = engine, drain_seconds, on_ready
        self._hurry = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        host, port = sockets[0].getsockname()[:2]
        self._on_ready(f"http://{f'[{host}]' if ':' in host else host}:{port}")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self._loop.call_soon_threadsafe(self._hurry.set)
        else:
            print("finishing what is in flight; once more to end now", file=sys.stderr, flush=True)
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        finishing = asyncio.create_task(self._finish())
        await super().shutdown(sockets)  # it waits for the connections
        await finishing

    async def _finish(self) -> None:
        """End what is in flight: in good time, or at once when asked again; then hang up on who is left."""
        draining = asyncio.create_task(self._engine.shutdown(drain=True, timeout=self._drain_seconds))
        hurry = asyncio.create_task(self._hurry.wait())
        await asyncio.wait((draining, hurry), return_when=asyncio.FIRST_COMPLETED)
        await self._engine.shutdown(drain=False)
        await draining
        patience = 0.5 if self._hurry.is_set() else SEND_SECONDS
        end = self._loop.time() + patience
        while self.server_state.connections and self._loop.time() < end:
            await asyncio.sleep(0.05)
        hurry.cancel()
        for connection in [*self.server_state.connections]:
            connection.transport.abort()


def make_server(
    app: FastAPI, engine: AsyncLLM, drain_seconds: float, access_log: bool, on_ready: Callable[[str], None]
) -> Server:
    """A server whose `run([listener])` lasts until SIGINT or SIGTERM; `on_ready` is told the URL."""
    config = uvicorn.Config(
        app,
        http=Protocol,
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="error",  # strangers' garbage is no news
        access_log=access_log,
        server_header=False,
        timeout_graceful_shutdown=int(drain_seconds + 2 * SEND_SECONDS),  # only if what was hung up on does not end
    )
    if access_log:
        logging.getLogger("uvicorn.access").setLevel(logging.INFO)
    return Server(config, engine, drain_seconds, on_ready)
