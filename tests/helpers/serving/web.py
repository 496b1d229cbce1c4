"""A fake network and local web servers for tests that fetch images and videos."""

import asyncio
import ipaddress
import socket
import threading
from asyncio.selector_events import BaseSelectorEventLoop
from collections.abc import Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from mmvllm.media import http_fetching
from mmvllm.media.fetching import fetch as fetch_media
from mmvllm.media.policy import Kind, MediaPolicy
from tests.helpers.engine.requests import noise_image
from tests.helpers.media.images import encode

NAME = "images.example"
PUBLIC = "93.184.216.34"
ANYWHERE = MediaPolicy(allowed_domains=("*",))


PNG = encode(noise_image(13, 7, seed=0))


class FakeNetwork:
    """Records lookups and connections; names resolve as a test says, and only loopback addresses are reached."""

    def __init__(self):
        self.names: dict[str, list[list[str]]] = {}  # per name the answer of each lookup; the last is repeated
        self.lookups: list[str] = []
        self.connected: list[str] = []
        self.delay = 0.0

    async def look_up(self, host, port):
        self.lookups.append(host)
        await asyncio.sleep(self.delay)
        if host not in self.names:
            return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        answers = self.names[host]
        addresses = answers.pop(0) if len(answers) > 1 else answers[0]
        families = [socket.AF_INET6 if ":" in address else socket.AF_INET for address in addresses]
        return [
            (family, socket.SOCK_STREAM, 6, "", (one, port)) for family, one in zip(families, addresses, strict=True)
        ]

    async def sock_connect(self, loop, sock, place):
        self.connected.append(place[0])
        if not ipaddress.ip_address(place[0]).is_loopback:
            raise ConnectionRefusedError
        return await SOCK_CONNECT(loop, sock, place)


SOCK_CONNECT = BaseSelectorEventLoop.sock_connect


def fake_network(monkeypatch: pytest.MonkeyPatch) -> FakeNetwork:
    """Replace lookups and connections of the event loop."""
    made = FakeNetwork()
    monkeypatch.setattr(http_fetching, "look_up", made.look_up)
    monkeypatch.setattr(BaseSelectorEventLoop, "sock_connect", lambda *args: made.sock_connect(*args))
    return made


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_) -> None:
        pass


@contextmanager
def serving_files(folder: Path) -> Iterator[str]:
    """The URL of a local web server for the files in a folder."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


class StubServer:
    """A local web server; `answers` maps a path to the bytes to send, or to a coroutine that writes them."""

    def __init__(self, answers: dict):
        self.answers, self.heads = answers, []

    async def serve(self, reader, writer):
        try:
            self.heads.append((await reader.readuntil(b"\r\n\r\n")).decode("latin-1"))
            answer = self.answers[self.heads[-1].split(" ")[1]]
            if isinstance(answer, bytes):
                writer.write(answer)
                await writer.drain()
            else:
                await answer(writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            writer.close()

    @asynccontextmanager
    async def running(self):
        server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()


def answer(body: bytes = b"", status: str = "200 OK", length: int | None = None, **headers: str) -> bytes:
    fields = {"Content-Length": len(body) if length is None else length, **headers}
    lines = [f"HTTP/1.1 {status}", *(f"{name.replace('_', '-')}: {value}" for name, value in fields.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def moved(to: str) -> bytes:
    return answer(status="302 Found", Location=to)


def local(**changes) -> MediaPolicy:
    """A policy that allows everything on 127.0.0.1."""
    return MediaPolicy(**{"allowed_domains": ("*",), "allowed_networks": ("127.0.0.1/32",), **changes})


def fetch(url: str, policy: MediaPolicy = ANYWHERE, kind: Kind = "image") -> bytes:
    return asyncio.run(fetch_media(url, policy, kind))


def fetch_from(
    site: StubServer,
    policy: MediaPolicy,
    path: str = "/a.png",
    host: str = "127.0.0.1",
    scheme: str = "http",
    **options,
) -> bytes:
    async def main():
        async with site.running() as port:
            return await fetch_media(f"{scheme}://{host}:{port}{path}", policy, **options)

    return asyncio.run(main())
