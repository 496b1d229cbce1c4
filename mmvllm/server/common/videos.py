"""The videos of a chat request, and limits on the frames and pixels that it may request."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from mmvllm.processors.videos import qwen_vl_utils
from mmvllm.processors.videos.processor import VideoProcessorConfig
from mmvllm.server.common.messages import InputMessage, VideoOptions, VideoPart, options_of, parts_of
from mmvllm.server.common.protocol import ProcessorKwargs
from mmvllm.server.errors import ApiError

KWARGS = "mm_processor_kwargs"
FRAMES_PREFIX = "data:video/jpeg;base64,"  # vLLM's format for JPEG frames, separated by commas


@dataclass(frozen=True, slots=True)
class VideoReference:
    """A video of a request; `path` is the path of its part, `options` are the part's keys of `qwen_vl_utils`."""

    path: str
    url: str | list[str] | None  # None if the request has only the uuid
    options: Mapping[str, Any]
    uuid: str | None = None

    @property
    def param(self) -> str:
        """The path of its URL in the request."""
        return f"{self.path}.video_url.url"

    def option_of(self, error: ValueError) -> str | None:
        """Return the path of the option to which an engine error refers, or None."""
        name = getattr(error, "param", None)
        return f"{self.path}.{name}" if name in self.options else None

    @property
    def has_frames(self) -> bool:
        """Whether the video is a list of frames."""
        if isinstance(self.url, str):
            return self.url[: len(FRAMES_PREFIX)].lower() == FRAMES_PREFIX
        return self.url is not None

    @property
    def num_frames(self) -> int:
        """The length of the list of frames, without creating their URLs; 0 for other videos."""
        if isinstance(self.url, list):
            return len(self.url)
        return self.url.count(",") if self.has_frames else 0

    @property
    def frames(self) -> list[str]:
        """The URLs of the frames."""
        if isinstance(self.url, list):
            return self.url
        return [f"data:image/jpeg;base64,{frame}" for frame in self.url[len(FRAMES_PREFIX) :].split(",")]

    def part(self, data: bytes | list[bytes]) -> dict[str, Any]:
        """Return the part of the engine's request, given the encoded bytes of the video or its frames."""
        return {"type": "video", "video": data, **self.options}


def videos_of(messages: Sequence[InputMessage]) -> list[VideoReference]:
    """Return all videos of a conversation, in the order of the prompt."""
    return [
        VideoReference(path, part.url, options_of(VideoOptions, path, part, part.video_url), part.uuid)
        for path, part in parts_of(messages, VideoPart)
    ]


@dataclass(frozen=True, slots=True)
class VideoOptionLimits:
    """Limits on the options of a request, which could otherwise enlarge small videos without limit.

    Args:
        max_frames: maximum frames of a video.
        max_frame_pixels: maximum `min_pixels` of a part, to which a frame is enlarged.
        max_pixels: maximum `min_pixels` and `max_pixels` in the request's `mm_processor_kwargs`.
    """

    max_frames: int
    max_frame_pixels: int
    max_pixels: int

    @classmethod
    def of(cls, config: VideoProcessorConfig) -> "VideoOptionLimits":
        """Return the limits of a checkpoint."""
        return cls(config.max_frames, qwen_vl_utils.MAX_TOKENS * config.factor**2, config.max_pixels)

    def check(self, videos: Sequence[VideoReference], kwargs: ProcessorKwargs | None) -> None:
        """Raise ApiError for options above the limits, and for options that exclude each other."""
        for video in videos:
            for names in combinations(("fps", "nframes", "num_frames"), 2):
                _check_one_of(video.path, video.options, names)
            names = ("nframes", "num_frames", "min_frames", "max_frames")
            _check_most(video.path, video.options, dict.fromkeys(names, self.max_frames))
            _check_most(video.path, video.options, {"min_pixels": self.max_frame_pixels})
            if video.num_frames > self.max_frames:
                message = f"{video.num_frames} frames; at most {self.max_frames} are accepted; leave some out"
                raise ApiError(400, message, param=video.param)
        if kwargs is not None:
            given = kwargs.model_dump(exclude_none=True)
            _check_one_of(KWARGS, given, ("fps", "num_frames"))
            if videos:
                most = {"num_frames": self.max_frames, "min_pixels": self.max_pixels, "max_pixels": self.max_pixels}
                _check_most(KWARGS, given, most)


def _check_one_of(path: str, given: Mapping[str, Any], names: tuple[str, str]) -> None:
    if all(name in given for name in names):
        raise ApiError(400, f"{path} has both {names[0]} and {names[1]}; give one of them", param=f"{path}.{names[1]}")


def _check_most(path: str, given: Mapping[str, Any], limits: Mapping[str, int]) -> None:
    for name, most in limits.items():
        if given.get(name, 0) > most:
            raise ApiError(400, f"{name} must be at most {most} here, got {given[name]}", param=f"{path}.{name}")


def processor_param_of(error: ValueError, kwargs: ProcessorKwargs | None) -> str | None:
    """Return the path of the `mm_processor_kwargs` field to which an engine error refers, or None."""
    name = getattr(error, "param", None)
    return f"{KWARGS}.{name}" if getattr(kwargs, str(name), None) is not None else None
