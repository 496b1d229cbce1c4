"""Backends that read the videos of Python callers: PyAV, or the package qwen-vl-utils if it is installed."""

from collections.abc import Callable
from os import PathLike, fspath
from typing import Any

import numpy as np

from mmvllm.errors import VideoError
from mmvllm.processors.videos.clip import Clip, VideoInfo
from mmvllm.processors.videos.load import Load, load_video
from mmvllm.processors.videos.processor import ClipPlan, resize_frame


def load_with(backend: str) -> Load:
    """Return the functions that load media with a `video_backend`; raises ValueError if it is unknown or missing."""
    if backend not in BACKENDS:
        raise ValueError(f"video_backend must be {' or '.join(map(repr, BACKENDS))}, got {backend!r}")
    if backend == "qwen-vl-utils":
        _fetch_video()
    return Load(video=BACKENDS[backend])


def load_with_qwen_vl_utils(source: Any, plan: ClipPlan) -> Clip:
    """Load the frames of a path or URL as qwen-vl-utils samples and resizes them; else fall back to `load_video`.

    The fallback includes lists of frames, which qwen-vl-utils 0.0.14 resizes by a wrong factor.
    """
    is_read = isinstance(source, str | PathLike) and not str(source).startswith("data:")
    if not is_read or plan.do_sample_frames is False:
        return load_video(source, plan)
    name, options = fspath(source), {"fps": plan.fps, "nframes": plan.num_frames, **plan.part}
    options = {key: value for key, value in options.items() if value is not None}
    try:
        (video, metadata), _ = _fetch_video()(
            {"type": "video", "video": name, **options},
            image_patch_size=plan.config.patch_size,
            return_video_sample_fps=True,
            return_video_metadata=True,
        )
    except Exception as error:  # its readers raise any exception
        raise VideoError(name, f"qwen-vl-utils cannot read it ({type(error).__name__}: {error})") from None
    # The package returns uint8 values as floats.
    frames = video.permute(0, 2, 3, 1).to("cpu").numpy().astype(np.uint8)
    sizes = plan.final_sizes(*frames.shape[:3])
    info = VideoInfo(round(metadata["total_num_frames"]), float(metadata["fps"]), *frames.shape[1:3])
    indices = tuple(int(index) for index in metadata["frames_indices"])
    return Clip(np.stack([resize_frame(frame, sizes) for frame in frames]), info, indices)


def _fetch_video() -> Callable:
    try:
        from qwen_vl_utils import fetch_video
    except Exception as error:  # torchvision is missing or does not load
        raise ValueError(
            f"video_backend='qwen-vl-utils' cannot be used ({error}); pip install qwen-vl-utils torchvision, "
            "or leave video_backend out"
        ) from None
    return fetch_video


BACKENDS: dict[str, Callable[[Any, ClipPlan], Clip]] = {"pyav": load_video, "qwen-vl-utils": load_with_qwen_vl_utils}
