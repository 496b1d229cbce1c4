"""A real server on a loopback port, in a thread, over the bundled model."""

import asyncio
import base64
import io
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
from fastapi import FastAPI

from mmvllm.async_llm import AsyncLLM
from mmvllm.cli.ports import listen
from mmvllm.server.app import build_app
from mmvllm.server.run import Server, make_server
from mmvllm.server.settings import ServerSettings
from tests.helpers.requests import noise_image

ENGINE = {"device": "cpu", "dtype": "float32", "num_kvcache_blocks": 512, "max_num_seqs": 8, "skip_warmup": True}


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True)
class Running:
    """A server that runs: where, and what is inside."""

    url: str
    engine: AsyncLLM
    server: Server
    thread: threading.Thread

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", int(self.url.rpartition(":")[2])

    def client(self, api_key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=60)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60)

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=20)


@contextmanager
def serving(engine: AsyncLLM, drain_seconds: float = 20.0, **settings) -> Iterator[Running]:
    """Ends as on a signal: what is in flight is finished, and the engine shut down."""
    app = build_app(engine, ServerSettings(model_names=("bundled",), **settings))
    told: list[str] = []
    is_ready = threading.Event()
    server = make_server(app, engine, drain_seconds, False, lambda url: (told.append(url), is_ready.set()))
    thread = threading.Thread(target=server.run, args=([listen("127.0.0.1", 0)],))
    thread.start()
    try:
        assert is_ready.wait(30)
        yield Running(told[0], engine, server, thread)
    finally:
        server.should_exit = True
        thread.join()


def call(app: FastAPI, method: str, path: str, **keys) -> httpx.Response:
    """One request to an application without a server around it."""

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **keys)

    return asyncio.run(send())


SCENES = sorted((Path(__file__).parents[2] / "examples" / "images").glob("scene-*.png"))


def data_uri(image: Path | bytes = SCENES[0]) -> str:
    data = image if isinstance(image, bytes) else image.read_bytes()
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def png(width: int, height: int, seed: int = 0) -> bytes:
    file = io.BytesIO()
    noise_image(width, height, seed).save(file, "PNG")
    return file.getvalue()


def image_part(url: str, **keys) -> dict:
    return {"type": "image_url", "image_url": {"url": url, **keys}}


def user(*parts: str | dict) -> dict:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"role": "user", "content": content}


def chat(*parts: str | dict, **keys) -> dict:
    """A request with one turn."""
    return {"model": "bundled", "messages": [user(*parts)], "temperature": 0, **keys}


LONG = chat("Describe this image.", max_tokens=1900, ignore_eos=True)  # on an unhurried engine, 19 s


def head(path: str, length: int | None, *lines: str) -> bytes:
    """The head of a POST request."""
    size = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    return "\r\n".join(
        (f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", size, *lines, "", "")
    ).encode()


def post(path: str, body: dict, *lines: str) -> bytes:
    """A whole POST request."""
    data = json.dumps(body).encode()
    return head(path, len(data), *lines) + data


def receive_until(connection: socket.socket, end: bytes = b"\r\n\r\n") -> bytes:
    """What comes until `end` has come, or the other side hangs up."""
    data = b""
    while end not in data and (chunk := connection.recv(65536)):
        data += chunk
    return data


def receive_all(connection: socket.socket) -> bytes:
    data = b""
    while chunk := connection.recv(65536):
        data += chunk
    return data


def error_of(answer: httpx.Response) -> dict:
    """The error in an answer, which must be in OpenAI's shape."""
    assert answer.headers["content-type"] == "application/json" and answer.json().keys() == {"error"}, answer.text
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"]
    return error


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Poll what another thread makes true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.005)


def is_idle(engine: AsyncLLM) -> bool:
    """Whether the engine has let go of every request."""
    stats = engine.stats()
    return not (stats.num_preparing or stats.num_waiting or stats.num_running or stats.num_used_blocks)
