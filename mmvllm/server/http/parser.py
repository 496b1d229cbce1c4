"""h11's parser, made strict: a proxy and this server must not see different requests in the same bytes (RFC 9112)."""

import re

import h11

MAX_HEAD_BYTES = 16 * 1024  # h11's default limit, which it applies only to heads that arrive in pieces
MAX_HEAD_LINES = 128  # parsing a line takes as long as parsing a hundred bytes
SMALL_CHUNK_BYTES, MAX_SMALL_CHUNKS = 1024, 4096  # size of a small chunk, and how many a body may have

_BAD_LINE_END = re.compile(rb"\r(?!\n|\Z)|(?<!\r)\n")
_HOST = re.compile(rb"(\[[0-9A-Fa-f:.]+\]|[0-9A-Za-z._~!$&'()*+,;=%-]*)(:[0-9]*)?")


class MalformedRequest(h11.RemoteProtocolError):
    """Raised for a request that is refused; `error_status_hint` is the HTTP status."""

    def __init__(self, message: str, status: int = 400):
        super().__init__(message, error_status_hint=status)


class StrictConnection(h11.Connection):
    """Raises MalformedRequest for ambiguous requests that h11 would accept.

    Bodies of many small chunks are refused too: each chunk blocks the event loop for about 4 µs.
    """

    _num_small_chunks = 0
    _recent = b""  # the bytes that are not parsed yet, after at least 4 parsed ones
    error: h11.RemoteProtocolError | None = None  # the last error raised

    def receive_data(self, data: bytes) -> None:
        super().receive_data(data)
        self._recent = (self._recent + data)[-len(self.trailing_data[0]) - 4 :]

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        try:
            if self.their_state is h11.IDLE:
                check_head(self.trailing_data[0])
            event = super().next_event()
            self._check_body(event)
        except h11.RemoteProtocolError as error:
            self.error = error
            raise
        return event

    def _check_body(self, event: h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]) -> None:
        if isinstance(event, h11.Request):
            self._num_small_chunks, self._is_chunked = 0, b"transfer-encoding" in dict(event.headers)
        elif isinstance(event, h11.Data):
            self._num_small_chunks += event.chunk_end and len(event.data) < SMALL_CHUNK_BYTES
            if self._num_small_chunks > MAX_SMALL_CHUNKS:
                limits = f"{MAX_SMALL_CHUNKS} chunks of less than {SMALL_CHUNK_BYTES} bytes"
                raise MalformedRequest(f"the body has more than {limits}")
        elif self.their_state is h11.SEND_BODY and self._is_chunked:
            self._check_chunks(b"\n" not in self.trailing_data[0])
        elif isinstance(event, h11.EndOfMessage) and self._is_chunked:
            read = self._recent.removesuffix(self.trailing_data[0])
            self._check_chunks(read.endswith(b"\r\n\r\n") and not event.headers)

    def _check_chunks(self, is_valid: bool) -> None:
        if not is_valid:
            raise MalformedRequest("the lines of a chunked body must end with CRLF, and it may have no trailer fields")


def check_head(received: bytes) -> None:
    """Check the received part of a request's head, and its fields once it is complete; data may follow the head."""
    head, end, _ = received.partition(b"\r\n\r\n")
    if len(head) > MAX_HEAD_BYTES:
        raise MalformedRequest(f"the request line and the headers have more than {MAX_HEAD_BYTES} bytes", 431)
    if head.count(b"\n") > MAX_HEAD_LINES:
        raise MalformedRequest(f"there are more than {MAX_HEAD_LINES} headers", 431)
    if _BAD_LINE_END.search(head):
        raise MalformedRequest("lines of the request's head must end with CRLF")
    if b"\n " in head or b"\n\t" in head:
        raise MalformedRequest("folded header lines are not supported")
    if end:
        request_line, *lines = head.split(b"\r\n")
        _check_request_line(request_line)
        _check_fields([_field(line) for line in lines], request_line.endswith(b"/1.0"))


def _field(line: bytes) -> tuple[bytes, bytes]:
    name, _, value = line.partition(b":")  # h11 refuses invalid names, such as those with a space at the end
    return name.lower(), value.strip(b" \t")


def _check_request_line(line: bytes) -> None:
    _, _, rest = line.partition(b" ")
    target, _, version = rest.rpartition(b" ")
    if re.fullmatch(rb"HTTP/[0-9]\.[0-9]", version) and version not in (b"HTTP/1.0", b"HTTP/1.1"):
        raise MalformedRequest("only HTTP/1.1 and HTTP/1.0 are supported")
    if target and not target.startswith(b"/"):
        raise MalformedRequest("the request's target must be a path that starts with /")


def _check_fields(fields: list[tuple[bytes, bytes]], is_http_1_0: bool) -> None:
    lengths = [value for name, value in fields if name == b"content-length"]
    codings = [value.lower() for name, value in fields if name == b"transfer-encoding"]
    if lengths and codings:
        raise MalformedRequest("Content-Length and Transfer-Encoding exclude each other")
    if len(lengths) > 1 or not all(value.isdigit() for value in lengths):
        raise MalformedRequest("Content-Length must be given once, as a number")
    if codings and is_http_1_0:
        raise MalformedRequest("HTTP/1.0 has no Transfer-Encoding")
    if codings and codings != [b"chunked"]:
        raise MalformedRequest("Transfer-Encoding must be chunked")
    if not all(_HOST.fullmatch(value) for name, value in fields if name == b"host"):
        raise MalformedRequest("Host must be a host and a port")
