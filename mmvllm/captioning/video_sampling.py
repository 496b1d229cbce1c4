"""How frames are sampled from the videos of a job: checks of its settings, and the request for a clip."""

from dataclasses import dataclass
from typing import Any

from mmvllm.captioning.items import Item
from mmvllm.errors import ArgumentError
from mmvllm.processors.clip import DEFAULT_FPS, MAX_FPS
from mmvllm.utils.arguments import is_number

MIN_FRAME_PIXELS = 128 * 28 * 28  # to which qwen-vl-utils enlarges smaller frames
_INTEGER = (lambda number: isinstance(number, int) and number >= 1, "an integer of at least 1")
_REQUIRED = {
    "video_fps": (lambda fps: 0 < fps <= MAX_FPS, f"a number above 0 and at most {MAX_FPS}"),
    "video_frames": _INTEGER,
    "video_max_pixels": _INTEGER,
    "clip_seconds": (lambda seconds: 0 < seconds <= 1e6, "a number above 0 and at most 1000000"),
}


@dataclass(frozen=True, slots=True)
class VideoSampling:
    """The settings of `CaptionSettings` with these names; raises ArgumentError for values that cannot be."""

    video_fps: float | None
    video_frames: int | None
    video_max_pixels: int | None
    clip_seconds: float | None

    def __post_init__(self):
        if self.video_fps is not None and self.video_frames is not None:
            raise ArgumentError("give either {video_fps} or {video_frames}")
        for name, (is_valid, required) in _REQUIRED.items():
            value = getattr(self, name)
            if value is not None and not (is_number(value) and is_valid(value)):
                raise ArgumentError(f"{{{name}}} is {{value!r}}, must be {required}", value=value)

    def part(self, item: Item) -> dict[str, Any]:
        """The part of a message for a clip, with keys as qwen-vl-utils means them."""
        keys = {"video_start": item.start, "video_end": item.end, "max_pixels": self.video_max_pixels}
        if self.video_frames is None:
            keys["fps"] = self.video_fps or DEFAULT_FPS
        else:
            keys["nframes"] = self.video_frames
        return {"type": "video", "video": item, **keys, **self.processor_kwargs}

    @property
    def processor_kwargs(self) -> dict[str, int]:
        """The smallest size of a frame where the largest is given, which may be below that of the checkpoint."""
        return {} if self.video_max_pixels is None else {"min_pixels": min(self.video_max_pixels, MIN_FRAME_PIXELS)}
