"""Frames taken, sizes and patches equal transformers' video processors', for any video."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmvllm.errors import RequestError
from mmvllm.models.qwen3_vl.video import VIDEO_DEFAULTS as QWEN3_VL
from mmvllm.models.video import VIDEO_DEFAULTS as QWEN2_VL
from mmvllm.processors.videos.clip import Clip, VideoInfo
from mmvllm.processors.videos.load import Load
from mmvllm.processors.videos.processor import ClipPlan, VideoProcessor, VideoProcessorConfig, resize_frame, resized_to
from tests.helpers.media.images import normalized
from tests.helpers.media.video_references import patchified, sampled_and_sized
from tests.helpers.media.videos import moving

CONFIGS = {"qwen2_vl": QWEN2_VL, "qwen3_vl": QWEN3_VL}
FAMILIES = pytest.mark.parametrize("family", CONFIGS)
many, few = (settings(max_examples=number) for number in (150, 12))

RATES = st.sampled_from([1.0, 5.0, 23.976, 24000 / 1001, 25.0, 29.97, 30.0, 59.94, 240.0]) | st.floats(0.5, 300)
INFOS = st.builds(VideoInfo, st.integers(2, 3000), RATES, st.integers(8, 2200), st.integers(8, 2200))
KWARGS = st.one_of(
    st.builds(dict, fps=st.sampled_from([1, 2, 0.5, 30]) | st.floats(0.01, 60)),
    st.builds(dict, num_frames=st.integers(1, 100)),
)


@st.composite
def bounds(draw) -> tuple[int, int]:
    """Pixel bounds of a checkpoint."""
    low = draw(st.integers(1, 400)) * 32 * 32
    return low, low * draw(st.integers(2, 200))


def settings_of(config: VideoProcessorConfig) -> dict:
    """Arguments of transformers' class."""
    size = {"shortest_edge": config.min_pixels, "longest_edge": config.max_pixels}
    return {"size": size, "min_frames": config.min_frames, "max_frames": config.max_frames}


def size_of(plan: ClipPlan, num_frames: int, info: VideoInfo) -> tuple[int, int]:
    return resized_to(plan.sizes(num_frames, info.height, info.width), info.height, info.width)


@pytest.mark.spawns
@pytest.mark.slow
@FAMILIES
@many
@given(info=INFOS, kwargs=KWARGS, pixels=bounds(), frames=st.tuples(st.integers(1, 20), st.integers(20, 800)))
def test_frames_and_sizes_are_those_of_transformers(family, info, kwargs, pixels, frames):
    names = ("min_pixels", "max_pixels", "min_frames", "max_frames")
    config = replace(CONFIGS[family], **dict(zip(names, (*pixels, *frames), strict=True)))
    plan = ClipPlan(config, **kwargs)
    got = plan.frame_indices(info)
    try:
        want, size = sampled_and_sized(family, info, settings_of(config), kwargs)
    except (ValueError, ZeroDivisionError):
        check_what_the_reference_refuses(plan, info)
        return
    assert got == [index for index in want if index < info.total_num_frames]  # in float32 one may be behind the last
    assert plan.num_tokens(info) == -(-len(got) // 2) * size[0] * size[1] // config.factor**2
    if len(got) == len(want):
        assert size_of(plan, len(got), info) == size


def check_what_the_reference_refuses(plan: ClipPlan, info: VideoInfo) -> None:
    """Frames that do not exist, less than a temporal patch of them, and frames that are far too thin."""
    indices = plan.frame_indices(info)
    assert 1 <= len(indices) <= info.total_num_frames and indices == sorted(indices)
    assert 0 <= indices[0] <= indices[-1] < info.total_num_frames
    if max(info.height, info.width) > 200 * min(info.height, info.width):
        with pytest.raises(RequestError, match=r"a frame is .* at most 200 times"):
            plan.num_tokens(info)
    else:
        assert plan.num_tokens(info) >= 1


@FAMILIES
def test_one_frame_fills_a_temporal_patch(family):
    info, plan = VideoInfo(1, 30.0, 100, 160), ClipPlan(CONFIGS[family])
    assert plan.frame_indices(info) == [0]
    assert size_of(plan, 1, info) == size_of(plan, 2, info)


@FAMILIES
def test_a_video_of_few_frames_gives_those_that_there_are(family):
    """Qwen3-VL's rule takes some of them several times, as transformers does."""
    indices = ClipPlan(CONFIGS[family], num_frames=50).frame_indices(VideoInfo(5, 10.0, 100, 160))
    assert sorted({*indices}) == [0, 1, 2, 3, 4]


def clip_of(frames: np.ndarray, plan: ClipPlan, fps: float) -> Clip:
    """All frames, resized."""
    number, height, width, _ = frames.shape
    sizes = plan.sizes(number, height, width)
    resized = np.stack([resize_frame(frame, sizes) for frame in frames])
    return Clip(resized, VideoInfo(number, fps, height, width), tuple(range(number)))


@pytest.mark.spawns
@FAMILIES
@few
@given(number=st.integers(2, 9), height=st.integers(20, 150), width=st.integers(20, 150), seed=st.integers(0, 99))
def test_patches_and_grids_are_those_of_transformers(family, number, height, width, seed):
    config = replace(CONFIGS[family], min_pixels=4 * 32 * 32, max_pixels=24 * 32 * 32)
    frames = np.random.default_rng(seed).integers(0, 256, (number, height, width, 3), dtype=np.uint8)
    want = patchified(family, frames, settings_of(config))
    media = VideoProcessor(config)(clip_of(frames, ClipPlan(config), 8.0))
    assert [list(media.grid)] == want["video_grid_thw"].tolist()
    assert torch.equal(normalized(media.patches, config), torch.from_numpy(want["pixel_values_videos"]))


@FAMILIES
def test_times_are_the_middle_of_temporal_patches(family):
    config = CONFIGS[family]
    media = VideoProcessor(config)(Clip(moving(5, 224, 224), VideoInfo(50, 10.0, 224, 224), (0, 12, 24, 37, 49)))
    assert media.times == pytest.approx([0.6, 3.05, 4.9])  # the last frame stands twice
    assert media.seconds_per_patch == pytest.approx(2.0)  # 5 frames in 5 seconds, two of them in a patch
    items = list(media.mm_items([(0, 1), (1, 1), (2, 1)], index=0))
    assert [item.time for item in items] == list(media.times)
    assert [item.time for item in pickle.loads(pickle.dumps(items))] == list(media.times)


def digests(frames: np.ndarray, fps: float = 8.0, config: VideoProcessorConfig = QWEN2_VL) -> tuple[bytes, ...]:
    return VideoProcessor(config)(clip_of(frames, ClipPlan(config), fps)).digests


def test_digests_are_of_the_pixels_and_of_what_was_done_to_them():
    frames = moving(6, 64, 96)
    own = digests(frames)
    assert len({*own}) == 3 and own == digests(frames.copy())
    assert digests(frames[2:]) == own[1:], "they do not depend on the place in the clip"
    assert {*digests(np.repeat(frames[:1], 6, axis=0))} != {*own}
    assert len({*digests(np.repeat(frames[:1], 6, axis=0))}) == 1, "equal frames are encoded once"
    assert not {*own} & {*digests(frames, fps=4.0)}, "another rate has other positions"
    assert not {*own} & {*digests(frames, config=replace(QWEN2_VL, image_mean=(0.5, 0.5, 0.5)))}


def test_the_rate_within_a_range_places_temporal_patches(checkpoints, make_llm):
    """Qwen2.5-VL: 4 frames of the second from 1 to 2 are a quarter of a second apart, whatever the video's length."""
    llm, source = make_llm(checkpoints("windows4-tied")), moving(40, 64, 64)

    def read(_, plan: ClipPlan) -> Clip:
        info = VideoInfo(40, 8.0, 64, 64)
        indices = plan.frame_indices(info)
        sizes = plan.sizes(len(indices), 64, 64)
        return Clip(np.stack([resize_frame(source[i], sizes) for i in indices]), info, tuple(indices))

    part = {"type": "video", "video": "x", "fps": 4, "video_start": 1, "video_end": 2, "max_pixels": 64 * 64}
    prompt = llm.processor({"messages": [{"role": "user", "content": [part]}]}, Load(video=read))
    times = prompt.positions[0, [item.offset for item in prompt.mm_items]]
    seconds = 2 / (4 / 9 * 8)  # two frames, of four among nine at 8 per second
    assert [int(time - times[0]) for time in times] == [0, int(seconds * 4)]
