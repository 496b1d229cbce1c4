"""Images and videos decoded in worker processes equal the policy's, and so do its errors; images do without torch."""

import sys
from collections.abc import Iterator

import numpy as np
import pytest
from PIL import Image

from mmvllm.errors import ImageError, RequestError, VideoError
from mmvllm.media.decoding import MediaDecoder
from mmvllm.media.policy import MediaError, MediaPolicy
from mmvllm.models.qwen3_vl.video import VIDEO_DEFAULTS
from mmvllm.processors.videos.processor import ClipPlan
from tests.helpers.media import tasks
from tests.helpers.media.images import encode, noise
from tests.helpers.media.videos import make_clip, make_sound

POLICY = MediaPolicy(max_bytes=100_000, max_pixels=20_000, max_video_bytes=200_000, video_timeout=20)
PLAN = ClipPlan(VIDEO_DEFAULTS)


@pytest.fixture(scope="module")
def decoder() -> Iterator[MediaDecoder]:
    decoder = MediaDecoder(POLICY)
    yield decoder
    decoder.close()


@pytest.mark.spawns
@pytest.mark.parametrize("channels", [3, 4])
@pytest.mark.parametrize("file_format", ["PNG", "WEBP", "GIF"])
def test_pixels_are_those_of_the_policy(decoder, channels, file_format):
    data = encode(Image.fromarray(noise(61, 47, channels)), file_format)
    with decoder.session() as load:
        image = load.image(data)
    assert (image.mode, image.size) == ("RGB", (61, 47))
    assert image.tobytes() == POLICY.load(data).tobytes()


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
@pytest.mark.parametrize(
    "data", [b"no image", b"", encode(Image.new("RGB", (200, 200))), encode(Image.new("RGB", (50, 50)), "BMP")]
)
def test_errors_of_images_are_those_of_the_policy(decoder, data):
    with pytest.raises(ImageError) as expected:
        POLICY.load(data)
    with decoder.session() as load, pytest.raises(ImageError) as caught:
        load.image(data)
    assert str(caught.value) == str(expected.value)
    assert caught.value.__dict__ == expected.value.__dict__


@pytest.mark.spawns
def test_errors_of_videos_are_those_of_the_policy(decoder, tmp_path):
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


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        *(("image", source) for source in ("/etc/passwd", bytes(100_001))),
        *(("video", source) for source in ("/etc/passwd", bytes(200_001), ["a.png"])),
    ],
)
def test_a_source_that_the_policy_does_not_allow_is_refused(decoder, kind, source):
    with decoder.session() as load:
        for decode in (load.image, POLICY.load) if kind == "image" else (load.video, POLICY.load_video):
            with pytest.raises(MediaError, match=r"must be given as bytes|too large; .* \(see max_(video_)?bytes\)"):
                decode(source, *[PLAN] * (kind == "video"))


@pytest.mark.spawns
def test_processes_that_decode_images_do_not_load_torch(decoder, tmp_path):
    data = make_clip(tmp_path / "a.mp4").read_bytes()
    with decoder.session() as load:
        load.video(data, PLAN)
    assert not {"torch", "av"} & decoder._pool.run(tasks.loaded_modules)
    assert {"torch", "av"} <= decoder._video_pool.run(tasks.loaded_modules)


@pytest.mark.spawns
@pytest.mark.parametrize(("kind", "function", "error"), [("image", "", ImageError), ("video", "_video", VideoError)])
@pytest.mark.parametrize(
    ("task", "message"),
    [
        (tasks.crash_on, "the {} could not be decoded, its worker process died: .* SIGSEGV"),
        pytest.param(
            tasks.need_memory,
            "the {} takes too much memory to decode; shrink it",
            marks=pytest.mark.skipif(sys.platform != "linux", reason="the memory limit is Linux's"),
        ),
    ],
)
def test_a_failure_of_the_process_is_a_sentence(decoder, kind, function, error, task, message, monkeypatch):
    monkeypatch.setattr(f"mmvllm.media.decoding._decode{function}", task)
    with decoder.session() as load, pytest.raises(error, match=message.format(kind)):
        load.image(b"") if kind == "image" else load.video(b"", PLAN)


@pytest.mark.spawns
def test_a_video_that_takes_too_long_is_refused(monkeypatch):
    decoder = MediaDecoder(MediaPolicy(video_timeout=0.2))
    monkeypatch.setattr("mmvllm.media.decoding._decode_video", tasks.sleep_on)
    with decoder.session() as load, pytest.raises(VideoError, match=r"took longer than 0\.2 s to decode; cut or re-"):
        load.video(b"", PLAN)
    decoder.close()


@pytest.mark.slow
@pytest.mark.spawns
@pytest.mark.parametrize("file_format", ["WEBP", "AVIF", "JPEG", "PNG"])
def test_memory_that_a_format_takes_before_it_is_decoded_is_there(file_format):
    decoder, data = MediaDecoder(MediaPolicy()), encode(Image.new("RGB", (8000, 8000)), file_format)
    with decoder.session() as load:
        assert load.image(data).size == (8000, 8000)
    decoder.close()
