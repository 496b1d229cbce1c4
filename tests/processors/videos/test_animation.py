"""Animated images and images with several pages are clips; their frames have the times that they declare."""

import io

import numpy as np
import pytest
from PIL import Image

from mmvllm.errors import MediaFileError, VideoError
from mmvllm.media.policy import MediaPolicy
from mmvllm.processors.images.load import load_image
from mmvllm.processors.videos.clip import VideoInfo
from mmvllm.processors.videos.limits import VideoLimits
from mmvllm.processors.videos.load import load_video, load_video_info
from tests.helpers.media.videos import FramesAt, moving

FRAMES = moving(6, 40, 60)
FORMATS = {
    "GIF": {},
    "WEBP": {"lossless": True},
    "PNG": {},
    "AVIF": {"quality": 100, "subsampling": "4:4:4"},
}
LOSSY = {"GIF", "AVIF"}


def animated(file_format: str, frames=FRAMES, **options) -> bytes:
    first, *others = [frame if isinstance(frame, Image.Image) else Image.fromarray(frame) for frame in frames]
    file = io.BytesIO()
    first.save(file, file_format, save_all=True, append_images=others, **FORMATS.get(file_format, {}), **options)
    return file.getvalue()


def decoded(data: bytes) -> list[np.ndarray]:
    """Every frame by Pillow."""
    with Image.open(io.BytesIO(data)) as image:
        return [np.array((image.seek(i), image.convert("RGB"))[1]) for i in range(image.n_frames)]


@pytest.mark.parametrize("file_format", FORMATS)
def test_an_animation_is_a_clip(file_format, tmp_path):
    data = animated(file_format, duration=100)
    clip = load_video(data, FramesAt())
    assert clip.info == load_video_info(data) == VideoInfo(6, 10.0, 40, 60)
    assert np.abs(clip.frames.astype(int) - FRAMES).max() <= (64 if file_format in LOSSY else 0)
    np.testing.assert_array_equal(clip.frames, np.stack(decoded(data)))
    path = tmp_path / "a.mp4"
    path.write_bytes(data)
    np.testing.assert_array_equal(load_video(path, FramesAt((1, 4))).frames, clip.frames[[1, 4]])


def test_pages_are_frames_at_2_per_second():
    data = animated("TIFF")
    clip = load_video(io.BytesIO(data), FramesAt())
    assert clip.info == VideoInfo(6, 2.0, 40, 60)
    np.testing.assert_array_equal(clip.frames, FRAMES)


@pytest.mark.parametrize("file_format", ["GIF", "PNG", "WEBP"])
def test_frames_have_the_times_that_they_declare(file_format):
    data = animated(file_format, duration=[100, 1000, 100, 100, 600, 100])
    clip = load_video(data, FramesAt((0, 1, 2, 3, 4, 5)))
    assert clip.info.duration == pytest.approx(2.0)  # frames begin at 0, 0.1, 1.1, 1.2, 1.3 and 1.9 s
    all_frames = decoded(data)
    np.testing.assert_array_equal(clip.frames, np.stack([all_frames[i] for i in (0, 1, 1, 2, 4, 4)]))


def test_a_frame_without_a_time_lasts_a_tenth_of_a_second():
    assert load_video_info(animated("GIF")) == VideoInfo(6, 10.0, 40, 60)


def test_an_image_of_one_frame_is_one_frame():
    for file_format in FORMATS:
        clip = load_video(animated(file_format, FRAMES[:1]), FramesAt())
        assert clip.frames.shape == (1, 40, 60, 3)


def test_transparency_is_laid_over_white():
    frames = [Image.new("RGBA", (8, 8), (200, 0, 0, alpha)) for alpha in (255, 0, 128)]
    clip = load_video(animated("PNG", frames, blend=0, disposal=1), FramesAt())
    assert [tuple(frame[0, 0]) for frame in clip.frames] == [(200, 0, 0), (255, 255, 255), (227, 127, 127)]


def test_the_image_for_programs_without_animation_is_no_frame():
    data = animated("PNG", FRAMES, default_image=True, duration=100)
    clip = load_video(data, FramesAt())
    assert clip.info == VideoInfo(5, 10.0, 40, 60)
    np.testing.assert_array_equal(clip.frames, FRAMES[1:])


def test_pages_of_other_sizes_get_the_first_one_s():
    clip = load_video(animated("TIFF", [FRAMES[0], FRAMES[1, :20, :30]]), FramesAt())
    assert clip.frames.shape == (2, 40, 60, 3)


@pytest.mark.parametrize("file_format", ["GIF", "PNG"])
def test_of_a_truncated_animation_the_frames_that_there_are(file_format):
    data = animated(file_format, duration=100)
    clip = load_video(data[: len(data) * 2 // 3], FramesAt())
    assert 1 <= len(clip.frames) < 6 and clip.info.fps == 10
    np.testing.assert_array_equal(clip.frames[:-1], np.stack(decoded(data))[: len(clip.frames) - 1])


def test_what_images_are_scanned_for_is_refused():
    data = animated("GIF")
    comments = b"!\xfe" + b"\xff" + b"x" * 255
    hostile = data[:781] + (comments[:2] + comments[2:] * 8000 + b"\0") + data[781:]
    for load in (load_image, lambda data: load_video(data, FramesAt())):
        with pytest.raises(MediaFileError, match="bytes: is a GIF with more than 1,048,576 bytes of comments"):
            load(hostile)


def test_limits():
    data = animated("PNG", duration=100)
    for limits, message in (
        (VideoLimits(max_frame_pixels=2399), "has frames of 60x40, more than 2399 pixels"),
        (VideoLimits(max_seconds=0.5), r"lasts 1 s, more than 0\.5 s; cut it first"),
        (VideoLimits(max_pixels=6 * 2400 - 1), "6 frames of 60x40 are more than 14399 pixels"),
        (VideoLimits(animated=("GIF", "WEBP")), "is not an animated image in GIF, WEBP"),
    ):
        with pytest.raises(VideoError, match=message):
            load_video(data, FramesAt(), limits)
    with pytest.raises(VideoError, match="is not an animated image in PNG"):
        load_video(animated("TIFF"), FramesAt(), MediaPolicy().video_limits)


def webp_of(number: int, milliseconds: int) -> bytes:
    """An animation of equal frames, written by hand: Pillow refuses such times."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return name + len(content).to_bytes(4, "little") + content + bytes(len(content) % 2)

    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "WEBP")
    size = (7).to_bytes(3, "little") * 2
    frame = chunk(b"ANMF", bytes(6) + size + milliseconds.to_bytes(3, "little") + b"\0" + file.getvalue()[12:])
    content = chunk(b"VP8X", b"\2\0\0\0" + size) + chunk(b"ANIM", bytes(6)) + frame * number
    return chunk(b"RIFF", b"WEBP" + content)


def test_times_that_fall_are_refused():
    """libwebp counts milliseconds in 32 bits."""
    assert load_video_info(webp_of(100, 2**24 - 1)).total_num_frames == 100
    for number in (130, 257, 300):
        with pytest.raises(VideoError, match=r"frame 128 lasts -[0-9]+ ms; write the animation with shorter times"):
            load_video_info(webp_of(number, 2**24 - 1))


def test_a_truncated_webp_is_refused():
    data = animated("WEBP")
    with pytest.raises(VideoError, match="cannot be decoded, damaged or truncated"):
        load_video(data[: len(data) * 2 // 3], FramesAt())
