"""Gradio makes one response at a time, however a client leaves, and gets the query that was checked."""

import asyncio
import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from starlette.types import Receive

from mmvllm.demo import route_filter as route_filter_module
from mmvllm.demo.route_filter import API, DemoRouteFilter
from mmvllm.demo.session import Sessions
from mmvllm.demo.settings import DemoSettings
from mmvllm.demo.uploads import Uploads
from mmvllm.media.policy import MediaPolicy
from tests.helpers.serving.demo import Work

BODY = json.dumps({"fn_index": 5, "session_hash": "a"}).encode()


async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})


@pytest.fixture
def route_filter(tmp_path) -> DemoRouteFilter:
    results = SimpleNamespace(
        num_unread=lambda session: 0,
        has_results=lambda session: session == "known",
        count_event_bytes=lambda: 0,
        being_sent=lambda *_: nullcontext(),
    )
    return DemoRouteFilter(app, Sessions(None, Uploads(tmp_path), DemoSettings(MediaPolicy())), {5}, results)


def scope_of(path: str, method: str, body: bytes = b"", **keys) -> dict:
    headers = [(b"content-length", str(len(body)).encode())] if method == "POST" else []
    return {
        "type": "http",
        "method": method,
        "path": path,
        "headers": headers,
        "app": None,
        "query_string": b"",
        **keys,
    }


JOIN = "/gradio_api/queue/join"


def client(body: bytes, leaves_after: float = 3600) -> Receive:
    """Return the `receive` of a client that sends a body and waits for the response."""
    pieces = [{"type": "http.request", "body": body}]

    async def receive():
        if not pieces:
            await asyncio.sleep(leaves_after)
        return pieces.pop() if pieces else {"type": "http.disconnect"}

    return receive


@pytest.mark.parametrize(
    ("path", "method"),
    [("/", "GET"), ("/", "HEAD"), ("/config", "GET"), ("/gradio_api/info", "GET"), (JOIN, "POST")],
)
@pytest.mark.parametrize("ends", ["read slowly", "fails"])
def test_gradio_makes_one_response_at_a_time_whoever_reads_it(path, method, ends, route_filter):
    work, started = Work(), []
    body = BODY if method == "POST" else b""

    async def slow(scope, receive, send):
        await work.do()
        if ends == "fails" and scope["number"] == 0:
            raise RuntimeError("of gradio")
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message):
        started.append(message)
        await asyncio.sleep(3600)

    async def visit():
        scope = scope_of(path, method, body)
        tasks = [asyncio.create_task(route_filter(scope | {"number": i}, client(body), send)) for i in range(5)]
        await asyncio.wait(tasks, timeout=0.05)
        tasks[1].cancel()
        late = asyncio.create_task(route_filter(scope | {"number": 9}, client(body), send))
        await asyncio.wait([late], timeout=0.05)
        for task in (*tasks, late):
            task.cancel()
        await asyncio.gather(*tasks, late, return_exceptions=True)

    route_filter.app = slow
    asyncio.run(visit())
    assert work.peak == 1 and [message["status"] for message in started] == [200] * (5 if ends == "fails" else 6)


def test_a_handler_that_takes_long_does_not_keep_the_turn(route_filter):

    async def endless(scope, receive, send):
        await asyncio.sleep(3600)

    async def send(message):
        assert message["status"] == 200

    async def visit():
        route_filter.app = endless
        scope = scope_of("/gradio_api/run/ask", "POST", BODY)
        task = asyncio.create_task(route_filter(scope, client(BODY), None))
        await asyncio.sleep(0.01)
        route_filter.app = app
        await asyncio.wait_for(route_filter(scope | {"path": JOIN}, client(BODY), send), 5)
        task.cancel()

    asyncio.run(visit())


@pytest.mark.parametrize(("path", "method"), [("/", "GET"), ("/config", "GET"), (JOIN, "POST")])
def test_a_client_that_has_gone_gives_up_its_turn(path, method, route_filter):
    """One that asks and leaves, again and again, would keep the page from everyone else."""
    served, body = [], BODY if method == "POST" else b""

    async def slow(scope, receive, send):
        served.append(scope["number"])
        await asyncio.sleep(0.05)
        assert (await receive())["type"] == "http.request"
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message):
        pass

    async def visit():
        scope = scope_of(path, method, body)
        stays = [(0, 3600), *((number, 0.0) for number in range(1, 100)), (100, 3600)]
        tasks = [route_filter(scope | {"number": number}, client(body, leaves), send) for number, leaves in stays]
        await asyncio.wait_for(asyncio.gather(*tasks), 5)

    route_filter.app = slow
    asyncio.run(visit())
    assert served == [0, 100] and not any(turns.lock.locked() for turns in (route_filter._pages, route_filter._joins))


def test_a_client_that_is_cancelled_while_it_waits_leaves_no_turn_taken(route_filter):
    async def visit():
        await route_filter._pages.lock.acquire()
        task = asyncio.create_task(route_filter(scope_of("/", "GET"), client(b""), None))
        await asyncio.sleep(0.01)
        route_filter._pages.lock.release()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.wait_for(route_filter._pages.lock.acquire(), 5)

    asyncio.run(visit())


@pytest.mark.parametrize(("size", "waits"), [(10, False), (route_filter_module.SMALL_BODY + 1, True)])
def test_only_a_large_body_waits_for_a_turn_to_be_looked_at(size, waits, route_filter):
    body = json.dumps({"fn_index": 5, "session_hash": "a", "data": "x" * size}).encode()
    statuses = []

    async def send(message):
        statuses.append(message.get("status"))

    async def visit():
        await route_filter._large_joins.lock.acquire()
        stop = route_filter(scope_of("/gradio_api/run/stop", "POST", body), client(body), send)
        with pytest.raises(TimeoutError) if waits else nullcontext():
            await asyncio.wait_for(stop, 0.2)

    asyncio.run(visit())
    assert statuses == ([] if waits else [200])


def test_small_events_do_not_wait_for_large_ones_which_count_until_gradio_has_them(route_filter, monkeypatch):
    monkeypatch.setattr(route_filter_module, "MAX_EVENT_BYTES", 4 * route_filter_module.SMALL_BODY)
    large = json.dumps({"fn_index": 5, "session_hash": "a", "data": "x" * route_filter_module.SMALL_BODY}).encode()
    statuses = []

    async def send(message):
        if "status" in message:
            statuses.append(message["status"])

    async def visit():
        await route_filter._large_joins.lock.acquire()
        waiting = [asyncio.create_task(route_filter(scope_of(JOIN, "POST", large), client(large), send)) for _ in "abc"]
        await asyncio.sleep(0.01)
        await asyncio.wait_for(route_filter(scope_of(JOIN, "POST", BODY), client(BODY), send), 5)
        await asyncio.wait_for(route_filter(scope_of(JOIN, "POST", large), client(large), send), 5)
        assert statuses == [200, 503]
        route_filter._large_joins.lock.release()
        await asyncio.gather(*waiting)
        await route_filter(scope_of(JOIN, "POST", large), client(large), send)

    asyncio.run(visit())
    assert statuses == [200, 503] + [200] * 4


def test_a_handler_that_times_out_is_not_taken_for_a_late_body(route_filter):
    sent = []

    async def failing(scope, receive, send):
        await app(scope, receive, send)
        raise TimeoutError

    async def send(message):
        sent.append(message)

    route_filter.app = failing
    for path in (JOIN, "/gradio_api/run/stop"):
        with pytest.raises(TimeoutError):
            asyncio.run(route_filter(scope_of(path, "POST", BODY), client(BODY), send))
    assert [message["status"] for message in sent] == [200, 200]


def test_the_page_itself_does_not_wait_for_events(route_filter):
    statuses = []

    async def send(message):
        statuses.append(message["status"])

    async def visit():
        await route_filter._joins.lock.acquire()
        await asyncio.wait_for(route_filter(scope_of("/", "GET"), client(b""), send), 5)

    asyncio.run(visit())
    assert statuses == [200]


@pytest.mark.parametrize("query", [b"session_hash=nosuch", b"", b"session_hash=%ff&session_hash=known", b"a=b"])
def test_results_of_a_session_that_is_not_known_are_a_complete_response(query, route_filter):
    sent = []

    async def send(message):
        sent.append(message)

    route_filter.app = None
    asyncio.run(route_filter(scope_of("/gradio_api/queue/data", "GET", query_string=query), client(b""), send))
    assert b'"session_not_found":true' in sent[-1]["body"] and not sent[-1].get("more_body")
    assert (b"content-type", b"text/event-stream; charset=utf-8") in sent[0]["headers"]


@pytest.mark.parametrize("error", [RuntimeError, KeyError])
def test_results_of_a_session_that_is_forgotten_end(error, route_filter):
    sent = []

    async def forgotten(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"data: {}", "more_body": True})
        raise error

    async def send(message):
        sent.append(message)

    route_filter.app = forgotten
    scope = scope_of("/gradio_api/queue/data", "GET", query_string=b"session_hash=known")
    asyncio.run(route_filter(scope, client(b""), send))
    assert sent[-1] == {"type": "http.response.body", "body": b""}


def queries_of(route_filter: DemoRouteFilter, path: str, method: str, query: bytes) -> list[bytes]:
    """Those that gradio gets."""
    seen = []

    async def noting(scope, receive, send):
        seen.append(scope["query_string"])
        await app(scope, receive, send)

    async def send(_message):
        pass

    route_filter.app, route_filter._results.forget_upload = noting, lambda _: None
    route_filter._results.has_results = lambda session: True
    scope = scope_of(path, method, b"--", query_string=query)
    scope["headers"].append((b"content-type", b"multipart/form-data; boundary=x"))
    asyncio.run(route_filter(scope, client(b"--"), send))
    return seen


@pytest.mark.parametrize(
    "path", ["/", "/demo/", "/config", *(API + name for name in ("info", "theme.css", "queue/data"))]
)
def test_gradio_gets_no_query_but_of_its_routes(path, route_filter):
    assert queries_of(route_filter, path, "GET", b"page=/&deep_link=%ff") == [b""]


@pytest.mark.parametrize(
    ("path", "name"),
    [("upload", "upload_id"), ("upload_progress", "upload_id"), ("queue/data", "session_hash")],
)
@pytest.mark.parametrize("others", ["&{}=other", "&{}=" + "x" * 9000, "&page=/", "&a=b&{}=%ff"], ids=len)
def test_gradio_gets_the_value_that_was_checked(path, name, others, route_filter):
    """Gradio takes the last value of a name that a query has several times."""
    query = f"{name}=plain{others.format(name)}".encode()
    method = "POST" if path == "upload" else "GET"
    assert queries_of(route_filter, API + path, method, query) == [f"{name}=plain".encode()]
