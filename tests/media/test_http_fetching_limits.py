"""A host that sends too much is given up, and what a fetch holds is counted as it arrives."""

import asyncio
import threading

import pytest

from mmvllm.media.policy import MediaError
from tests.helpers.serving.web import StubServer, fetch_from, local

pytestmark = pytest.mark.network


def test_interim_responses_without_end_are_refused(network):
    async def blast(writer):
        while True:
            writer.write(b"HTTP/1.1 103 Early Hints\r\n\r\n" * 1000)
            await writer.drain()

    with pytest.raises(MediaError, match="its host sends more than 262144 bytes, most of which are not data"):
        fetch_from(StubServer({"/a.png": blast}), local())


def test_chunks_of_little_data_and_long_extensions_are_refused(network):
    async def blast(writer):
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            writer.write((b"40;" + b"x" * 60_000 + b"\r\n" + b"a" * 64 + b"\r\n") * 10)
            await writer.drain()

    with pytest.raises(MediaError, match="its host sends more than 2262144 bytes, most of which are not data"):
        fetch_from(StubServer({"/a.png": blast}), local(max_bytes=10**6))


def test_a_few_interim_responses_and_a_large_body_are_read(network):
    body = b"a" * 2**20

    async def respond(writer):
        writer.write(b"HTTP/1.1 103 Early Hints\r\n\r\n" * 3)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    assert fetch_from(StubServer({"/a.png": respond}), local()) == body


def test_bytes_are_counted_as_they_arrive(network):
    is_counted, counts = threading.Event(), []

    async def respond(writer):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 200\r\n\r\n" + b"a" * 100)
        assert await asyncio.to_thread(is_counted.wait, 20)
        writer.write(b"a" * 100)

    def count(num_bytes: int) -> None:
        counts.append(num_bytes)
        is_counted.set()

    assert fetch_from(StubServer({"/a.png": respond}), local(), count=count) == b"a" * 200
    assert counts == [100, 100]


def test_bytes_that_may_not_be_held_end_a_fetch(network):
    async def respond(writer):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 200\r\n\r\n" + b"a" * 100)
        await asyncio.sleep(60)

    def count(num_bytes: int) -> None:
        raise MemoryError(num_bytes)

    with pytest.raises(MemoryError, match="100"):
        fetch_from(StubServer({"/a.png": respond}), local(), count=count)
