"""Events of the page are limited by their size together, and by the sessions that they belong to."""

import asyncio
import json
from collections.abc import Callable

import pytest

from mmvllm.demo import route_filter as route_filter_module
from mmvllm.demo import session as session_module
from mmvllm.demo.route_filter import MAX_EVENT_BYTES, SMALL_EVENT_BYTES, DemoRouteFilter
from tests.demo.filtering import JOIN, Sent, client, filter_of, post, scope_of


@pytest.fixture
def route_filter(tmp_path) -> DemoRouteFilter:
    return filter_of(tmp_path)


@pytest.fixture
def joined(route_filter) -> Callable[..., int]:
    """The status of a join by a session, with a body of about this size."""

    def joined(session: str, num_bytes: int = 0) -> int:
        body = json.dumps({"fn_index": 5, "session_hash": session, "x": "x" * num_bytes}).encode()
        sent = Sent()
        asyncio.run(route_filter(post(JOIN, body), client(body), sent))
        return sent.statuses[0]

    return joined


def test_large_events_are_refused_while_those_that_run_are_many_bytes(joined, route_filter):
    assert joined("a", 500_000) == 200
    route_filter._results.count_event_bytes = lambda: MAX_EVENT_BYTES - 100_000
    assert joined("a", 50_000) == 200 and joined("a", 200_000) == 503
    route_filter._results.count_event_bytes = lambda: 2 * MAX_EVENT_BYTES
    assert joined("a", SMALL_EVENT_BYTES + 1) == 503 and joined("a", 100) == 200


def test_large_bodies_are_refused_while_those_that_arrive_are_many_bytes(route_filter, monkeypatch):
    monkeypatch.setattr(route_filter_module, "MAX_EVENT_BYTES", 250_000)

    async def status(num_bytes: int, receive=None) -> int | None:
        sent = Sent()
        scope = scope_of(JOIN, "POST", content_length=num_bytes)
        await route_filter(scope, receive or client(b"x" * num_bytes), sent)
        return sent.statuses[0] if sent else None

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

        announced = await start(50, 1)
        assert await status(100_000) == 400  # and not 503: it is no event
        slow = await start(2, 99_000)
        assert await status(100_000) == 503 and await status(100) == 400
        leaving.set()
        await asyncio.gather(*announced, *slow)
        assert await status(100_000) == 400

    asyncio.run(run())


def test_a_session_begins_with_its_first_event_so_that_sessions_are_limited(joined, route_filter, monkeypatch):
    monkeypatch.setattr(session_module, "MAX_SESSIONS", 3)
    sessions = route_filter._sessions
    with sessions.open_tab("a"), sessions.open_tab("b"):
        assert [joined(name) for name in "abcd"] == [200] * 4  # "c" is closed, and goes
        assert [*sessions._sessions] == ["a", "b", "d"]
        with sessions.open_tab("d"):
            assert joined("e") == 503 and joined("b") == 200
