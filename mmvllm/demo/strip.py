"""A strip of small frames of a video, which shows a visitor what is taken of it."""

import base64
import io

import numpy as np
from PIL import Image

from mmvllm.processors.clip import Clip, VideoInfo
from mmvllm.processors.video import ClipPlan, Resize, shrunk

MAX_FRAMES = 6
MAX_HEIGHT, MAX_WIDTH = 96, 240  # pixels of a frame

Strip = tuple[tuple[float, str], ...]  # seconds and data URI of each frame


class PreviewPlan(ClipPlan):
    """A few of the frames that a clip with the same settings consists of, small."""

    __slots__ = ()
    is_preview = True

    def frame_indices(self, info: VideoInfo) -> list[int]:
        indices = super().frame_indices(info)
        places = np.linspace(0, len(indices) - 1, min(len(indices), MAX_FRAMES))
        return [indices[place] for place in places.round().astype(int)]

    def sizes(self, num_frames: int, height: int, width: int) -> list[Resize]:
        return [shrunk(height, width, MAX_HEIGHT, MAX_WIDTH)]


def strip_of(clip: Clip) -> Strip:
    """The strip of a clip's frames."""
    return tuple((time, _data_uri(frame)) for time, frame in zip(clip.times, clip.frames, strict=True))


def _data_uri(frame: np.ndarray) -> str:
    buffer = io.BytesIO()
    Image.fromarray(frame).save(buffer, "JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
