"""Uploaded videos: what is taken of them, how many tokens that costs, and what is refused."""

import asyncio
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("av")

from mmvllm.demo.conversation import Turn, to_request
from mmvllm.demo.images import UploadError
from mmvllm.demo.session import Sessions
from mmvllm.demo.settings import DemoSettings
from mmvllm.demo.uploads import Uploads
from mmvllm.demo.videos import STRIP_FRAMES, ClipOptions, ClipRules, UploadedVideo, is_video, why_no_videos
from mmvllm.entrypoints.async_llm import AsyncLLM
from mmvllm.errors import ParameterError
from mmvllm.media.decoding import MediaDecoder
from mmvllm.media.policy import MediaPolicy
from mmvllm.models.folder import BUNDLED
from mmvllm.processes.pool import NUM_WORKERS
from mmvllm.processors.videos.clip import VideoInfo
from mmvllm.processors.videos.load import Load
from tests.helpers.engine.requests import noise_image
from tests.helpers.media.videos import make_clip
from tests.helpers.serving.demo import OPTIONS, InProcessDecoder
from tests.helpers.serving.pages import elsewhere
from tests.helpers.serving.server import ENGINE

pytestmark = pytest.mark.thinned

POLICY = MediaPolicy()
FAMILIES = ("gqa2-tied", "windows4-tied", "deepstack3-tied")


@pytest.fixture(scope="module")
def decoder():
    decoder = MediaDecoder(POLICY)
    yield decoder
    decoder.close()


@pytest.fixture(scope="module", params=FAMILIES)
def engine(request, checkpoints, tmp_path_factory):
    """A model of each family, with a chat template that knows videos."""
    folder = tmp_path_factory.mktemp("with-template") / "model"
    shutil.copytree(checkpoints(request.param), folder)
    shutil.copy(BUNDLED / "chat_template.jinja", folder)
    engine = AsyncLLM(folder, **ENGINE)
    yield engine
    elsewhere(engine.shutdown(drain=False))


def read(decoder, rules: ClipRules, path: Path, options: ClipOptions = OPTIONS.of_clips):
    with decoder.session() as decode:
        return UploadedVideo.read(path, rules.preview_plan(options), decode)


@pytest.mark.spawns
@pytest.mark.parametrize("fps", [0.5, 2.0, 5.0])
@pytest.mark.parametrize("pixels", [(3136, 20_000), (16_384, 16_384)])
@pytest.mark.parametrize("clip", [{"number": 24, "fps": 8}, {"number": 31, "fps": 10}, {"number": 1, "fps": 8}])
def test_the_tokens_that_are_shown_are_those_of_the_prompt(fps, pixels, clip, engine, decoder, tmp_path):
    rules, path = ClipRules.of(engine), make_clip(tmp_path / "a.mp4", **clip)
    options = replace(OPTIONS, fps=fps, min_pixels=pixels[0], max_pixels=pixels[1])
    video = read(decoder, rules, path, options.of_clips)

    def num_tokens(*media) -> int:
        load = Load(video=lambda video, plan: video.load(Load(), plan))
        return len(engine._preparer.prepare(to_request([Turn("What?", media)], options, rules), load).token_ids)

    start_and_end = 2
    shown = rules.num_tokens(video.info, options.of_clips)
    assert num_tokens(video) == num_tokens() + start_and_end + shown


@pytest.mark.spawns
def test_the_strip_has_a_few_of_the_frames_that_the_model_sees(engine, decoder, tmp_path):
    rules, path = ClipRules.of(engine), make_clip(tmp_path / "a.mp4", 48, 8)
    few, many = (read(decoder, rules, path, OPTIONS.of_clips._replace(fps=fps)) for fps in (1, 4))
    for video, fps in ((few, 1), (many, 4)):
        taken = rules.plan(OPTIONS.of_clips._replace(fps=fps)).frame_indices(video.info)
        assert len(taken) == rules.num_frames(video.info, OPTIONS.of_clips._replace(fps=fps))
        assert {*video.indices} <= {*taken} and (video.indices[0], video.indices[-1]) == (taken[0], taken[-1])
        assert len(video.strip) == min(len(taken), STRIP_FRAMES)
    assert many.strip[1][0] == many.indices[1] / 8  # seconds
    assert all(data.startswith("data:image/jpeg;base64,") for _, data in many.strip)


@pytest.mark.parametrize("seconds", [60, 3600])
def test_a_long_video_takes_at_most_about_half_of_the_context(seconds, engine):
    rules, info = ClipRules.of(engine), VideoInfo(seconds * 30, 30.0, 1080, 1920)
    assert rules.num_frames(info, OPTIONS.of_clips) > 8
    assert rules.num_tokens(info, OPTIONS.of_clips) < 0.7 * engine.max_model_len


@pytest.mark.spawns
@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "a.mp4: is empty"),
        (b"this is no video", "a.mp4: is not a video"),
        (None, "a.mp4: "),
    ],
)
def test_a_file_that_is_no_video_is_named(content, message, engine, decoder, tmp_path):
    path = make_clip(tmp_path / "a.mp4")
    path.write_bytes(path.read_bytes()[:300] if content is None else content)
    with pytest.raises(UploadError, match=message):
        read(decoder, ClipRules.of(engine), path)
    path.unlink()
    with pytest.raises(UploadError, match=r"a\.mp4 cannot be read; remove it, or add it again"):
        read(decoder, ClipRules.of(engine), path)


@pytest.mark.spawns
def test_limits_of_the_policy_are_told(engine, tmp_path):
    path, rules = make_clip(tmp_path / "a.mp4"), ClipRules.of(engine)
    for limit, message in (
        ({"max_video_bytes": 100}, "a.mp4: the video of [0-9]+ bytes: too large; at most 100 bytes are accepted"),
        ({"max_video_seconds": 2.0}, "a.mp4: lasts 3 s, more than 2 s"),
    ):
        policy = MediaPolicy(**limit)
        decoder = MediaDecoder(policy)
        with pytest.raises(UploadError, match=message):
            read(decoder, rules, path)
        decoder.close()


@pytest.mark.spawns
def test_too_many_pixels_are_told_before_the_frames_are_decoded(engine, decoder, tmp_path):
    video = read(decoder, ClipRules.of(engine), make_clip(tmp_path / "a.mp4"))
    video.check_pixels(6, MediaPolicy(max_video_pixels=6 * 64 * 96))
    with pytest.raises(UploadError, match=r"a\.mp4: 7 frames of 96x64 are more than 36864 pixels"):
        video.check_pixels(7, MediaPolicy(max_video_pixels=6 * 64 * 96))


@pytest.mark.parametrize("name, value", [("fps", 0), ("fps", "x"), ("min_pixels", 0.5), ("max_pixels", "1")])
def test_values_that_no_control_has_are_refused(name, value, engine):
    with pytest.raises(ParameterError, match=f"{name} must be"):
        ClipRules.of(engine).part_keys(ClipOptions(**{name: value}))


@pytest.mark.parametrize("name, value", [("min_pixels", 0.5), ("max_pixels", "1"), ("max_pixels", 0)])
def test_values_that_no_control_has_are_refused_for_images_too(name, value):
    with pytest.raises(ParameterError, match=f"{name} must be"):
        assert replace(OPTIONS, **{name: value}).pixel_bounds


def test_an_image_does_not_wait_for_videos(engine, tmp_path):
    may_end = threading.Event()

    class SlowDecoder(InProcessDecoder):
        @contextmanager
        def session(self) -> Iterator[Load]:
            yield Load(POLICY.load, lambda data, plan: may_end.wait(60))

    async def work() -> None:
        sessions = Sessions(engine, Uploads(tmp_path), DemoSettings(POLICY), SlowDecoder(POLICY))
        session = sessions.get("one")
        reads = [sessions.read(session, tmp_path / "a.mp4", ClipOptions()) for _ in range(NUM_WORKERS)]
        videos = [asyncio.create_task(read) for read in reads]
        await asyncio.sleep(0)  # they are read
        try:
            async with asyncio.timeout(30):
                assert (await sessions.read(session, tmp_path / "a.png", ClipOptions())).path == tmp_path / "a.png"
            assert not any(video.done() for video in videos)
        finally:
            may_end.set()
            await asyncio.gather(*videos, return_exceptions=True)  # what the decoder has returned is no clip

    noise_image(30, 30).save(tmp_path / "a.png")
    (tmp_path / "a.mp4").write_bytes(b"any")
    elsewhere(work())


@pytest.mark.parametrize("name, want", [("a.MP4", True), ("a.webm", True), ("a.gif", False), ("mp4", False)])
def test_videos_are_known_by_their_suffix(name, want):
    assert is_video(Path(name)) == want


def test_a_page_without_videos_says_why(engine, tmp_path, monkeypatch):
    assert why_no_videos(engine) is None
    monkeypatch.setattr("mmvllm.demo.videos.find_spec", lambda name: None)
    assert why_no_videos(engine) == "this server takes no videos, since it lacks PyAV"
    monkeypatch.setattr(engine, "takes_videos", False)
    sessions = Sessions(engine, Uploads(tmp_path), DemoSettings(POLICY))
    with pytest.raises(ValueError, match="this model takes no videos"):
        elsewhere(sessions.read(sessions.get("one"), tmp_path / "a.mp4", ClipOptions()))


@pytest.mark.spawns
def test_frames_of_any_shape_fit_into_the_strip(engine, decoder, tmp_path):
    frames = np.zeros((4, 16, 1600, 3), dtype=np.uint8)
    video = read(decoder, ClipRules.of(engine), make_clip(tmp_path / "a.mp4", frames=frames))
    assert len(video.strip) == 4
