"""Images of untrusted senders are decoded in worker processes, which have a time limit and a memory limit."""

import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from PIL import Image

from mmvllm.config import MiB
from mmvllm.errors import ImageError
from mmvllm.media import MediaPolicy
from mmvllm.processors.load import DECODING
from mmvllm.processors.load_video import Load, load_video
from mmvllm.workers import WorkerDied, WorkerPool, WorkerTimeout, reserve_in_parent

# What a decoder and the conversion to RGB allocate at most for a pixel, with room: Pillow alone holds three copies of 4
# bytes at a time, and decoders of progressive JPEG and AVIF planes of their own.
BYTES_PER_PIXEL = 48
BASE_BYTES = 256 * MiB


class MediaDecoder:
    """Decodes media within the limits of a policy, from any number of threads; `close` ends its processes."""

    def __init__(self, policy: MediaPolicy):
        self._policy = policy
        memory_limit = policy.max_pixels * BYTES_PER_PIXEL + BASE_BYTES
        self._pool = WorkerPool(
            initializer=_start, initargs=(policy,), memory_limit=memory_limit, reserve=DECODING.reserve
        )

    def start(self) -> None:
        """Start a process before the first image needs it."""
        self._pool.start()

    def close(self) -> None:
        self._pool.close()

    @contextmanager
    def session(self) -> Iterator[Load]:
        """Functions that decode bytes; what they are decoding on exit is given up.

        That for images raises MediaError and ImageError as `MediaPolicy.load` does, and ImageError for an image that
        takes longer than `image_timeout` or ends its process.
        """
        is_over = threading.Event()
        try:
            yield Load(
                image=lambda data: self._decode(data, is_over.is_set),
                video=lambda data, plan: self._pool.run(load_video, data, plan, is_cancelled=is_over.is_set),
            )
        finally:
            is_over.set()

    def _decode(self, data: bytes, is_cancelled: Callable[[], bool]) -> Image.Image:
        timeout = self._policy.image_timeout
        try:
            size, pixels = self._pool.run(_decode, data, timeout=timeout, is_cancelled=is_cancelled)
        except WorkerTimeout:
            reason = f"the image took longer than {timeout:g} s to decode; shrink or re-encode it"
            raise ImageError("", reason) from None
        except WorkerDied as error:
            raise ImageError("", f"the image could not be decoded, its worker process died: {error}") from None
        except MemoryError:
            raise ImageError("", "the image takes too much memory to decode; shrink it") from None
        return Image.frombytes("RGB", size, pixels)


# What follows runs in the processes.

_policy: MediaPolicy | None = None


def _start(policy: MediaPolicy) -> None:
    global _policy
    _policy = policy
    Image.init()


def _decode(data: bytes) -> tuple[tuple[int, int], pickle.PickleBuffer]:
    """The size and the pixels, 3 bytes each."""
    image = _policy.load(data, reserve_in_parent)
    return image.size, pickle.PickleBuffer(image.tobytes())
