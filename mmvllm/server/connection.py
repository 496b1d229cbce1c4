"""One connection: uvicorn's, with limits on who says nothing, reads nothing, or sends crumbs."""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 10.0
STALL_SECONDS = 60.0  # that a client may take to read what was sent
CRUMB_BYTES, MAX_CRUMBS = 64, 4096  # chunks so small, and how many of them a body may have


class Connection(h11.Connection):
    """Refuses bodies in crumbs: what one read brings of them would keep the event loop for half a second."""

    _num_crumbs = 0

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._num_crumbs = 0
        elif isinstance(event, h11.Data):
            self._num_crumbs += event.chunk_end and len(event.data) < CRUMB_BYTES
            if self._num_crumbs > MAX_CRUMBS:
                raise h11.RemoteProtocolError("too many small chunks")
        return event


class Protocol(H11Protocol):
    """Hangs up on who has not sent a whole head `HEADER_SECONDS` after connecting, or after its first byte, and on who
    does not read: what a client leaves unread is kept for ever otherwise, and its connection too."""

    _header_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.conn = Connection(h11.SERVER)

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

    def send_400_response(self, msg: str) -> None:
        if self.cycle is not None:
            self.cycle.disconnected = True  # whatever the application answers comes too late
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:  # an answer has begun, and there can be no other
            self.transport.close()

    def shutdown(self) -> None:
        """Let the answer under way be finished; some versions of uvicorn would tell the application to give up."""
        if self.cycle is None or self.cycle.response_complete:
            super().shutdown()
        else:
            self.cycle.keep_alive = False

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
