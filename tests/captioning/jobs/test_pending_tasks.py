"""Long videos become several tasks, with keys, caption files and failures of their own; nothing is captioned."""

import dataclasses
import json
from pathlib import Path

import pytest

from mmvllm.captioning import CaptionSettings
from mmvllm.captioning.jobs.pending_tasks import PendingTasks, Selection, clips_of
from mmvllm.captioning.jobs.progress import Progress
from mmvllm.captioning.outputs.options import OutputOptions
from mmvllm.captioning.outputs.output import Output
from mmvllm.captioning.outputs.record import COLUMNS
from mmvllm.captioning.sources.items import Item
from mmvllm.captioning.sources.loading import ItemLoader
from mmvllm.errors import ArgumentError
from mmvllm.processors.videos.clip import VideoInfo
from mmvllm.processors.videos.qwen_vl_utils import frame_indices
from tests.helpers.captioning.pending_tasks import opened
from tests.helpers.media.videos import make_clip

CUT = CaptionSettings(clip_seconds=2)
WHOLE = CaptionSettings()


@pytest.fixture
def videos(tmp_path) -> Path:
    """Videos of 3 and 10 seconds: two clips, the last one longer, and five."""
    folder = tmp_path / "videos"
    folder.mkdir()
    make_clip(folder / "a.mp4", 20)
    make_clip(folder / "long.mp4", 80)
    return folder


def places(tasks) -> list[tuple]:
    return [(Path(task.item.path).name, task.item.start, task.item.end) for task in tasks]


def record(task, error: str | None = None, duration: float = 10.0) -> dict:
    """The record of a task of a video."""
    item, is_clip = task.item, task.item.is_video
    known = {"path": item.path, "id": item.id, "key": task.key, "digest": task.key}
    place = {"start": item.start or 0.0, "end": item.end or duration, "duration": duration} if is_clip else {}
    made = {"caption": None if error else "a caption", "error": error, "finish_reason": "error" if error else "eos"}
    prompt = CUT.prompt_for(item)
    return dict.fromkeys(COLUMNS) | known | place | made | {"prompt": prompt, "file": None if error else task.file}


def record_some(
    output: Path, *paths, number: int = 1000, failing: tuple = (), settings: CaptionSettings = CUT, **options
) -> None:
    """Record the first tasks; those with a start in `failing` fail."""
    with opened(settings, *paths, output=output, **options) as (out, tasks):
        for task in tasks[:number]:
            error = task.item.error or ("is damaged" if task.item.start in failing else None)
            out.write(record(task, error) | {"settings": settings.fingerprint})


def left(output: Path, *paths, settings: CaptionSettings = CUT, **options) -> list[tuple]:
    with opened(settings, *paths, output=output, **options) as (_, tasks):
        return places(tasks)


def test_videos_are_cut_and_a_short_rest_joins_the_clip_before(videos, tmp_path):
    assert left(tmp_path / "out.jsonl", videos) == [
        *(("a.mp4", 0.0, 2.0), ("a.mp4", 2.0, 2.5)),
        *(("long.mp4", float(start), float(start + 2)) for start in range(0, 10, 2)),
    ]
    of_four = dataclasses.replace(CUT, clip_seconds=2.25)
    assert left(tmp_path / "four.jsonl", videos / "a.mp4", settings=of_four) == [("a.mp4", None, None)]
    assert left(tmp_path / "whole.jsonl", videos, settings=WHOLE) == [("a.mp4", None, None), ("long.mp4", None, None)]


@pytest.mark.parametrize(
    ("info", "seconds", "want"),
    [
        (VideoInfo(240, 24, 40, 40), 60, [None]),  # shorter than a clip
        (VideoInfo(24 * 135, 24, 40, 40), 60, [0, 60, 120]),  # a quarter of a clip is left
        (VideoInfo(24 * 134, 24, 40, 40), 60, [0, 60]),
        (VideoInfo(10, 0.5, 40, 40), 1, [0, 4, 8, 12, 16]),  # a clip has two frames at least
        (VideoInfo(9, 0.5, 40, 40), 4, [0, 4, 8, 12]),  # the last frame alone is no clip
        (VideoInfo(1, 25, 40, 40), 0.01, [None]),
    ],
)
def test_clips_are_cut_at_these_seconds(info, seconds, want, monkeypatch):
    monkeypatch.setattr(ItemLoader, "info", lambda self, item: info)
    settings = CaptionSettings(clip_seconds=seconds)
    made = list(clips_of(Item("a.mp4", "a.mp4", "a.mp4", is_video=True), settings, ItemLoader()))
    assert [clip.start for clip in made] == want
    if len(made) > 1:
        assert [clip.end for clip in made] == [*want[1:], info.duration]


@pytest.mark.parametrize("fps", [29.97, 30000 / 1001, 120, 0.3])
def test_the_shortest_clips_have_two_frames(fps, monkeypatch):
    info = VideoInfo(200, fps, 40, 40)
    monkeypatch.setattr(ItemLoader, "info", lambda self, item: info)
    video, settings = Item("a.mp4", "a.mp4", "a.mp4", is_video=True), CaptionSettings(clip_seconds=0.01)
    for clip in clips_of(video, settings, ItemLoader()):
        assert len(frame_indices({"video_start": clip.start, "video_end": clip.end}, info)) >= 2


def test_headers_are_read_as_tasks_are_taken(videos, tmp_path, monkeypatch):
    read = []
    info = ItemLoader.info
    monkeypatch.setattr(ItemLoader, "info", lambda self, item: read.append(Path(item.path).name) or info(self, item))
    out = Output(CUT, OutputOptions(output=tmp_path / "out.jsonl"))
    out.begin()
    tasks = iter(PendingTasks(CUT, Selection([videos]), out, Progress(), ItemLoader()))
    next(tasks)
    assert read == ["a.mp4"]
    assert places([next(tasks), next(tasks)]) == [("a.mp4", 2.0, 2.5), ("long.mp4", 0.0, 2.0)]
    assert read == ["a.mp4", "long.mp4"]
    out.close()
    with opened(WHOLE, videos, output=tmp_path / "whole.jsonl"):
        assert len(read) == 2  # whole videos are opened when they are prepared


def test_a_run_that_stopped_within_a_video_goes_on_there(videos, tmp_path):
    out = tmp_path / "out.jsonl"
    record_some(out, videos, number=4)
    rest = [("long.mp4", 4.0, 6.0), ("long.mp4", 6.0, 8.0), ("long.mp4", 8.0, 10.0)]
    assert left(out, videos) == rest
    assert left(out, videos / "long.mp4") == rest
    record_some(out, videos)
    assert left(out, videos) == []
    assert len({json.loads(line)["key"] for line in out.open()}) == 7


def test_a_recorded_range_of_a_list_does_not_stand_for_the_video(videos, tmp_path):
    out, names = tmp_path / "out.jsonl", tmp_path / "list.jsonl"
    line = {"video": str(videos / "long.mp4")}
    names.write_text(json.dumps(line | {"start": 0, "end": 1}) + "\n" + json.dumps(line | {"start": 2}))
    record_some(out, names)
    assert left(out, names) == []
    assert len(left(out, videos / "long.mp4")) == 5


def test_a_failed_clip_is_tried_again_alone(videos, tmp_path):
    out = tmp_path / "out.jsonl"
    record_some(out, videos, failing=(4.0,))
    assert left(out, videos) == []
    assert left(out, videos, retry_failed=True) == [("long.mp4", 4.0, 6.0)]


def test_a_header_that_cannot_be_read_is_one_failure_and_a_retry_takes_all_clips(videos, tmp_path):
    out, good = tmp_path / "out.jsonl", (videos / "long.mp4").read_bytes()
    (videos / "long.mp4").write_bytes(good[:60])
    record_some(out, videos)
    failed = [json.loads(line) for line in out.open()][-1]
    assert (Path(failed["path"]).name, failed["start"], failed["finish_reason"]) == ("long.mp4", 0.0, "error")
    assert failed["error"] and str(videos) not in failed["error"]
    assert left(out, videos) == []
    (videos / "long.mp4").write_bytes(good)
    again = left(out, videos, retry_failed=True)
    assert again == [("long.mp4", float(start), float(start + 2)) for start in range(0, 10, 2)]
    record_some(out, videos, retry_failed=True)
    assert left(out, videos, retry_failed=True) == left(out, videos) == []
    assert [json.loads(line)["error"] for line in out.open()] == [None] * 7


def test_caption_files_of_clips_have_their_seconds_in_the_name(videos, tmp_path):
    for folder, place in ((tmp_path / "texts", {"output_dir": tmp_path / "texts"}), (videos, {})):
        settings = dataclasses.replace(CUT, clip_seconds=2.5)
        with opened(settings, videos, output=tmp_path / f"{folder.name}.jsonl", format="txt", **place) as (_, tasks):
            names = [Path(task.file).relative_to(folder).as_posix() for task in tasks]
        long = ["00000-00002.5", "00002.5-00005", "00005-00007.5", "00007.5-00010"]
        assert names == ["a.txt", *(f"long.{part}.txt" for part in long)]


def test_missing_caption_files_of_clips_are_written_again_and_existing_ones_skipped(videos, tmp_path):
    out, texts = tmp_path / "out.jsonl", tmp_path / "texts"
    settings = {
        "format": "txt",
        "output_dir": texts,
    }
    record_some(out, videos, **settings)
    (texts / "long.00004-00006.txt").unlink()
    (texts / "long.00002-00004.txt").write_text("edited")
    assert left(out, videos, **settings) == []
    assert (texts / "long.00004-00006.txt").read_text() == "a caption\n"
    assert (texts / "long.00002-00004.txt").read_text() == "edited"
    (texts / "a.00000-00002.txt").unlink()
    skipping = left(tmp_path / "other.jsonl", videos, skip_existing=True, **settings)
    assert skipping == [("a.mp4", 0.0, 2.0)]


def test_settings_of_videos_are_part_of_the_run():
    others = [{"video_fps": 1}, {"video_frames": 8}, {"video_max_pixels": 9999}, {"clip_seconds": 9}]
    made = {CaptionSettings(**keys).fingerprint for keys in [{}, {"animations_as_clips": True}, *others]}
    assert len(made) == 6
    assert WHOLE.difference(dataclasses.asdict(CUT)) == ["clip_seconds was 2, is None"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"video_fps": 2, "video_frames": 8}, "give either video_fps or video_frames"),
        ({"video_fps": 0}, "video_fps must be a number above 0 and at most 1000, got 0"),
        ({"video_frames": True}, "video_frames must be an integer of at least 1, got True"),
        ({"video_frames": 2.5}, "video_frames must be an integer of at least 1, got 2.5"),
        ({"video_max_pixels": 0}, "video_max_pixels must be an integer of at least 1, got 0"),
        ({"clip_seconds": float("nan")}, "clip_seconds must be a number above 0 and at most 1000000, got nan"),
        ({"clip_seconds": "9"}, "clip_seconds must be a number above 0 and at most 1000000, got '9'"),
    ],
)
def test_wrong_settings_of_videos_are_refused(options, message):
    with pytest.raises(ArgumentError) as caught:
        CaptionSettings(**options)
    assert str(caught.value) == message


def test_presets_speak_of_a_video():
    video = Item("a.mp4", "a.mp4", "a.mp4", is_video=True)
    assert WHOLE.prompt_for(video) == "Describe this video."
    assert CaptionSettings(prompt="Which image?").prompt_for(video) == "Which image?"
    assert WHOLE.prompt_for(dataclasses.replace(video, prompt="Who?", context="Tom")) == "Context: Tom\n\nWho?"
