"""A conversation that the browser has kept is restored with the images that are still there."""

import asyncio
import json
from types import SimpleNamespace

import pytest

pytest.importorskip("gradio")
import gradio

from mmvllm.demo.conversation import Turn
from mmvllm.demo.events import MAX_FILES
from mmvllm.demo.handlers import Handlers
from mmvllm.demo.images import UploadedImage
from mmvllm.demo.messages import spoken, spoken_model
from mmvllm.demo.record import (
    INTERRUPTED,
    MAX_CHARACTERS,
    MAX_NOTE,
    MAX_STRIP_CHARACTERS,
    MAX_TURNS,
    check_length,
    read_turns,
    to_record,
)
from mmvllm.demo.settings import DemoSettings
from mmvllm.demo.uploads import Uploads
from mmvllm.demo.videos import UploadedVideo
from mmvllm.errors import EngineBusy, EngineStopped, PromptTooLong, RequestError
from mmvllm.media.policy import MediaPolicy
from mmvllm.processors.videos.load import DIRECT
from tests.helpers.engine.requests import noise_image
from tests.helpers.serving.demo import InProcessDecoder

POLICY = MediaPolicy()


def uploaded(uploads: Uploads, name: str) -> UploadedImage:
    path = uploads.folder / f"hash-of-{name}" / name
    path.parent.mkdir()
    noise_image(60, 40).save(path)
    return UploadedImage.read(path, DIRECT)


@pytest.fixture
def handlers(tmp_path) -> Handlers:
    settings = DemoSettings(POLICY)
    return Handlers(SimpleNamespace(model="x"), settings, Uploads(tmp_path), [], InProcessDecoder(POLICY))


def restored(handlers: Handlers, turns: list[dict], **flags) -> tuple[list[Turn], dict]:
    """The turns of the visitor's session after a restore, and the record that the browser is given."""
    event = gradio.EventData(None, {"turns": turns, **flags})
    view = asyncio.run(handlers.restore(SimpleNamespace(session_hash="visitor"), event))
    return handlers.sessions.get("visitor").turns, json.loads(view[-1])


def test_a_record_is_read_as_it_was_written(handlers):
    image = uploaded(handlers.uploads, "a.png")
    turns = [Turn("**What** is <b>?", (image,), "A </script> star.", "5 tokens/s"), Turn("And?", (), "", "Looking …")]
    record = to_record(turns)
    assert "<" not in record  # it is inserted into a page
    got, again = restored(handlers, json.loads(record)["turns"])
    assert [(turn.question, turn.media, turn.answer, turn.note) for turn in got] == [
        ("**What** is <b>?", (image,), "A </script> star.", "5 tokens/s"),
        ("And?", (), "", INTERRUPTED),
    ]
    assert again["missing"] == [] and again["turns"][0]["images"] == [str(image.path)]
    assert [caption for _, caption in handlers.sessions.get("visitor").gallery] == [
        "**What** is <b>? A </script> star."
    ]


def test_images_that_are_gone_are_asked_for_and_then_left_out(handlers, tmp_path):
    here = uploaded(handlers.uploads, "a.png")
    gone = str(tmp_path / "hash" / "gone.png")
    kept = [{"question": "q", "answer": "a", "note": "n", "images": [str(here.path), gone]}]
    assert restored(handlers, kept) == ([], {"turns": [], "missing": [gone], "strips": {}, "boxes": {}})
    (turn,), record = restored(handlers, kept, final=True)
    assert turn.media == (here,) and record["turns"][0]["images"] == [str(here.path)]


@pytest.mark.parametrize("path", ["{folder}/secret.png", "https://example.com/a.png"])
def test_a_kept_conversation_gives_access_to_no_other_file(path, handlers, tmp_path_factory):
    folder = tmp_path_factory.mktemp("others")
    noise_image(60, 40).save(folder / "secret.png")
    kept = {"question": "q", "answer": "a", "note": "n", "images": [path.format(folder=folder)]}
    (turn,), _ = restored(handlers, [kept], final=True)
    assert turn.media == ()


def test_a_record_of_a_wrong_shape_is_refused():
    turn = {"question": "q", "answer": "a", "note": "n", "images": ["a.png"] * 9}
    few = turn | {"images": []}
    wrong = (
        None,
        5,
        {},
        [None],
        [{"question": "q"}],
        [few | {"answer": 5}],
        [few | {"images": [5]}],
        [few] * (MAX_TURNS + 1),
    )
    for value in (*wrong, [turn]):
        with pytest.raises(ValueError, match="reload it"):
            read_turns(value, max_files=8)
    assert len(read_turns([few] * MAX_TURNS, max_files=8)) == MAX_TURNS
    assert len(read_turns([turn], max_files=9)) == 1
    (read,) = read_turns([turn | {"note": "n" * (MAX_NOTE + 1)}], max_files=9)
    assert read.note == "n" * MAX_NOTE


def test_a_conversation_has_a_longest_length():
    def record(length: int) -> list[dict]:
        return [{"question": "q" * length, "answer": "a", "note": "n", "images": []}] * 2

    check_length([Turn("q" * (MAX_CHARACTERS - 1), (), "a")])
    with pytest.raises(ValueError, match="too long to go on; start a new conversation"):
        check_length([Turn("q" * MAX_CHARACTERS, (), "a")])
    with pytest.raises(ValueError, match="too long to go on"):
        check_length([Turn("q")] * (MAX_TURNS + 1))
    with pytest.raises(ValueError, match="too long to go on"):
        check_length([Turn("q", (None,) * 100), Turn("q", (None,) * (MAX_FILES - 99))])
    assert len(read_turns(record(MAX_CHARACTERS - 2), max_files=8)) == 2
    with pytest.raises(ValueError, match="reload it"):
        read_turns(record(MAX_CHARACTERS - 1), max_files=8)


def test_a_record_has_the_frames_of_the_last_videos_only(tmp_path):
    strip = tuple((float(i), "x" * (MAX_STRIP_CHARACTERS // 20)) for i in range(6))
    videos = [UploadedVideo(tmp_path / f"{i}.mp4", None, (), strip) for i in range(9)]
    turns = [Turn("q", (video,), "a") for video in videos]
    strips = json.loads(to_record(turns))["strips"]
    assert [*strips] == [str(video.path) for video in (videos[8], videos[7], videos[6])]
    assert strips[str(videos[8].path)] == [*map(list, strip)]
    assert [*json.loads(to_record([Turn("q", (videos[0],) * 9)]))["strips"]] == [str(videos[0].path)]


@pytest.mark.parametrize(
    "error, words",
    [
        (EngineBusy(5, 4), "Many people are asking right now; try again in a moment"),
        (MemoryError(), "There is not enough memory for these files"),
        (EngineStopped("x"), "The model is not running any more; the page has to be started again"),
        (PromptTooLong("x", "y", value=3000, limit=2048), "has 3,000 tokens, and the model takes fewer than 2,048"),
        (RequestError("min_pixels is 9", param="min_pixels"), '"fewest pixels" above "most pixels"'),
        (ValueError("a.png is no longer here; add it again"), "a.png is no longer here; add it again"),
    ],
)
def test_errors_are_said_without_the_names_of_arguments(error, words):
    assert words in spoken(error)


def test_a_local_model_is_called_by_its_folder(tmp_path):
    (tmp_path / "Qwen2-VL-2B").mkdir()
    assert spoken_model(str(tmp_path / "Qwen2-VL-2B")) == "Qwen2-VL-2B"
    assert spoken_model("Qwen/Qwen2-VL-2B-Instruct") == "Qwen/Qwen2-VL-2B-Instruct"
