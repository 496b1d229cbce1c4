"""`mmvllm caption` on clips as a process: formats, options, progress, interruption."""

import csv
import json
import shutil
import signal
from pathlib import Path

import pyarrow.parquet
import pytest

from tests.helpers.captioning.command import recorded, records, until
from tests.helpers.engine.requests import noise_image
from tests.helpers.media.videos import make_clip


@pytest.fixture(scope="module")
def clips(tmp_path_factory) -> Path:
    """Videos of 3 and 6 seconds, a copy of the first, and an image."""
    folder = tmp_path_factory.mktemp("videos") / "clips"
    folder.mkdir()
    make_clip(folder / "a.mp4", 24)
    make_clip(folder / "long.mp4", 48, seed=1)
    shutil.copy(folder / "a.mp4", folder / "same.mov")
    noise_image(60, 64, seed=1).save(folder / "image.png")
    return folder


PLACES = {
    *(("a.mp4", 0.0, 3.0), ("same.mov", 0.0, 3.0), ("image.png", None, None)),
    *(("long.mp4", 0.0, 3.0), ("long.mp4", 3.0, 6.0)),
}


def places(rows) -> set[tuple]:
    def number(value) -> float | None:
        return None if value in (None, "") else float(value)

    return {(Path(row["path"]).name, number(row["start"]), number(row["end"])) for row in rows}


def test_clips_are_in_tables(caption, clips, tmp_path):
    for name in ("out.csv", "out.parquet"):
        assert caption(clips, "--clip-seconds", "3", "--output", tmp_path / name).code == 0
    with (tmp_path / "out.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert places(rows) == PLACES and len(rows) == 5
    (image,) = (row for row in rows if row["start"] == "")
    assert [image[name] for name in ("duration", "num_frames", "fps")] == [""] * 3
    table = pyarrow.parquet.read_table(tmp_path / "out.parquet")
    assert places(table.to_pylist()) == PLACES
    assert [str(table.schema.field(name).type) for name in ("start", "num_frames")] == ["double", "int64"]


def test_clips_have_caption_files(caption, clips, tmp_path):
    options = ("--clip-seconds", "3", "--output-dir")
    for format in ("txt", "webdataset-json"):
        assert caption(clips, "--format", format, *options, tmp_path / format).code == 0
    stems = {"a", "same", "image", "long.00000-00003", "long.00003-00006"}
    assert {path.name for path in (tmp_path / "txt").glob("*.txt")} == {f"{stem}.txt" for stem in stems}
    made = {
        path.name[: -len(".json")]: json.loads(path.read_text()) for path in tmp_path.glob("webdataset-json/*.json")
    }
    assert made.keys() == stems and places(made.values()) == PLACES


def test_the_summary_and_the_log_count_clips_and_seconds_of_video(caption, clips, out):
    done = caption(clips, "--output", out, "--video-fps", "4", "--progress", "log")
    assert done.code == 0
    rows = dict(line.split("  ", 1) for line in done.err.splitlines() if "  " in line)
    rows = {name: text.strip() for name, text in rows.items()}
    assert rows["clips"] == "3 with a caption, 12.0 s of video"
    assert rows["captioned"] == "3" and rows["duplicates"] == "1 (caption copied from an equal image or clip)"
    assert rows["speed"].endswith(" records/s")
    assert "Describe this image." in done.err and "Describe this video." in done.err


def test_captions_of_clips_are_printed_with_their_place(caption, clips):
    done = caption(clips / "long.mp4", "--clip-seconds", "3", "--progress", "none")
    assert sorted(line.partition(": ")[0] for line in done.out.splitlines()) == [
        f"{clips / 'long.mp4'} 0-3 s",
        f"{clips / 'long.mp4'} 3-6 s",
    ]


def test_a_run_that_is_interrupted_within_a_video_is_resumed(start, tmp_path, out):
    long = make_clip(tmp_path / "long.mp4", 240, size=(32, 48))
    options = (long, "--clip-seconds", "0.5", "--output", out, "--ordered", "--progress", "none")
    options += ("--max-num-seqs", "2", "--workers", "1")  # so that few clips are in flight
    run = start(*options)
    until(lambda: recorded(out) >= 5)
    run.send(signal.SIGINT)
    assert run.end().code == 130
    before = out.read_bytes()
    assert 5 <= len(records(out)) < 60
    assert start(*options).end().code == 0
    assert out.read_bytes().startswith(before)
    assert [(record["start"], record["end"]) for record in records(out)] == [(i / 2, i / 2 + 0.5) for i in range(60)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--video-fps", "2", "--video-frames", "8"], "give either --video-fps or --video-frames"),
        (["--video-fps", "0"], "--video-fps must be a number above 0 and at most 1000, got 0.0"),
        (["--video-fps", "2000"], "--video-fps must be a number above 0 and at most 1000, got 2000.0"),
        (["--clip-seconds", "-1"], "--clip-seconds"),
        (["--video-max-pixels", "0"], "--video-max-pixels"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message, caption, clips):
    done = caption(clips, *options)
    assert done.code == 2 and message in done.err


def test_another_sampling_of_clips_is_another_run(caption, clips, out):
    assert caption(clips / "a.mp4", "--output", out).code == 0
    done = caption(clips / "a.mp4", "--output", out, "--video-frames", "8")
    assert done.code == 2 and "video_frames was None, is 8" in done.err
    assert caption(clips / "a.mp4", "--output", out, "--video-frames", "8", "--append-anyway").code == 0
    assert [record["num_frames"] for record in records(out)] == [6, 8]
