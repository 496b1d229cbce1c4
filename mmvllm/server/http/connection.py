"""uvicorn's HTTP/1.1 protocol, with a strict parser and limits on slow clients."""

import asyncio
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from mmvllm.server.errors import ApiError
from mmvllm.server.http.parser import MalformedRequest, StrictConnection
from mmvllm.server.http.request_id import new_request_id

HEADER_SECONDS = 10.0
STALL_SECONDS = 60.0  # a client must read what was sent within this time, and at one of these rates overall
MIN_BYTES_PER_SECOND = 32 * 1024
MIN_COUNTED_BYTES_PER_SECOND = 2**20  # for requests that hold bytes of the ByteBudget, which others need


class OpenTransport:
    """A transport that drops writes after the client hung up; asyncio would log a warning for each of them."""

    def __init__(self, transport: asyncio.Transport):
        self._transport = transport
        self.num_written = 0

    def write(self, data: bytes) -> None:
        self.num_written += len(data)
        if not self._transport.is_closing():
            self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class TimeLimitedProtocol(H11Protocol):
    """Handles one connection, and closes it if its client is too slow.

    A request's head must be complete `HEADER_SECONDS` after the connection was opened, or after the head's first byte.
    The client must read what was sent within `STALL_SECONDS`. All pauses of a response together may last that long,
    plus the time that its bytes take at the minimum rate. Otherwise slow clients could hold data and connections for
    hours.
    """

    _header_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.conn = StrictConnection(h11.SERVER)
        self._num_written_before = 0  # bytes of earlier responses
        self._paused_at, self._paused_seconds = 0.0, 0.0  # of the current response

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(OpenTransport(transport))
        transport.set_write_buffer_limits(high=0)  # so that `pause_writing` is called for any unread data
        self._start_header_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._cancel_header_timer()
        elif self._header_timer is None:
            self._start_header_timer()

    def send_400_response(self, msg: str) -> None:
        """Respond to a malformed request with an OpenAI error object, and close the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):  # otherwise a response has already started
            self.transport.write(_refusal(self.conn.error))
        self._close()

    def shutdown(self) -> None:
        """Let the response in flight complete; some versions of uvicorn would signal a disconnect to the app."""
        if self.cycle is None or self.cycle.response_complete:
            super().shutdown()
        else:
            self.cycle.keep_alive = False

    def pause_writing(self) -> None:
        super().pause_writing()
        self._paused_at = self.loop.time()
        num_bytes = self.transport.num_written - self._num_written_before
        is_counted = "reservation" in (self.scope or {}).get("state", {})
        rate = MIN_COUNTED_BYTES_PER_SECOND if is_counted else MIN_BYTES_PER_SECOND
        left = STALL_SECONDS + num_bytes / rate - self._paused_seconds
        self._stall_timer = self.loop.call_later(min(STALL_SECONDS, max(0.0, left)), self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._paused_seconds += self.loop.time() - self._paused_at
        self._cancel_stall_timer()

    def on_response_complete(self) -> None:
        """Reset the counts for the next response."""
        self._num_written_before, self._paused_seconds = self.transport.num_written, 0.0
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_header_timer()
        self._cancel_stall_timer()
        super().connection_lost(exc)

    def _close(self) -> None:
        """Close the connection once the client has read what was sent; the application can send nothing more."""
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()

    def _start_header_timer(self) -> None:
        self._header_timer = self.loop.call_later(HEADER_SECONDS, self._close)

    def _cancel_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _cancel_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None


def _refusal(error: h11.RemoteProtocolError) -> bytes:
    """Return a complete response as bytes, without h11, which has no valid request to respond to."""
    status = HTTPStatus(error.error_status_hint)
    message = str(error) if isinstance(error, MalformedRequest) else "the request is not valid HTTP/1.1"
    body = ApiError(status, message).body()
    lines = (
        f"HTTP/1.1 {status} {status.phrase}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "connection: close",
        f"x-request-id: {new_request_id()}",
    )
    return "\r\n".join((*lines, "", "")).encode() + body
