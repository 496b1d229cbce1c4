"""Decode untrusted images and videos in worker processes with time and memory limits."""

import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import TYPE_CHECKING

from PIL import Image

from mmvllm.config import MiB
from mmvllm.errors import ImageError, MediaFileError, VideoError
from mmvllm.media.policy import MediaPolicy
from mmvllm.processes.pool import NUM_WORKERS, WorkerDied, WorkerPool, WorkerTimeout
from mmvllm.processes.worker import reserve_in_parent
from mmvllm.processors.budget import DECODING, VIDEO_DECODING
from mmvllm.processors.images.draft import Draft, source_size, with_source_size
from mmvllm.processors.images.pixels import orientation_of, with_orientation
from mmvllm.processors.videos.clip import Clip
from mmvllm.utils.memory_limit import memory_limit, return_freed_memory

if TYPE_CHECKING:
    from mmvllm.processors.videos.load import Load
    from mmvllm.processors.videos.processor import ClipPlan

# Memory that a worker may allocate beyond its task's reservation: Pillow and FFmpeg allocate when they open a file.
IMAGE_BYTES, OPENED_BYTES_PER_PIXEL = 256 * MiB, 8  # 8: the two canvases of a WebP image
VIDEO_BYTES = 1024 * MiB  # enough for the largest animated WebP; 10-bit H.264 in 8K takes 131 MiB
NUM_VIDEO_WORKERS = min(4, NUM_WORKERS)  # few, since each one loads torch to resize frames


class MediaDecoder:
    """Decodes media in worker processes within the limits of a policy; thread-safe. `close` ends the processes.

    Images and videos use separate worker pools. The first video starts the video workers.
    """

    def __init__(self, policy: MediaPolicy):
        self._policy = policy
        self._pool = WorkerPool(initializer=_start, initargs=(policy,), reserve=DECODING.reserve)
        self._video_pool = WorkerPool(NUM_VIDEO_WORKERS, _start_video, (policy,), VIDEO_DECODING.reserve)

    def start(self) -> None:
        """Start an image worker ahead of the first image."""
        self._pool.start()

    def close(self) -> None:
        self._pool.close()
        self._video_pool.close()

    @contextmanager
    def session(self) -> "Iterator[Load]":
        """Yield functions that decode encoded media; on exit, decoding still in progress is cancelled.

        They raise the errors of `MediaPolicy.load` and `load_video`. Decoding that exceeds `image_timeout` or
        `video_timeout`, or that kills its worker process, is an ImageError or VideoError.
        """
        from mmvllm.processors.videos.load import Load  # imports torch, which image workers do not need

        is_over = threading.Event()
        try:
            yield Load(
                image=lambda data, draft=None: self._decode(data, draft, is_over.is_set),
                video=lambda data, plan: self._decode_video(data, plan, is_over.is_set),
            )
        finally:
            is_over.set()

    def _decode(self, data: bytes, draft: Draft | None, is_cancelled: Callable[[], bool]) -> Image.Image:
        self._policy.check("image", data)  # before it is copied to a process
        timeout = self._policy.image_timeout
        with _sentences(ImageError, "image", timeout, "shrink"):
            size, pixels, orientation, full = self._pool.run(
                _decode, data, draft, timeout=timeout, is_cancelled=is_cancelled
            )
        return with_source_size(with_orientation(Image.frombytes("RGB", size, pixels), orientation), full)

    def _decode_video(self, data: bytes | list[bytes], plan: "ClipPlan", is_cancelled: Callable[[], bool]) -> Clip:
        self._policy.check("video", data)  # before it is copied to a process
        timeout = self._policy.video_timeout
        with _sentences(VideoError, "video", timeout, "cut"):
            return self._video_pool.run(_decode_video, data, plan, timeout=timeout, is_cancelled=is_cancelled)


@contextmanager
def _sentences(error_class: type[MediaFileError], kind: str, timeout: float, remedy: str) -> Iterator[None]:
    """Turn failures of a worker process into errors for the client."""
    try:
        yield
    except WorkerTimeout:
        reason = f"the {kind} took longer than {timeout:g} s to decode; {remedy} or re-encode it"
        raise error_class("", reason) from None
    except WorkerDied as error:
        raise error_class("", f"the {kind} could not be decoded, its worker process died: {error}") from None
    except MemoryError:
        raise error_class("", f"the {kind} takes too much memory to decode; shrink it") from None


# The functions below run in the worker processes.

_policy: MediaPolicy | None = None


def _start(policy: MediaPolicy) -> None:
    global _policy
    _policy = policy
    Image.init()


def _start_video(policy: MediaPolicy) -> None:
    _start(policy)
    import_video_decoders()


def import_video_decoders() -> None:
    """Import the video decoders now, outside the time and memory limits of the first video."""
    for name in ("mmvllm.processors.videos.load", "av"):
        with suppress(ImportError):
            import_module(name)


def _decode(data: bytes, draft: Draft | None) -> tuple[tuple[int, int], pickle.PickleBuffer, int, tuple[int, int]]:
    """Decode an image; return its size, RGB bytes, EXIF orientation and size at full scale."""
    with memory_limit(IMAGE_BYTES + OPENED_BYTES_PER_PIXEL * _policy.max_pixels):
        image = _policy.load(data, draft, reserve_in_parent)
    return image.size, pickle.PickleBuffer(image.tobytes()), orientation_of(image), source_size(image)


@contextmanager
def memory_of_video() -> Iterator[None]:
    """Apply the memory limit of a video worker; on exit, return freed memory to the system."""
    try:
        with memory_limit(VIDEO_BYTES):
            yield
    finally:
        return_freed_memory()


def _decode_video(data: bytes | list[bytes], plan: "ClipPlan") -> Clip:
    with memory_of_video():
        return _policy.load_video(data, plan, reserve_in_parent)
