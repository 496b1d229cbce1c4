"""Videos are captioned like images: whole, cut into clips, from folders, lists and tars, in threads and processes."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from PIL import Image

from mmvllm import LLM, SamplingParams
from mmvllm.captioning import caption_images
from mmvllm.captioning.jobs import pending_tasks
from mmvllm.captioning.jobs.progress import kind_of_failure
from mmvllm.captioning.outputs.record import COLUMNS
from mmvllm.models.folder import BUNDLED
from mmvllm.processors.budget import DECODING
from mmvllm.processors.videos.load import load_video_info
from tests.helpers.captioning.finding import make_tar
from tests.helpers.engine.requests import noise_image
from tests.helpers.media.videos import make_clip, moving


@pytest.fixture(scope="module")
def llm():
    """The bundled model; its answers about clips mean nothing."""
    with LLM(device="cpu", dtype="float32", num_kvcache_blocks=512, skip_warmup=True, max_num_seqs=4) as made:
        yield made


@pytest.fixture(scope="module")
def clips(tmp_path_factory) -> Path:
    """A video of 3 seconds, its copy, one of 10 seconds, an image, and a broken video."""
    folder = tmp_path_factory.mktemp("clips")
    make_clip(folder / "a.mp4", 24)
    shutil.copy(folder / "a.mp4", folder / "copy.m4v")
    make_clip(folder / "long.mov", 80, seed=1)
    noise_image(60, 64, seed=1).save(folder / "image.png")
    (folder / "broken.mp4").write_bytes((folder / "a.mp4").read_bytes()[:60])
    return folder


def run(paths, llm, **options):
    return caption_images(paths, llm=llm, max_tokens=3, **options)


def by_place(records) -> dict[tuple, dict]:
    made = {(Path(record["path"]).name, record["start"]): record for record in records}
    return made


def test_a_folder_of_images_and_videos_has_a_record_for_each(clips, llm):
    job = run(clips, llm, ordered=True)
    made = {Path(record["path"]).name: record for record in job}
    assert all(list(record) == list(COLUMNS) for record in made.values())
    a = made["a.mp4"]
    assert [a[name] for name in ("duration", "start", "end", "num_frames", "fps")] == [3.0, 0.0, 3.0, 6, 2.0]
    assert (a["width"], a["height"], a["prompt"]) == (96, 64, "Describe this video.")
    assert 0 < a["image_tokens"] < a["prompt_tokens"]
    part = {"type": "video", "video": clips / "a.mp4", "fps": 2.0}
    content = [part, {"type": "text", "text": "Describe this video."}]
    request = {"messages": [{"role": "user", "content": content}]}
    (answer,) = llm.generate_multimodal([request], SamplingParams(max_tokens=3))
    assert (a["caption"], a["prompt_tokens"]) == (answer.text.strip(), answer.num_prompt_tokens)
    assert made["copy.m4v"]["duplicate_of"] == a["path"] and made["copy.m4v"]["caption"] == a["caption"]
    assert made["long.mov"]["duplicate_of"] is None and made["long.mov"]["num_frames"] == 20
    image = made["image.png"]
    assert image["prompt"] == "Describe this image." and image["caption"] is not None
    assert [image[name] for name in ("duration", "start", "end", "num_frames", "fps")] == [None] * 5
    broken = made["broken.mp4"]
    assert broken["caption"] is None and broken["error"] and broken["start"] == 0.0
    p = job.progress
    assert (p.num_captioned, p.num_duplicates, p.num_failed) == (3, 1, 1)
    assert (p.num_clips, p.video_seconds, p.unit) == (3, 16.0, "records")


def test_videos_do_not_wait_for_images_that_are_being_decoded(clips, llm):
    with DECODING.reserve(DECODING.limit):
        (record,) = run(clips / "a.mp4", llm)
    assert record["error"] is None


@pytest.mark.spawns
def test_worker_processes_make_the_same_records(clips, llm):
    def told(**options) -> list[dict]:
        changing = ("time", "seconds")
        made = run(clips, llm, clip_seconds=4, ordered=True, **options)
        return [{name: value for name, value in record.items() if name not in changing} for record in made]

    threads = told(workers=1)
    assert told(worker_processes=True, workers=1) == threads
    assert [record["start"] for record in threads if record["path"].endswith("long.mov")] == [0.0, 4.0, 8.0]


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("options", "num_frames"),
    [({"video_fps": 4}, 12), ({"video_fps": 0.5}, 4), ({"video_frames": 8}, 8), ({"video_frames": 1000}, 24)],
)
def test_frames_are_sampled_as_the_options_say(options, num_frames, clips, llm):
    (record,) = run(clips / "a.mp4", llm, **options)
    assert (record["num_frames"], record["error"]) == (num_frames, None)
    assert record["fps"] == pytest.approx(num_frames / 3, abs=1e-3)


@pytest.mark.parametrize(("max_pixels", "num_tokens"), [(None, 36), (112 * 112, 16), (56 * 56, 4)])
def test_frames_are_shrunk_to_the_pixels_that_are_given(max_pixels, num_tokens, llm, tmp_path):
    large = make_clip(tmp_path / "large.mp4", 4, size=(320, 320))
    (record,) = run(large, llm, video_max_pixels=max_pixels)
    assert (record["num_frames"], record["image_tokens"], record["error"]) == (4, 2 * num_tokens, None)


@pytest.mark.slow
def test_frames_are_shrunk_so_that_a_clip_fits_the_models_context(make_llm, tmp_path):
    model = shutil.copytree(BUNDLED, tmp_path / "model")
    settings = json.loads((model / "preprocessor_config.json").read_text())
    (model / "preprocessor_config.json").write_text(json.dumps(settings | {"max_pixels": 768 * 28 * 28}))
    make_clip(tmp_path / "large.mp4", 16, fps=4, size=(700, 700))
    (record,) = run(tmp_path / "large.mp4", make_llm(model, num_kvcache_blocks=512))
    assert (record["error"], record["num_frames"]) == (None, 8)
    assert 1200 < record["image_tokens"] <= 0.75 * 2048 < 4 * 25 * 25  # a frame of 700x700 pixels has 25 * 25 tokens


@pytest.mark.slow
def test_fewer_frames_are_taken_of_a_clip_that_would_not_fit_the_models_context(llm, tmp_path):
    make_clip(tmp_path / "long.mp4", 480, fps=4)
    (record,) = caption_images(tmp_path / "long.mp4", llm=llm, max_tokens=2)
    most = llm.engine.max_model_len * 3 // 4
    assert record["error"] is None and record["duration"] == 120
    assert most * 0.9 < record["image_tokens"] <= most
    assert record["num_frames"] % 2 == 0 and record["fps"] == pytest.approx(record["num_frames"] / 120, abs=1e-3)
    (record,) = caption_images(tmp_path / "long.mp4", llm=llm, max_tokens=2, video_frames=240)
    assert "240 frames of" in record["error"] and "maximum context length is" in record["error"]


def make_gap(path: Path, seconds: float) -> Path:
    """A video of two frames with `seconds` between them, and a hole as large as if there were frames between them."""
    make_clip(path, 2, codec="mjpeg", pix_fmt="yuvj420p", times=[0, seconds], size=(32, 32))
    size = round(seconds * 8) + 1000
    with path.open("ab") as file:
        file.write(b"\xec" + (size | 1 << 56).to_bytes(8, "big"))  # Matroska's element Void
    os.truncate(path, path.stat().st_size + size)
    return path


def test_a_gap_between_two_frames_has_no_clips(llm, tmp_path):
    path = make_gap(tmp_path / "gap.mkv", 400_000)
    assert load_video_info(path).total_num_frames > 1_000_000  # as the time of the last one says
    records = [*run([path], llm, clip_seconds=60)]
    assert len(records) == 1


def test_a_video_of_more_clips_than_are_captioned_is_refused(llm, tmp_path, monkeypatch):
    monkeypatch.setattr(pending_tasks, "MAX_CLIPS", 4)
    path = make_clip(tmp_path / "a.mp4", 41)
    (record,) = run([path], llm, clip_seconds=1)
    assert record["error"] == "has 5 clips of 1 s, at most 4 are captioned; give more seconds for each (--clip-seconds)"
    assert len([*run([path], llm, clip_seconds=1.25)]) == 4


def test_long_texts_are_not_repeated_for_many_clips(llm, tmp_path, monkeypatch):
    monkeypatch.setattr(pending_tasks, "MAX_CLIP_CHARACTERS", 5000)
    make_clip(tmp_path / "a.mp4", 41)
    for length, number in ((400, 5), (1000, 1)):
        (tmp_path / "list.jsonl").write_text(json.dumps({"video": "a.mp4", "id": "x" * length}))
        records = [*run([tmp_path / "list.jsonl"], llm, clip_seconds=1)]
        assert len(records) == number and (number > 1 or "has 5 clips, each with" in records[0]["error"])


def test_duplicates_are_clips_with_equal_frames_and_options(clips, llm, tmp_path):
    lines = [
        {"video": str(clips / "a.mp4"), "id": "first"},
        {"video": str(clips / "copy.m4v"), "id": "same"},
        {"video": str(clips / "copy.m4v"), "id": "part", "end": 1.5},
        {"video": str(clips / "copy.m4v"), "id": "asked", "prompt": "Which colors?"},
    ]
    (tmp_path / "list.jsonl").write_text("\n".join(map(json.dumps, lines)))
    made = {record["id"]: record for record in run(tmp_path / "list.jsonl", llm, ordered=True)}
    originals = {id: record["duplicate_of"] for id, record in made.items()}
    assert originals == {"first": None, "same": str(clips / "a.mp4"), "part": None, "asked": None}
    assert made["part"]["end"] == 1.5 and made["asked"]["prompt"] == "Which colors?"


def test_a_range_of_a_list_is_cut_and_wrong_ones_fail(clips, llm, tmp_path):
    long = str(clips / "long.mov")
    lines = [
        {"video": long, "start": 2, "end": 7.5, "id": "range"},
        {"video": long, "start": 9, "id": "rest"},
        {"video": long, "start": 20, "end": 30, "id": "behind"},
        {"video": long, "start": 40, "id": "open"},
        {"video": "gone.mp4", "id": "gone"},
    ]
    (tmp_path / "list.jsonl").write_text("\n".join(map(json.dumps, lines)))
    made = [(r["id"], r["start"], r["end"], r["error"]) for r in run(tmp_path / "list.jsonl", llm, clip_seconds=2.5)]
    good = {(id, start, end) for id, start, end, error in made if error is None}
    assert good == {("range", 2.0, 4.5), ("range", 4.5, 7.5), ("rest", 9.0, 10.0)}
    errors = {id: (start, end, error) for id, start, end, error in made if error is not None}
    assert errors["behind"][:2] == (20.0, 30.0) and "has less than two frames" in errors["behind"][2]
    assert errors["open"][2] == "video_start 40.0 has less than two frames; the video is 10.00 s long"
    assert errors["gone"][:2] == (0.0, None) and errors.keys() == {"behind", "open", "gone"}


def test_videos_in_a_tar_are_captioned_with_the_images(clips, llm, tmp_path):
    members = {name: (clips / name).read_bytes() for name in ("a.mp4", "image.png", "long.mov")}
    tar = make_tar(tmp_path / "shard.tar", members | {"notes.txt": b""})
    made = by_place(run(tar, llm, clip_seconds=5))
    assert made.keys() == {("a.mp4", 0.0), ("image.png", None), ("long.mov", 0.0), ("long.mov", 5.0)}
    assert {record["error"] for record in made.values()} == {None}
    (alone,) = run(clips / "a.mp4", llm, clip_seconds=5)
    assert made["a.mp4", 0.0]["digest"] == alone["digest"]


def animation(path: Path, number: int) -> Path:
    first, *rest = map(Image.fromarray, moving(number, 40, 60))
    first.save(path, save_all=True, append_images=rest, duration=250)
    return path


def test_animations_are_videos_on_request(llm, tmp_path):
    animation(tmp_path / "moving.gif", 8)
    Image.new("RGB", (60, 40), "red").save(tmp_path / "still.gif")
    assert [record["start"] for record in run(tmp_path, llm)] == [None, None]
    made = by_place(run(tmp_path, llm, animations_as_clips=True))
    assert made.keys() == {("moving.gif", 0.0), ("still.gif", None)}
    assert {record["error"] for record in made.values()} == {None}
    assert made["moving.gif", 0.0]["num_frames"] == 4


@pytest.mark.parametrize("options", [{}, {"clip_seconds": 1}])
def test_without_pyav_videos_fail_and_images_are_captioned(options, clips, llm, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    made = {Path(record["path"]).name: record["error"] for record in run(clips, llm, **options)}
    assert made.pop("image.png") is None
    assert len(made) == 4 and all("pip install 'mmvllm[video]'" in error for error in made.values())
    assert {kind_of_failure({"path": "a", "error": error}) for error in made.values()} == {
        "is a video, and PyAV is not installed"
    }


def test_videos_are_counted_while_the_walk_goes_on(clips, llm):
    job = run(clips, llm, clip_seconds=2)
    assert job.count() == 5
    number = len(list(job))
    assert job.progress.num_further_clips == 1 + 1 + 4  # of the two short videos and of the long one
    assert number == job.count() + job.progress.num_further_clips
