"""Requests that do not reach gradio."""

import asyncio
import json
import os
from collections.abc import Iterable
from contextlib import ExitStack, nullcontext
from itertools import chain, repeat
from types import SimpleNamespace

import pytest
from starlette.formparsers import MultiPartException
from starlette.requests import Request
from starlette.types import Receive

from mmvllm.demo import route_filter as route_filter_module
from mmvllm.demo import session as session_module
from mmvllm.demo import uploads as uploads_module
from mmvllm.demo.parts import FileParts
from mmvllm.demo.route_filter import MAX_BODY_BYTES, MAX_ENDINGS, MAX_LOGIN_BYTES, MAX_UNREAD, DemoRouteFilter
from mmvllm.demo.settings import DemoSettings
from mmvllm.media.policy import MediaPolicy
from mmvllm.utils.asgi import PIECE_BYTES
from tests.demo.filtering import JOIN, UPLOAD, Sent, app, client, filter_of, scope_of

FORM = "multipart/form-data; boundary=x"


@pytest.fixture
def route_filter(tmp_path, monkeypatch) -> DemoRouteFilter:
    """The filter of a page with one image and one video of 1 MiB per question, and space for five."""
    monkeypatch.setattr(uploads_module, "MAX_BYTES", 5 * MAX_BODY_BYTES)
    monkeypatch.setattr(uploads_module, "FIRST_BYTES", 3 * MAX_BODY_BYTES)
    policy = MediaPolicy(max_bytes=MAX_BODY_BYTES, max_video_bytes=MAX_BODY_BYTES)
    settings = DemoSettings(policy, max_images=1, max_videos=1)
    return filter_of(tmp_path, settings, num_unread=lambda session: MAX_UNREAD - (session != "busy"))


def messages(route_filter: DemoRouteFilter, path: str, method="POST", receive=None, page=None, **headers) -> list[dict]:
    """The messages of the response."""
    if path == UPLOAD:
        headers = {"content_type": FORM} | headers
    sent, scope = Sent(), scope_of(path, method, b"page=/&deep_link=%ff", page, **headers)
    asyncio.run(asyncio.wait_for(route_filter(scope, receive or client(leaves_after=0), sent), 20))
    return sent


def status(route_filter: DemoRouteFilter, path: str, method: str = "POST", **headers) -> int:
    """The status of the response; 200 is the response of the app behind the filter."""
    return messages(route_filter, path, method, **headers)[0]["status"]


@pytest.mark.parametrize("path", ["/", "/gradio_api/queue/data"])
def test_a_long_response_is_sent_in_pieces(path, route_filter):
    """Uvicorn would copy all that a browser has not read, also of a session that is dropped."""
    body = b"0123456789" * 50_000

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    route_filter.app = app
    sent = messages(route_filter, path, "GET")[1:]
    assert b"".join(one["body"] for one in sent) == body and max(len(one["body"]) for one in sent) <= PIECE_BYTES


@pytest.mark.parametrize("prefix", ["", "/demo"])
@pytest.mark.parametrize(
    "path, want",
    [
        ("/", 200),
        ("/config", 200),
        ("/gradio_api/queue/data", 200),
        ("/gradio_api/heartbeat/abc", 200),
        ("/gradio_api/file=/etc/hostname", 404),
        ("/gradio_api/file=https://example.com/a.png", 404),
        ("/gradio_api/file/etc/hostname", 404),
        ("/gradio_api/process_recording", 404),
        ("/gradio_api/component_server", 404),
        ("/gradio_api/deep_link", 404),
        ("/gradio_api/runs", 404),
        ("/openapi.json", 404),
        ("/docs", 404),
        ("/logout", 404),
        ("/logout/", 404),
    ],
)
def test_only_routes_of_the_page_reach_gradio(prefix, path, want, route_filter):
    assert status(route_filter, prefix + path, "GET") == want


def test_only_uploaded_files_reach_gradio(route_filter, tmp_path):
    file, link, fifo, gone = (tmp_path / "hash" / name for name in ("a.png", "link.png", "fifo", "gone.png"))
    file.parent.mkdir()
    file.write_bytes(b"x")
    link.symlink_to("/etc/hostname")
    os.mkfifo(fifo)
    refused = (link, fifo, gone, tmp_path, file.parent, f"{tmp_path}/hash/../hash/a.png", f"{tmp_path}-b/hash/a.png")
    for path, want in {file: 200, **dict.fromkeys(refused, 404)}.items():
        assert status(route_filter, f"/gradio_api/file={path}", "GET") == want
        assert status(route_filter, f"/demo/gradio_api/file={path}", "HEAD") == want


def start(route_filter: DemoRouteFilter, text: str, route: str = "queue/join") -> int:
    """The status of an event."""
    return status(route_filter, f"/demo/gradio_api/{route}", receive=client(text.encode()), content_length=len(text))


@pytest.mark.parametrize(("route", "of_busy"), [("queue/join", 429), ("run/stop", 200)])
def test_a_session_whose_results_are_not_read_starts_nothing_but_stop(route, of_busy, route_filter):
    for session, want in {"0a9z": 200, "5b6e-77": 200, "busy": of_busy}.items():
        assert start(route_filter, json.dumps({"fn_index": 5, "session_hash": session, "data": ["é"]}), route) == want


@pytest.mark.parametrize("session", [None, "", "a b", "é", "x" * 65, "a/b", 5, ["x"], "\ud800"])
def test_a_session_has_a_plain_name(session, route_filter):
    assert start(route_filter, json.dumps({"fn_index": 5, "session_hash": session})) == 400
    if isinstance(session, str):
        assert status(route_filter, f"/gradio_api/heartbeat/{session}", "GET") == 404


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999", '"\\ud800"', '{"\\udfff": 1}'])
def test_values_that_gradio_fails_with_are_refused(value, route_filter):
    assert start(route_filter, f'{{"fn_index": 5, "session_hash": "x", "data": [{value}]}}') == 400


def test_many_parts_are_refused_before_they_are_parsed(route_filter):
    value = ("[" * 40 + "]" * 40 + ",") * 1000
    for path in ("/login", "/gradio_api/queue/join", "/gradio_api/run/5"):
        body = f'{{"fn_index": 5, "session_hash": "x", "data": [{value}0]}}'.encode()
        assert status(route_filter, path, receive=client(body), content_length=len(body)) == 413


@pytest.mark.parametrize(
    ("kind", "want"),
    [
        ("multipart/form-data; boundary=x; charset=utf-7", 400),
        ("multipart/form-data; boundary=x; Charset=unicode_escape", 400),
        ("multipart/form-data; boundary=x", 200),
        ("application/x-www-form-urlencoded; charset=UTF-8", 200),
    ],
)
def test_a_login_names_no_encoding(kind, want, route_filter):
    assert status(route_filter, "/login", receive=client(b"a"), content_length=1, content_type=kind) == want


def test_nothing_but_a_login_is_possible_before_it(route_filter):
    page = SimpleNamespace(auth=object(), cookie_id="id", tokens={"right": "bob"})
    gets, posts = ("queue/data", "heartbeat/abc", "info"), ("queue/join", "run/5", "upload")
    for method, path in [*(("GET", path) for path in gets), *(("POST", path) for path in posts)]:
        for cookie, is_let_in in (("", False), ("access-token-id=right", True)):
            keys = {"page": page, "cookie": cookie, "content_length": 2, "receive": client(b"{}")}
            assert (status(route_filter, f"/gradio_api/{path}", method, **keys) == 401) == (not is_let_in)
    for path in ("/", "/login", "/config", "/gradio_api/login_check", "/gradio_api/user", "/gradio_api/startup-events"):
        assert status(route_filter, path, "GET", page=page) == 200


def test_a_stalled_request_times_out(route_filter, monkeypatch):
    for limit, path in (("LOGIN_SECONDS", "/login"), ("BODY_SECONDS", JOIN), ("BODY_SECONDS", "/gradio_api/run/5")):
        with monkeypatch.context() as patch:
            patch.setattr(route_filter_module, limit, 0)
            assert status(route_filter, path, receive=never, content_length=9) == 408


def test_requests_other_than_uploads_are_short(route_filter):
    for path, most, want in (("/login", MAX_LOGIN_BYTES, 200), ("/gradio_api/queue/join", MAX_BODY_BYTES, 400)):
        assert status(route_filter, path, receive=client(b"x"), content_length=most) == want
        assert status(route_filter, path, content_length=most + 1) == 413
    for path in ("/", "/demo/", "/config", "/theme.css"):
        assert status(route_filter, path, content_length=1) == 404


@pytest.mark.parametrize("upload_id", ["", "a" * 65, "ä", "a b"])
def test_an_upload_has_a_plain_id(upload_id, route_filter):
    """Gradio keeps each of them."""
    seen, forgotten = [], []

    async def noting(scope, receive, send):
        seen.append(scope["query_string"])
        await app(scope, receive, send)

    async def ask(path: str, method: str, given: str) -> int:
        sent, headers = Sent(), {"content_length": 2, "content_type": FORM} if method == "POST" else {}
        await route_filter(scope_of(path, method, f"upload_id={given}".encode(), **headers), client(), sent)
        await asyncio.sleep(0.01)
        return sent.statuses[0]

    async def ask_all() -> list[int]:
        return [
            await ask(path, method, given)
            for given in (upload_id, "plain")
            for path, method in ((UPLOAD, "POST"), ("/gradio_api/upload_progress", "GET"))
        ]

    route_filter.app, route_filter._results.forget_upload = noting, forgotten.append
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(route_filter_module, "FORGET_SECONDS", 0.0)
        assert asyncio.run(ask_all()) == [200, 404, 200, 200]
    assert seen == [b"", b"upload_id=plain", b"upload_id=plain"] and forgotten[-2:] == ["plain"] * 2


def test_a_body_of_unknown_length_is_refused(route_filter):
    for path in (UPLOAD, "/gradio_api/queue/join"):
        assert status(route_filter, path) == status(route_filter, path, content_length="x") == 411
        assert status(route_filter, path, content_length=1, transfer_encoding="chunked") == 411


def test_an_upload_is_accepted_while_there_is_space(route_filter, tmp_path):
    assert status(route_filter, UPLOAD, content_length=2 * MAX_BODY_BYTES) == 200
    (tmp_path / "a.png").write_bytes(b"x" * 3 * MAX_BODY_BYTES)
    assert status(route_filter, UPLOAD, content_length=2 * MAX_BODY_BYTES) == 200
    assert status(route_filter, UPLOAD, content_length=2 * MAX_BODY_BYTES + 1) == 507


def test_an_upload_is_no_larger_than_a_question(route_filter):
    assert status(route_filter, UPLOAD, content_length=3 * MAX_BODY_BYTES) == 200  # including the multipart headers
    refusal, text = messages(route_filter, UPLOAD, content_length=3 * MAX_BODY_BYTES + 1)
    assert refusal["status"] == 413
    limits = "1 picture of 1,048,576 bytes and 1 video of 1,048,576 bytes"
    assert text["body"] == f"Too much for one question; at most {limits} go into it".encode()


def test_concurrent_uploads_share_the_space(route_filter):
    """One of two uploads of 3 MiB is accepted, and reserves its space until it is complete."""
    may_end, seen = asyncio.Event(), []

    async def slow(scope, receive, send):
        await may_end.wait()

    async def send(message):
        seen.append(message.get("status"))
        may_end.set()

    async def both():
        route_filter.app = slow
        scope = scope_of(UPLOAD, "POST", content_length=3 * MAX_BODY_BYTES, content_type=FORM)
        await asyncio.wait_for(asyncio.gather(*(route_filter(scope, client(), send) for _ in range(2))), 20)

    asyncio.run(both())
    assert seen[0] == 507
    route_filter.app = app
    assert status(route_filter, UPLOAD, content_length=3 * MAX_BODY_BYTES) == 200


def test_a_slow_upload_holds_little_space_before_it_arrives(route_filter, monkeypatch):
    monkeypatch.setattr(uploads_module, "FIRST_BYTES", 1000)
    monkeypatch.setattr(uploads_module, "AHEAD_BYTES", 1000)
    route_filter.app, size = reading, 3 * MAX_BODY_BYTES
    pieces = [PART, *[b"x" * MAX_BODY_BYTES] * 2]
    with ExitStack() as others:
        for _ in range(4):
            parts = FileParts(FORM, max_files=2)
            upload = others.enter_context(route_filter._uploads.incoming(size, parts))
            assert status(route_filter, UPLOAD, receive=dripping([PART]), content_length=size) == 200
        upload.reserve(2 * MAX_BODY_BYTES)
        assert status(route_filter, UPLOAD, receive=dripping(pieces), content_length=size) == 200
        upload.reserve(3 * MAX_BODY_BYTES)
        with pytest.raises(MultiPartException, match="no room"):
            status(route_filter, UPLOAD, receive=dripping(pieces), content_length=size)


async def gone() -> dict:
    """The disconnection of a client."""
    return {"type": "http.disconnect"}


async def never() -> dict:
    """The body of a client that sends nothing."""
    await asyncio.Event().wait()


async def reading(scope, receive, send):
    """An app that reads the body, as starlette does."""
    await Request(scope, receive).body()
    await app(scope, receive, send)


def test_a_stalled_upload_times_out_and_releases_its_space(route_filter, monkeypatch):
    monkeypatch.setattr(route_filter_module, "FIRST_SECONDS", 0)
    route_filter.app = reading
    for _ in range(3):
        refusal, text = messages(route_filter, UPLOAD, receive=never, content_length=2 * MAX_BODY_BYTES)
        assert (refusal["status"], text["body"]) == (408, b"The files took too long to arrive; try again")


PART = b'--x\r\nContent-Disposition: form-data; name="files"; filename="a"\r\n\r\n'


def dripping(pieces: Iterable[bytes]) -> Receive:
    """A body that arrives in pieces: the first at once, the others after a turn of other tasks."""
    left = iter(enumerate(pieces))

    async def receive() -> dict:
        number, piece = next(left, (0, None))
        if number:
            await asyncio.sleep(0)
        return {"type": "http.request", "body": piece or b"", "more_body": piece is not None}

    return receive


@pytest.mark.parametrize("rate, want", [(1e9, 408), (1e-9, 200)])
def test_an_upload_that_drips_times_out(rate, want, route_filter, monkeypatch):
    monkeypatch.setattr(route_filter_module, "FIRST_SECONDS", 1e-3)
    monkeypatch.setattr(route_filter_module, "MIN_BYTES_PER_SECOND", rate)
    route_filter.app = reading
    pieces = repeat(b"x") if want == 408 else [b"x"] * 9
    receive = dripping(chain([PART], pieces))
    assert status(route_filter, UPLOAD, receive=receive, content_length=10**6) == want


def test_an_upload_ends_in_time_however_fast_it_is(route_filter, monkeypatch):
    monkeypatch.setattr(route_filter_module, "UPLOAD_SECONDS", 1e-3)
    route_filter.app = reading
    receive = dripping(chain([PART], repeat(b"x" * 1000)))
    assert status(route_filter, UPLOAD, receive=receive, content_length=10**6) == 408


def test_an_upload_is_ended_by_its_first_file_that_there_is_no_room_for(route_filter, monkeypatch):
    monkeypatch.setattr(uploads_module, "MAX_INCOMING_FILES", 2)
    route_filter.app = reading
    for num_begun, is_accepted in {1: True, 2: False}.items():
        other = FileParts(FORM, max_files=2)
        other.add((PART + b"\r\n") * num_begun)
        with (
            route_filter._uploads.incoming(1, other),
            nullcontext() if is_accepted else pytest.raises(MultiPartException, match="no room"),  # gradio: 400
        ):
            assert status(route_filter, UPLOAD, receive=dripping([PART]), content_length=1) == 200


def test_a_timeout_during_the_response_sends_no_second_one(route_filter, monkeypatch):
    async def answering(scope, receive, send):
        await app(scope, receive, send)
        await never()

    monkeypatch.setattr(route_filter_module, "FIRST_SECONDS", 0)
    route_filter.app = answering
    assert len(messages(route_filter, UPLOAD, content_length=1)) == 1


def test_a_disconnect_while_sending_is_not_an_error(route_filter):
    route_filter.app = reading
    assert messages(route_filter, UPLOAD, receive=gone, content_length=1) == []


def test_a_session_is_kept_while_its_tab_is_open(route_filter, monkeypatch):
    monkeypatch.setattr(session_module, "ORPHAN_SECONDS", -1)
    sessions = route_filter._sessions
    session = sessions.get("one")

    async def heart(scope, receive, send):
        await sessions.sweep()
        assert sessions.get("one") is session

    route_filter.app = heart
    messages(route_filter, "/demo/gradio_api/heartbeat/one", "GET")
    asyncio.run(sessions.sweep())
    assert sessions.get("one") is not session


def test_heartbeats_that_end_together_do_so_in_turns(route_filter):
    """Gradio does much when a page is closed; meanwhile other clients are answered."""
    at_once, most = 0, 0

    async def ending(scope, receive, send):
        nonlocal at_once, most
        assert (await receive())["type"] == "http.disconnect"
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0)
        at_once -= 1

    async def all_of_them() -> None:
        scopes = [scope_of(f"/gradio_api/heartbeat/{i}") for i in range(30)]
        await asyncio.gather(*(route_filter(scope, gone, Sent()) for scope in scopes))

    route_filter.app = ending
    asyncio.run(all_of_them())
    assert (at_once, most) == (0, MAX_ENDINGS)


def test_open_pages_are_limited(route_filter, monkeypatch):
    monkeypatch.setattr(route_filter_module, "MAX_SESSIONS", 1)
    with route_filter._sessions.open_tab("one"):
        assert status(route_filter, "/gradio_api/heartbeat/two", "GET") == 429
    assert status(route_filter, "/gradio_api/heartbeat/two", "GET") == 200


def test_unclaimed_uploads_are_removed_without_further_requests(route_filter, monkeypatch, tmp_path):
    monkeypatch.setattr(session_module, "SWEEP_SECONDS", 0)
    path = tmp_path / "hash" / "a.png"

    async def come_once_and_wait() -> None:
        await route_filter(scope_of("/"), client(), Sent())
        while path.exists():
            await asyncio.sleep(0)

    for _ in range(2):  # also on another event loop
        path.parent.mkdir()
        path.write_bytes(b"picture")
        os.utime(path, (0, 0))
        asyncio.run(asyncio.wait_for(come_once_and_wait(), 20))
