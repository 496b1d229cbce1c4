"""What Ray's workers do in a captioning job: one finds the pictures, the others have an engine each."""

import json
import os
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import count, islice
from queue import SimpleQueue
from typing import Any

import pyarrow
import ray
import torch

from mmvllm.captioning.captioner import Captioner, Task
from mmvllm.captioning.files import CaptionFiles
from mmvllm.captioning.index import Index
from mmvllm.captioning.items import Item
from mmvllm.captioning.output import Output
from mmvllm.captioning.progress import Progress
from mmvllm.captioning.run import Selection, Worklist
from mmvllm.captioning.settings import CaptionSettings
from mmvllm.captioning.tars import TarMember
from mmvllm.llm import LLM

CHUNK = 16  # pictures that travel together, and that are done again when their actor is lost


@dataclass(frozen=True, slots=True)
class Job:
    """What walk and actors need to know; it travels to them."""

    settings: CaptionSettings
    selection: Selection
    model: str | os.PathLike | None
    engine_args: dict[str, Any]
    files: CaptionFiles | None
    num_workers: int | None
    worker_processes: bool
    num_threads: int
    folder: str

    def enter_folder(self) -> None:
        with suppress(OSError):  # another machine need not have it: absolute paths and URLs mean the same there
            os.chdir(self.folder)


@dataclass(slots=True)
class Chunk:
    """Some items, later with their records; it travels as one row of a data set."""

    items: list[Item] = field(default_factory=list)
    records: list[dict] = field(default_factory=list)
    num_skipped: int = 0  # by the walk, up to here
    actor: str = ""
    engine_wait_share: float = 0.0  # of that actor
    error: str | None = None  # the job's, not that of a picture

    def pack(self) -> pyarrow.Table:
        return pyarrow.table({"chunk": [json.dumps(asdict(self))]})

    @classmethod
    def unpack(cls, table: pyarrow.Table) -> "list[Chunk]":
        chunks = [cls(**json.loads(row.as_py())) for row in table["chunk"]]
        for chunk in chunks:
            chunk.items = [_item(**item) for item in chunk.items]
        return chunks


def _item(source: str | dict | None, **others: str | None) -> Item:
    return Item(source=TarMember(**source) if isinstance(source, dict) else source, **others)


class _RecordedElsewhere(Output):
    """What the walk asks of an output that another process writes."""

    def __init__(self, index: Index, files: CaptionFiles | None):
        self.journal, self._index, self.files = None, index, files


def walk(_: pyarrow.Table, job: Job, recorded: "ray.ObjectRef") -> Iterator[pyarrow.Table]:
    """Find what is to be done, chunk by chunk as Ray asks for more."""
    job.enter_folder()
    index = Index()
    index.load(ray.get(recorded))
    worklist = Worklist(job.settings, job.selection, _RecordedElsewhere(index, job.files), Progress())
    tasks = iter(worklist)
    try:
        while items := [task.item for task in islice(tasks, CHUNK)]:
            worklist.under_way.clear()
            yield Chunk(items, num_skipped=worklist.progress.num_skipped).pack()
        yield Chunk(num_skipped=worklist.progress.num_skipped).pack()
    except (ValueError, OSError) as error:
        yield Chunk(error=str(error)).pack()


class CaptionActor:
    """One engine. Ray calls it from several threads, and their chunks run through it together, to keep it busy."""

    def __init__(self, job: Job):
        job.enter_folder()
        torch.set_num_threads(job.num_threads)
        self._error: str | None = None
        try:
            llm = LLM(job.model, **job.engine_args)
        except (ValueError, TypeError, OSError) as error:  # raised here, Ray would wrap it, and try again for long
            self._error = str(error)
            return
        self._id = ray.get_runtime_context().get_actor_id()
        self._captioner = Captioner(llm, job.settings, job.num_workers or job.num_threads, job.worker_processes)
        self._tickets = map(str, count())
        self._tasks: SimpleQueue[Task] = SimpleQueue()
        self._replies: dict[str, Future[dict]] = {}
        self._end: Future[None] = Future()
        threading.Thread(target=self._run, name="mmvllm-caption", daemon=True).start()

    def __call__(self, table: pyarrow.Table) -> Iterator[pyarrow.Table]:
        # A generator, because Ray calls anything else in a single thread.
        for chunk in Chunk.unpack(table):
            if chunk.error is None:
                chunk.error = self._error
            if chunk.error is None:
                chunk.records = self._captions(chunk.items)
                chunk.actor, chunk.engine_wait_share = self._id, self._captioner.engine_wait_share
            yield chunk.pack()

    def _captions(self, items: list[Item]) -> list[dict]:
        replies = [self._submit(item) for item in items]
        for reply in replies:
            wait((reply, self._end), return_when=FIRST_COMPLETED)
            if not reply.done():
                self._end.result()  # raises what ended it
        return [reply.result() for reply in replies]

    def _submit(self, item: Item) -> "Future[dict]":
        ticket = next(self._tickets)  # not the item's own key: Ray may have the same chunk done twice at a time
        reply = self._replies[ticket] = Future()
        self._tasks.put(Task(item, ticket))
        return reply

    def _run(self) -> None:
        try:
            for record in self._captioner.records(iter(self._tasks.get, None), Index()):
                self._replies.pop(record["key"]).set_result(record)
        except BaseException as error:
            self._end.set_exception(error)
