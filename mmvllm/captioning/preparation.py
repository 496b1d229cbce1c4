"""Requests with an item as their picture -> prompts, with what records say of the picture; in threads or processes."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from PIL.Image import Image

from mmvllm.captioning.items import Item
from mmvllm.processors.chat import Processor, Prompt
from mmvllm.processors.load import load_image

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, slots=True, kw_only=True)
class PicturePrompt(Prompt):
    """`digest` is of the decoded pixels, 32 hex digits; the sizes are those of the picture as it came, upright."""

    digest: str
    width: int
    height: int

    def __reduce__(self):
        # As bytes: torch would pass shared memory, of which there may be little, and a file descriptor for each.
        pixels = [tensor.numpy() for tensor in self.multimodal["pixel_values"]]
        multimodal = {**self.multimodal, "pixel_values": pixels}
        return _from_arrays, (self.token_ids, multimodal, self.digest, self.width, self.height)


def _from_arrays(token_ids: list[int], multimodal: dict[str, Any], digest: str, width: int, height: int):
    multimodal["pixel_values"] = [torch.from_numpy(array) for array in multimodal["pixel_values"]]
    return PicturePrompt(token_ids, multimodal, digest=digest, width=width, height=height)


class Preparer:
    """Prepares requests whose picture is an `Item`; raises ValueError for a picture that cannot be used."""

    def __init__(self, processor: Processor):
        self._processor = processor

    def __call__(self, request: dict) -> PicturePrompt:
        seen: dict[str, Any] = {}

        def load(item: Item) -> Image:
            image = load_image(item.read())
            seen.update(width=image.width, height=image.height)
            digest = xxhash.xxh3_128(f"{image.size}".encode())
            digest.update(image.tobytes())
            seen["digest"] = digest.hexdigest()
            return image

        prompt = self._processor(request, load)
        return PicturePrompt(prompt.token_ids, prompt.multimodal, **seen)


class WorkerProcesses:
    """Makes pools of processes in which `prepare_in_worker` works: for more than one interpreter lock allows."""

    def __init__(self, processor: Processor):
        self._processor = processor

    def __call__(self, num_workers: int) -> Executor:
        # Not forked: the engine's threads may hold locks.
        context = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(num_workers, context, initializer=_begin, initargs=(self._processor,))


def without_signals(requests: Iterator[dict]) -> Iterator[dict]:
    """Walk them in a thread that signals do not reach, and so none of the processes that are begun from it.

    Ctrl-C in a terminal is sent to all processes of a job, and the first one finishes what has been begun.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    yield from requests


_prepare: Preparer | None = None  # of a worker process


def _begin(processor: Processor) -> None:
    global _prepare
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    os.nice(5)  # the engine comes first
    _prepare = Preparer(processor)


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def prepare_in_worker(request: dict) -> PicturePrompt:
    """Prepare a request in one of the `WorkerProcesses`."""
    return _prepare(request)
