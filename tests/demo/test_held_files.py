"""What a session holds and has shown is bounded, whatever its events name."""

import asyncio
import json
from dataclasses import astuple
from types import SimpleNamespace

import pytest

pytest.importorskip("gradio")
import gradio
from starlette.formparsers import MultiPartException

from mmvllm.demo import page as page_module
from mmvllm.demo.conversation import Options
from mmvllm.demo.handlers import NOTHING_NEW, UNCHANGED, Handlers
from mmvllm.demo.parts import FileParts
from mmvllm.demo.settings import DemoSettings
from mmvllm.demo.uploads import Uploads
from mmvllm.media import MediaPolicy
from tests.helpers.demo import InProcessDecoder
from tests.helpers.images import image_config
from tests.helpers.requests import noise_image

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:gradio")
POLICY = MediaPolicy()
VALUES = astuple(Options("", 0, 1, 0, 1, 900, -1, 3136, 20_000))
VISITOR = SimpleNamespace(session_hash="one")


@pytest.fixture
def handlers(tmp_path) -> Handlers:
    engine = SimpleNamespace(image_config=image_config(), model="x")
    return Handlers(engine, DemoSettings(POLICY), Uploads(tmp_path), [], InProcessDecoder(POLICY))


def uploaded(handlers: Handlers, number: int) -> str:
    path = handlers.uploads.folder / f"hash-{number}" / "a.png"
    path.parent.mkdir()
    noise_image(60, 40, seed=number).save(path)
    return str(path)


def test_a_session_holds_the_files_of_its_last_draft_only(handlers):
    paths = [uploaded(handlers, number) for number in range(5)]

    async def visit() -> None:
        for path in paths:
            assert "picture tokens" in await handlers.count(VISITOR, json.dumps([path]), *VALUES)

    asyncio.run(visit())
    session = handlers.sessions.get("one")
    assert [str(path) for path in session.known] == paths[-1:]
    assert [str(path) for path in handlers.uploads.folder.glob("*/*")] == paths[-1:]


def test_files_of_a_question_that_was_sent_stay_while_another_is_written(handlers):
    first, second = (uploaded(handlers, number) for number in range(2))
    session = handlers.sessions.get("one")
    session.asked = handlers._claimed(session, [first])
    asyncio.run(handlers.count(VISITOR, json.dumps([second]), *VALUES))
    assert {str(path) for path in handlers.uploads.folder.glob("*/*")} == {first, second}


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
