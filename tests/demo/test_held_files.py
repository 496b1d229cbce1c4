"""What a session holds and has shown is bounded, whatever its events name."""

import asyncio
import json
import os
from dataclasses import astuple
from types import SimpleNamespace

import pytest

pytest.importorskip("gradio")
import gradio
from starlette.formparsers import MultiPartException

from mmvllm.demo import page as page_module
from mmvllm.demo import uploads as uploads_module
from mmvllm.demo.conversation import Options
from mmvllm.demo.handlers import NOTHING_NEW, UNCHANGED, Handlers
from mmvllm.demo.parts import FileParts
from mmvllm.demo.settings import DemoSettings
from mmvllm.demo.uploads import Uploads
from mmvllm.media.policy import MediaPolicy
from tests.helpers.engine.requests import noise_image
from tests.helpers.media.images import image_config
from tests.helpers.serving.demo import InProcessDecoder

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:gradio")
POLICY = MediaPolicy()
VALUES = astuple(Options("", 0, 1, 0, 1, 900, -1, 3136, 20_000))
VISITOR = SimpleNamespace(session_hash="one")


@pytest.fixture
def handlers(tmp_path) -> Handlers:
    engine = SimpleNamespace(image_config=image_config(), model="x", takes_videos=False)
    return Handlers(engine, DemoSettings(POLICY), Uploads(tmp_path), [], InProcessDecoder(POLICY))


def uploaded(handlers: Handlers, number: int) -> str:
    path = handlers.uploads.folder / f"hash-{number}" / "a.png"
    path.parent.mkdir()
    noise_image(60, 40, seed=number).save(path)
    return str(path)


def test_what_was_read_of_earlier_drafts_is_forgotten(handlers):
    paths = [uploaded(handlers, number) for number in range(5)]

    async def visit() -> None:
        for path in paths:
            assert "picture tokens" in await handlers.count(VISITOR, json.dumps([path]), *VALUES)

    asyncio.run(visit())
    assert [str(path) for path in handlers.sessions.get("one").known] == paths[-1:]
    assert {str(path) for path in handlers.uploads.folder.glob("*/*")} == {*paths}  # until the next answer


def test_a_session_that_is_removed_while_it_stops_holds_no_files(handlers):
    """Nobody would release what it claims after that."""
    turns = [{"question": "q", "answer": "a", "note": "", "images": [uploaded(handlers, 0)]}]

    async def stop(session) -> None:
        handlers.sessions._remove(session)

    handlers.sessions.stop = stop
    asyncio.run(handlers.restore(VISITOR, gradio.EventData(None, {"turns": turns})))
    assert len(handlers.uploads._held["one"]) == 1
    handlers.sessions._remove(handlers.sessions._sessions["one"])  # which is known, and can be removed
    assert not handlers.uploads._held and not [*handlers.uploads.folder.glob("*/*")]


def test_a_draft_removes_no_file_of_a_conversation_that_is_restored(handlers):
    paths = [uploaded(handlers, number) for number in range(4)]
    turns = [{"question": "q", "answer": "a", "note": "", "images": [path]} for path in paths[:3]]
    read, is_reading = handlers.sessions.read, asyncio.Event()

    async def slowly(session, path, options):
        is_reading.set()
        await asyncio.sleep(0.01)
        return await read(session, path, options)

    async def visit() -> None:
        handlers.sessions.read = slowly
        event = gradio.EventData(None, {"turns": turns, "final": True})
        restoring = asyncio.create_task(handlers.restore(VISITOR, event))
        await is_reading.wait()
        for draft in (paths[3:], []):
            await handlers.count(VISITOR, json.dumps(draft), *VALUES)
        await restoring

    asyncio.run(visit())
    kept = [str(one.path) for turn in handlers.sessions.get("one").turns for one in turn.media]
    assert kept == paths[:3] and all(map(os.path.exists, kept))


def test_a_session_holds_a_limited_number_of_files(handlers, monkeypatch):
    monkeypatch.setattr(uploads_module, "MAX_HELD", 3)
    paths = [uploaded(handlers, number) for number in range(4)]
    for path in (*paths[:3], *paths[:3]):
        handlers.uploads.claim("one", path)
    with pytest.raises(ValueError, match="too many files; start a new conversation"):
        handlers.uploads.claim("one", paths[3])
    handlers.uploads.claim("another", paths[3])


def test_more_files_than_a_question_has_are_not_claimed(handlers):
    paths = [uploaded(handlers, number) for number in range(DemoSettings(POLICY).max_images + 1)]
    assert "go into one question" in asyncio.run(handlers.count(VISITOR, json.dumps(paths), *VALUES))
    assert not handlers.uploads._held


@pytest.mark.parametrize("data", [{"index": 99}, {"index": "x"}, {}])
def test_an_event_that_fails_shows_nothing_again(handlers, data):
    """A long conversation takes a tenth of a second to show."""

    async def ask() -> list:
        return [view async for view in handlers.retry(VISITOR, gradio.EventData(None, data), {}, *VALUES)]

    view = asyncio.run(handlers.undo(VISITOR, gradio.EventData(None, data)))
    assert [one == UNCHANGED for one in view] == [True, False, True, True, True]
    assert asyncio.run(ask()) == [NOTHING_NEW]
    assert asyncio.run(handlers.restore(VISITOR, gradio.EventData(None, {"turns": 5}))) == NOTHING_NEW


def test_sessions_take_turns_whatever_the_number_of_their_events(monkeypatch):
    order = []
    states = {name: type("State", (), {})() for name in "ab"}
    names = {id(state): name for name, state in states.items()}

    async def slow(self, block_fn, predictions, state):
        order.append(names[id(state)])
        await asyncio.sleep(0)
        return []

    async def visit() -> None:
        page = page_module.Page(analytics_enabled=False)
        await asyncio.gather(*(page.postprocess_data(None, [], states[name]) for name in "aaaaab"))

    monkeypatch.setattr(page_module.gr.Blocks, "postprocess_data", slow)
    asyncio.run(visit())
    assert order.index("b") <= 1 and len(order) == 6


@pytest.mark.parametrize("size", [1, 7, 64, 10**6])
def test_boundaries_within_a_file_are_refused(size):
    """The parser goes on byte by byte at each of them."""
    head = b'--bound\r\nContent-Disposition: form-data; name="files"; filename="a.png"\r\n\r\n'
    body = head + b"\r\n--bound-" * 5000 + b"\r\n--bound--\r\n"
    parts = FileParts("multipart/form-data; boundary=bound", max_files=3)
    with pytest.raises(MultiPartException, match="At most 3 files go into one question"):
        for at in range(0, len(body), size):
            parts.add(body[at : at + size])
    accepted = FileParts("multipart/form-data; boundary=bound", max_files=3)
    whole = b"\r\n".join([head + b"data \r\n--boun"] * 3) + b"\r\n--bound--\r\n"
    for at in range(0, len(whole), size):
        accepted.add(whole[at : at + size])
    assert accepted.num_files == 3
