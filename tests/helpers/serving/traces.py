"""Spans in memory, and a collector that keeps what it is sent."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import BinaryIO

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
STAGES = ["queue", "prefill", "decode"]  # of every request with a token


def headers(sampled: bool = True) -> dict[str, str]:
    """The headers of a request that belongs to `TRACE`."""
    return {"traceparent": f"00-{TRACE}-{PARENT}-0{int(sampled)}", "tracestate": "vendor=1"}


def requests_of(spans: tuple[ReadableSpan, ...]) -> list[tuple[ReadableSpan, dict[str, ReadableSpan]]]:
    """The span of each request, and its children by name; a child lies within its parent."""
    found = []
    for root in (span for span in spans if span.name == "llm_request"):
        children = {span.name: span for span in spans if span.parent and span.parent.span_id == root.context.span_id}
        for child in children.values():
            assert child.context.trace_id == root.context.trace_id
            assert root.start_time <= child.start_time <= child.end_time <= root.end_time
        found.append((root, children))
    assert sum(1 + len(children) for _, children in found) == len(spans)
    return found


@contextmanager
def collector(
    status: int = 200, write_body: Callable[[BinaryIO], None] | None = None
) -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """A collector on this machine: its URL and the requests that it was sent, to which it answers with `status`.

    `write_body` writes the body of an answer, without which there is none.
    """
    received: list[ExportTraceServiceRequest] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["Content-Length"]))
            assert self.path == "/v1/traces"
            received.append(ExportTraceServiceRequest.FromString(data))
            self.send_response(status)
            if 300 <= status < 400:
                self.send_header("Location", "/elsewhere")
            self.send_header("Content-Length", "0" if write_body is None else "1000000000")
            self.end_headers()
            if write_body is not None:
                with suppress(OSError):  # it is not read
                    write_body(self.wfile)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", received
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
