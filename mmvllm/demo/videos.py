"""Uploaded videos: their preview strips, and the frames, sizes and token counts with which the engine uses them."""

import base64
import html
import io
import mimetypes
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from mmvllm.demo.images import UploadError, decoded
from mmvllm.errors import VideoError
from mmvllm.inputs import MediaRules, MultiModalInput
from mmvllm.media.policy import MediaPolicy
from mmvllm.processors.chat.parts import check_numbers
from mmvllm.processors.chat.processor import tokenize
from mmvllm.processors.placeholders import Encode, expansion_of
from mmvllm.processors.videos.clip import DEFAULT_FPS, Clip, VideoInfo
from mmvllm.processors.videos.load import Load
from mmvllm.processors.videos.processor import ClipPlan, Resize, VideoProcessorConfig, shrunk
from mmvllm.utils.text import counted

if TYPE_CHECKING:
    from mmvllm.entrypoints.async_llm import AsyncLLM

SUFFIXES = (".mp4", ".m4v", ".webm", ".mkv", ".mov", ".avi")  # suffixes of `mmvllm.media.policy.VIDEO_CONTAINERS`
MAX_TIMESTAMPS = 2**14  # whose tokens are cached: each question counts the videos of its conversation
TIMESTAMP_TOKENS = 12  # estimate for a timestamp with its start and end tokens
STRIP_FRAMES = 6
STRIP_HEIGHT, STRIP_WIDTH = 96, 240  # pixels of a frame, at most
# Gradio recognizes videos by their MIME types; not every system knows these two.
mimetypes.add_type("video/mp4", ".m4v")
mimetypes.add_type("video/x-matroska", ".mkv")

Strip = tuple[tuple[float, str], ...]  # seconds and data URI of each frame


class PreviewPlan(ClipPlan):
    """Selects a few of the frames of a clip with the same settings, at a small size."""

    __slots__ = ()
    is_preview = True

    def frame_indices(self, info: VideoInfo) -> list[int]:
        indices = super().frame_indices(info)
        places = np.linspace(0, len(indices) - 1, min(len(indices), STRIP_FRAMES))
        return [indices[place] for place in places.round().astype(int)]

    def sizes(self, num_frames: int, height: int, width: int) -> list[Resize]:
        return [shrunk(height, width, STRIP_HEIGHT, STRIP_WIDTH)]


def strip_of(clip: Clip) -> Strip:
    """Convert the frames of a clip to a strip, which shows a visitor how a video is sampled."""
    return tuple((time, _data_uri(frame)) for time, frame in zip(clip.times, clip.frames, strict=True))


def _data_uri(frame: np.ndarray) -> str:
    buffer = io.BytesIO()
    Image.fromarray(frame).save(buffer, "JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


class ClipOptions(NamedTuple):
    """The values of the page's controls for the sampling of videos; the pixel bounds are per frame."""

    fps: float = DEFAULT_FPS
    min_pixels: int | None = None
    max_pixels: int | None = None


@dataclass(frozen=True, slots=True)
class ClipRules:
    """The engine's rules for sampling the frames of videos and counting their tokens.

    Args:
        max_tokens: maximum number of tokens of a prompt.
        encode: function that tokenizes a text, such as a timestamp.
    """

    config: VideoProcessorConfig
    media: MediaRules
    max_tokens: int
    encode: Encode

    @classmethod
    def of(cls, engine: "AsyncLLM") -> "ClipRules":
        tokenizer = deepcopy(engine.tokenizer)  # threads that prepare requests use the original
        encode = lru_cache(MAX_TIMESTAMPS)(partial(tokenize, tokenizer))
        return cls(engine.video_config, engine.media_rules, engine.max_model_len, encode)

    def part_keys(self, options: ClipOptions) -> dict[str, Any]:
        """Return the keys of a video's message part; raises ParameterError for values that the controls do not allow.

        A long video gets fewer and smaller frames, to take at most about half of the model's context.
        """
        given = {name: value for name, value in options._asdict().items() if value is not None}
        check_numbers(given)
        token, half = self.config.factor**2, self.max_tokens // 2
        num_text = 0 if self.media.timestamp is None else TIMESTAMP_TOKENS
        least = max(2 * given.get("min_pixels", self.config.min_pixels) // token, 1) + num_text  # per temporal patch
        num_patches = min(half // least, self.config.max_frames // 2)
        pixels = max(half - num_patches * num_text, 1) * token
        return {**given, "total_pixels": pixels, "max_frames": max(2 * num_patches, 4)}

    def plan(self, options: ClipOptions) -> ClipPlan:
        return ClipPlan(self.config, part=self.part_keys(options))

    def preview_plan(self, options: ClipOptions) -> PreviewPlan:
        return PreviewPlan(self.config, part=self.part_keys(options))

    def num_frames(self, info: VideoInfo, options: ClipOptions) -> int:
        """Return the number of frames that are sampled from a video."""
        return len(self.plan(options).frame_indices(info))

    def num_tokens(self, info: VideoInfo, options: ClipOptions) -> int:
        """Return the number of tokens that replace a video's placeholder in the prompt, including any timestamps."""
        plan = self.plan(options)
        clip = plan.timed(Clip(np.empty(0), info, tuple(plan.frame_indices(info))))
        times = clip.patch_times(self.config.temporal_patch_size)
        undecoded = MultiModalInput("video", torch.empty(0), plan.grid(info), (), times)
        return len(expansion_of(undecoded, self.media, self.encode).token_ids)


def why_no_videos(engine: "AsyncLLM") -> str | None:
    """Return why the page takes no videos, as a message for visitors; None if it takes videos."""
    if not engine.takes_videos:
        return "this model takes no videos"
    return None if find_spec("av") else "this server takes no videos, since it lacks PyAV"


@dataclass(frozen=True, slots=True)
class UploadedVideo:
    """A video file, the information in its header, and a strip of small frames.

    `indices` are the indices of the strip's frames, chosen from the frames that the latest options select.
    """

    path: Path
    info: VideoInfo
    indices: tuple[int, ...]
    strip: Strip

    @classmethod
    def read(cls, path: Path, plan: PreviewPlan, decode: Load) -> "UploadedVideo":
        """Decode a few frames; raises UploadError if the file is not a video or exceeds the limits."""
        clip = decoded(path, lambda data: decode.video(data, plan))
        return cls(path, clip.info, clip.indices, strip_of(clip))

    def check_pixels(self, num_frames: int, policy: MediaPolicy) -> None:
        """Raise UploadError if `num_frames` frames of the video exceed the policy's limits."""
        try:
            policy.video_limits.check_frames(self.path.name, self.info, num_frames)
        except VideoError as error:
            raise UploadError(str(error)) from None

    def load(self, decode: Load, plan: ClipPlan) -> Clip:
        """Decode the frames that a plan selects; raises UploadError."""
        return decoded(self.path, lambda data: decode.video(data, plan))


def is_video(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES


def estimate(videos: list[tuple[UploadedVideo, int]], note: str) -> str:
    """Return HTML to show below the message box: each video's frame count, some of its frames, and the token note."""
    return "".join(_described(video, num_frames) for video, num_frames in videos) + note


def _described(video: UploadedVideo, num_frames: int) -> str:
    name, length = html.escape(video.path.name), spoken_time(video.info.duration)
    taken = f"<b>{name}</b> lasts {length}; the model sees {counted(num_frames, 'frame')}"
    some = ", some of which are:" if num_frames > len(video.strip) else ":"
    frames = "".join(
        f'<figure><img src="{data}" alt="Frame at {spoken_time(time)}"><figcaption>{spoken_time(time)}</figcaption>'
        "</figure>"
        for time, data in video.strip
    )
    return f'<div class="clip"><p>{taken}{some}</p><div class="strip">{frames}</div></div>'


def spoken_time(seconds: float) -> str:
    """Format seconds, such as "7.5 s" or, from a minute on, "1:05 min"."""
    return f"{seconds:.1f} s" if seconds < 60 else f"{int(seconds) // 60}:{int(seconds) % 60:02d} min"
