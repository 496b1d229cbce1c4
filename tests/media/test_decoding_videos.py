"""Videos decoded in worker processes equal the policy's, and so do its errors; images do without torch."""

import sys
from collections.abc import Iterator

import numpy as np
import pytest

from mmvllm.errors import RequestError, VideoError
from mmvllm.media.decoding import MediaDecoder
from mmvllm.media.policy import MediaError, MediaPolicy
from mmvllm.models.qwen3_vl.video import VIDEO_DEFAULTS
from mmvllm.processors.videos.processor import ClipPlan
from tests.helpers.media import tasks
from tests.helpers.media.videos import make_clip, make_sound

POLICY = MediaPolicy(max_video_bytes=200_000, max_pixels=100_000, video_timeout=20)
PLAN = ClipPlan(VIDEO_DEFAULTS)


@pytest.fixture(scope="module")
def decoder() -> Iterator[MediaDecoder]:
    decoder = MediaDecoder(POLICY)
    yield decoder
    decoder.close()


@pytest.mark.spawns
@pytest.mark.parametrize(("name", "codec"), [("a.mp4", "libx264"), ("a.webm", "libvpx-vp9"), ("a.gif", "gif")])
def test_frames_are_those_of_the_policy(decoder, name, codec, tmp_path):
    data = make_clip(tmp_path / name, codec=codec, pix_fmt="rgb8" if codec == "gif" else "yuv420p").read_bytes()
    with decoder.session() as load:
        clip = load.video(data, PLAN)
    expected = POLICY.load_video(data, PLAN)
    assert (clip.info, clip.indices) == (expected.info, expected.indices)
    np.testing.assert_array_equal(clip.frames, expected.frames)
    assert clip.frames.flags.writeable  # as torch wants it


@pytest.mark.spawns
def test_errors_are_those_of_the_policy(decoder, tmp_path):
    clip = make_clip(tmp_path / "a.mp4").read_bytes()
    large = make_clip(tmp_path / "b.mp4", 1, size=(320, 320)).read_bytes()
    for data in (b"no video", b"", make_sound(tmp_path / "a.m4a").read_bytes(), clip[:1000], large):
        with pytest.raises(VideoError) as expected:
            POLICY.load_video(data, PLAN)
        with decoder.session() as load, pytest.raises(VideoError) as caught:
            load.video(data, PLAN)
        assert str(caught.value) == str(expected.value)
        assert caught.value.__dict__ == expected.value.__dict__
    with decoder.session() as load, pytest.raises(RequestError, match="lower fps, num_frames or max_pixels"):
        load.video(clip, ClipPlan(VIDEO_DEFAULTS, max_tokens=4))


@pytest.mark.parametrize("source", ["/etc/passwd", bytes(200_001), ["a.png"]])
def test_a_source_that_the_policy_does_not_allow_is_refused(decoder, source):
    for load in (POLICY.load_video, lambda *given: decoder._decode_video(*given, lambda: False)):
        with pytest.raises(MediaError, match=r"must be given as bytes|too large; .* \(see max_video_bytes\)"):
            load(source, PLAN)


@pytest.mark.spawns
def test_processes_that_decode_images_do_not_load_torch(decoder, tmp_path):
    data = make_clip(tmp_path / "a.mp4").read_bytes()
    with decoder.session() as load:
        load.video(data, PLAN)
    assert not {"torch", "av"} & decoder._pool.run(tasks.loaded_modules)
    assert {"torch", "av"} <= decoder._video_pool.run(tasks.loaded_modules)


@pytest.mark.spawns
def test_a_video_that_takes_too_long_is_refused(monkeypatch, tmp_path):
    decoder = MediaDecoder(MediaPolicy(video_timeout=0.2))
    monkeypatch.setattr("mmvllm.media.decoding._decode_video", tasks.sleep_on)
    with decoder.session() as load, pytest.raises(VideoError, match=r"took longer than 0\.2 s to decode; cut or re-"):
        load.video(b"", PLAN)
    decoder.close()


@pytest.mark.spawns
def test_a_video_that_ends_its_process_is_refused(decoder, monkeypatch):
    monkeypatch.setattr("mmvllm.media.decoding._decode_video", tasks.crash_on)
    with decoder.session() as load, pytest.raises(VideoError, match=r"its worker process died: .* SIGSEGV"):
        load.video(b"", PLAN)


@pytest.mark.spawns
@pytest.mark.skipif(sys.platform != "linux", reason="the memory limit is Linux's")
def test_memory_over_the_limit_is_a_sentence(decoder, monkeypatch):
    monkeypatch.setattr("mmvllm.media.decoding._decode_video", tasks.need_memory)
    with decoder.session() as load, pytest.raises(VideoError, match="the video takes too much memory to decode"):
        load.video(b"", PLAN)


def test_limits_of_the_policy(tmp_path):
    data = make_clip(tmp_path / "a.mp4").read_bytes()
    for limits, message in (
        ({"max_pixels": 6143}, "has frames of 96x64, more than 6143 pixels; shrink it first"),
        ({"max_video_pixels": 1000}, "6 frames of 96x64 are more than 1000 pixels; take fewer or shrink the video"),
        ({"max_video_seconds": 2}, "lasts 3 s, more than 2 s; cut it first"),
    ):
        with pytest.raises(VideoError, match=f"the video of {len(data)} bytes: {message}"):
            MediaPolicy(**limits).load_video(data, PLAN)
    with pytest.raises(MediaError, match=r"at most 10 bytes are accepted; shrink it \(see max_video_bytes\)"):
        MediaPolicy(max_video_bytes=10).load_video(data, PLAN)


@pytest.mark.parametrize("name", ["max_video_bytes", "max_video_seconds", "max_video_pixels", "video_timeout"])
def test_a_limit_of_videos_must_be_above_0(name):
    with pytest.raises(ValueError, match=f"^{name} must be above 0, got 0"):
        MediaPolicy(**{name: 0})
