"""Videos that are refused: the status, the field and the reason."""

import asyncio
import base64
import json
import shutil
from pathlib import Path

import pytest
from PIL import Image

from mmvllm.entrypoints.async_llm import AsyncLLM
from mmvllm.media.policy import MediaPolicy
from mmvllm.models.folder import BUNDLED
from tests.helpers.media.images import encode
from tests.helpers.media.videos import make_clip
from tests.helpers.serving.server import CHAT, ENGINE, chat, make_app, video_part, video_uri
from tests.server.refusals import check_refusal, refusal

PART = "messages[0].content[1]"
URL = f"{PART}.video_url.url"
ANY = video_part("data:video/mp4;base64,AAAA")
RATES = [1] * 10**5 + [2]


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> str:
    """The data URI of 3 seconds, 24 frames of 96x64 pixels."""
    return video_uri(make_clip(tmp_path_factory.mktemp("clips") / "a.mp4"))


def refused(app, part: dict, **keys) -> dict:
    """The error of a request with this part as its second."""
    return refusal(app, CHAT, chat("What is this?", part, max_tokens=4, **keys))


@pytest.mark.parametrize(
    ("part", "keys", "param", "words"),
    [
        (video_part(5), {}, URL, "must be a string"),
        ({"type": "video", "video": "x"}, {}, URL, "not a URL of a video"),
        ({"type": "video", "video": []}, {}, PART, "at least 1 item"),
        pytest.param({"type": "video", "video": ["data:,"] * 769}, {}, URL, "769 frames; at most 768", id="frames"),
        (ANY | {"video_url": {"url": "x", "fps": 1}, "fps": 2}, {}, f"{PART}.fps", "is given twice"),
        (ANY | {"n_frames": 2}, {}, f"{PART}.n_frames", "does not belong here; did you mean nframes?"),
        (ANY | {"resized_height": 28}, {}, f"{PART}.resized_height", "does not belong here"),
        ({"type": "video_url", "video_url": {"url": "x", "detail": "low"}}, {}, f"{PART}.video_url.detail", "does not"),
        (ANY | {"nframes": 8, "num_frames": 4}, {}, f"{PART}.num_frames", "both nframes and num_frames"),
        (ANY | {"num_frames": 769}, {}, f"{PART}.num_frames", "must be at most 768 here"),
        (ANY | {"fps": 0}, {}, f"{PART}.fps", "greater than or equal to 0.000001"),
        (ANY | {"fps": 1001}, {}, f"{PART}.fps", "less than or equal to 1000"),
        (ANY | {"fps": "2"}, {}, f"{PART}.fps", "valid number"),
        (ANY | {"nframes": 0}, {}, f"{PART}.nframes", "greater than or equal to 1"),
        (ANY | {"nframes": 769}, {}, f"{PART}.nframes", "must be at most 768 here"),
        (ANY | {"min_frames": 10**9}, {}, f"{PART}.min_frames", "must be at most 768 here"),
        (ANY | {"max_frames": 769}, {}, f"{PART}.max_frames", "must be at most 768 here"),
        (ANY | {"fps": 1, "nframes": 4}, {}, f"{PART}.nframes", "both fps and nframes"),
        (ANY | {"min_pixels": 10**9}, {}, f"{PART}.min_pixels", "must be at most 602112 here"),
        (ANY, {"mm_processor_kwargs": {"fps": 1, "num_frames": 4}}, "mm_processor_kwargs.num_frames", "both fps and"),
        (ANY, {"mm_processor_kwargs": {"num_frames": 769}}, "mm_processor_kwargs.num_frames", "at most 768"),
        (ANY, {"mm_processor_kwargs": {"min_pixels": 10**6}}, "mm_processor_kwargs.min_pixels", "at most 38416"),
        (ANY, {"mm_processor_kwargs": {"max_pixels": 10**6}}, "mm_processor_kwargs.max_pixels", "at most 38416"),
        (
            ANY,
            {"mm_processor_kwargs": {"size": {"height": 5}}},
            "mm_processor_kwargs",
            "must be a dict of 'shortest_edge'",
        ),
        (ANY, {"mm_processor_kwargs": {"fps": [1, 2]}}, "mm_processor_kwargs.fps", "fps has 2 rates for 1 video"),
        (ANY, {"mm_processor_kwargs": {"fps": [1, 0]}}, "mm_processor_kwargs.fps[1]", "greater than or equal to"),
        pytest.param(ANY, {"mm_processor_kwargs": {"fps": RATES}}, "mm_processor_kwargs.fps", "at most 64", id="rates"),
        (ANY, {"media_io_kwargs": {"video": {"fps": 1, "num_frames": 4}}}, "media_io_kwargs.video", "both fps and"),
        (video_part("data:video/jpeg;base64," + "," * 768), {}, URL, "769 frames; at most 768 are accepted"),
        pytest.param(video_part("data:video/jpeg;base64,AAAA,"), {}, URL, "not an image", marks=pytest.mark.spawns),
        (video_part("data:video/mp4,abc"), {}, URL, "must be plain base64; write data:video/mp4;base64,<data>"),
        pytest.param(ANY, {}, URL, "not a video", marks=pytest.mark.spawns),
    ],
    ids=str,
)
def test_an_error_names_the_field_and_the_reason(app, part, keys, param, words):
    check_refusal(app, CHAT, chat("What is this?", part, max_tokens=4, **keys), param, words)


@pytest.mark.spawns
@pytest.mark.parametrize(
    ("options", "kwargs", "param"),
    [
        ({"video_start": 2, "video_end": 1}, {}, f"{PART}.video_start"),
        ({"video_end": 0.01}, {}, f"{PART}.video_end"),
        ({"min_pixels": 28 * 28 * 300, "max_pixels": 28 * 28 * 200}, {}, f"{PART}.min_pixels"),
        ({}, {"min_pixels": 30000, "max_pixels": 20000}, "mm_processor_kwargs.min_pixels"),
    ],
    ids=str,
)
def test_options_that_do_not_fit_the_video_are_refused_by_name(app, clip, options, kwargs, param):
    assert refused(app, video_part(clip, **options), mm_processor_kwargs=kwargs)["param"] == param


@pytest.mark.spawns
def test_a_prompt_that_is_too_long_says_how_many_tokens(app, tmp_path):
    clip = make_clip(tmp_path / "long.mp4", number=240)
    error = refused(app, video_part(video_uri(clip), nframes=240))
    assert (error["param"], error["code"]) == (URL, "context_length_exceeded")
    assert "240 frames of" in error["message"]
    assert "4800 tokens, the maximum context length is 2048 tokens" in error["message"]


def test_more_videos_than_allowed_are_refused_before_they_are_fetched(app):
    assert refusal(app, CHAT, chat(*[ANY] * 5))["message"] == "5 videos; at most 4 are accepted (max_videos)"


@pytest.fixture
def without_video_token(tmp_path) -> Path:
    """The bundled model, whose vocabulary ends before the token for videos."""
    shutil.copytree(BUNDLED, folder := tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"video_token_id": 151656}))
    return folder


@pytest.mark.parametrize("shape", [None, "qwen3-mqa-untied"], ids=["images only", "text only"])
def test_a_checkpoint_without_a_token_for_videos_takes_none(shape, checkpoints, without_video_token, clip):
    engine = AsyncLLM(without_video_token if shape is None else checkpoints(shape), **ENGINE)
    error = refused(make_app(engine), video_part(clip))
    asyncio.run(engine.shutdown(drain=False))
    assert error["param"] == URL and "no token for videos" in error["message"]


@pytest.mark.spawns
def test_a_video_that_the_policy_does_not_allow_is_refused(engine, app, clip, tmp_path):
    longer = refused(make_app(engine, media=MediaPolicy(max_video_seconds=2)), video_part(clip))
    assert longer["param"] == URL and "lasts 3 s, more than 2 s" in longer["message"]
    other = refused(app, video_part(video_uri(make_clip(tmp_path / "a.mp4", codec="mpeg2video"))))
    assert other["param"] == URL and "codec mpeg2video is not accepted" in other["message"]


@pytest.mark.spawns
def test_without_pyav_the_error_says_what_to_install(engine, clip, tmp_path, monkeypatch):
    (tmp_path / "av.py").write_text("raise ImportError('no module')")
    monkeypatch.syspath_prepend(tmp_path)  # also of the processes that are started from now on
    error = refused(make_app(engine), video_part(clip))
    assert error["param"] == URL and "pip install 'mmvllm[video]'" in error["message"]


@pytest.mark.spawns
def test_frames_as_jpegs_are_images_for_the_policy(engine):
    frames = [base64.b64encode(encode(Image.new("RGB", (80, 60)), kind)).decode() for kind in ("JPEG", "BMP")]
    error = refused(make_app(engine), video_part("data:video/jpeg;base64," + ",".join(frames)))
    assert error["param"] == URL and "not an image in PNG, JPEG" in error["message"]
    uri = "data:video/jpeg;base64," + ",".join(frames[:1] * 3)
    error = refused(make_app(engine, media=MediaPolicy(max_video_pixels=9999)), video_part(uri))
    assert error["param"] == URL and "3 frames of 80x60 are more than 9999 pixels" in error["message"]
