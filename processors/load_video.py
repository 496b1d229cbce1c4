"""Loads the frames of a video from any source, or raises VideoError with the source and the reason."""

import io
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL.Image import Image

from mmvllm.errors import VideoError
from mmvllm.processors import qwen_vl_utils
from mmvllm.processors.clip import Clip, VideoInfo
from mmvllm.processors.decode_video import decode_video, video_info
from mmvllm.processors.load import load_image
from mmvllm.processors.video import DEFAULT_FPS, ClipPlan, resize_frame


def load_video(source: Any, plan: ClipPlan) -> Clip:
    """Load the frames that `plan` takes.

    Args:
        source: a path; encoded bytes or a binary file object; a file:// or http(s):// URL or a data URI; a list of
            frames, each of them what `load_image` takes.

    Raises VideoError, a ValueError; ImageError for a frame of a list.
    """
    if isinstance(source, list | tuple):
        return _frames(source, plan)
    if isinstance(source, bytes):
        return decode_video(io.BytesIO(source), f"the video of {len(source)} bytes", plan)
    return decode_video(os.fspath(source), os.fspath(source), plan)


def load_video_info(source: Any) -> VideoInfo:
    """What the header of a video says, given as for `load_video`; its frames are not decoded."""
    return video_info(os.fspath(source), os.fspath(source))


def _frames(given: Sequence[Any], plan: ClipPlan) -> Clip:
    """Frames that are given as they are, at the rate `sample_fps` or `fps`."""
    if not given:
        raise VideoError("the list of frames", "is empty")
    images = [load_image(frame) for frame in given]
    if plan.part:
        images = [qwen_vl_utils.resize_given_frame(plan.part, image, plan.config.factor) for image in images]
        images += images[-1:] * (len(images) % 2)
    for i, image in enumerate(images):
        if image.size != images[0].size:
            raise VideoError(
                f"frame {i} of the list",
                f"is {image.width}x{image.height} pixels, frame 0 {images[0].width}x{images[0].height}; frames of a "
                "video must have one size",
            )
    fps = plan.part.get("sample_fps") or plan.part.get("fps") or plan.fps or DEFAULT_FPS
    info = VideoInfo(len(images), fps, images[0].height, images[0].width)
    sizes = plan.sizes(len(images), info.height, info.width)
    frames = np.stack([resize_frame(np.asarray(image), sizes) for image in images])
    return Clip(frames, info, tuple(range(len(images))))


@dataclass(frozen=True, slots=True)
class Load:
    """How the media of a request are read: in the calling thread from any source, unless other functions do it.

    Args:
        image: source -> RGB image.
        video: source, plan -> the frames that the plan takes.
    """

    image: Callable[[Any], Image] = load_image
    video: Callable[[Any, ClipPlan], Clip] = load_video


DIRECT = Load()
