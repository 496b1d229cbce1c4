"""Build clips from lists or arrays of frames, with optional metadata of the video that they were sampled from."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import numpy as np
from PIL import Image

from mmvllm.errors import VideoError
from mmvllm.processors.images.load import dtype_name, is_array, load_image
from mmvllm.processors.videos import qwen_vl_utils
from mmvllm.processors.videos.clip import DEFAULT_FPS, Clip, VideoInfo
from mmvllm.processors.videos.limits import ANY_VIDEO, VideoLimits
from mmvllm.processors.videos.processor import ClipPlan, check_fps, resize_frame, resized_to
from mmvllm.utils.arguments import is_number

FLOATS = ("bfloat16", "float16", "float32", "float64")
MOST_FRAMES = 2**53  # of the source video; up to this number, times in seconds are exact
LoadFrame = Callable[[Any], Image.Image]


def is_given(source: Any) -> bool:
    """Return whether a source consists of frames: a list, an array, or a tuple (frames, vLLM's metadata)."""
    return isinstance(source, list | tuple) or is_array(source)


def given_info(source: Any) -> VideoInfo:
    """Return the metadata of a source that consists of frames; raises VideoError and ImageError."""
    given = _GivenFrames.of(source)
    image = load_image(given.frames[0])
    return given.info(given.fps or DEFAULT_FPS, image.height, image.width)


def clip_of(source: Any, plan: ClipPlan, load_frame: LoadFrame = load_image, limits: VideoLimits = ANY_VIDEO) -> Clip:
    """Build the clip of a source that consists of frames; each frame is loaded and resized before the next one.

    Frames are sampled only if there are metadata without `frames_indices` and the video's message part has no options.
    Then `do_sample_frames` of the request decides, else of the metadata, else whether the request has `fps` or
    `num_frames`. Raises VideoError for frames of different sizes or wrong metadata, ImageError for a frame.
    """
    given = _GivenFrames.of(source)
    fps = given.fps or plan.part.get("sample_fps") or plan.part.get("fps") or plan.fps or DEFAULT_FPS
    first = load_frame(given.frames[0])
    info = given.info(fps, first.height, first.width)
    places = plan.frame_indices(info) if given.is_sampled(plan) else list(range(len(given.frames)))
    indices = tuple(given.indices[i] for i in places)
    if plan.part and len(places) % 2:
        places, indices = places + places[-1:], (*indices, indices[-1] + 1)
        info = given.info(fps, first.height, first.width, at_least=len(places))
    limits.check_frames("the list of frames", info, len(places))
    return Clip(_resized([given.frames[i] for i in places], plan, given.were_floats, load_frame), info, indices)


def _resized(frames: Sequence[Any], plan: ClipPlan, as_floats: bool, load_frame: LoadFrame) -> np.ndarray:
    """Load and resize frames to (T, height, width, 3) uint8."""
    resized = np.empty(0)
    for i, frame in enumerate(frames):
        image = load_frame(frame)
        if plan.part:
            image = qwen_vl_utils.resize_given_frame(plan.part, image, plan.config.factor)
        if i == 0:
            size = image.size
            sizes = plan.sizes(len(frames), image.height, image.width)
            sizes = [size._replace(as_floats=True) for size in sizes] if as_floats else sizes
            resized = np.empty((len(frames), *resized_to(sizes, image.height, image.width), 3), dtype=np.uint8)
        _check_size(i, image, size)
        resized[i] = resize_frame(np.array(image), sizes)
    return resized


def _check_size(i: int, image: Image.Image, size: tuple[int, int]) -> None:
    if image.size != size:
        reason = f"is {image.width}x{image.height} pixels, frame 0 {size[0]}x{size[1]}"
        raise VideoError(f"frame {i} of the list", f"{reason}; all frames of a video must have the same size")


@dataclass(frozen=True, slots=True)
class _GivenFrames:
    """Frames with vLLM's metadata: their `indices` in a video of `total` frames at `fps`.

    `were_floats` says whether qwen-vl-utils may have prepared the frames, which it resizes as floats.
    """

    frames: Sequence[Any]
    indices: Sequence[int]
    total: int
    fps: float | None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    were_floats: bool = False

    @classmethod
    def of(cls, source: Any) -> "_GivenFrames":
        has_metadata = isinstance(source, tuple) and len(source) == 2 and isinstance(source[1], Mapping)
        frames, metadata = source if has_metadata else (source, {})
        if isinstance(frames, list | tuple) and frames and all(map(_is_of_floats, frames)):
            frames = _stacked(frames)
        were_floats = _is_of_floats(frames)
        if is_array(frames):
            frames = _channels_last(_with_levels(frames) if were_floats else frames)
        if len(frames) == 0:
            raise VideoError("the list of frames", "is empty")
        metadata = {key: value for key, value in metadata.items() if value is not None}
        indices = _indices(metadata, len(frames))
        total = max(int(_number(metadata, "total_num_frames", MOST_FRAMES)), max(indices) + 1)
        fps = metadata.get("fps")
        if fps is None and (duration := _number(metadata, "duration", float("inf"))):
            fps = total / duration
        if fps is not None:
            check_fps("fps", fps)
        return cls(frames, indices, total, fps, metadata, were_floats)

    def info(self, fps: float, height: int, width: int, at_least: int = 0) -> VideoInfo:
        return VideoInfo(max(self.total, at_least), fps, height, width)

    def is_sampled(self, plan: ClipPlan) -> bool:
        if "frames_indices" in self.metadata or plan.part or not self.metadata:
            return False
        asked = self.metadata.get("do_sample_frames") if plan.do_sample_frames is None else plan.do_sample_frames
        return bool(plan.fps is not None or plan.num_frames is not None if asked is None else asked)


def _is_of_floats(value: Any) -> bool:
    return is_array(value) and dtype_name(value) in FLOATS


def _stacked(frames: Sequence[Any]) -> np.ndarray:
    """Stack a list of float arrays into one array."""
    if len({tuple(frame.shape) for frame in frames}) > 1:
        raise VideoError(
            "the list of frames", "has arrays of different shapes; all frames of a video must have the same size"
        )
    return np.stack([_as_numpy(frame) for frame in frames])


def _as_numpy(array: Any) -> np.ndarray:
    if isinstance(array, np.ndarray):
        return array
    return (array.float() if dtype_name(array) == "bfloat16" else array).cpu().numpy()  # numpy has no bfloat16


def _channels_last(frames: Any) -> Any:
    """Return frames as (frames, height, width, 3); torch often has (frames, 3, height, width)."""
    shape, dtype = tuple(frames.shape), dtype_name(frames)
    if len(shape) != 4 or dtype != "uint8" or not (shape[3] in (3, 4) or shape[1] == 3):
        required = "uint8 of shape (frames, height, width, 3) or (frames, 3, height, width)"
        raise VideoError("the array", f"must be {required}, got shape {shape} and dtype {dtype}")
    return frames if shape[3] in (3, 4) else frames.swapaxes(1, 2).swapaxes(2, 3)


def _with_levels(frames: Any) -> Any:
    """Convert a float array to uint8 if all its values are uint8 levels, as in frames of qwen-vl-utils."""
    values = _as_numpy(frames)
    with np.errstate(invalid="ignore"):
        levels = values.astype(np.uint8)
    if not np.array_equal(levels, values):
        reason = f"has dtype {dtype_name(frames)} and values that are no integers from 0 to 255; give uint8"
        raise VideoError("the array", reason)
    return levels


def _number(metadata: Mapping[str, Any], key: str, most: float) -> Any:
    """Return a number of at least 0 from the metadata; 0 if the key is missing."""
    value = metadata.get(key, 0)
    if not is_number(value) or not 0 <= value <= most:
        raise VideoError("the frames", f"{key} must be a number from 0 to {most:g}, got {value!r:.60}")
    return value


def _indices(metadata: Mapping[str, Any], number: int) -> list[int]:
    """Return the indices of the frames in their video."""
    indices = metadata.get("frames_indices")
    if indices is None:
        return list(range(number))
    if is_array(indices):
        indices = indices.tolist()  # qwen-vl-utils' torchvision reader returns a tensor
    given = list(indices) if isinstance(indices, Iterable) else [indices]
    if len(given) != number or not all(isinstance(index, Integral) and 0 <= index < MOST_FRAMES for index in given):
        raise VideoError("the frames", f"frames_indices must be {number} integers of at least 0, got {indices!r:.60}")
    return [int(index) for index in given]
