"""Frames of a video file by PyAV (the extra `video`): those that are asked for, each resized as soon as it is decoded.

The index of a frame stands for a time, index / average rate; the frame that is nearest to it is taken, so that videos
with a variable frame rate are sampled evenly in time.
"""

from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np

from mmvllm.errors import VideoError
from mmvllm.processors.clip import Clip, VideoInfo
from mmvllm.processors.video import ClipPlan, resize_frame


def video_info(file: str | BinaryIO, name: str) -> VideoInfo:
    """What the header of a video says; raises VideoError, which calls the video `name`."""
    with _open(file, name) as container:
        return _info(container.streams.video[0])


def decode_video(file: str | BinaryIO, name: str, plan: ClipPlan) -> Clip:
    """The frames that `plan` takes; raises VideoError, which calls the video `name`."""
    with _open(file, name) as container:
        stream = container.streams.video[0]
        frames, info = container.decode(stream), _info(stream)
        indices = plan.frame_indices(info)
        sizes = plan.sizes(len(indices), info.height, info.width)
        taken = list(_taken(frames, indices, info.fps, sizes))
    return Clip(np.stack(taken), info, tuple(indices))


def _open(file: str | BinaryIO, name: str) -> Any:
    try:
        import av
    except ImportError:
        raise VideoError(name, "is a video; pip install 'mmvllm[video]'") from None
    return av.open(file)


def _info(stream: Any) -> VideoInfo:
    return VideoInfo(stream.frames, float(stream.average_rate), stream.height, stream.width)


def _taken(frames: Iterator[Any], indices: list[int], fps: float, sizes: list[tuple[int, int]]) -> Iterator[np.ndarray]:
    i = 0
    for frame in frames:
        resized = None
        while i < len(indices) and frame.time >= (indices[i] - 0.5) / fps:
            if resized is None:
                resized = resize_frame(frame.to_ndarray(format="rgb24"), sizes)
            yield resized
            i += 1
        if i == len(indices):
            return
