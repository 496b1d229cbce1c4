"""Frames of videos equal a full decode's at the same times, upright, and only the requested ones are decoded."""

import io
import struct
import sys
import time
from fractions import Fraction

import av
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmvllm.errors import VideoError
from mmvllm.processors.videos import decode as module
from mmvllm.processors.videos.clip import VideoInfo
from mmvllm.processors.videos.decode import decode_video, video_info
from mmvllm.processors.videos.limits import VideoLimits
from mmvllm.processors.videos.stream import VideoStream
from tests.helpers.media.hostile import with_samples
from tests.helpers.media.videos import FramesAt, declare_seconds, frame_at, full_decode, make_clip, make_sound

pytestmark = pytest.mark.thinned

CLIPS = [
    ("h264.mp4", "libx264"),
    ("h264.mov", "libx264"),
    ("h264.mkv", "libx264"),
    ("hevc.mp4", "libx265"),
    ("vp8.webm", "libvpx"),
    ("vp9.webm", "libvpx-vp9"),
    ("av1.mp4", "libsvtav1"),
    ("mpeg4.avi", "mpeg4"),
    ("mpeg4.mp4", "mpeg4"),
    ("h264.ts", "libx264"),
    ("mpeg2.mpg", "mpeg2video"),
]
CLIPS_OF_PHONES_AND_BROWSERS = [("h264.mp4", {"movflags": "frag_keyframe+empty_moov"}), ("vp9.webm", {"live": "1"})]


def frames(path, indices=None, **settings):
    return decode_video(str(path), path.name, FramesAt(indices, **settings))


def assert_as_decoded_in_full(path, indices=None):
    full, clip = full_decode(path), frames(path, indices)
    expected = [frame_at(full, index, clip.info.fps) for index in clip.indices]
    np.testing.assert_array_equal(clip.frames, np.stack(expected))


@pytest.mark.thinned(11)
@pytest.mark.parametrize(("name", "codec"), CLIPS, ids=lambda value: value)
@pytest.mark.parametrize("indices", [None, (0, 17, 33, 39), (7, 8, 9, 15, 16, 31, 32), (38, 39), (20, 20, 21)])
def test_frames_are_those_of_a_full_decode(name, codec, indices, tmp_path):
    path = make_clip(tmp_path / name, 40, fps=8, codec=codec)
    clip, full = frames(path, indices), full_decode(path)
    assert clip.info == video_info(str(path), name) == VideoInfo(40, 8.0, 64, 96)
    np.testing.assert_array_equal(clip.frames, np.stack([full[i][1] for i in indices or range(40)]))


def test_frames_without_times_of_their_own_are_counted(tmp_path):
    """An AVI file has the order in which frames are decoded, which is not that in which they are shown."""
    path = make_clip(tmp_path / "b.avi", 30, codec="libx264")
    np.testing.assert_array_equal(
        frames(path, (0, 3, 20, 29)).frames, np.stack([full_decode(path)[i][1] for i in (0, 3, 20, 29)])
    )


def test_frames_of_a_stream_without_a_container_are_counted(tmp_path):
    path = make_clip(tmp_path / "a.h264", 12, format="h264")
    np.testing.assert_array_equal(frames(path).frames, np.stack([pixels for _, pixels in full_decode(path)]))


@pytest.mark.slow
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from([("a.mp4", "libx264"), ("a.mkv", "libx264"), ("a.webm", "libvpx-vp9"), ("a.avi", "mpeg4")]),
    st.integers(1, 40),
    st.lists(st.integers(0, 47), min_size=1, max_size=6),
    st.none() | st.lists(st.integers(20, 900), min_size=47, max_size=47),
)
def test_seeking_gives_the_frames_of_a_full_decode(tmp_path, clip, gop, indices, steps):
    name, codec = clip
    times = None if steps is None or name == "a.avi" else [sum(steps[:i]) / 1000 for i in range(48)]
    path = make_clip(tmp_path / name, 48, codec=codec, gop=gop, times=times)
    last = video_info(str(path), name).total_num_frames - 1
    assert_as_decoded_in_full(path, tuple(sorted(min(index, last) for index in indices)))


def test_only_the_groups_of_frames_that_are_needed_are_decoded(tmp_path, monkeypatch):
    decoded = []
    path = make_clip(tmp_path / "a.mp4", 200, gop=10)
    pts = VideoStream._pts
    monkeypatch.setattr(VideoStream, "_pts", lambda self, frame: decoded.append(frame.pts) or pts(self, frame))
    frames(path, (5, 105, 195))
    assert len(set(decoded)) < 30


def test_a_variable_rate_is_sampled_evenly_in_time(tmp_path):
    times = [0, 0.1, 0.2, 0.3, 3.0, 3.1, 3.9]
    path = make_clip(tmp_path / "a.mkv", 7, fps=10, times=times)
    clip = frames(path, (0, 3, 10, 25, 31))
    assert clip.info.fps == 10 and clip.times == [0, 0.3, 1, 2.5, 3.1]
    full = [pixels for _, pixels in full_decode(path)]
    np.testing.assert_array_equal(clip.frames, np.stack([full[i] for i in (0, 3, 3, 3, 5)]))


def test_more_frames_than_the_bytes_can_have_are_refused(tmp_path):
    data = make_clip(tmp_path / "a.mp4", 24, fps=8).read_bytes()
    begin = time.monotonic()
    for number in (90_000, len(data) + 1):
        with pytest.raises(VideoError, match=f"an index of {number} packets, more than {len(data)} bytes can have"):
            video_info(io.BytesIO(with_samples(data, number)), "it")
    assert time.monotonic() - begin < 20  # to decode a million takes minutes


def test_a_video_ends_after_many_errors_of_the_decoder(tmp_path, monkeypatch):
    data = make_clip(tmp_path / "a.mp4", 24, fps=8).read_bytes()
    packets, numbers, read = [], [], VideoStream._packets
    monkeypatch.setattr(VideoStream, "measure", lambda *_: (1, 1.0))  # which reads all packets
    monkeypatch.setattr(VideoStream, "_packets", lambda self: (packets.append(one) or one for one in read(self)))
    for limit in (50, 100_000):
        monkeypatch.setattr("mmvllm.processors.videos.stream.MAX_DECODER_ERRORS", limit)
        packets.clear()
        with pytest.raises(VideoError, match="has no frame that can be decoded"):
            video_info(io.BytesIO(with_samples(data, len(data) - 1)), "it")
        numbers.append(len(packets))
    assert numbers[0] == 50 and numbers[1] > 1000


@pytest.mark.thinned(3)
@pytest.mark.parametrize("fps", [Fraction(30000, 1001), Fraction(24000, 1001), 25, 60, Fraction(1, 2)])
def test_common_rates_are_exact(fps, tmp_path):
    for name in ("a.mp4", "a.mkv"):
        path = make_clip(tmp_path / name, 90, fps=fps, gop=30)
        assert video_info(str(path), name) == VideoInfo(90, float(fps), 64, 96)
        np.testing.assert_array_equal(frames(path, (44, 89)).frames[1], full_decode(path)[89][1])


@pytest.mark.parametrize("size", [(37, 101), (1, 1), (2, 900), (163, 61)])
def test_odd_sizes(size, tmp_path):
    path = make_clip(tmp_path / "a.mkv", 5, size=size, codec="libvpx-vp9")
    assert frames(path).frames.shape == (5, *size, 3)
    assert_as_decoded_in_full(path)


@pytest.mark.parametrize("rotation", [0, 90, 180, 270])
def test_frames_are_turned_upright(rotation, tmp_path):
    path = make_clip(tmp_path / "a.mp4", 4, rotation=rotation)
    stored = np.stack([pixels for _, pixels in full_decode(path)])
    clip = frames(path)
    np.testing.assert_array_equal(clip.frames, np.rot90(stored, rotation // 90, axes=(1, 2)))
    assert (clip.info.height, clip.info.width) == clip.frames.shape[1:3]


@pytest.mark.parametrize(
    ("matrix", "turned"),
    [
        ((-1, 0, 0, 1), lambda pixels: pixels[:, ::-1]),
        ((1, 0, 0, -1), lambda pixels: pixels[::-1]),
        ((0, 1, 1, 0), lambda pixels: pixels.transpose(1, 0, 2)),
    ],
)
def test_mirrored_frames_are_turned_upright(matrix, turned, tmp_path):
    path = make_clip(tmp_path / "a.mp4", 1)
    data, (a, b, c, d) = bytearray(path.read_bytes()), [value << 16 for value in matrix]
    at = data.index(b"tkhd") + 44
    data[at : at + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    stored = full_decode(path)[0][1]
    path.write_bytes(data)
    np.testing.assert_array_equal(frames(path).frames[0], turned(stored))


def test_a_clip_of_one_frame_is_one_frame(tmp_path):
    for name in ("a.mp4", "a.mkv", "a.avi"):
        path = make_clip(tmp_path / name, 1, codec="mpeg4")
        assert frames(path).frames.shape == (1, 64, 96, 3)
        assert_as_decoded_in_full(path)


def test_frames_are_resized_one_by_one(tmp_path, monkeypatch):
    path = make_clip(tmp_path / "a.mp4", 6)
    sizes = []
    resize = module.resize_frame
    monkeypatch.setattr(module, "resize_frame", lambda frame, size: sizes.append(frame.shape) or resize(frame, size))
    assert frames(path, (1, 1, 4), size=(28, 56)).frames.shape == (3, 28, 56, 3)
    assert sizes == [(64, 96, 3)] * 2


def test_frames_whose_size_changes_get_the_first_one_s(tmp_path):
    """A transport stream may be continued by another one."""
    parts = [
        make_clip(tmp_path / f"{size[0]}.ts", 8, size=size, times=[t + at / 8 for at in range(8)])
        for t, size in ((0, (64, 96)), (1, (96, 128)))
    ]
    path = tmp_path / "a.ts"
    path.write_bytes(b"".join(part.read_bytes() for part in parts))
    assert {pixels.shape for _, pixels in full_decode(path)} == {(64, 96, 3), (96, 128, 3)}
    assert frames(path).frames.shape[1:] == (64, 96, 3)


@pytest.mark.slow
def test_a_large_frame(tmp_path):
    path = make_clip(tmp_path / "a.mp4", 2, size=(2160, 3840))
    assert frames(path, (0, 1), size=(270, 480)).frames.shape == (2, 270, 480, 3)
    assert_as_decoded_in_full(path)


# How many frames there are


@pytest.mark.parametrize(("name", "options"), CLIPS_OF_PHONES_AND_BROWSERS)
def test_frames_are_counted_where_the_header_does_not_say_how_many(name, options, tmp_path):
    path = make_clip(tmp_path / name, 24, codec="libvpx-vp9" if name.endswith("webm") else "libx264", options=options)
    with av.open(str(path)) as container:
        assert container.streams.video[0].frames == 0
    assert video_info(str(path), name) == VideoInfo(24, 8.0, 64, 96)
    assert_as_decoded_in_full(path, (0, 11, 23))


def test_a_header_that_declares_three_hours(tmp_path, caplog):
    path = make_clip(tmp_path / "a.mkv", 24)
    path.write_bytes(declare_seconds(path.read_bytes(), 3 * 3600))
    assert frames(path, (0, 23)).info == VideoInfo(24, 8.0, 64, 96)
    assert caplog.messages == ["a.mkv: declares 10800.0 s, but only 3.0 s are there"]
    caplog.clear()
    assert video_info(str(path), "a.mkv").duration == 3 and not caplog.messages  # said where frames are taken
    with pytest.raises(VideoError, match=r"a\.mkv: lasts 10800 s, more than 3600 s; cut it first"):
        video_info(str(path), "a.mkv", VideoLimits(max_seconds=3600))


def test_more_samples_than_an_mp4_has(tmp_path):
    path = make_clip(tmp_path / "a.mp4", 24)
    data = bytearray(path.read_bytes())
    at = data.index(b"stts") + 12
    data[at : at + 4] = struct.pack(">I", 86400)
    path.write_bytes(data)
    assert video_info(str(path), "a.mp4").total_num_frames == 24


def test_a_gap_of_days_is_not_full_of_frames(tmp_path):
    """Cut into clips of seconds, a file of a few kilobytes would be hundreds of thousands of them."""
    path = make_clip(tmp_path / "a.mkv", 60, times=[*(at / 8 for at in range(59)), 1_000_000])
    assert path.stat().st_size < 100_000
    assert video_info(str(path), "a.mkv").total_num_frames == 60


# What has no frames


@pytest.mark.parametrize("name", ["a.m4a", "a.mkv", "a.mp4"])
def test_sound_alone(name, tmp_path):
    path = make_sound(tmp_path / name)
    with pytest.raises(VideoError, match=f"^{name}: has no video stream$"):
        frames(path)


def test_a_cover_image_is_no_video(tmp_path):
    path = make_sound(tmp_path / "a.mp4", has_cover=True)
    with av.open(str(path)) as container:
        assert len(container.streams.video) == 1
    with pytest.raises(VideoError, match="has no video stream"):
        frames(path)


def test_a_stream_without_frames(tmp_path):
    for name in ("a.mp4", "a.avi", "a.mkv"):
        path = make_clip(tmp_path / name, frames=np.empty((0, 64, 96, 3), np.uint8))
        with pytest.raises(VideoError, match=name):
            frames(path)


def test_a_suffix_does_not_matter(tmp_path):
    path = make_clip(tmp_path / "a.mp4", 4)
    expected = frames(path).frames
    for name in ("a.avi", "a.txt", "a.m3u8", "a.png", "a: b", "http:a"):
        np.testing.assert_array_equal(frames(path.rename(tmp_path / name)).frames, expected)
        path = tmp_path / name


def test_without_pyav_the_message_says_what_to_install(tmp_path, monkeypatch):
    path = make_clip(tmp_path / "a.mp4", 1)
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(
        VideoError, match=r"a.mp4: is a video, and PyAV is not installed; pip install 'mmvllm\[video\]'"
    ):
        frames(path)
