"""The middleware that checks API keys and limits the size and duration of bodies."""

import asyncio
import json

import pytest

from mmvllm.server.http.auth_and_limits import MAX_IGNORED_BYTES, AuthAndSizeLimitMiddleware, ByteBudget
from mmvllm.utils.asgi import PIECE_BYTES


@pytest.fixture(autouse=True)
def brief_linger(monkeypatch):
    monkeypatch.setattr("mmvllm.server.http.auth_and_limits.LINGER_SECONDS", 0.01)


class Exchange:
    """One request whose body is received in pieces; without `ends`, the last piece never arrives."""

    def __init__(self, *pieces: bytes, path: str = "/v1/x", ends: bool = True, **headers: str):
        self._pieces, self._ends = list(pieces), ends
        self.sent: list[dict] = []
        encoded = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        self.scope = {"type": "http", "path": path, "headers": encoded}

    async def receive(self) -> dict:
        if self._pieces:
            body = self._pieces.pop(0)
            return {"type": "http.request", "body": body, "more_body": bool(self._pieces) or not self._ends}
        await asyncio.sleep(60)

    async def send(self, message: dict) -> None:
        self.sent.append(message)

    @property
    def status(self) -> int:
        return self.sent[0]["status"]

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.sent[1:])


def make_middleware(app=None, budget: ByteBudget | None = None, **keys) -> AuthAndSizeLimitMiddleware:
    """Around an app that echoes the body."""

    async def echo(scope, receive, send):
        message = await receive()
        assert not message["more_body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": message["body"]})

    limits = {"api_keys": (), "max_bytes": 100, "timeout": 0.05, "open_paths": ("/demo",)}
    return AuthAndSizeLimitMiddleware(app or echo, budget=budget or ByteBudget(1000), **limits | keys)


def run(middleware: AuthAndSizeLimitMiddleware, *exchanges: Exchange) -> None:
    async def run_all() -> None:
        await asyncio.gather(*(middleware(one.scope, one.receive, one.send) for one in exchanges))

    asyncio.run(run_all())


def test_the_app_receives_the_body_in_one_message():
    exchange = Exchange(b"a" * 40, b"", b"b" * 60)
    run(make_middleware(), exchange)
    assert (exchange.status, exchange.body) == (200, b"a" * 40 + b"b" * 60)


@pytest.mark.parametrize(
    "exchange", [Exchange(b"a" * 101), Exchange(b"a" * 60, b"a" * 60), Exchange(content_length="101")]
)
def test_a_body_over_the_limit_is_refused(exchange):
    run(make_middleware(), exchange)
    assert exchange.status == 413 and b"at most 100 bytes" in exchange.body


@pytest.mark.parametrize("keys", [(), ("one",)])
def test_a_body_that_no_route_reads_has_a_small_limit(keys):
    limits = {"max_bytes": 10**6, "budget": ByteBudget(10**6), "api_keys": keys}
    accepted = Exchange(b"a" * MAX_IGNORED_BYTES, path="/health/live")
    sent = Exchange(b"a" * (MAX_IGNORED_BYTES + 1), path="/health/live")
    announced = Exchange(path="/metrics", content_length=str(MAX_IGNORED_BYTES + 1))
    run(make_middleware(**limits), accepted, sent, announced)
    assert [accepted.status, sent.status, announced.status] == [200, 413, 413]
    assert f"at most {MAX_IGNORED_BYTES} bytes are accepted (on this path)".encode() in announced.body


def test_a_body_that_does_not_arrive_in_time_is_refused():
    exchange = Exchange(b"a", ends=False)
    run(make_middleware(), exchange)
    assert exchange.status == 408


def test_the_total_size_of_bodies_is_limited():
    """While the app handles the first, the second is refused; afterwards the third is accepted."""
    is_working, may_end = asyncio.Event(), asyncio.Event()

    async def app(scope, receive, send):
        is_working.set()
        await may_end.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})

    first, second, third = (Exchange(b"a" * 60) for _ in range(3))
    limited = make_middleware(app, ByteBudget(100))

    async def send_three() -> None:
        working = asyncio.create_task(limited(first.scope, first.receive, first.send))
        await is_working.wait()
        await limited(second.scope, second.receive, second.send)
        may_end.set()
        await working
        await limited(third.scope, third.receive, third.send)

    asyncio.run(send_three())
    assert [first.status, second.status, third.status] == [200, 429, 200]
    assert dict(second.sent[0]["headers"])[b"retry-after"] == b"1"


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES])
def test_a_long_response_is_sent_in_pieces(size):
    body = bytes(range(256)) * (size // 256) + b"a" * (size % 256)

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": body})

    exchange = Exchange(b"")
    run(make_middleware(app), exchange)
    assert exchange.body == body * 2 and max(len(one["body"]) for one in exchange.sent[1:]) <= PIECE_BYTES
    assert [one.get("more_body", False) for one in exchange.sent[1:]] == [True] * (len(exchange.sent) - 2) + [False]


def test_large_requests_do_not_keep_small_ones_waiting():
    """A client that reads a response slowly keeps the bytes of its request."""
    size = 4096 * 40
    budget = ByteBudget(size)
    others = [Exchange(b"a" * 41), Exchange(b"a" * 40), Exchange(b"a" * 20, b"a" * 21)]
    others += [Exchange(b"a" * 50, path=path) for path in ("/health/live", "/metrics")] + [Exchange(b"")]

    async def app(scope, receive, send):
        if others[0].sent == []:
            scope["state"]["reservation"].hold(10 * size)  # of its response
            for one in others:
                await make_middleware(app, budget)(one.scope, one.receive, one.send)
        await send({"type": "http.response.start", "status": 200, "headers": []})

    run(make_middleware(app, budget, max_bytes=size), Exchange(b"a" * size))
    assert [one.status for one in others] == [429, 200, 429, 200, 200, 200]
    run(make_middleware(app, budget, max_bytes=size), again := Exchange(b"a" * size))
    assert again.status == 200  # all was given back


def test_small_requests_have_a_share_of_their_own_which_is_limited():
    size = 4096 * 40
    budget, may_end = ByteBudget(size), asyncio.Event()
    small = [Exchange(b"a" * 40) for _ in range(1024 + 2)]

    async def app(scope, receive, send):
        await may_end.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send_all() -> None:
        middleware = make_middleware(app, budget, max_bytes=size)
        tasks = [
            asyncio.create_task(middleware(one.scope, one.receive, one.send)) for one in (Exchange(b"a" * size), *small)
        ]
        await asyncio.sleep(0.3)
        may_end.set()
        await asyncio.gather(*tasks)

    asyncio.run(send_all())
    assert [one.status for one in small].count(429) == 2


def test_bytes_that_are_there_already_are_counted_beyond_the_limit():
    budget, first, second = ByteBudget(100), Exchange(b"a" * 40), Exchange(b"a" * 40)

    async def app(scope, receive, send):
        if not second.sent:
            scope["state"]["reservation"].hold(1000)
            await make_middleware(app, budget)(second.scope, second.receive, second.send)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    run(make_middleware(app, budget), first)
    assert (first.status, second.status) == (200, 429)
    run(make_middleware(app, budget), again := Exchange(b"a" * 40))
    assert again.status == 200


def test_bytes_reserved_by_the_app_count_until_the_request_ends():
    budget = ByteBudget(100)

    async def app(scope, receive, send):
        scope["state"]["reservation"].take(50)
        with pytest.raises(Exception, match="too many bytes"):
            scope["state"]["reservation"].take(1)

    run(make_middleware(app, budget), Exchange(b"a" * 50))
    run(make_middleware(app, budget), Exchange(b"a" * 50))


def test_bytes_that_arrive_after_the_end_of_their_request_do_not_count():
    budget = ByteBudget(100)
    with budget.reservation() as ended:
        ended.take(60)
    ended.take(60)  # by the thread of a fetch
    with budget.reservation() as next:
        next.take(100)


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("Bearer one", 200),
        ("bearer  two", 200),
        ("Bearer three", 401),
        ("Bearer", 401),
        ("Basic one", 401),
        ("one", 401),
        ("Bearer öne", 401),
        (None, 401),
    ],
)
def test_v1_needs_a_valid_key(header, status):
    exchange = Exchange(b"hi", **({} if header is None else {"authorization": header}))
    run(make_middleware(api_keys=("one", "two")), exchange)
    assert exchange.status == status
    if status == 401:
        assert dict(exchange.sent[0]["headers"])[b"www-authenticate"] == b"Bearer"
        error = json.loads(exchange.body)["error"]
        assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")


def test_the_body_of_a_request_without_a_key_is_not_read():
    pieces = [b"a" * 50] * 2
    exchange = Exchange(*pieces, content_length="100")
    budget = ByteBudget(10)  # too little for a single piece
    run(make_middleware(api_keys=("one",), budget=budget), exchange)
    assert exchange.status == 401


def test_open_paths_are_passed_on_unchecked():
    exchange = Exchange(b"a" * 1000, path="/demo/upload")
    run(make_middleware(), exchange)
    assert (exchange.status, len(exchange.body)) == (200, 1000)


def test_a_disconnect_before_the_end_of_the_body_gets_no_response():
    exchange = Exchange()

    async def receive() -> dict:
        return {"type": "http.disconnect"}

    exchange.receive = receive
    run(make_middleware(), exchange)
    assert exchange.sent == []


@pytest.mark.slow
def test_too_little_memory_for_a_body_is_a_503(monkeypatch):
    class Full(bytearray):
        def __iadd__(self, chunk):
            raise MemoryError

    monkeypatch.setattr("mmvllm.server.http.auth_and_limits.bytearray", Full, raising=False)
    exchange = Exchange(b"a" * 50)
    run(make_middleware(), exchange)
    assert exchange.status == 503 and b"not enough memory" in exchange.body
