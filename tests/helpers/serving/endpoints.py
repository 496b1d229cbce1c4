"""A server with the form of OpenAI's API, which answers as a test says."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Answer = tuple[int, dict[str, str], bytes | Iterator[bytes]] | None  # None closes the connection


@dataclass
class FakeEndpoint:
    """Its URL; `answer` is given each body and the number of requests before it."""

    answer: Callable[[dict, int], Answer]
    models: Answer = None
    url: str = ""
    bodies: list[dict] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)  # of all requests, with their queries
    num_at_once: int = 0
    most_at_once: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


def said(text: str, **keys) -> Answer:
    """A chat completion."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"} | keys
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    return as_json(200, {"object": "chat.completion", "choices": [choice], "usage": usage})


def as_json(status: int, body: object, **headers: str) -> Answer:
    return status, {name.replace("_", "-"): value for name, value in headers.items()}, json.dumps(body).encode()


def failed(status: int, message: str = "no", **headers: str) -> Answer:
    return as_json(status, {"error": {"message": message}}, **headers)


MODELS = as_json(200, {"object": "list", "data": [{"id": "fake-vl"}, {"id": "other"}]})


@contextmanager
def fake_endpoint(answer: Callable[[dict, int], Answer], models: Answer = MODELS) -> Iterator[FakeEndpoint]:
    fake = FakeEndpoint(answer, models)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(fake))
    server.daemon_threads = True
    fake.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()


def _handler(fake: FakeEndpoint) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            fake.paths.append(self.path)
            self._send(fake.models)

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with fake.lock:
                number = len(fake.bodies)
                fake.bodies.append(body)
                fake.headers.append(dict(self.headers))
                fake.paths.append(self.path)
                fake.num_at_once += 1
                fake.most_at_once = max(fake.most_at_once, fake.num_at_once)
            try:
                answer = fake.answer(body, number)
            finally:
                with fake.lock:
                    fake.num_at_once -= 1
            self._send(answer)

        def _send(self, answer: Answer) -> None:
            if answer is None:
                self.close_connection = True
                return
            status, headers, data = answer
            self.send_response(status)
            is_whole = isinstance(data, bytes)
            length = {"Content-Length": str(len(data))} if is_whole else {"Connection": "close"}
            for name, value in (headers | length).items():
                self.send_header(name, value)
            self.end_headers()
            with suppress(ConnectionError):  # the client has had enough
                for part in [data] if is_whole else data:
                    self.wfile.write(part)

        def log_message(self, *_):
            pass

    return Handler
