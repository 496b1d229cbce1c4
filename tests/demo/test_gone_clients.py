"""What clients leave behind that ask and do not read the results."""

import asyncio
import gc
import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import CoroutineType, SimpleNamespace

import httpx
import pytest

pytest.importorskip("gradio")
import gradio

from mmvllm.demo import session as session_module
from mmvllm.demo.handlers import MAX_UNREAD_UPDATES
from mmvllm.demo.images import UploadedImage
from tests.helpers.engine.requests import noise_image
from tests.helpers.media.images import encode
from tests.helpers.serving.pages import CONTROLS, event, in_steps, post, until

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:gradio")


def test_updates_of_an_answer_that_nobody_reads_are_few(chatty_site):
    """Each has the whole conversation: gigabytes of answers of a minute."""
    body = {"data": [{"text": "talk", "files": []}, *CONTROLS], "session_hash": "unread-answer"}
    index, queue = chatty_site.events["box", "submit"], chatty_site.page._queue
    with in_steps(chatty_site.engine) as release:
        assert post(f"{chatty_site.url}gradio_api/queue/join", json=body | {"fn_index": index}).is_success
        until(lambda: chatty_site.page.num_unread_updates("unread-answer") > 0)
        for _ in range(15):
            release(1)
            time.sleep(0.1)
        assert chatty_site.page.num_unread_updates("unread-answer") <= MAX_UNREAD_UPDATES + 2
    until(lambda: not queue.event_ids_to_events)
    assert 3 <= chatty_site.page.num_unread_updates("unread-answer") <= MAX_UNREAD_UPDATES + 4


@pytest.mark.spawns
def test_files_of_a_client_that_has_gone_are_not_read(site, monkeypatch):
    monkeypatch.setattr(session_module, "LISTEN_SECONDS", 0.2)
    reads, read = [], UploadedImage.read
    monkeypatch.setattr(UploadedImage, "read", lambda path, decode: (reads.append(path), read(path, decode))[1])
    files = [("files", (f"{number}.png", encode(noise_image(60, 60, seed=number)), "image/png")) for number in range(3)]
    paths = json.dumps(post(f"{site.url}gradio_api/upload", files=files).json())
    index = site.events[None, "change"]
    for number in range(4):
        body = {"data": [paths, *CONTROLS], "fn_index": index, "session_hash": f"gone-{number}"}
        assert post(f"{site.url}gradio_api/queue/join", json=body).is_success
    until(lambda: not site.page._queue.event_ids_to_events)
    assert reads == []
    end, _ = event(site, None, "change", [paths, *CONTROLS], "stays")
    assert end["success"] and "picture tokens" in json.dumps(end) and len(reads) == 3


@contextmanager
def paused(page) -> Iterator[None]:
    """No event of the page begins meanwhile."""
    begin, waiting = page.process_api, threading.Event()

    async def process_api(*args, **kwargs):
        while not waiting.is_set():
            await asyncio.sleep(0.01)
        return await begin(*args, **kwargs)

    page.process_api = process_api
    try:
        yield
    finally:
        waiting.set()
        del page.process_api


def kept(turns: list[dict]) -> dict:
    return {"turns": turns, "final": True}


@pytest.mark.spawns
def test_a_session_that_nobody_reads_is_waited_for_once(site, monkeypatch):
    """However many events and files it has: together they took all places of the page for half an hour."""
    monkeypatch.setattr(session_module, "LISTEN_SECONDS", 1.0)
    files = [("files", (f"{number}.png", encode(noise_image(60, 60, seed=number)), "image/png")) for number in range(4)]
    paths = post(f"{site.url}gradio_api/upload", files=files).json()
    turns = [{"question": "q", "answer": "a", "note": "", "images": [path]} for path in paths]
    body = {"data": [], "fn_index": site.events["conversations", "restore"], "event_data": kept(turns)}
    begin = time.monotonic()
    for number in range(24):
        assert post(f"{site.url}gradio_api/queue/join", json=body | {"session_hash": f"left-{number % 2}"}).is_success
    until(lambda: not site.page._queue.event_ids_to_events)
    assert time.monotonic() - begin < 8  # and not 24 * 4 seconds
    end, _ = event(site, "chat", "clear", [], "another")
    assert end["success"]


@pytest.mark.spawns
def test_no_file_is_read_for_a_session_that_was_removed(site, monkeypatch):
    monkeypatch.setattr(session_module, "LISTEN_SECONDS", 60.0)
    files = [("files", ("a.png", encode(noise_image(60, 60, seed=99)), "image/png"))]
    paths = json.dumps(post(f"{site.url}gradio_api/upload", files=files).json())
    body = {"data": [paths, *CONTROLS], "fn_index": site.events[None, "change"], "session_hash": "removed"}
    assert post(f"{site.url}gradio_api/queue/join", json=body).is_success
    until(lambda: (session := site.page.sessions._sessions.get("removed")) and session.unread_since)
    site.page.sessions._remove(site.page.sessions._sessions["removed"])
    until(lambda: not site.page._queue.event_ids_to_events)


@pytest.mark.spawns
@pytest.mark.parametrize("name", ["x.svg", "X.SVG", "x.gif"])
def test_a_result_has_the_path_of_a_picture_however_it_is_named(name, site):
    """Gradio would write a file into it whose path ends with .svg."""
    picture = encode(noise_image(60, 60, seed=5)) + bytes(100_000)
    [path] = post(f"{site.url}gradio_api/upload", files=[("files", (name, picture, "image/png"))]).json()
    turns = [{"question": "q", "answer": "a", "note": "", "images": [path]}] * 3
    end, _ = event(site, "conversations", "restore", [], f"named-{name.replace('.', '-')}", kept(turns))
    assert end["success"] and path in json.dumps(end) and len(json.dumps(end)) < 20_000


def test_what_gradio_starts_for_a_response_ends_with_it(site, monkeypatch):
    """Its heartbeat went on for good where several responses of a session, or the session and its response, ended."""

    def num_heartbeats() -> int:
        coroutines = (one for one in gc.get_objects() if type(one) is CoroutineType and one.cr_frame is not None)
        return sum(one.__qualname__.endswith("queue_data_helper.<locals>.heartbeat") for one in coroutines)

    monkeypatch.setattr(gradio.utils, "get_heartbeat_rate", lambda: 0.1)
    end, _ = event(site, "chat", "clear", [], "read-twice")
    assert end["success"]
    clients = [httpx.stream("GET", f"{site.url}gradio_api/queue/data?session_hash=read-twice") for _ in range(5)]
    with ExitStack() as opened:
        for client in clients:
            opened.enter_context(client)
        until(lambda: num_heartbeats() >= 5)
        site.page.forget("read-twice")
    until(lambda: num_heartbeats() == 0)


def test_a_result_for_a_session_that_is_gone_stops_nothing(site):
    """Gradio's queue would stop for good."""
    queue = site.page._queue
    gone = SimpleNamespace(alive=True, session_hash="no such session", _id="x")
    queue.send_message(gone, SimpleNamespace())
    end, _ = event(site, "chat", "clear", [], "still-served")
    assert end["success"] and not queue.stopped


def test_events_count_by_their_size_until_they_end(site):
    body = {"data": [], "fn_index": site.events["chat", "clear"], "session_hash": "sized"}
    until(lambda: site.page.count_event_bytes() == 0)
    assert not site.page._event_bytes
    with paused(site.page):
        large = body | {"event_data": {"x": "y" * 5000}}
        assert post(f"{site.url}gradio_api/queue/join", json=large).is_success
        assert 5000 < site.page.count_event_bytes() < 6000
    until(lambda: site.page.count_event_bytes() == 0)
