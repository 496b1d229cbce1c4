"""Loads the images and videos of a job within limits of time and memory.

Most images are decoded in threads. Worker processes with memory limits decode videos, and images that may take far more
memory or time than their size suggests: a few bytes of a video can make FFmpeg allocate gigabytes before its size is
known.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol, TypeVar

from PIL.Image import Image

from mmvllm.captioning.sources.items import Item
from mmvllm.captioning.sources.names import FORMATS
from mmvllm.captioning.sources.tars import TarMember
from mmvllm.captioning.sources.timeouts import DEFAULT_TIMEOUTS, Timeouts, outside
from mmvllm.config import MiB
from mmvllm.errors import RequestError
from mmvllm.media.decoding import import_video_decoders, memory_of_video
from mmvllm.processes.pool import NUM_WORKERS, WorkerDied, WorkerPool, WorkerTimeout
from mmvllm.processes.worker import reserve_in_parent
from mmvllm.processors.budget import DECODING, VIDEO_DECODING, DecodeBudget
from mmvllm.processors.images.decode import Reserve
from mmvllm.processors.images.draft import Draft
from mmvllm.processors.images.load import load_image
from mmvllm.processors.images.scan import needs_limits
from mmvllm.processors.videos.clip import Clip, VideoInfo
from mmvllm.processors.videos.load import load_video, load_video_info
from mmvllm.processors.videos.processor import ClipPlan
from mmvllm.utils.time_limit import TimeLimit

T = TypeVar("T")

# Memory for encoded images in threads; a file may be as large as `processors.images.load.MAX_FILE_BYTES`.
ENCODED = DecodeBudget(1024 * MiB)
# Larger files are decoded in a process, which can be killed: a thread that takes too long keeps its data in memory.
MAX_THREAD_BYTES = 64 * MiB


class Loader(Protocol):
    """Loads the images and clips of a job; raises ValueError for one that cannot be used."""

    def image(self, item: Item, draft: Draft | None = None) -> Image: ...

    def clip(self, item: Item, plan: ClipPlan) -> Clip: ...


class ItemLoader:
    """Loads items in threads of this process and in worker processes, which `close` ends.

    Args:
        timeouts: limits after which a thread is abandoned, or a process is killed.
        num_workers: maximum number of worker processes; they are started when a video, or an image that needs limits,
            is loaded.
        accept_truncated: see `load_image`.
    """

    def __init__(
        self,
        timeouts: Timeouts = DEFAULT_TIMEOUTS,
        num_workers: int | None = None,
        accept_truncated: bool = False,
    ):
        self.timeouts, self.accept_truncated = timeouts, accept_truncated
        self._pool = WorkerPool(num_workers or NUM_WORKERS, import_video_decoders, reserve=VIDEO_DECODING.reserve)

    def close(self) -> None:
        """End the worker processes at once."""
        self._pool.close()

    def image(self, item: Item, draft: Draft | None = None) -> Image:
        """Load the image of an item; raises ValueError."""

        def load(limit: TimeLimit) -> Image:
            num_bytes, reserve = item.num_bytes, outside(limit, DECODING.reserve)
            if num_bytes > MAX_THREAD_BYTES:
                raise _NeedsLimits
            with outside(limit, ENCODED.reserve)(num_bytes):
                return load_image(
                    item.read(),
                    draft,
                    formats=FORMATS,
                    reserve=reserve,
                    check=_check_thread_may_decode,
                    accept_truncated=self.accept_truncated,
                )

        try:
            return self.timeouts.load(item, load)
        except _NeedsLimits:
            pass  # continues below, where the error no longer holds the encoded image; a URL is downloaded again
        return run_for(item, self.timeouts, self._pool, load_limited_image, item, draft, self.accept_truncated)

    def clip(self, item: Item, plan: ClipPlan) -> Clip:
        """Load the frames that the plan selects; raises ValueError."""
        return run_for(item, self.timeouts, self._pool, load_clip, item, plan)

    def info(self, item: Item) -> VideoInfo:
        """Read the size, frame rate and number of frames of a video; raises ValueError."""
        return run_for(item, self.timeouts, self._pool, _load_info, item)


class _NeedsLimits(Exception):
    """Raised for an image that a process with limits must decode."""


def _check_thread_may_decode(data: bytes) -> None:
    if needs_limits(data):
        raise _NeedsLimits


class LoaderInWorker:
    """The loader inside a worker process, which the parent process kills if loading takes too long."""

    def __init__(self, accept_truncated: bool = False):
        self._accept_truncated = accept_truncated

    def image(self, item: Item, draft: Draft | None = None) -> Image:
        """Load the image of an item; raises ValueError."""
        return load_limited_image(item, draft, self._accept_truncated)

    def clip(self, item: Item, plan: ClipPlan) -> Clip:
        """Load the frames that the plan selects; raises ValueError."""
        return load_clip(item, plan)


def run_for(item: Item, timeouts: Timeouts, pool: WorkerPool, task: Callable[..., T], *args: Any) -> T:
    """Run `task(*args)` in a worker process and return its result; retry once if the process dies.

    Raises RequestError if the second process dies too, or if the task exceeds the item's time limit.
    """
    run = partial(pool.run, task, *args, timeout=timeouts.seconds_for(item))
    try:
        try:
            return run()
        except WorkerDied:
            return run()
    except WorkerDied as error:
        raise RequestError(f"preparation failed, its worker process died twice: {error}") from None
    except WorkerTimeout:
        raise timeouts.exceeded(item) from None


# The functions below run in worker processes.


def load_limited_image(item: Item, draft: Draft | None, accept_truncated: bool) -> Image:
    """Load the image of an item within the memory limit; raises ValueError."""
    load = partial(load_image, draft=draft, formats=FORMATS, accept_truncated=accept_truncated)
    return _limited(lambda source, reserve: load(source, reserve=reserve), item, item.num_bytes)


def load_clip(item: Item, plan: ClipPlan) -> Clip:
    """Load the frames that the plan selects from a video, within the memory limit; raises ValueError."""
    return _limited(lambda source, reserve: load_video(source, plan, reserve=reserve), item, _num_bytes_held(item))


def _load_info(item: Item) -> VideoInfo:
    # Frames are counted, because two frames that are years apart would otherwise be split into millions of clips.
    return _limited(
        lambda source, reserve: load_video_info(source, reserve=reserve, counts=True), item, _num_bytes_held(item)
    )


def _num_bytes_held(video: Item) -> int:
    """Return the encoded bytes held in memory: a tar member is read whole, a file piece by piece."""
    return video.num_bytes if isinstance(video.source, TarMember) else 0


def _limited(load: Callable[[Any, Reserve], T], item: Item, num_bytes: int) -> T:
    """Load the item's source; each reservation also includes the `num_bytes` of encoded data in memory."""

    def reserve(more: int) -> AbstractContextManager[None]:
        return reserve_in_parent(num_bytes + more)

    try:
        with memory_of_video(), reserve(0) if num_bytes else nullcontext():
            return load(item.read(), reserve)
    except MemoryError:
        pass
    raise RequestError("takes too much memory to decode; shrink it")  # here, where the MemoryError is released
