"""Questions of a session are answered by the engine, and their requests and files are released."""

import asyncio
import json
import time
from contextlib import aclosing
from dataclasses import astuple, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from mmvllm.demo import session as session_module
from mmvllm.demo.conversation import Options, Turn
from mmvllm.demo.images import UploadedImage
from mmvllm.demo.session import Sessions, in_ticks
from mmvllm.demo.settings import DemoSettings
from mmvllm.demo.uploads import Uploads
from mmvllm.entrypoints.async_llm import AsyncLLM
from mmvllm.media.policy import MediaPolicy
from mmvllm.outputs import Delta
from mmvllm.processors.videos.load import DIRECT
from tests.helpers.engine.requests import noise_image
from tests.helpers.media.images import image_config
from tests.helpers.serving.demo import InProcessDecoder
from tests.helpers.serving.pages import elsewhere

POLICY = MediaPolicy()
OPTIONS = Options("", 0, 1, 0, 1, 900, -1, 3136, 20_000)
VISITOR = SimpleNamespace(session_hash="one")
SMALL = {"dtype": "float32", "device": "cpu", "num_kvcache_blocks": 256, "skip_warmup": True}


@pytest.fixture
def uploads(tmp_path) -> Uploads:
    (tmp_path / "up").mkdir()
    return Uploads(tmp_path / "up")


@pytest.fixture
def sessions(uploads) -> Sessions:
    """Sessions without an engine."""
    return Sessions(None, uploads, DemoSettings(POLICY))


def handlers_of(uploads: Uploads, engine=None, decoder=None):
    """The handlers of the page; without an engine they can read images."""
    pytest.importorskip("gradio")
    from mmvllm.demo.handlers import Handlers

    engine = engine or SimpleNamespace(image_config=image_config())
    return Handlers(engine, DemoSettings(POLICY), uploads, [], decoder)


def sent(uploads: Uploads, session_id: str, name: str = "a.png") -> UploadedImage:
    path = uploads.folder / "hash" / name
    path.parent.mkdir(exist_ok=True)
    noise_image(100, 80).save(path)
    return UploadedImage.read(uploads.claim(session_id, str(path)), DIRECT)


def with_engine(checkpoint: Path, work, **engine_args) -> None:
    """Run `work(engine)`, after which the engine must hold no request; its answers take seconds, if not stopped."""

    async def run() -> None:
        async with AsyncLLM(checkpoint, **SMALL | engine_args) as engine:
            runner = engine._engine.model_runner
            runner.run = lambda *args, step=runner.run: time.sleep(0.003) or step(*args)
            await work(engine)
            while sum(_load(engine)):  # the engine releases it within a step
                await asyncio.sleep(0.01)

    elsewhere(asyncio.wait_for(run(), 60))


def _load(engine: AsyncLLM) -> tuple[int, int, int]:
    stats = engine.stats()
    return stats.num_preparing, stats.num_waiting, stats.num_running


async def answer_steps(sessions: Sessions, session, turn: Turn, options: Options = OPTIONS) -> list[str]:
    """The answer after each update."""
    seen = []
    async with aclosing(sessions.answer(session, turn, options)) as ticks:
        async for _ in ticks:
            seen.append(turn.answer)
    return seen


@pytest.mark.spawns
def test_an_answer_is_streamed_and_ends_with_statistics(checkpoint, uploads):
    async def work(engine):
        sessions = Sessions(engine, uploads, DemoSettings(POLICY))
        session = sessions.get("one")
        turn = Turn("What is this?", (sent(uploads, "one"),))
        seen = await answer_steps(sessions, session, turn)
        assert len(set(seen)) > 2 and all(later.startswith(sooner) for sooner, later in pairwise(seen))
        assert turn.note.startswith("Cut off at the maximum length · first token after")
        assert turn.note.endswith("12 picture tokens")
        assert (session.request_id, session.turns) == (None, [turn])
        assert session.gallery[0] == (turn.media[0], f"What is this? {turn.answer}")

    with_engine(checkpoint, work)


def test_stop_keeps_the_answer_so_far(checkpoint, uploads):
    async def work(engine):
        handlers = handlers_of(uploads, engine)
        turn, answer = Turn("talk"), handlers.sessions.answer
        async with aclosing(answer(handlers.sessions.get("one"), turn, OPTIONS)) as ticks:
            async for _ in ticks:
                if turn.answer:
                    await handlers.stop(VISITOR)
                    assert engine.stats().num_running == 0
        assert turn.answer and turn.note.startswith("Stopped · first token after")

    with_engine(checkpoint, work)


def test_a_question_asked_right_after_a_stop_is_not_counted_under_the_stopped_answer(checkpoint, uploads):
    async def work(engine):
        sessions = Sessions(engine, uploads, DemoSettings(POLICY))
        session, turn = sessions.get("one"), Turn("talk")
        held = sent(uploads, "one")
        async with aclosing(sessions.answer(session, turn, OPTIONS)) as ticks:
            async for _ in ticks:
                if turn.answer and len(session.turns) == 1:
                    await sessions.stop(session)
                    session.turns.append(Turn("next", (held,)))
        assert turn.note.startswith("Stopped") and "picture" not in turn.note
        assert not session.gallery

    with_engine(checkpoint, work)


def test_closing_the_stream_aborts_the_request(checkpoint, uploads):
    async def work(engine):
        sessions = Sessions(engine, uploads, DemoSettings(POLICY))
        session = sessions.get("one")
        async with aclosing(sessions.answer(session, Turn("talk"), OPTIONS)) as ticks:
            async for _ in ticks:
                break
        assert session.request_id is None

    with_engine(checkpoint, work)


@pytest.mark.spawns
def test_leaving_aborts_the_request_and_removes_the_images(checkpoint, uploads, monkeypatch):
    monkeypatch.setattr(session_module, "RELOAD_SECONDS", 0)

    async def work(engine):
        sessions = Sessions(engine, uploads, DemoSettings(POLICY))
        session = sessions.get("one")
        turn = Turn("talk", (sent(uploads, "one"),))
        task = asyncio.create_task(answer_steps(sessions, session, turn))
        while not turn.answer:
            await asyncio.sleep(0.01)
        await sessions.end("one")
        assert engine.stats().num_running == 0
        await task
        assert [*uploads.folder.iterdir()] == []
        assert sessions.get("one").turns == []

    with_engine(checkpoint, work)


async def counts(handlers, *paths: Path, options: Options = OPTIONS) -> str:
    """What is said about images when they are added."""
    return await handlers.count(VISITOR, json.dumps([*map(str, paths)]), *astuple(options))


@pytest.mark.spawns
def test_a_question_that_is_undone_while_it_is_answered_keeps_its_images(checkpoint, uploads):
    gradio = pytest.importorskip("gradio")

    async def work(engine):
        handlers, held = handlers_of(uploads, engine), sent(uploads, "one")
        session, event = handlers.sessions.get("one"), gradio.EventData(None, {"index": 0})
        draft = {"text": "talk", "files": [{"path": str(held.path)}]}
        async for _ in handlers.ask(VISITOR, event, draft, *astuple(OPTIONS)):
            if session.turns and session.turns[0].answer:
                await counts(handlers)  # the message box is empty now
                await handlers.undo(VISITOR, event)
        assert (session.turns, held.path.exists()) == ([], True)

    with_engine(checkpoint, work)


@pytest.mark.spawns
def test_an_invalid_question_leaves_no_turn(checkpoint, uploads):
    async def work(engine):
        sessions = Sessions(engine, uploads, DemoSettings(POLICY))
        session, held, good = sessions.get("one"), sent(uploads, "one"), sent(uploads, "one", "b.png")
        held.path.write_bytes(held.path.read_bytes()[:100])
        for turn, options, message in (
            (Turn("q", (held,)), OPTIONS, r"a\.png: cannot be decoded"),
            (Turn("word " * 2000), OPTIONS, "maximum context length is 1024"),
            (Turn("q"), replace(OPTIONS, temperature=-1), "temperature must be a number of at least 0, got -1"),
            (Turn("q", (good,)), replace(OPTIONS, min_pixels=9000, max_pixels=8000), "min_pixels is 9000, above"),
        ):
            with pytest.raises(ValueError, match=message):
                await answer_steps(sessions, session, turn, options)
            assert (session.turns, session.request_id) == ([], None)

    with_engine(checkpoint, work)


def test_a_full_engine_refuses_a_question_and_takes_it_later(checkpoint, uploads, monkeypatch):
    gradio = pytest.importorskip("gradio")
    warnings = []
    monkeypatch.setattr(gradio, "Warning", warnings.append)

    async def work(engine):
        handlers = handlers_of(uploads, engine)
        sessions, turn, draft = handlers.sessions, Turn("talk"), {"text": "me too", "files": []}
        one, two = sessions.get("another"), sessions.get("one")
        task = asyncio.create_task(answer_steps(sessions, one, turn))
        while not turn.answer:
            await asyncio.sleep(0.01)
        *_, view = [view async for view in handlers.ask(VISITOR, None, draft, *astuple(OPTIONS))]
        assert warnings == ["Many people are asking right now; try again in a moment"]
        assert view[1]["value"] == draft and two.turns == []
        await sessions.stop(one)
        await task
        assert (await answer_steps(sessions, two, Turn("me too"), replace(OPTIONS, max_tokens=5)))[-1]

    with_engine(checkpoint, work, max_num_seqs=1, max_waiting=0)


def test_the_number_of_sessions_is_limited(sessions, uploads, monkeypatch):
    """The one that was idle longest goes, unless its tab is open; while all are, no further one begins."""
    monkeypatch.setattr(session_module, "MAX_SESSIONS", 3)
    forgotten = []
    sessions.forget = forgotten.append
    held = sent(uploads, "old")
    sessions.get("old").turns.append(Turn("q", (held,)))
    sessions.get("busy").request_id = "runs"
    with sessions.open_tab("open"), sessions.open_tab("new"):
        tab = sessions.get("open")
        sessions.get("new")
        assert not held.path.exists() and forgotten == ["old"]
        with pytest.raises(ValueError, match="Too many people have this page open"):
            sessions.get("one more")
        assert sessions.get("busy").request_id == "runs" and sessions.get("open") is tab
    sessions.get("one more")
    assert forgotten == ["old", "new"]


def test_few_sessions_without_a_tab_are_kept(sessions, monkeypatch):
    monkeypatch.setattr(session_module, "MAX_CLOSED", 2)
    forgotten = []
    sessions.forget = forgotten.append
    with sessions.open_tab("open"):
        for name in ("open", "a", "b", "a", "c"):
            sessions.get(name)
    assert forgotten == ["b"]


def sweep(sessions: Sessions) -> None:
    elsewhere(sessions.sweep())


@pytest.mark.spawns
def test_an_event_after_its_visitor_left_leaves_no_session(uploads, monkeypatch):
    handlers = handlers_of(uploads)

    async def late() -> None:
        await handlers.leave(VISITOR)
        await counts(handlers, held.path)

    handlers.sessions.get("one")
    held = sent(uploads, "nobody")
    elsewhere(late())
    uploads.release("nobody")
    sweep(handlers.sessions)
    assert held.path.exists()  # the connection may have been lost only for a moment
    monkeypatch.setattr(session_module, "ORPHAN_SECONDS", -1)
    sweep(handlers.sessions)
    assert not held.path.exists()


def test_a_reloaded_tab_keeps_its_images(sessions, uploads, monkeypatch):
    monkeypatch.setattr(session_module, "RELOAD_SECONDS", 0)
    held, gone = sent(uploads, "one"), sent(uploads, "one", "b.png")
    sessions.get("one")

    async def reload() -> None:
        await sessions.end("one")
        sessions.get("two")
        uploads.claim("two", str(held.path))
        await asyncio.sleep(0.01)

    elsewhere(reload())
    assert (held.path.exists(), gone.path.exists()) == (True, False)


def test_a_connection_that_is_lost_for_a_moment_loses_nothing(sessions, uploads, monkeypatch):
    monkeypatch.setattr(session_module, "RELOAD_SECONDS", 0)
    held, session = sent(uploads, "one"), sessions.get("one")

    async def reconnect() -> None:
        await sessions.end("one")
        with sessions.open_tab("one"):
            await asyncio.sleep(0.01)

    elsewhere(reconnect())
    assert sessions.get("one") is session and held.path.exists()


@pytest.mark.spawns
def test_a_damaged_image_is_named_when_it_is_added_and_good_ones_are_decoded_once(uploads, monkeypatch):
    handlers = handlers_of(uploads)
    good, bad = sent(uploads, "one"), sent(uploads, "one", "bad.png")
    bad.path.write_bytes(bad.path.read_bytes()[:300])
    decoded, read = [], UploadedImage.read
    monkeypatch.setattr(UploadedImage, "read", lambda path, decode: (decoded.append(path), read(path, decode))[1])
    said = []

    async def add() -> None:
        for paths in ([good], [good, bad]):
            said.append(await counts(handlers, *(image.path for image in paths)))

    elsewhere(add())
    assert said[0] == "12 picture tokens" and "bad.png: cannot be decoded, damaged or truncated" in said[1]
    assert decoded == [good.path, bad.path]


def test_a_count_ends_an_older_one(uploads):
    gradio = pytest.importorskip("gradio")

    async def work() -> None:
        handlers, held = handlers_of(uploads, decoder=InProcessDecoder(POLICY)), sent(uploads, "one")
        is_reading, read = asyncio.Event(), handlers.sessions.read

        async def slowly(*given):
            if not is_reading.is_set():
                is_reading.set()
                await asyncio.sleep(3600)
            return await read(*given)

        handlers.sessions.read = slowly
        older = asyncio.create_task(counts(handlers, held.path))
        await is_reading.wait()
        fewer = replace(OPTIONS, max_pixels=OPTIONS.min_pixels)
        assert await counts(handlers, held.path, options=fewer) == "2 picture tokens"
        assert await older == gradio.skip()

    elsewhere(work())


def test_an_open_tab_keeps_its_session_however_long_it_idles(sessions, uploads, monkeypatch):
    monkeypatch.setattr(session_module, "ORPHAN_SECONDS", -1)
    held, session = sent(uploads, "one"), sessions.get("one")
    with sessions.open_tab("one"):
        with sessions.open_tab("one"):  # a second heartbeat of the same session
            pass
        sweep(sessions)
        assert (sessions.get("one"), held.path.exists()) == (session, True)
    sweep(sessions)
    assert (sessions.get("one") is session, held.path.exists()) == (False, False)


def test_a_session_without_a_tab_is_kept_while_it_is_answered(sessions, uploads, monkeypatch):
    monkeypatch.setattr(session_module, "ORPHAN_SECONDS", -1)
    held, session = sent(uploads, "one"), sessions.get("one")
    session.request_id = "runs"
    sweep(sessions)
    assert sessions.get("one") is session and held.path.exists()


def test_ticks_have_all_deltas_and_raise_the_exception_of_the_stream():
    async def stream():
        for i in range(5):
            yield Delta("id", 0, str(i), [i])
            await asyncio.sleep(0.004 * i)
        raise ValueError("it broke")

    async def run():
        got = []
        with pytest.raises(ValueError, match="it broke"):
            async for deltas in in_ticks(stream(), 0.005):
                got += [delta.text for delta in deltas]
                await asyncio.sleep(0.003)
        assert got == ["0", "1", "2", "3", "4"]

    elsewhere(run())
