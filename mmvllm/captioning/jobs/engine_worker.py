"""The engine of one process, or of one Ray actor, in a job that captions images with several engines."""

import os
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count
from queue import SimpleQueue
from typing import Any

import torch

from mmvllm.captioning.jobs.captioner import Captioner, Task, requested_range
from mmvllm.captioning.json_captions import OBJECT
from mmvllm.captioning.multi_prompt import LIST
from mmvllm.captioning.outputs.index import Index, keep_caption
from mmvllm.captioning.outputs.record import MEDIA_INFO
from mmvllm.captioning.settings import CaptionSettings
from mmvllm.captioning.sources.items import Item
from mmvllm.captioning.sources.loading import ItemLoader
from mmvllm.captioning.sources.timeouts import Timeouts
from mmvllm.entrypoints.llm import LLM


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """The description of an engine and its threads, from which another process creates the engine."""

    settings: CaptionSettings
    model: str | os.PathLike | None
    engine_args: dict[str, Any]
    num_workers: int | None
    worker_processes: bool
    timeouts: Timeouts
    accept_truncated: bool = False
    num_threads: int = 1


class EngineWorker:
    """An engine and the thread in which it captions submitted images; raises the exceptions of `LLM`."""

    def __init__(self, spec: EngineSpec):
        torch.set_num_threads(spec.num_threads)
        llm = LLM(spec.model, **spec.engine_args)
        self.max_requests = llm.admission.max_requests
        num_workers = spec.num_workers or spec.num_threads
        loader = ItemLoader(spec.timeouts, num_workers, spec.accept_truncated)
        self._captioner = Captioner(llm, spec.settings, loader, num_workers, spec.worker_processes)
        self._tickets = map(str, count())
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._replies: dict[str, Future[dict]] = {}
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="mmvllm-caption", daemon=True).start()

    @property
    def engine_wait_share(self) -> float:
        """Share of the time in which the engine waited for images, in [0, 1]."""
        return self._captioner.engine_wait_share

    def submit(self, item: Item) -> "Future[dict]":
        """Caption an image; the future's result is its record, or the error that ended the engine.

        The future is cancelled if the worker is stopped before the image is begun.
        """
        reply: Future[dict] = Future()
        with self._lock:
            if self._error is not None:
                reply.set_exception(self._error)
                return reply
            ticket = next(self._tickets)  # not the item's key: an image may be submitted twice
            self._replies[ticket] = reply
        self._tasks.put(Task(item, ticket))
        return reply

    def stop(self) -> None:
        """Finish the requests that the engine has begun, and drop the rest."""
        self._captioner.stop()
        self._tasks.put(None)  # wakes the thread that may be waiting for a task

    def _run(self) -> None:
        try:
            for record in self._captioner.records(iter(self._tasks.get, None), Index()):
                with self._lock:
                    reply = self._replies.pop(record["key"])
                reply.set_result(record)
        except BaseException as error:
            self._fail(error)
        for reply in self._replies.values():
            reply.cancel()  # only a stopped worker has any left

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._error, replies = error, [*self._replies.values()]
            self._replies.clear()
        for reply in replies:
            reply.set_exception(error)


def finalized(task: Task, record: dict, settings: CaptionSettings, index: Index) -> dict:
    """Turn a worker's record into the output's record; the first of equal images to arrive is the original."""
    record = record | {"key": task.key, "file": None if record["error"] is not None else task.file}
    if not task.has_source:
        return record | {"finish_reason": None}
    if task.item.error is not None and record["error"] is None:  # its caption file cannot be written
        nothing = dict.fromkeys((*MEDIA_INFO, "caption", "boxes", "duplicate_of", "seconds"))
        counts = dict.fromkeys(("prompt_tokens", "image_tokens", "completion_tokens"), 0)
        nothing |= {name: [] for name in {LIST} & record.keys()} | dict.fromkeys({OBJECT} & record.keys())
        return (
            record
            | nothing
            | requested_range(task.item)
            | counts
            | {"error": task.item.error, "finish_reason": "error"}
        )
    if record["error"] is not None or not settings.is_repeatable:
        return record
    original = index.caption(settings.content_key(record["digest"], record["prompt"]))
    if original is None:
        record |= {"duplicate_of": None}
        keep_caption(settings, index, record)
        return record
    same = ("caption", "boxes", "prompt_tokens", "image_tokens", "completion_tokens", "finish_reason", OBJECT, LIST)
    return (
        record
        | {name: original[name] for name in same if name in original}
        | {"duplicate_of": original["path"], "seconds": 0.0}
    )
