"""Questions about videos, alone and with images: answers, caches, limits, and how long the files are kept."""

import asyncio
import json
from dataclasses import astuple, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("av")
pytest.importorskip("gradio")
import gradio

from mmvllm.demo import session as session_module
from mmvllm.demo.conversation import Options, Turn, to_chat
from mmvllm.demo.handlers import Handlers
from mmvllm.demo.images import UploadedImage
from mmvllm.demo.record import to_record
from mmvllm.demo.settings import DemoSettings
from mmvllm.demo.uploads import Uploads
from mmvllm.demo.videos import ClipRules, UploadedVideo
from mmvllm.entrypoints.async_llm import AsyncLLM
from mmvllm.media.policy import MediaPolicy
from tests.helpers.engine.requests import noise_image
from tests.helpers.media.videos import make_clip
from tests.helpers.serving.demo import OPTIONS
from tests.helpers.serving.pages import elsewhere
from tests.helpers.serving.server import ENGINE

SHORT = replace(OPTIONS, max_tokens=4)
VISITOR = SimpleNamespace(session_hash="one")


@pytest.fixture(scope="module")
def engine():
    engine = AsyncLLM(None, **ENGINE)
    yield engine
    elsewhere(engine.shutdown(drain=False))


@pytest.fixture
def handlers(engine, tmp_path):
    (tmp_path / "up").mkdir()
    handlers = Handlers(engine, DemoSettings(MediaPolicy()), Uploads(tmp_path / "up"), [])
    yield handlers
    handlers.sessions.decoder.close()


def sent(handlers: Handlers, name: str, **clip) -> str:
    path = handlers.uploads.folder / f"hash-of-{name}" / name
    path.parent.mkdir()
    if name.endswith(".png"):
        noise_image(100, 80).save(path)
    else:
        make_clip(path, **clip)
    return str(path)


def counted(handlers: Handlers, *paths: str, options: Options = SHORT) -> str:
    return asyncio.run(handlers.count(VISITOR, json.dumps(paths), *astuple(options)))


async def ask(handlers: Handlers, question: str, *paths: str, options: Options = SHORT) -> Turn:
    draft = {"text": question, "files": [{"path": path} for path in paths]}
    async for _ in handlers.ask(VISITOR, gradio.EventData(None, None), draft, *astuple(options)):
        pass
    return handlers.sessions.get("one").turns[-1]


def asked(handlers: Handlers, question: str, *paths: str) -> Turn:
    return asyncio.run(ask(handlers, question, *paths))


@pytest.mark.spawns
def test_frames_and_tokens_are_shown_before_asking_and_follow_the_options(handlers):
    clip, image = sent(handlers, "a.mp4", number=24, fps=8), sent(handlers, "a.png")
    said = counted(handlers, clip, image)
    assert "<b>a.mp4</b> lasts 3.0 s; the model sees 6 frames:" in said and said.count("<figure>") == 6
    assert said.endswith("12 picture tokens and 105 video tokens")
    said = counted(handlers, clip, options=replace(SHORT, fps=4))
    assert "the model sees 12 frames, some of which are:" in said and said.endswith("</div>210 video tokens")
    said = counted(handlers, clip, options=replace(SHORT, min_pixels=36_000, max_pixels=38_416))
    assert said.endswith("</div>120 video tokens")


@pytest.mark.spawns
def test_a_video_is_decoded_again_only_if_other_frames_are_shown(handlers, monkeypatch):
    clip, read, reads = sent(handlers, "a.mp4", number=48, fps=8), UploadedVideo.read, []
    monkeypatch.setattr(UploadedVideo, "read", lambda *given: (reads.append(given), read(*given))[1])
    for options in (SHORT, SHORT, replace(SHORT, max_pixels=8_000), replace(SHORT, fps=4)):
        counted(handlers, clip, options=options)
    assert len(reads) == 2


@pytest.mark.spawns
def test_a_second_question_about_a_video_runs_no_vit(handlers, engine):
    clip, encoded = sent(handlers, "a.webm", codec="libvpx-vp9", seed=1), engine.stats().num_encoded_images
    first = asked(handlers, "What moves?", clip)
    assert engine.stats().num_encoded_images - encoded == 3  # temporal patches
    assert " 0 of " in first.note and first.note.endswith("105 video tokens")
    encoded = engine.stats().num_encoded_images
    second = asked(handlers, "And what else?")
    assert engine.stats().num_encoded_images == encoded
    num_cached = int(second.note.partition(" tokens/s · ")[2].split()[0])
    assert num_cached > 105 and second.note.endswith("105 video tokens")


@pytest.mark.spawns
def test_images_and_videos_are_asked_about_in_one_conversation(handlers):
    session, names = handlers.sessions.get("one"), ("a.png", "a.mp4", "b.png", "b.mp4")
    first = asked(handlers, "What is this?", *(sent(handlers, name) for name in names))
    assert [one.path.name for one in first.media] == [*names]
    assert first.note.endswith("12 + 12 = 24 picture tokens and 105 + 105 = 210 video tokens")
    assert asked(handlers, "", sent(handlers, "c.mp4", number=8)).question == "Describe this video."
    assert session.gallery[0][0].path.name == "c.mp4" and len(session.gallery) == 2
    files = [message["content"]["path"] for message in to_chat(session.turns) if "path" in message["content"]]
    assert [Path(path).name for path in files] == [*names, "c.mp4"]


@pytest.mark.spawns
def test_a_damaged_video_is_named_before_it_is_asked_about(handlers):
    good, bad = sent(handlers, "good.mp4"), sent(handlers, "bad.mp4")
    Path(bad).write_bytes(Path(bad).read_bytes()[:300])
    said = counted(handlers, good, bad)
    assert said.startswith('<span class="bad" role="alert">bad.mp4: ')
    assert counted(handlers, good).endswith("105 video tokens")


@pytest.mark.spawns
def test_the_numbers_of_images_and_videos_are_limited(handlers):
    clips = [sent(handlers, f"{i}.mp4", number=2) for i in range(3)]
    assert "3 videos; at most 2 go into one question" in counted(handlers, *clips)
    images = [sent(handlers, f"{i}.png") for i in range(9)]
    assert "9 pictures; at most 8 go into one question" in counted(handlers, *clips[:2], *images)
    assert counted(handlers, *clips[:2], *images[:8]).endswith("video tokens")


@pytest.mark.spawns
def test_videos_that_exceed_the_context_together_are_refused_before_they_are_decoded(handlers, engine, monkeypatch):
    clips = [sent(handlers, f"{i}.mp4", number=60, fps=2) for i in range(2)]
    messages, decoded = [], []
    monkeypatch.setattr(gradio, "Warning", messages.append)
    monkeypatch.setattr(UploadedVideo, "load", lambda *given: decoded.append(given))
    counted(handlers, *clips)  # each is planned for the whole context
    monkeypatch.setattr(engine, "max_model_len", 500)
    with pytest.raises(IndexError):  # there is no turn
        asked(handlers, "What?", *clips)
    assert decoded == [] and "more pictures and videos than the model takes" in messages[0]
    assert handlers.sessions.get("one").turns == []


@pytest.mark.spawns
def test_no_more_videos_are_counted_than_fit(handlers, engine, monkeypatch):
    """A conversation may name 200, and to count the tokens of each takes the event loop some milliseconds."""
    clip = sent(handlers, "a.mp4", number=60, fps=2)
    counted(handlers, clip)
    session, numbers = handlers.sessions.get("one"), []
    [video] = session.known.values()
    session.turns[:] = [Turn("q", [video] * 20, "a") for _ in range(10)]
    count = handlers.sessions._num_tokens
    monkeypatch.setattr(handlers.sessions, "_num_tokens", lambda *given: numbers.append(count(*given)) or numbers[-1])
    with pytest.raises(ValueError, match="more pictures and videos than the model takes"):
        handlers.sessions._check_length(session, SHORT)
    assert sum(numbers[:-1]) < engine.max_model_len <= sum(numbers) and len(numbers) < 200


@pytest.mark.spawns
def test_nothing_is_kept_of_a_draft_that_cannot_be_read(handlers):
    """What was read of a video has frames."""
    clips, broken = [sent(handlers, f"{i}.mp4") for i in range(2)], handlers.uploads.folder / "hash" / "broken.png"
    broken.parent.mkdir()
    broken.write_bytes(b"no image")
    for clip in clips:
        assert 'class="bad"' in counted(handlers, clip, str(broken))
        assert all(path in handlers.sessions.get("one").draft for path in handlers.sessions.get("one").known)
    assert {path.name for path in handlers.sessions.get("one").known} <= {"1.mp4"}


def test_a_timestamp_is_tokenized_once(engine):
    rules = ClipRules.of(engine)
    assert rules.encode("<1.0 seconds>") == engine.tokenizer.encode("<1.0 seconds>")
    assert rules.encode("<1.0 seconds>") is rules.encode("<1.0 seconds>")


def test_a_page_that_takes_no_videos_says_why(handlers, engine, monkeypatch):
    clip = sent(handlers, "a.mp4")
    assert "and 2 videos of 256 MiB and 60 minutes" in handlers.limits
    monkeypatch.setattr(engine, "takes_videos", False)
    assert counted(handlers, clip) == '<span class="bad" role="alert">this model takes no videos</span>'
    assert "video" not in handlers.limits


@pytest.mark.spawns
def test_a_kept_conversation_is_restored_with_its_video(handlers):
    clip = sent(handlers, "a.mp4")
    turn = asked(handlers, "What moves?", clip)
    record = json.loads(to_record([turn]))
    assert record["turns"][0]["images"] == [clip] and len(record["strips"][clip]) == 6
    other = SimpleNamespace(session_hash="other")
    view = asyncio.run(handlers.restore(other, gradio.EventData(None, {"turns": record["turns"]})))
    (restored,) = handlers.sessions.get("other").turns
    assert isinstance(restored.media[0], UploadedVideo) and restored.answer == turn.answer
    assert json.loads(view[-1])["strips"][clip]


def test_a_conversation_without_its_video_says_so(handlers, monkeypatch):
    infos = []
    monkeypatch.setattr(gradio, "Info", infos.append)
    turns = [{"question": "q", "answer": "a", "note": "n", "images": []}]
    asyncio.run(handlers.restore(VISITOR, gradio.EventData(None, {"turns": turns, "final": True, "lost": True})))
    assert infos == ["The videos of this conversation are no longer here; to ask about them, add them again"]


@pytest.mark.spawns
def test_videos_are_kept_no_longer_than_images(handlers, monkeypatch):
    monkeypatch.setattr(session_module, "RELOAD_SECONDS", 0)
    clip, image = sent(handlers, "a.mp4"), sent(handlers, "a.png")

    async def work() -> None:
        turn = await ask(handlers, "What moves?", clip, image)
        assert isinstance(turn.media[1], UploadedImage)
        await handlers.leave(VISITOR)
        await asyncio.sleep(0.01)

    asyncio.run(work())
    assert [*handlers.uploads.folder.iterdir()] == []
