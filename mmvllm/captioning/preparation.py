"""Requests with an item as their image -> engine inputs with what records say of the image; in threads or processes."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import xxhash
from PIL.Image import Image

from mmvllm.captioning.items import Item
from mmvllm.errors import ArgumentError
from mmvllm.inputs import EngineInput
from mmvllm.processors.chat import ForeignProcessor, Processor
from mmvllm.processors.load import load_image

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptionInput(EngineInput):
    """An image's prompt; `digest` is of the decoded pixels, 32 hex digits, and the size that of the upright image."""

    digest: str
    width: int
    height: int


class CaptionPreparer:
    """Prepares requests whose image is an `Item`; raises RequestError for an image that cannot be used."""

    def __init__(self, processor: Processor | ForeignProcessor):
        self._processor = processor

    def __call__(self, request: dict) -> CaptionInput:
        seen: dict[str, Any] = {}

        def load(item: Item) -> Image:
            image = load_image(item.read())
            seen.update(width=image.width, height=image.height)
            digest = xxhash.xxh3_128(f"{image.size}".encode())
            digest.update(image.tobytes())
            seen["digest"] = digest.hexdigest()
            return image

        made = self._processor(request, load)
        return CaptionInput(made.token_ids, made.items, made.positions, made.position_delta, **seen)


class WorkerProcesses:
    """Makes pools of worker processes for `prepare_in_worker`: for more work than one interpreter lock allows.

    Raises ArgumentError for a processor that cannot be sent to them.
    """

    def __init__(self, processor: Processor | ForeignProcessor):
        try:
            ForkingPickler.dumps(processor)
        except Exception as error:  # objects decide themselves what they raise
            raise ArgumentError(
                "{worker_processes} needs a processor that can be pickled: {reason}", reason=error
            ) from error
        self._processor = processor

    def __call__(self, num_workers: int) -> Executor:
        # Not forked: the engine's threads may hold locks.
        context = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(num_workers, context, initializer=_start_worker, initargs=(self._processor,))


def without_signals(requests: Iterator[dict]) -> Iterator[dict]:
    """Iterate in a thread that signals do not reach, nor the worker processes that are started from it.

    Ctrl-C in a terminal is sent to all processes of a job; the main process finishes what is in flight.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    yield from requests


_prepare: CaptionPreparer | None = None  # of a worker process


def _start_worker(processor: Processor | ForeignProcessor) -> None:
    global _prepare
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    os.nice(5)  # the engine has priority
    _prepare = CaptionPreparer(processor)


def _exit_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def prepare_in_worker(request: dict) -> CaptionInput:
    """Prepare a request in one of the `WorkerProcesses`."""
    return _prepare(request)
