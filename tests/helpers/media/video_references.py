"""What transformers' processors and qwen-vl-utils make of frames, computed in a process where torchvision is a stub.

The functions of this module run in the test's process; what they call runs in the other one, and takes and gives numpy
arrays.
"""

import multiprocessing
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np

from mmvllm.processors.videos.clip import VideoInfo
from tests.helpers.media.torchvision_stub import install

# Family -> the modules of its processors of requests and of videos, and the prefixes of their classes' names.
PROCESSORS = {
    "qwen2_vl": ("qwen2_vl", "Qwen2VL", "qwen2_vl", "Qwen2VL"),
    "qwen2_5_vl": ("qwen2_5_vl", "Qwen2_5_VL", "qwen2_vl", "Qwen2VL"),
    "qwen3_vl": ("qwen3_vl", "Qwen3VL", "qwen3_vl", "Qwen3VL"),
    "qwen3_vl_moe": ("qwen3_vl", "Qwen3VL", "qwen3_vl", "Qwen3VL"),
}
Prepared = dict[str, np.ndarray]


def processed(folder: Path, family: str, messages: list[dict], images: list, videos: list, **kwargs: Any) -> Prepared:
    """What transformers' processor of a family returns for messages, images, and videos as (frames, their rate).

    The frames are taken as they are, unless `kwargs` says `do_sample_frames`.
    """
    return _process().submit(_processed, folder, family, messages, images, videos, kwargs).result()


def sampled_and_sized(family: str, info: VideoInfo, settings: dict, kwargs: dict) -> tuple[list[int], tuple[int, int]]:
    """Indices of the frames that transformers' video processor takes, and the (height, width) it resizes them to."""
    return _process().submit(_sampled_and_sized, family, info, settings, kwargs).result()


def patchified(family: str, frames: np.ndarray, settings: dict) -> Prepared:
    """The patches and the grid that transformers' video processor makes of frames."""
    return _process().submit(_patchified, family, frames, settings).result()


def fetched(
    part: dict, patch_size: int, source: VideoInfo | tuple[np.ndarray, float] | None = None, as_published: bool = True
) -> tuple[np.ndarray | tuple[int, ...], dict]:
    """What qwen-vl-utils' `fetch_video` returns for a part: frames (T, 3, height, width), and their metadata.

    Args:
        source: frames and rate of the file that `part` names; of a `VideoInfo`, whose frames are not computed, only the
            shape of the result is returned.
        as_published: False mends the factor of frames that are given as a list, which 0.0.14 doubles.
    """
    return _process().submit(_fetched, part, patch_size, source, as_published).result()


def vision_info(messages: list[dict], patch_size: int, sources: Mapping[str, tuple], **keys: bool) -> tuple:
    """What qwen-vl-utils' `process_vision_info` returns for messages.

    Args:
        sources: frames and rate of each file that a part names as its video.
        keys: `return_video_kwargs` and `return_video_metadata`.
    """
    return _process().submit(_vision_info, messages, patch_size, sources, keys).result()


def _process() -> ProcessPoolExecutor:
    sys.audit("mmvllm.spawn")  # for each test that needs the process, whichever comes first
    return _pool()


@cache
def _pool() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), initializer=install)


def end_process() -> None:
    """End the process, if there is one: it would outlive a worker that pytest-xdist kills because it exits slowly."""
    if _pool.cache_info().currsize:
        _pool().shutdown()
        _pool.cache_clear()


@cache
def _video_processor_class(family: str) -> type:
    _, _, module, prefix = PROCESSORS[family]
    return getattr(import_module(f"transformers.models.{module}.video_processing_{module}"), f"{prefix}VideoProcessor")


@cache
def _processor(folder: Path, family: str) -> Any:
    from transformers import AutoTokenizer
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    module, prefix, _, _ = PROCESSORS[family]
    processor_class = getattr(import_module(f"transformers.models.{module}.processing_{module}"), f"{prefix}Processor")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return processor_class(
        image_processor=Qwen2VLImageProcessorPil.from_pretrained(folder),
        tokenizer=tokenizer,
        video_processor=_video_processor_class(family).from_pretrained(folder, cap_pixels_per_frame=False),
        chat_template=tokenizer.chat_template,
    )


def _processed(folder: Path, family: str, messages: list[dict], images: list, videos: list, kwargs: dict) -> Prepared:
    processor = _processor(folder, family)
    keys = {"do_sample_frames": False, "return_mm_token_type_ids": True, "return_tensors": "pt", **kwargs}
    if videos:
        keys["videos"] = [frames for frames, _ in videos]
        keys["video_metadata"] = [_metadata(len(frames), fps) for frames, fps in videos]
    text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    made = processor(text=[text], images=images or None, **keys)
    return {name: np.asarray(value) for name, value in made.items() if name != "video_metadata"}


def _metadata(number: int, fps: float) -> Any:
    from transformers.video_utils import VideoMetadata

    return VideoMetadata(number, fps=fps, duration=number / fps, frames_indices=list(range(number)))


def _sampled_and_sized(family: str, info: VideoInfo, settings: dict, kwargs: dict) -> tuple[list[int], tuple[int, int]]:
    import torch
    from transformers.video_processing_utils import BaseVideoProcessor

    processor, sizes = _video_processor_class(family)(**settings), []
    indices = processor.sample_frames(_metadata(info.total_num_frames, info.fps), **kwargs)
    video = torch.empty(1, len(indices), 3, info.height, info.width, device="meta")
    with patch.object(BaseVideoProcessor, "resize", lambda self, image, size, **_: sizes.append(size)):
        processor.resize(
            video,
            processor.size,
            processor.resample,
            factor=processor.patch_size * processor.merge_size,
            temporal_factor=processor.temporal_patch_size,
            cap_pixels_per_frame=False,
        )
    return [int(index) for index in indices], (sizes[0].height, sizes[0].width)


def _patchified(family: str, frames: np.ndarray, settings: dict) -> Prepared:
    processor = _video_processor_class(family)(**settings)
    made = processor(videos=[frames], do_sample_frames=False, cap_pixels_per_frame=False, return_tensors="pt")
    return {name: value.numpy() for name, value in made.items() if name != "video_metadata"}


def _fetched(part: dict, patch_size: int, source: VideoInfo | tuple | None, as_published: bool) -> tuple:
    from qwen_vl_utils import vision_process as package

    package.VIDEO_READER_BACKENDS = dict.fromkeys(package.VIDEO_READER_BACKENDS, partial(_read, source, package))
    mended = partial(_with_patch_size, package.fetch_image, patch_size)
    options = {"image_patch_size": patch_size, "return_video_sample_fps": True, "return_video_metadata": True}
    with patch.object(package, "fetch_image", package.fetch_image if as_published else mended):
        (video, metadata), fps = package.fetch_video(part, **options)
    metadata["sample_fps"] = fps
    return (tuple(video.shape) if video.is_meta else video.numpy()), metadata


def _vision_info(messages: list[dict], patch_size: int, sources: Mapping, keys: dict) -> tuple:
    import torch
    from qwen_vl_utils import vision_process as package

    def read(part: dict) -> tuple:
        frames, metadata, fps = _read(sources[part["video"]], package, part)
        return frames, metadata | {"frames_indices": torch.tensor(metadata["frames_indices"])}, fps  # as torchvision's

    package.VIDEO_READER_BACKENDS = dict.fromkeys(package.VIDEO_READER_BACKENDS, read)
    return package.process_vision_info(messages, image_patch_size=patch_size, **keys)


def _with_patch_size(fetch: Callable, patch_size: int, part: dict, given: int) -> Any:
    return fetch(part, patch_size)


def _read(source: VideoInfo | tuple[np.ndarray, float], package: ModuleType, part: dict) -> tuple:
    """Frames and metadata, as the package's readers take them from decord and torchcodec."""
    import torch

    if isinstance(source, VideoInfo):
        frames, fps = torch.empty(source.total_num_frames, source.height, source.width, 3, device="meta"), source.fps
        frames = frames.to(torch.uint8)
    else:
        frames, fps = torch.from_numpy(source[0]), source[1]
    start, end, total = package.calculate_video_frame_range(part, len(frames), fps)
    number = package.smart_nframes(part, total_frames=total, video_fps=fps)
    indices = torch.linspace(start, end, number).round().long().tolist()
    metadata = {"fps": fps, "frames_indices": indices, "total_num_frames": total, "video_backend": "test"}
    return frames[indices].permute(0, 3, 1, 2), metadata, number / max(total, 1e-6) * fps
