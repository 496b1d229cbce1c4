"""What does not come through to gradio."""

import asyncio

import pytest

from mmvllm.demo import uploads as uploads_module
from mmvllm.demo.gate import MAX_BODY_BYTES, Gate
from mmvllm.demo.uploads import Uploads


@pytest.fixture
def gate(tmp_path, monkeypatch) -> Gate:
    monkeypatch.setattr(uploads_module, "MAX_BYTES", 2 * MAX_BODY_BYTES)

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})

    return Gate(app, Uploads(tmp_path))


def status(gate: Gate, path: str, method: str = "POST", **headers) -> int:
    """What a request is answered with; 200 is what the app behind the gate would say."""
    sent = []

    async def send(message):
        sent.append(message)

    raw = [(name.replace("_", "-").encode(), str(value).encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": method, "path": path, "headers": raw}
    asyncio.run(gate(scope, None, send))
    return sent[0]["status"]


@pytest.mark.parametrize("prefix", ["", "/demo"])
@pytest.mark.parametrize(
    "path, want",
    [
        ("/", 200),
        ("/config", 200),
        ("/gradio_api/queue/data", 200),
        ("/gradio_api/heartbeat/abc", 200),
        ("/gradio_api/file=/tmp/a.png", 200),
        ("/gradio_api/file=https://example.com/a.png", 404),
        ("/gradio_api/file=//example.com/a.png", 200),  # the path of a file to gradio
        ("/gradio_api/file/etc/hostname", 404),
        ("/gradio_api/process_recording", 404),
        ("/gradio_api/component_server", 404),
        ("/gradio_api/deep_link", 404),
    ],
)
def test_only_what_the_page_asks_for_comes_through(prefix, path, want, gate):
    assert status(gate, prefix + path, "GET") == want


def test_what_is_no_upload_is_short(gate):
    for path in ("/login", "/gradio_api/queue/join", "/gradio_api/run/stop"):
        assert status(gate, path, content_length=MAX_BODY_BYTES) == 200
        assert status(gate, path, content_length=MAX_BODY_BYTES + 1) == 413


def test_a_body_of_unknown_length_is_refused(gate):
    for path in ("/gradio_api/upload", "/gradio_api/queue/join"):
        assert status(gate, path) == status(gate, path, content_length="x") == 411
        assert status(gate, path, content_length=1, transfer_encoding="chunked") == 411


def test_an_upload_comes_through_while_there_is_room(gate):
    assert status(gate, "/gradio_api/upload", content_length=2 * MAX_BODY_BYTES) == 200
    assert status(gate, "/gradio_api/upload", content_length=2 * MAX_BODY_BYTES + 1) == 507
