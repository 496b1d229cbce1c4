"""Gradio makes one response at a time, however a client leaves, and gets the query that was checked."""

import asyncio
import json
from contextlib import nullcontext

import pytest

from mmvllm.demo import route_filter as route_filter_module
from mmvllm.demo.route_filter import API, DemoRouteFilter
from tests.demo.filtering import JOIN, Sent, app, client, filter_of, post, scope_of
from tests.helpers.serving.demo import Work

BODY = json.dumps({"fn_index": 5, "session_hash": "a"}).encode()


@pytest.fixture
def route_filter(tmp_path) -> DemoRouteFilter:
    return filter_of(tmp_path, has_results=lambda session: session == "known")


def request(path: str, method: str) -> tuple[dict, bytes]:
    """A request with its body."""
    return (post(path, BODY), BODY) if method == "POST" else (scope_of(path, method), b"")


@pytest.mark.parametrize(
    ("path", "method"),
    [("/", "GET"), ("/", "HEAD"), ("/config", "GET"), ("/gradio_api/info", "GET"), (JOIN, "POST")],
)
@pytest.mark.parametrize("ends", ["read slowly", "fails"])
def test_gradio_makes_one_response_at_a_time_whoever_reads_it(path, method, ends, route_filter):
    work, started = Work(), []
    scope, body = request(path, method)

    async def slow(scope, receive, send):
        await work.do()
        if ends == "fails" and scope["number"] == 0:
            raise RuntimeError("of gradio")
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message):
        started.append(message)
        await asyncio.sleep(3600)

    async def visit():
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
    sent = Sent()

    async def endless(scope, receive, send):
        await asyncio.sleep(3600)

    async def visit():
        route_filter.app = endless
        task = asyncio.create_task(route_filter(post("/gradio_api/run/ask", BODY), client(BODY), None))
        await asyncio.sleep(0.01)
        route_filter.app = app
        await asyncio.wait_for(route_filter(post(JOIN, BODY), client(BODY), sent), 5)
        task.cancel()

    asyncio.run(visit())
    assert sent.statuses == [200]


@pytest.mark.parametrize(("path", "method"), [("/", "GET"), ("/config", "GET"), (JOIN, "POST")])
def test_a_client_that_has_gone_gives_up_its_turn(path, method, route_filter):
    """One that asks and leaves, again and again, would keep the page from everyone else."""
    served, (scope, body) = [], request(path, method)

    async def slow(scope, receive, send):
        served.append(scope["number"])
        await asyncio.sleep(0.05)
        assert (await receive())["type"] == "http.request"
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def visit():
        stays = [(0, 3600), *((number, 0.0) for number in range(1, 100)), (100, 3600)]
        tasks = [route_filter(scope | {"number": number}, client(body, leaves), Sent()) for number, leaves in stays]
        await asyncio.wait_for(asyncio.gather(*tasks), 5)

    route_filter.app = slow
    asyncio.run(visit())
    assert served == [0, 100] and not any(turns.lock.locked() for turns in (route_filter._pages, route_filter._joins))


def test_a_client_that_is_cancelled_while_it_waits_leaves_no_turn_taken(route_filter):
    async def visit():
        await route_filter._pages.lock.acquire()
        task = asyncio.create_task(route_filter(scope_of("/"), client(), None))
        await asyncio.sleep(0.01)
        route_filter._pages.lock.release()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.wait_for(route_filter._pages.lock.acquire(), 5)

    asyncio.run(visit())


@pytest.mark.parametrize(("size", "waits"), [(10, False), (route_filter_module.SMALL_BODY + 1, True)])
def test_only_a_large_body_waits_for_a_turn_to_be_looked_at(size, waits, route_filter):
    body = json.dumps({"fn_index": 5, "session_hash": "a", "data": "x" * size}).encode()
    sent = Sent()

    async def visit():
        await route_filter._large_joins.lock.acquire()
        stop = route_filter(post("/gradio_api/run/stop", body), client(body), sent)
        with pytest.raises(TimeoutError) if waits else nullcontext():
            await asyncio.wait_for(stop, 0.2)

    asyncio.run(visit())
    assert sent.statuses == ([] if waits else [200])


def test_small_events_do_not_wait_for_large_ones_which_count_until_gradio_has_them(route_filter, monkeypatch):
    monkeypatch.setattr(route_filter_module, "MAX_EVENT_BYTES", 4 * route_filter_module.SMALL_BODY)
    large = json.dumps({"fn_index": 5, "session_hash": "a", "data": "x" * route_filter_module.SMALL_BODY}).encode()
    sent = Sent()

    async def join(body: bytes) -> None:
        await route_filter(post(JOIN, body), client(body), sent)

    async def visit():
        await route_filter._large_joins.lock.acquire()
        waiting = [asyncio.create_task(join(large)) for _ in "abc"]
        await asyncio.sleep(0.01)
        await asyncio.wait_for(join(BODY), 5)
        await asyncio.wait_for(join(large), 5)
        assert sent.statuses == [200, 503]
        route_filter._large_joins.lock.release()
        await asyncio.gather(*waiting)
        await join(large)

    asyncio.run(visit())
    assert sent.statuses == [200, 503] + [200] * 4


def test_a_handler_that_times_out_is_not_taken_for_a_late_body(route_filter):
    sent = Sent()

    async def failing(scope, receive, send):
        await app(scope, receive, send)
        raise TimeoutError

    route_filter.app = failing
    for path in (JOIN, "/gradio_api/run/stop"):
        with pytest.raises(TimeoutError):
            asyncio.run(route_filter(post(path, BODY), client(BODY), sent))
    assert sent.statuses == [200, 200]


def test_the_page_itself_does_not_wait_for_events(route_filter):
    sent = Sent()

    async def visit():
        await route_filter._joins.lock.acquire()
        await asyncio.wait_for(route_filter(scope_of("/"), client(), sent), 5)

    asyncio.run(visit())
    assert sent.statuses == [200]


@pytest.mark.parametrize("query", [b"session_hash=unknown", b"", b"session_hash=%ff&session_hash=known", b"a=b"])
def test_results_of_a_session_that_is_not_known_are_a_complete_response(query, route_filter):
    sent, route_filter.app = Sent(), None
    asyncio.run(route_filter(scope_of("/gradio_api/queue/data", query=query), client(), sent))
    assert b'"session_not_found":true' in sent[-1]["body"] and not sent[-1].get("more_body")
    assert (b"content-type", b"text/event-stream; charset=utf-8") in sent[0]["headers"]


@pytest.mark.parametrize("error", [RuntimeError, KeyError])
def test_results_of_a_session_that_is_forgotten_end(error, route_filter):
    sent = Sent()

    async def forgotten(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"data: {}", "more_body": True})
        raise error

    route_filter.app = forgotten
    scope = scope_of("/gradio_api/queue/data", query=b"session_hash=known")
    asyncio.run(route_filter(scope, client(), sent))
    assert sent[-1] == {"type": "http.response.body", "body": b""}


def queries_of(route_filter: DemoRouteFilter, path: str, method: str, query: bytes) -> list[bytes]:
    """Those that gradio gets."""
    seen = []

    async def noting(scope, receive, send):
        seen.append(scope["query_string"])
        await app(scope, receive, send)

    route_filter.app, route_filter._results.has_results = noting, lambda session: True
    headers = {"content_length": 2, "content_type": "multipart/form-data; boundary=x"} if method == "POST" else {}
    asyncio.run(route_filter(scope_of(path, method, query, **headers), client(b"--"), Sent()))
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
