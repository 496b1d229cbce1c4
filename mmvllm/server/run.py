"""uvicorn, with a limit on how long a request's head may take, and a shutdown that finishes what was begun."""

import asyncio
import logging
import socket
from collections.abc import Callable
from types import FrameType

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from mmvllm.async_llm import AsyncLLM

HEADER_SECONDS = 10.0
STALL_SECONDS = 60.0  # that a client may take to read what was sent
SEND_SECONDS = 5.0  # for answers to be sent whose requests have ended


class Protocol(H11Protocol):
    """Hangs up on who has not sent a whole head `HEADER_SECONDS` after connecting, or after its first byte, and on who
    does not read: what a client leaves unread is kept for ever otherwise, and its connection too."""

    _header_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # so that `pause_writing` tells of all that is left unread
        self._expect_header()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._forget_header()
        elif self._header_timer is None:
            self._expect_header()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall_timer = self.loop.call_later(STALL_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._forget_stall()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_header()
        self._forget_stall()
        super().connection_lost(exc)

    def _expect_header(self) -> None:
        self._header_timer = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def _forget_header(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _forget_stall(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None


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
