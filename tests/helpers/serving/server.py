"""A real server with the bundled model, in a thread, and requests to it."""

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
from prometheus_client.parser import text_string_to_metric_families

from mmvllm.cli.ports import listen
from mmvllm.entrypoints.async_llm import AsyncLLM
from mmvllm.server.app import build_app
from mmvllm.server.common.served_models import ServedModels
from mmvllm.server.common.serving import Serving
from mmvllm.server.metrics.metrics import Metrics
from mmvllm.server.run import GracefulServer, make_server
from mmvllm.server.settings import ServerSettings
from tests.helpers.engine.requests import noise_image

ENGINE = {"device": "cpu", "dtype": "float32", "num_kvcache_blocks": 512, "max_num_seqs": 8, "skip_warmup": True}


openai.OpenAI(api_key="none").platform_headers()  # starts `uname` once; the first test that used a client would need it

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
RESPONSES, TOKENIZE = "/v1/responses", "/tokenize"


@dataclass(frozen=True)
class Running:
    """A running server: its URL, engine and thread."""

    url: str
    engine: AsyncLLM
    server: GracefulServer
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


def served(engine: AsyncLLM, model_names: tuple[str, ...] = ("bundled",), **settings) -> Serving:
    """What the routes of a server share, to make jobs without a server."""
    settings = ServerSettings(model_names=model_names, **settings)
    return Serving(engine, settings, ServedModels(engine, settings), Metrics(engine, settings), decoder=None)


@contextmanager
def serving(engine: AsyncLLM, drain_seconds: float = 20.0, **settings) -> Iterator[Running]:
    """Shuts down as on a signal: requests in flight are finished, then the engine is shut down."""
    app = make_app(engine, **settings)
    urls: list[str] = []
    is_ready = threading.Event()
    server = make_server(app, engine, drain_seconds, False, lambda url: (urls.append(url), is_ready.set()))
    thread = threading.Thread(target=server.run, args=([listen("127.0.0.1", 0)],))
    thread.start()
    try:
        assert is_ready.wait(30)
        yield Running(urls[0], engine, server, thread)
    finally:
        server.should_exit = True
        thread.join()


def make_app(engine: AsyncLLM, **settings) -> FastAPI:
    return build_app(engine, ServerSettings(model_names=("bundled",), **settings))


def call(app: FastAPI, method: str, path: str, **keys) -> httpx.Response:
    """One request to an application without a server."""

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **keys)

    return asyncio.run(send())


def answered(app: FastAPI, path: str, body: dict) -> dict:
    """The JSON of a successful response."""
    data = json.dumps(body).encode()  # ASCII, since a body may have lone surrogates
    answer = call(app, "POST", path, content=data, headers={"Content-Type": "application/json"})
    assert answer.status_code == 200, answer.text
    return answer.json()


def chunks_of(app, path: str, body: dict) -> list[dict]:
    events = call(app, "POST", path, json=body | {"stream": True}).text.strip().split("\n\n")
    assert events.pop() == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


SCENES = sorted((Path(__file__).parents[3] / "examples" / "images").glob("scene-*.png"))


def data_uri(image: Path | bytes = SCENES[0]) -> str:
    data = image if isinstance(image, bytes) else image.read_bytes()
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def png(width: int, height: int, seed: int = 0) -> bytes:
    file = io.BytesIO()
    noise_image(width, height, seed).save(file, "PNG")
    return file.getvalue()


def image_part(url: str, **keys) -> dict:
    return {"type": "image_url", "image_url": {"url": url, **keys}}


def video_uri(clip: Path | bytes) -> str:
    """A data URI, whose media type is not read: the format follows from the content."""
    data = clip if isinstance(clip, bytes) else clip.read_bytes()
    return f"data:video/mp4;base64,{base64.b64encode(data).decode()}"


def video_part(url: str, **options) -> dict:
    return {"type": "video_url", "video_url": {"url": url}, **options}


def user(*parts: str | dict) -> dict:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"role": "user", "content": content}


def chat(*parts: str | dict, **keys) -> dict:
    """A request with one turn."""
    return {"model": "bundled", "messages": [user(*parts)], "temperature": 0, **keys}


def completion(**keys) -> dict:
    """A request for a completion of one token."""
    return {"model": "bundled", "prompt": "Hello", "max_tokens": 1, **keys}


LONG = chat("Describe this image.", max_tokens=1900, ignore_eos=True)  # 19 s on a slowed engine


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
    """Receive up to and including `end`, or until the connection is closed."""
    data = b""
    while end not in data and (chunk := connection.recv(65536)):
        data += chunk
    return data


def receive_all(connection: socket.socket) -> bytes:
    data = b""
    while chunk := connection.recv(65536):
        data += chunk
    return data


def error_of(response: httpx.Response) -> dict:
    """The error of a response, which must be an OpenAI error object."""
    assert response.headers["content-type"] == "application/json" and response.json().keys() == {"error"}, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"]
    return error


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Poll a condition that another thread will make true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"the condition did not hold within {seconds:g} s"
        time.sleep(0.005)


def is_idle(engine: AsyncLLM) -> bool:
    """Whether the engine holds no request and no KV block."""
    stats = engine.stats()
    return not (stats.num_preparing or stats.num_waiting or stats.num_running or stats.num_used_blocks)


def metric_samples(app: FastAPI) -> dict[tuple, float]:
    """Values of /metrics by (name, *sorted labels)."""
    text = call(app, "GET", "/metrics").text
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
