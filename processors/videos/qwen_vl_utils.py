"""The options of a video's message part, with the same meaning as in qwen-vl-utils 0.0.14.

The package samples `fps` frames per second (2 by default), or `nframes` frames, evenly from the first to the last frame
between `video_start` and `video_end`. It bounds the pixels of a frame by `min_pixels` and `max_pixels`, and the pixels
of all frames by `total_pixels`. For a list of frames, `sample_fps` is their rate, and `raw_fps` is the rate of the
source video; timestamps are computed as if the frames were the first ones of that video.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from PIL import Image

from mmvllm.errors import RequestError
from mmvllm.processors.images.processor import FRAME, PART_MAX_TOKENS, PART_MIN_TOKENS, smart_resize
from mmvllm.processors.videos.clip import Clip, VideoInfo

FPS = 2.0
MIN_FRAMES, MAX_FRAMES = 4, 768
FRAME_FACTOR = 2  # the number of frames is a multiple of it
MIN_TOKENS, MAX_TOKENS = 128, 768  # of a frame, merged in space only
TOTAL_TOKENS = 128_000 * 0.9

SAMPLING_KEYS = ("fps", "nframes", "min_frames", "max_frames", "video_start", "video_end")
SIZE_KEYS = ("min_pixels", "max_pixels", "total_pixels", "resized_height", "resized_width")
LIST_KEYS = ("sample_fps", "raw_fps")
KEYS = (*SAMPLING_KEYS, *SIZE_KEYS, *LIST_KEYS)


def frame_indices(part: Mapping[str, Any], info: VideoInfo) -> list[int]:
    """Return the indices of the frames to sample.

    Raises RequestError for a range of less than two frames, and for both `fps` and `nframes`.
    """
    start, end = _frame_range(part, info)
    number = _num_frames(part, end - start + 1, info.fps)
    return torch.linspace(start, end, number).round().long().tolist()


def _frame_range(part: Mapping[str, Any], info: VideoInfo) -> tuple[int, int]:
    """Return the first and the last frame of the range, both inclusive."""
    start, end, last = part.get("video_start"), part.get("video_end"), info.total_num_frames - 1
    if start is None and end is None:
        return 0, last
    first = 0 if start is None else math.ceil(min(max(0.0, start), info.duration) * info.fps)
    last = last if end is None else min(math.floor(min(max(0.0, end), info.duration) * info.fps), last)
    if first >= last:
        given = [f"{key} {part[key]}" for key in ("video_start", "video_end") if part.get(key) is not None]
        raise RequestError(
            f"{' to '.join(given)} has less than two frames; the video is {info.duration:.2f} s long",
            param="video_start" if start is not None else "video_end",
        )
    return first, last


def _num_frames(part: Mapping[str, Any], total: int, fps: float) -> int:
    if "nframes" in part:
        if "fps" in part:
            raise RequestError("a video has both fps and nframes; give one of them", param="nframes")
        number = round(part["nframes"] / FRAME_FACTOR) * FRAME_FACTOR
        # The package refuses a number above the video's; here it is lowered to the largest even number of its frames.
        return max(min(number, total // FRAME_FACTOR * FRAME_FACTOR), 1)
    low = math.ceil(part.get("min_frames", MIN_FRAMES) / FRAME_FACTOR) * FRAME_FACTOR
    high = part.get("max_frames", min(MAX_FRAMES, total)) // FRAME_FACTOR * FRAME_FACTOR
    number = min(max(total / fps * part.get("fps", FPS), low), high, total)
    # The package refuses a video of one frame; here that frame is taken.
    return max(math.floor(number / FRAME_FACTOR) * FRAME_FACTOR, 1)


def timed(part: Mapping[str, Any], clip: Clip) -> Clip:
    """Return the clip with the package's metadata, which cover only the range that the frames were sampled from."""
    total, fps = clip.indices[-1] - clip.indices[0] + 1, clip.info.fps
    raw_fps = part.get("raw_fps", fps)
    return replace(clip, info=replace(clip.info, total_num_frames=total / fps * raw_fps, fps=raw_fps))


def frame_size(part: Mapping[str, Any], num_frames: int, height: int, width: int, factor: int) -> tuple[int, int]:
    """Return the (height, width) that frames are resized to."""
    if "resized_height" in part and "resized_width" in part:
        bounds = PART_MIN_TOKENS * factor**2, PART_MAX_TOKENS * factor**2
        return smart_resize(part["resized_height"], part["resized_width"], factor, *bounds, min_side=factor, noun=FRAME)
    # The package refuses a max_pixels below its default minimum; here the minimum is lowered.
    default = MIN_TOKENS * factor**2
    low = part.get("min_pixels", min(default, part.get("max_pixels", default)))
    total = part.get("total_pixels", TOTAL_TOKENS * factor**2)
    _check_low(low, factor)
    high = max(min(MAX_TOKENS * factor**2, total / num_frames * FRAME_FACTOR), int(low * 1.05))
    high = min(part.get("max_pixels", high), high)
    if low > high:
        raise RequestError(f"min_pixels is {low}, above max_pixels {high}", param="min_pixels", value=low, limit=high)
    return smart_resize(height, width, factor, low, high, min_side=factor, noun=FRAME)


def _check_low(low: int, factor: int) -> None:
    """Raise RequestError for frames that would be enlarged beyond the maximum of a message part."""
    most = PART_MAX_TOKENS * factor**2
    if low > most:
        reason = f"min_pixels must be at most {most} for a frame, got {low}"
        raise RequestError(reason, param="min_pixels", value=low, limit=most)


def resize_given_frame(part: Mapping[str, Any], frame: Image.Image, factor: int) -> Image.Image:
    """Resize a frame of a list as an image, before all frames are resized together.

    qwen-vl-utils 0.0.14 doubles the patch size twice to get the resize factor of images; this function doubles it once.
    """
    height, width = part.get("resized_height"), part.get("resized_width")
    low, high = PART_MIN_TOKENS * factor**2, PART_MAX_TOKENS * factor**2
    if height is None or width is None:
        height, width = frame.height, frame.width
        low, high = part.get("min_pixels", low), part.get("max_pixels", high)
        _check_low(low, factor)
    height, width = smart_resize(height, width, factor, low, high, min_side=factor, noun=FRAME)
    return frame.resize((width, height), Image.Resampling.BICUBIC)
