"""Clients that stall, disconnect, or send malformed or excessive data, over raw sockets."""

import asyncio
import contextlib
import json
import socket
import struct
import threading
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mmvllm.entrypoints.async_llm import AsyncLLM
from mmvllm.server.http import auth_and_limits, parser, sse
from mmvllm.server.http import connection as connection_module
from tests.helpers.engine.engines import slow_steps
from tests.helpers.needs import needs
from tests.helpers.serving.server import (
    CHAT,
    COMPLETIONS,
    ENGINE,
    LONG,
    RESPONSES,
    SCENES,
    TOKENIZE,
    chat,
    data_uri,
    head,
    image_part,
    is_idle,
    post,
    receive_all,
    receive_until,
    serving,
    wait_for,
)

MAX_BODY = 1 << 20
BRIEF = {"model": "bundled", "prompt": "Hello", "max_tokens": 2}


@pytest.fixture(scope="module")
@needs("network")
def running():
    with serving(slow_steps(AsyncLLM(**ENGINE)), max_body_bytes=MAX_BODY) as running:
        yield running


@pytest.fixture
def connection(running):
    with running.connect() as connection:
        yield connection


@pytest.fixture
def brief_linger(monkeypatch):
    """For clients that send nothing after they were refused."""
    monkeypatch.setattr(auth_and_limits, "LINGER_SECONDS", 0.1)


END_OF_COMPLETION = b'"system_fingerprint":null}'


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def count_of(running, path: str, code: int) -> float:
    for family in text_string_to_metric_families(running.get("/metrics").text):
        for sample in family.samples:
            if sample.name == "mmvllm_http_responses_total" and sample.labels == {"path": path, "status": str(code)}:
                return sample.value
    return 0.0


@pytest.mark.spawns
@pytest.mark.parametrize("begun", [b"", b"POST /v1/chat/comp", b"POST / HTTP/1.1\r\nHost: x\r\nX-Slow: "])
def test_an_incomplete_head_times_out(running, monkeypatch, begun):
    monkeypatch.setattr(connection_module, "HEADER_SECONDS", 0.5)
    start, is_closed = time.monotonic(), False
    with contextlib.suppress(OSError), running.connect() as connection:
        connection.sendall(begun)
        connection.settimeout(0.1)
        while not is_closed and time.monotonic() < start + 20:  # single bytes do not extend the timeout
            connection.sendall(b"x" if begun else b"")
            with contextlib.suppress(TimeoutError):
                is_closed = not connection.recv(1)
    assert 0.5 <= time.monotonic() - start < 20


def test_an_incomplete_head_of_a_second_request_times_out(connection, monkeypatch):
    connection.sendall(post(COMPLETIONS, BRIEF))
    assert status(receive_until(connection, END_OF_COMPLETION)) == 200
    monkeypatch.setattr(connection_module, "HEADER_SECONDS", 0.5)
    start = time.monotonic()
    connection.sendall(b"POST /v1")
    assert connection.recv(1) == b""
    assert time.monotonic() - start >= 0.5


@pytest.mark.network
@pytest.mark.spawns
def test_a_body_that_stalls_gets_408(brief_linger):
    with serving(AsyncLLM(**ENGINE), body_timeout=0.5) as running, running.connect() as connection:
        connection.sendall(head(CHAT, 1000) + b'{"model"')
        answer = receive_all(connection)
    assert status(answer) == 408 and b"did not arrive within 0.5 seconds" in answer
    assert b"connection: close" in answer.lower()


@pytest.mark.parametrize("lines", [[], ["Expect: 100-continue"]])
def test_a_content_length_over_the_limit_is_refused_unread(connection, brief_linger, lines):
    connection.sendall(head(CHAT, 1 << 30, *lines))
    answer = receive_all(connection)
    assert status(answer) == 413 and b"at most 1048576 bytes" in answer


@pytest.mark.parametrize("content_length", [None, 1 << 30], ids=["chunked", "content-length"])
def test_reading_a_too_large_body_stops_at_the_limit(connection, content_length):
    piece = b" " * 65536
    chunk = piece if content_length else b"10000\r\n" + piece + b"\r\n"
    connection.sendall(head(CHAT, content_length))
    sent = 0
    with contextlib.suppress(OSError):
        while sent < 1 << 30:
            connection.sendall(chunk)
            sent += len(piece)
    # Bytes in the buffers of the sockets count as sent.
    assert sent < MAX_BODY + auth_and_limits.LINGER_BYTES + (32 << 20)


def test_a_client_that_sends_the_whole_body_first_receives_the_error(connection):
    connection.sendall(head(CHAT, 2 * MAX_BODY) + b" " * 2 * MAX_BODY)
    assert status(receive_all(connection)) == 413


def test_malformed_data_after_the_response_has_started_is_not_logged(connection, caplog):
    size = 2 * MAX_BODY
    connection.sendall(head(CHAT, None) + b"%x\r\n" % size + b" " * size)
    assert status(receive_until(connection)) == 413
    with contextlib.suppress(OSError):
        connection.sendall(b"zz\r\n")
        receive_all(connection)
    assert not caplog.records


@pytest.mark.parametrize("size", [1, 64, 200])
def test_a_body_of_too_many_small_chunks_is_refused(connection, size, caplog):
    chunk = b"%x\r\n%s\r\n" % (size, b" " * size)
    with contextlib.suppress(OSError):
        connection.sendall(head(COMPLETIONS, None) + chunk * (parser.MAX_SMALL_CHUNKS + 1))
    assert status(receive_all(connection)) == 400 and not caplog.records


def test_a_body_of_many_small_chunks_is_accepted(connection):
    data = json.dumps(BRIEF).encode()
    body = b"".join(b"1\r\n%c\r\n" % byte for byte in data + b" " * (parser.MAX_SMALL_CHUNKS - len(data)))
    connection.sendall(head(COMPLETIONS, None, "Connection: close") + body + b"0\r\n\r\n")
    assert status(receive_all(connection)) == 200


@pytest.mark.essential(2)
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("resets", [False, True], ids=["closes", "resets"])
def test_a_disconnect_aborts_the_request(running, streams, resets):
    before = count_of(running, CHAT, 499)
    with running.connect() as connection:
        connection.sendall(post(CHAT, LONG | {"stream": streams}))
        if streams:
            receive_until(connection, b'"content":"A')
        wait_for(lambda: running.engine.stats().num_running == 1)
        if resets:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wait_for(lambda: is_idle(running.engine), 10)  # much earlier than the completion would end
    wait_for(lambda: count_of(running, CHAT, 499) == before + 1)


@pytest.mark.parametrize(
    ("path", "body"), [(TOKENIZE, {"prompt": "Hi"}), (f"{RESPONSES}/input_tokens", {"input": "Hi"})]
)
def test_a_disconnect_ends_the_work_for_a_count_of_tokens(running, monkeypatch, path, body):
    begun, ended = threading.Event(), threading.Event()

    async def tokenize(*_, **__):
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    monkeypatch.setattr(running.engine, "tokenize", tokenize)
    before = count_of(running, path, 499)
    with running.connect() as connection:
        connection.sendall(post(path, body))
        assert begun.wait(20)
    assert ended.wait(10)
    wait_for(lambda: count_of(running, path, 499) == before + 1)


def test_a_disconnect_in_the_body_leaves_no_request(running):
    before = count_of(running, CHAT, 499)
    with running.connect() as connection:
        connection.sendall(post(CHAT, chat(image_part(data_uri(SCENES[0]))))[:-10])
    wait_for(lambda: count_of(running, CHAT, 499) == before + 1)
    assert is_idle(running.engine)


def test_a_disconnect_after_a_refusal_is_counted_as_the_refusal(running):
    before = count_of(running, CHAT, 413), count_of(running, CHAT, 499)
    with running.connect() as connection:
        connection.sendall(head(CHAT, 1 << 30))
        assert status(receive_until(connection, b"}}")) == 413
    wait_for(lambda: count_of(running, CHAT, 413) == before[0] + 1)
    assert count_of(running, CHAT, 499) == before[1]


def test_several_prompts_are_aborted_together(running):
    with running.connect() as connection:
        body = {"model": "bundled", "prompt": ["Hello", "a", "b"], "n": 2, "max_tokens": 1900, "ignore_eos": True}
        connection.sendall(post(COMPLETIONS, body))
        wait_for(lambda: running.engine.stats().num_running == 6)
    wait_for(lambda: is_idle(running.engine), 10)  # much earlier than the completions would end


def test_a_body_in_several_packets_is_joined(connection):
    for piece in (request := post(COMPLETIONS, BRIEF, "Connection: close"))[:40], request[40:-5], request[-5:]:
        connection.sendall(piece)
        time.sleep(0.02)
    assert status(receive_all(connection)) == 200


def test_a_stream_has_the_right_headers_and_events(connection):
    connection.sendall(post(CHAT, chat("Hello", stream=True, max_tokens=3), "Connection: close"))
    answer_head, _, rest = receive_all(connection).partition(b"\r\n\r\n")
    lines = answer_head.lower().split(b"\r\n")
    assert b"content-type: text/event-stream; charset=utf-8" in lines
    assert b"cache-control: no-cache" in lines and b"x-accel-buffering: no" in lines
    events = [line for line in rest.decode().splitlines() if line.startswith("data: ")]
    assert events[-1] == "data: [DONE]"
    assert all(json.loads(event[6:])["object"] == "chat.completion.chunk" for event in events[:-1])


def test_an_idle_stream_is_kept_alive_with_comments(monkeypatch):
    monkeypatch.setattr(sse, "PING_SECONDS", 0.02)
    sent = []

    async def stay_idle():
        async with sse.EventStream(send):
            while len(sent) < 4:
                await asyncio.sleep(0.01)

    async def send(message):
        sent.append(message.get("body"))

    asyncio.run(asyncio.wait_for(stay_idle(), 20))
    assert sent[0] is None and set(sent[1:-1]) == {b": ping\n\n"} and sent[-1] == b""


def test_no_comment_is_within_an_event_that_is_read_slowly(monkeypatch):
    monkeypatch.setattr(sse, "PING_SECONDS", 0.01)
    sent = []

    async def send(message):
        for at in range(0, len(message.get("body", b"")), 4):
            await asyncio.sleep(0.02)
            sent.append(message["body"][at : at + 4])

    async def write() -> None:
        async with sse.EventStream(send) as events:
            for _ in range(3):
                await events.data("a" * 20)
                await asyncio.sleep(0.05)

    asyncio.run(write())
    text = b"".join(sent).decode()
    assert text.replace(": ping\n\n", "") == f"data: {'a' * 20}\n\n" * 3 and ": ping" in text


def test_a_stream_that_nobody_reads_takes_no_time(monkeypatch):
    monkeypatch.setattr(sse, "PING_SECONDS", 0.01)
    waits, sleep = [], asyncio.sleep

    async def counted(seconds: float) -> None:
        waits.append(seconds)
        await sleep(seconds)

    async def write() -> None:
        async with sse.EventStream(lambda _: sleep(0.3)) as events:
            await events.data("a")

    monkeypatch.setattr(sse.asyncio, "sleep", counted)
    asyncio.run(write())
    assert len(waits) < 20


def with_small_buffers(running) -> socket.socket:
    """The only connection to a server, whose client and server wait for each other after a few kilobytes."""
    connections = running.server.server_state.connections
    wait_for(lambda: not connections)  # earlier tests may have left some
    connection = running.connect()
    wait_for(lambda: len(connections) == 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    next(iter(connections)).transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)
    return connection


@pytest.mark.parametrize(
    "requests",
    [
        b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 20,
        post(CHAT, LONG | {"stream": True}),
        post(COMPLETIONS, BRIEF | {"max_tokens": 30, "n": 4, "logprobs": 20, "ignore_eos": True}),
    ],
    ids=["pipelined", "stream", "whole"],
)
def test_a_client_that_does_not_read_is_disconnected(running, requests, caplog, monkeypatch):
    monkeypatch.setattr(connection_module, "STALL_SECONDS", 0.5)
    connections = running.server.server_state.connections
    connection = with_small_buffers(running)
    connection.sendall(requests)
    wait_for(lambda: not connections)
    wait_for(lambda: is_idle(running.engine))
    connection.close()
    assert not caplog.records


@pytest.mark.parametrize("path", [COMPLETIONS, "/openapi.json"])
def test_a_client_that_reads_too_slowly_is_disconnected(path, running, monkeypatch):
    """It would keep the bytes of its request and of the response for as long as it likes."""
    monkeypatch.setattr(connection_module, "STALL_SECONDS", 1.0)
    for name in ("MIN_BYTES_PER_SECOND", "MIN_COUNTED_BYTES_PER_SECOND"):
        monkeypatch.setattr(connection_module, name, 1e9)
    connections = running.server.server_state.connections
    connection = with_small_buffers(running)
    body = BRIEF | {"max_tokens": 200, "n": 16, "logprobs": 20, "ignore_eos": True, "stop": ["never there"]}
    connection.sendall(post(path, body) if path == COMPLETIONS else f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    begin = time.monotonic()
    with contextlib.suppress(OSError):
        while connections and time.monotonic() < begin + 60:
            connection.recv(500)
            time.sleep(0.1)
    assert time.monotonic() < begin + 60
    wait_for(lambda: is_idle(running.engine))
    connection.close()


def test_writes_to_a_client_that_hung_up_are_not_logged(caplog):
    async def write_to_nobody() -> None:
        ours, theirs = socket.socketpair()
        transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=ours)
        theirs.close()
        for _ in range(20):  # without a pause in which asyncio could tell the protocol
            connection_module.OpenTransport(transport).write(b"data: {}\n\n")
        transport.close()

    asyncio.run(write_to_nobody())
    assert caplog.records == []
