"""Videos come from any source, and every failure is a VideoError with the source's name."""

import base64
import gc
import io
import os
import pickle
import shutil
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mmvllm.errors import ImageError, ParameterError, VideoError
from mmvllm.models.qwen3_vl.video import VIDEO_DEFAULTS
from mmvllm.processors.videos import load as module
from mmvllm.processors.videos.clip import Clip, VideoInfo
from mmvllm.processors.videos.load import load_video, load_video_info
from mmvllm.processors.videos.processor import ClipPlan
from tests.helpers.media.videos import FramesAt, full_decode, make_clip, moving
from tests.helpers.needs import needs
from tests.helpers.serving.web import serving_files


@pytest.fixture
def path(tmp_path) -> Path:
    return make_clip(tmp_path / "a clip.mp4", 4)


def assert_all_frames(clip: Clip, path: Path) -> None:
    np.testing.assert_array_equal(clip.frames, np.stack([pixels for _, pixels in full_decode(path)]))


def data_uri(data: bytes) -> str:
    return f"data:video/mp4;base64,{base64.b64encode(data).decode()}"


SOURCES = {
    "path": str,
    "Path": Path,
    "file URL": lambda path: f"file://{path}",
    "quoted file URL": Path.as_uri,
    "bytes": Path.read_bytes,
    "bytearray": lambda path: bytearray(path.read_bytes()),
    "memoryview": lambda path: memoryview(path.read_bytes()),
    "data URI": lambda path: data_uri(path.read_bytes()),
    "file object": lambda path: path.open("rb"),
    "file object that can be written": lambda path: path.open("r+b"),
    "BytesIO": lambda path: io.BytesIO(path.read_bytes()),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_sources(kind, path):
    source = SOURCES[kind](path)
    assert load_video_info(source) == VideoInfo(4, 8.0, 64, 96)
    for _ in range(2):
        assert_all_frames(load_video(source, FramesAt()), path)


def test_a_path_relative_to_the_home_folder_and_one_that_is_no_utf8(path, monkeypatch):
    monkeypatch.setenv("HOME", str(path.parent))
    assert_all_frames(load_video(f"~/{path.name}", FramesAt()), path)
    odd = os.fsdecode(os.fsencode(path.parent) + b"/\xff.mp4")
    shutil.copyfile(path, odd)
    assert_all_frames(load_video(odd, FramesAt()), path)


def test_a_file_is_not_read_whole(path, monkeypatch):
    monkeypatch.setattr(module, "MAX_FILE_BYTES", 100)
    assert_all_frames(load_video(path, FramesAt()), path)


@pytest.fixture
@needs("network")
def site(tmp_path):
    with serving_files(tmp_path) as url:
        yield url


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_url_is_fetched(in_memory, path, site, monkeypatch):
    monkeypatch.setattr(module, "MEMORY_BYTES", 1 << 20 if in_memory else 10)
    assert_all_frames(load_video(f"{site}/{path.name}", FramesAt()), path)


def test_a_url_that_cannot_be_fetched(path, site, monkeypatch):
    with pytest.raises(VideoError, match=r"/none\.mp4: cannot be fetched \(HTTP Error 404"):
        load_video(f"{site}/none.mp4", FramesAt())
    monkeypatch.setattr(module, "MAX_VIDEO_DOWNLOAD_BYTES", path.stat().st_size - 1)
    with pytest.raises(VideoError, match=f"more than {path.stat().st_size - 1} bytes; fetch and shrink it first"):
        load_video(f"{site}/{path.name}", FramesAt())


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("/no/such/file.mp4", "/no/such/file.mp4: no such file"),
        ("/", "/: is a folder, not a video"),
        ("/dev/zero", r"/dev/zero: cannot be read \(it is a device or a pipe\)"),
        (b"", "the video of 0 bytes: is empty"),
        (b"GIF89a", "the video of 6 bytes: is not an animated image in GIF, WEBP, AVIF"),
        ("data:video/mp4;base64,AA==", "the video in the data URI: is not a video"),
        ("data:video/mp4", "data URI without a comma: 'data:video/mp4'; write data:video/mp4;base64,<data>"),
        ("ftp://a/b.mp4", "cannot load a video from ftp://a/b.mp4; give a path, bytes"),
        (7, "cannot load a video from int; give"),
        (io.StringIO("text"), "the file object: gives str instead of bytes; open it in binary mode"),
        ([], "the list of frames: is empty"),
        (np.zeros((4, 4, 3), np.uint8), r"the array: must be uint8 of shape .*, got shape \(4, 4, 3\) and dtype uint8"),
    ],
)
def test_what_cannot_be_loaded(source, message):
    for load in (load_video_info, lambda source: load_video(source, FramesAt())):
        with pytest.raises(VideoError, match=message) as caught:
            load(source)
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_closed_file_is_refused(path):
    file = path.open("rb")
    file.close()
    with pytest.raises(VideoError, match=r"the file object: cannot be read \(.* closed file\)"):
        load_video(file, FramesAt())


@pytest.mark.slow
def test_an_error_holds_neither_the_source_nor_frames(tmp_path):
    class ReferredFile(io.BytesIO):
        pass

    source = ReferredFile(b"no video")
    with pytest.raises(VideoError) as caught:
        load_video(source, FramesAt())
    error, alive = caught.value, weakref.ref(source)
    assert error.__context__ is None and error.__cause__ is None
    del source, caught
    gc.collect()
    assert alive() is None


def test_a_file_object_may_be_shared_by_threads(path):
    file, found = path.open("rb"), []
    threads = [threading.Thread(target=lambda: found.append(load_video(file, FramesAt()))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    for clip in found:
        assert_all_frames(clip, path)


# Frames that are given

FRAMES = moving(6, 56, 84)
CHANNELS_FIRST = torch.from_numpy(FRAMES).permute(0, 3, 1, 2)


@pytest.mark.parametrize(
    "given",
    [
        FRAMES,
        torch.from_numpy(FRAMES),
        FRAMES.transpose(0, 3, 1, 2),
        CHANNELS_FIRST,
        list(FRAMES),
        tuple(FRAMES),
        [Image.fromarray(frame) for frame in FRAMES],
        # qwen-vl-utils returns floats
        *(FRAMES.astype(np.float32), CHANNELS_FIRST.float(), CHANNELS_FIRST.bfloat16()),
        *([*FRAMES.astype(np.float32)], [*CHANNELS_FIRST.half()], tuple(CHANNELS_FIRST.double())),
    ],
    ids=lambda given: type(given).__name__,
)
def test_given_frames(given):
    clip = load_video(given, FramesAt(fps=4))
    np.testing.assert_array_equal(clip.frames, FRAMES)
    assert clip.info == VideoInfo(6, 4, 56, 84) and clip.indices == (0, 1, 2, 3, 4, 5)
    assert load_video_info(given) == VideoInfo(6, 2.0, 56, 84)


def test_given_frames_that_were_taken_from_a_video():
    metadata = {"fps": 30.0, "total_num_frames": 300, "frames_indices": [0, 60, 120, 180, 240, 299], "duration": 10.0}
    metadata |= {"video_backend": "opencv", "do_sample_frames": False}
    clip = load_video((FRAMES, metadata), ClipPlan(VIDEO_DEFAULTS))
    assert (clip.info, clip.indices) == (VideoInfo(300, 30.0, 56, 84), (0, 60, 120, 180, 240, 299))
    assert clip.times == [0, 2, 4, 6, 8, 299 / 30] and len(clip.frames) == 6
    assert load_video_info((FRAMES, metadata)) == clip.info
    without_rate = {"total_num_frames": 300, "duration": 10.0, "frames_indices": metadata["frames_indices"]}
    assert load_video((FRAMES, without_rate), FramesAt()).info == clip.info


@pytest.mark.parametrize(
    ("metadata", "settings", "indices"),
    [
        ({"fps": 3.0}, {}, (0, 1, 2, 3, 4, 5)),
        ({"fps": 3.0}, {"num_frames": 4}, (0, 2, 3, 5)),
        ({"fps": 3.0}, {"fps": 2.0}, (0, 2, 3, 5)),
        ({"fps": 3.0, "do_sample_frames": True}, {}, (0, 2, 3, 5)),
        ({"fps": 3.0, "do_sample_frames": False}, {"num_frames": 4}, (0, 1, 2, 3, 4, 5)),
        ({"fps": 3.0}, {"do_sample_frames": True}, (0, 2, 3, 5)),
        ({"fps": 3.0}, {"num_frames": 4, "do_sample_frames": False}, (0, 1, 2, 3, 4, 5)),
        ({"fps": 3.0, "do_sample_frames": True}, {"do_sample_frames": False}, (0, 1, 2, 3, 4, 5)),
    ],
)
def test_given_frames_are_sampled_where_it_is_asked_for(metadata, settings, indices):
    clip = load_video((FRAMES, metadata), ClipPlan(VIDEO_DEFAULTS, min_pixels=1, max_pixels=10**9, **settings))
    assert (clip.info, clip.indices) == (VideoInfo(6, 3.0, 56, 84), indices)


def test_all_frames_of_a_file_are_taken_where_it_is_asked_for(path):
    plan = ClipPlan(VIDEO_DEFAULTS, fps=1, min_pixels=1, max_pixels=10**9, do_sample_frames=False)
    assert load_video(path, plan).indices == tuple(range(load_video_info(path).total_num_frames))


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ([FRAMES[0], FRAMES[1, :, :50]], VideoError, "frame 1 of the list: is 50x56 pixels, frame 0 84x56; all"),
        ([FRAMES[0] / 1.0, FRAMES[1, :, :50] / 1.0], VideoError, "the list of frames: has arrays of different shapes"),
        ([FRAMES[0], "/no/such.png"], ImageError, r"/no/such\.png: no such file"),
        (
            FRAMES[:, :, :, :2],
            VideoError,
            r"the array: must be uint8 of shape \(frames, he.*, got shape \(6, 56, 84, 2\)",
        ),
        (FRAMES.astype(np.float32) / 255, VideoError, "the array: has dtype float32 and values that are no integers"),
        (FRAMES.astype(np.float32) + 1, VideoError, "the array: has dtype float32 and values that are no integers"),
        (FRAMES.astype(np.int64), VideoError, "the array: must be uint8 .*, got .* dtype int64"),
        ((FRAMES, {"frames_indices": [0, 1]}), VideoError, r"the frames: frames_indices must be 6 .*, got \[0, 1\]"),
        ((FRAMES, {"frames_indices": [0, 1, 2, 3, 4, -1]}), VideoError, "integers of at least 0"),
        ((FRAMES, {"frames_indices": [0, 1, 2, 3, 4, 10**30]}), VideoError, "integers of at least 0"),
        ((FRAMES, {"frames_indices": 5}), VideoError, "frames_indices must be 6 integers .*, got 5"),
        ((FRAMES, {"total_num_frames": "6"}), VideoError, "total_num_frames must be a number from 0 .*, got '6'"),
        ((FRAMES, {"total_num_frames": 10**400}), VideoError, "total_num_frames must be a number .*, got 10{59}"),
        ((FRAMES, {"duration": "3"}), VideoError, "duration must be a number from 0 .*, got '3'"),
        ((FRAMES, {"fps": 0}), ParameterError, "fps must be a number from 1e-06 to 1000, got 0"),
    ],
)
def test_given_frames_that_make_no_clip(source, error, message):
    with pytest.raises(error, match=message):
        load_video(source, FramesAt())
