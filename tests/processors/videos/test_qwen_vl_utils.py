"""Videos in messages for qwen-vl-utils: frames, sizes, rates and values equal the package's."""

from dataclasses import replace
from importlib.util import find_spec
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mmvllm.errors import RequestError
from mmvllm.models.qwen3_vl.video import VIDEO_DEFAULTS as QWEN3_VL
from mmvllm.models.video import VIDEO_DEFAULTS as QWEN2_VL
from mmvllm.processors.videos.clip import Clip, VideoInfo
from mmvllm.processors.videos.load import load_video
from mmvllm.processors.videos.processor import ClipPlan, resize_frame, resized_to
from tests.helpers.engine.requests import noise_image
from tests.helpers.media.video_references import fetched

pytestmark = [
    pytest.mark.skipif(find_spec("qwen_vl_utils") is None, reason="qwen-vl-utils is not installed"),
    pytest.mark.spawns,
]

# The package's sizes are within these bounds, so that the model's own processor changes nothing.
CONFIGS = [replace(config, min_pixels=1, max_pixels=1 << 40) for config in (QWEN2_VL, QWEN3_VL)]
BOTH = pytest.mark.parametrize("config", CONFIGS, ids=["28", "32"])
many = settings(max_examples=150)

SAMPLING = st.fixed_dictionaries(
    {},
    optional={
        "fps": st.sampled_from([1, 2, 0.5, 4.0, 29.97]) | st.floats(0.05, 40),
        "min_frames": st.integers(1, 30),
        "max_frames": st.integers(2, 900),
        "video_start": st.floats(-1, 20),
        "video_end": st.floats(0, 40),
    },
)
NUMBER = st.fixed_dictionaries(
    {"nframes": st.integers(1, 64)}, optional={"video_start": st.floats(0, 9), "video_end": st.floats(9, 99)}
)
SIZES = st.fixed_dictionaries(
    {},
    optional={
        "min_pixels": st.integers(1, 400_000),
        "max_pixels": st.integers(10_000, 2_000_000),
        "total_pixels": st.integers(100_000, 100_000_000),
        "resized_height": st.integers(10, 900),
        "resized_width": st.integers(10, 900),
    },
)
INFOS = st.builds(
    VideoInfo,
    st.integers(2, 900),
    st.sampled_from([5.0, 23.976, 25.0, 30.0]) | st.floats(1, 120),
    st.integers(16, 1100),
    st.integers(16, 1100),
)


def plan_of(config, part: dict) -> ClipPlan:
    return ClipPlan(config, part=part)


@BOTH
@many
@given(info=INFOS, sampling=SAMPLING | NUMBER, sizes=SIZES)
def test_frames_sizes_and_rates_are_those_of_the_package(config, info, sampling, sizes):
    part = {**sampling, **sizes}
    assume(part)
    plan = plan_of(config, part)
    try:
        shape, metadata = fetched({"video": "file", **part}, config.patch_size, info)
    except (ValueError, AssertionError, RuntimeError):
        check_what_the_package_refuses(plan, info)
        return
    indices = plan.frame_indices(info)
    size = resized_to(plan.sizes(len(indices), info.height, info.width), info.height, info.width)
    clip = plan.timed(Clip(np.empty(0), info, tuple(indices)))
    assert indices == metadata["frames_indices"]
    assert (len(indices), 3, *size) == shape
    assert clip.sampled_fps == pytest.approx(metadata["sample_fps"], rel=1e-12)
    assert clip.info.total_num_frames == pytest.approx(metadata["total_num_frames"], rel=1e-12)
    assert clip.patch_times(1) == tuple(index / info.fps for index in metadata["frames_indices"])


def check_what_the_package_refuses(plan: ClipPlan, info: VideoInfo) -> None:
    """What contradicts itself is refused; of too few frames those that there are, are taken, and no side vanishes."""
    try:
        indices = plan.frame_indices(info)
        assert plan.num_tokens(info) >= 1
    except RequestError as error:
        assert error.param in ("video_start", "video_end", "min_pixels") or "at most 200 times" in error.reason
        return
    assert indices[0] >= 0 and indices[-1] < info.total_num_frames and indices == sorted({*indices})


@BOTH
def test_more_frames_than_there_are(config):
    info = VideoInfo(7, 10.0, 56, 64)
    with pytest.raises(ValueError, match=r"nframes should in interval \[2, 7\], but got 20"):
        fetched({"video": "file", "nframes": 20}, config.patch_size, info)
    assert plan_of(config, {"nframes": 20}).frame_indices(info) == [0, 1, 2, 4, 5, 6]
    assert plan_of(config, {"fps": 2}).frame_indices(VideoInfo(1, 10.0, 56, 64)) == [0]


@BOTH
@pytest.mark.parametrize(
    "part",
    [
        {"nframes": 4},
        {"fps": 3.0, "max_pixels": 150_000},
        {"fps": 2, "min_frames": 6, "total_pixels": 500_000, "min_pixels": 30_000},
        {"nframes": 6, "resized_height": 100, "resized_width": 170},
        {"video_start": 0.4, "video_end": 1.7, "fps": 4},
    ],
    ids=lambda part: " ".join(part),
)
def test_values_are_those_of_the_package(config, part):
    frames = np.random.default_rng(5).integers(0, 256, (20, 90, 131, 3), dtype=np.uint8)
    video, _ = fetched({"video": "file", **part}, config.patch_size, (frames, 8.0))
    plan = plan_of(config, part)
    sizes = plan.sizes(len(video), 90, 131)
    got = np.stack([resize_frame(frames[i], sizes) for i in plan.frame_indices(VideoInfo(20, 8.0, 90, 131))])
    assert np.array_equal(got.transpose(0, 3, 1, 2), video)


LISTS = [
    {"sample_fps": 1.5},
    {"sample_fps": 2.0, "max_pixels": 9000, "min_pixels": 4000},
    {"resized_height": 80, "resized_width": 130},
    {"total_pixels": 60_000, "min_pixels": 5000, "raw_fps": 24.0},
]


@BOTH
@pytest.mark.parametrize(("number", "part"), [*product([4, 5, 1], LISTS)], ids=str)
def test_lists_of_frames(number, part, config):
    """An odd number of them is made even."""
    given = [noise_image(131, 90, seed) for seed in range(number)]
    video, metadata = fetched({"video": given, **part}, config.patch_size, as_published=False)
    plan = plan_of(config, part)
    clip = plan.timed(load_video(given, plan))
    assert np.array_equal(clip.frames.transpose(0, 3, 1, 2), video)
    assert len(clip.frames) % 2 == 0
    assert clip.sampled_fps == pytest.approx(metadata["sample_fps"], rel=1e-12)
    assert list(clip.indices) == metadata["frames_indices"] and clip.info.fps == metadata["fps"]


@BOTH
@pytest.mark.parametrize("part", [{"fps": 2, "nframes": 4}, {"min_pixels": 90_000, "max_pixels": 80_000}], ids=str)
def test_contradictions_are_refused_as_by_the_package(config, part):
    with pytest.raises(AssertionError):
        fetched({"video": "file", **part}, config.patch_size, VideoInfo(20, 8.0, 64, 64))
    plan = plan_of(config, part)
    with pytest.raises(RequestError):
        plan.num_tokens(VideoInfo(20, 8.0, 64, 64))


@BOTH
def test_a_small_max_pixels_moves_the_smallest_size(config):
    info, part = VideoInfo(20, 8.0, 120, 160), {"fps": 2, "max_pixels": 9000}
    with pytest.raises(AssertionError, match="max_pixels of image must be greater"):
        fetched({"video": "file", **part}, config.patch_size, info)
    [(height, width, _)] = plan_of(config, part).sizes(4, 120, 160)
    assert 4000 < height * width <= 9000
