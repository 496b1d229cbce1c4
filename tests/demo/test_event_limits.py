"""Events of the page are limited by their size together, and by the sessions that they belong to."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from mmvllm.demo import route_filter as route_filter_module
from mmvllm.demo import session as session_module
from mmvllm.demo.route_filter import MAX_EVENT_BYTES, SMALL_EVENT_BYTES, DemoRouteFilter
from mmvllm.demo.session import Sessions
from mmvllm.demo.settings import DemoSettings
from mmvllm.demo.uploads import Uploads
from mmvllm.media.policy import MediaPolicy

JOIN = "/gradio_api/queue/join"


async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})


@pytest.fixture
def results() -> SimpleNamespace:
    results = SimpleNamespace(num_unread=lambda session: 0, has_results=lambda session: True, num_event_bytes=0)
    results.count_event_bytes = lambda: results.num_event_bytes
    return results


@pytest.fixture
def sessions(tmp_path) -> Sessions:
    return Sessions(None, Uploads(tmp_path), DemoSettings(MediaPolicy()))


@pytest.fixture
def joined(sessions, results):
    """The status of a join by a session, with a body of about this size."""
    route_filter = DemoRouteFilter(app, sessions, {5}, results)

    def joined(session: str, num_bytes: int = 0) -> int:
        body = json.dumps({"fn_index": 5, "session_hash": session, "x": "x" * num_bytes}).encode()
        sent, pieces = [], [{"type": "http.request", "body": body}]

        async def receive():
            return pieces.pop() if pieces else await asyncio.sleep(3600)

        async def send(message):
            sent.append(message)

        headers = [(b"content-length", str(len(body)).encode())]
        scope = {"type": "http", "method": "POST", "path": JOIN, "headers": headers, "app": None, "query_string": b""}
        asyncio.run(route_filter(scope, receive, send))
        return sent[0]["status"]

    return joined


def test_large_events_are_refused_while_those_that_run_are_many_bytes(joined, results):
    assert joined("a", 500_000) == 200
    results.num_event_bytes = MAX_EVENT_BYTES - 100_000
    assert joined("a", 50_000) == 200 and joined("a", 200_000) == 503
    results.num_event_bytes = 2 * MAX_EVENT_BYTES
    assert joined("a", SMALL_EVENT_BYTES + 1) == 503 and joined("a", 100) == 200


def test_large_bodies_are_refused_while_those_that_arrive_are_many_bytes(sessions, results, monkeypatch):
    monkeypatch.setattr(route_filter_module, "MAX_EVENT_BYTES", 250_000)
    route_filter = DemoRouteFilter(app, sessions, {5}, results)

    async def status(num_bytes: int, receive) -> int:
        sent, headers = [], [(b"content-length", str(num_bytes).encode())]

        async def send(message):
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": JOIN, "headers": headers, "app": None, "query_string": b""}
        await route_filter(scope, receive, send)
        return sent[0]["status"] if sent else 0

    async def run() -> None:
        leaving = asyncio.Event()

        def slow_after(num_bytes: int):
            pieces = [b"x" * num_bytes]

            async def receive():
                if pieces:
                    return {"type": "http.request", "body": pieces.pop(), "more_body": True}
                await leaving.wait()
                return {"type": "http.disconnect"}

            return receive

        async def start(number: int, num_bytes: int) -> list[asyncio.Task]:
            tasks = [asyncio.create_task(status(100_000, slow_after(num_bytes))) for _ in range(number)]
            await asyncio.sleep(0.01)
            return tasks

        def at_once(num_bytes: int):
            async def receive():
                return {"type": "http.request", "body": b"x" * num_bytes}

            return receive

        announced = await start(50, 1)
        assert await status(100_000, at_once(100_000)) == 400  # and not 503: it is no event
        slow = await start(2, 99_000)
        assert await status(100_000, at_once(100_000)) == 503 and await status(100, at_once(100)) == 400
        leaving.set()
        await asyncio.gather(*announced, *slow)
        assert await status(100_000, at_once(100_000)) == 400

    asyncio.run(run())


def test_a_login_is_waited_for_a_shorter_time(sessions, results, monkeypatch):
    monkeypatch.setattr(route_filter_module, "LOGIN_SECONDS", 0)
    sent = []

    async def receive():
        await asyncio.sleep(3600)

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/login", "headers": [(b"content-length", b"9")], "app": None}
    asyncio.run(DemoRouteFilter(app, sessions, {5}, results)(scope | {"query_string": b""}, receive, send))
    assert sent[0]["status"] == 408


def test_a_session_begins_with_its_first_event_so_that_sessions_are_limited(joined, sessions, monkeypatch):
    monkeypatch.setattr(session_module, "MAX_SESSIONS", 3)
    with sessions.open_tab("a"), sessions.open_tab("b"):
        assert [joined(name) for name in "abcd"] == [200] * 4  # "c" is closed, and goes
        assert [*sessions._sessions] == ["a", "b", "d"]
        with sessions.open_tab("d"):
            assert joined("e") == 503 and joined("b") == 200
