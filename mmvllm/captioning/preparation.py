"""Requests with an item as their image -> engine inputs with what records say of the image; in threads or processes."""

from dataclasses import dataclass
from typing import Any

import xxhash
from PIL.Image import Image

from mmvllm.captioning.items import Item
from mmvllm.errors import ArgumentError, RequestError
from mmvllm.inputs import EngineInput
from mmvllm.processors.chat import Processor
from mmvllm.processors.decode import Reserve
from mmvllm.processors.foreign import ForeignProcessor
from mmvllm.processors.load import DECODING, load_image
from mmvllm.processors.load_video import Load
from mmvllm.workers import WorkerDied, WorkerPool, reserve_in_parent


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptionInput(EngineInput):
    """An image's prompt; `digest` is of the decoded pixels, 32 hex digits, and the size that of the upright image."""

    digest: str
    width: int
    height: int


class CaptionPreparer:
    """Prepares requests whose image is an `Item`; raises RequestError for an image that cannot be used."""

    def __init__(self, processor: Processor | ForeignProcessor, reserve: Reserve = DECODING.reserve):
        self._processor, self._reserve = processor, reserve

    def __call__(self, request: dict) -> CaptionInput:
        seen: dict[str, Any] = {}

        def load(item: Item) -> Image:
            image = load_image(item.read(), reserve=self._reserve)
            seen.update(width=image.width, height=image.height)
            digest = xxhash.xxh3_128(f"{image.size}".encode())
            digest.update(image.tobytes())
            seen["digest"] = digest.hexdigest()
            return image

        made = self._processor(request, Load(image=load))
        return CaptionInput(made.token_ids, made.items, made.positions, made.position_delta, **seen)


class WorkerProcesses:
    """Prepares requests as `CaptionPreparer` does, in worker processes: for more work than one interpreter lock allows.

    A request whose process dies is prepared once more, and fails if that process dies too; others are not affected.

    Raises ArgumentError for a processor that cannot be sent to them.
    """

    def __init__(self, processor: Processor | ForeignProcessor, num_workers: int):
        try:
            self._pool = WorkerPool(num_workers, _start_worker, (processor,), reserve=DECODING.reserve)
        except Exception as error:  # objects decide themselves what they raise
            raise ArgumentError(
                "{worker_processes} needs a processor that can be pickled: {reason}", reason=error
            ) from error

    def __call__(self, request: dict) -> CaptionInput:
        try:
            return self._pool.run(_prepare_in_worker, request)
        except WorkerDied:
            pass
        try:
            return self._pool.run(_prepare_in_worker, request)
        except WorkerDied as error:
            raise RequestError(f"preparation failed, its worker process died twice: {error}") from None

    def close(self) -> None:
        """End the processes at once."""
        self._pool.close()


_prepare: CaptionPreparer | None = None  # of a worker process


def _start_worker(processor: Processor | ForeignProcessor) -> None:
    global _prepare
    _prepare = CaptionPreparer(processor, reserve_in_parent)


def _prepare_in_worker(request: dict) -> CaptionInput:
    return _prepare(request)
