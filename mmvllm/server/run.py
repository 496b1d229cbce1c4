"""Runs the application in uvicorn, with a graceful shutdown."""

import asyncio
import logging
import socket
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from mmvllm.entrypoints.async_llm import AsyncLLM
from mmvllm.server.http.connection import TimeLimitedProtocol

KEEP_ALIVE_SECONDS = 75.0  # longer than in proxies, which might otherwise send a request on a closing connection
SEND_SECONDS = 5.0  # to send the responses of finished requests
SEND_SECONDS_IF_FORCED = 0.5  # the same, after a second signal
ACCEPT_FAILS = "socket.accept() out of system resource"  # asyncio's message when it lacks file descriptors or memory
FULL_SECONDS = 60.0  # between warnings that connections cannot be accepted

logger = logging.getLogger(__name__)


class GracefulServer(uvicorn.Server):
    """A server that drains on the first SIGINT or SIGTERM, and aborts requests in flight on the second.

    Afterwards `run` returns normally.
    """

    def __init__(self, config: uvicorn.Config, engine: AsyncLLM, drain_seconds: float, on_ready: Callable[[str], None]):
        super().__init__(config)
        self._engine, self._drain_seconds, self._on_ready = engine, drain_seconds, on_ready
        self._forced = asyncio.Event()
        self._next_warning = 0.0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._report)
        host, port = sockets[0].getsockname()[:2]
        self._on_ready(f"http://{f'[{host}]' if ':' in host else host}:{port}")

    def _report(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Warn once a minute that connections cannot be accepted; asyncio reports it thousands of times a second."""
        if context["message"] != ACCEPT_FAILS:
            loop.default_exception_handler(context)
        elif time.monotonic() >= self._next_warning:
            self._next_warning = time.monotonic() + FULL_SECONDS
            message = "new connections cannot be accepted (%s) for now; raise the limit of open files (ulimit -n)"
            logger.warning(message, context["exception"].strerror)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self._loop.call_soon_threadsafe(self._forced.set)
        else:
            message = "shutting down: finishing the requests in flight; interrupt again to abort them"
            print(message, file=sys.stderr, flush=True)
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        finishing = asyncio.create_task(self._finish())
        await super().shutdown(sockets)  # returns when all connections are closed
        await finishing

    async def _finish(self) -> None:
        """Drain the engine, or stop it at once if forced to; then close the connections that are still open."""
        draining = asyncio.create_task(self._engine.shutdown(drain=True, timeout=self._drain_seconds))
        forced = asyncio.create_task(self._forced.wait())
        await asyncio.wait((draining, forced), return_when=asyncio.FIRST_COMPLETED)
        await self._engine.shutdown(drain=False)
        await draining
        deadline = self._loop.time() + (SEND_SECONDS_IF_FORCED if self._forced.is_set() else SEND_SECONDS)
        while self.server_state.connections and self._loop.time() < deadline:
            await asyncio.sleep(0.05)
        forced.cancel()
        for connection in [*self.server_state.connections]:
            connection.transport.abort()


def make_server(
    app: FastAPI,
    engine: AsyncLLM,
    drain_seconds: float,
    access_log: bool,
    on_ready: Callable[[str], None],
    keep_alive: float = KEEP_ALIVE_SECONDS,
) -> GracefulServer:
    """Return a server that calls `on_ready` with its URL, and whose `run([listener])` returns after a signal."""
    config = uvicorn.Config(
        app,
        loop="asyncio",  # even if uvloop is installed, as by the extra `ray`: its timers may fire too early
        http=TimeLimitedProtocol,
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="error",  # malformed client input is not logged
        access_log=access_log,
        server_header=False,
        timeout_keep_alive=keep_alive,
        timeout_graceful_shutdown=int(drain_seconds + 2 * SEND_SECONDS),  # in case an aborted connection does not close
    )
    if access_log:
        logging.getLogger("uvicorn.access").setLevel(logging.INFO)
    return GracefulServer(config, engine, drain_seconds, on_ready)
