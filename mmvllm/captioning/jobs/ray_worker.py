"""The code that Ray's workers run in a captioning job: one finds the images, the others run one engine each."""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import islice

import pyarrow
import ray

from mmvllm.captioning.errors import JobError
from mmvllm.captioning.jobs.engine_worker import EngineSpec, EngineWorker
from mmvllm.captioning.jobs.pending_tasks import PendingTasks, Selection
from mmvllm.captioning.jobs.progress import Progress
from mmvllm.captioning.outputs.caption_files import CaptionFiles, is_missing
from mmvllm.captioning.outputs.index import Index
from mmvllm.captioning.outputs.output import Output
from mmvllm.captioning.sources.items import Item
from mmvllm.captioning.sources.loading import ItemLoader
from mmvllm.captioning.sources.tars import TarMember

CHUNK = 16  # images that are sent together, and sent again if their actor is lost


@dataclass(frozen=True, slots=True)
class RayJobSpec:
    """The description of a job for the walk and the actors."""

    engine: EngineSpec
    selection: Selection
    files: CaptionFiles | None
    folder: str

    def enter_folder(self) -> None:
        with suppress(OSError):  # another machine may not have it; absolute paths and URLs work without it
            os.chdir(self.folder)


@dataclass(slots=True)
class Chunk:
    """A group of items, later with their records, which is sent as one row of a data set."""

    items: list[Item] = field(default_factory=list)
    records: list[dict] = field(default_factory=list)
    without_files: list[Item] = field(default_factory=list)  # recorded by an earlier run
    num_skipped: int = 0  # by the walk so far, like the next three
    num_failed_before: int = 0
    num_further_clips: int = 0
    ignored: dict[str, int] = field(default_factory=dict)
    actor: str = ""
    engine_wait_share: float = 0.0  # of that actor
    error: str | None = None  # of the job, not of an image

    def pack(self) -> pyarrow.Table:
        return pyarrow.table({"chunk": [json.dumps(asdict(self))]})

    @classmethod
    def unpack(cls, table: pyarrow.Table) -> "list[Chunk]":
        chunks = [cls(**json.loads(row.as_py())) for row in table["chunk"]]
        for chunk in chunks:
            chunk.items = [_item(**item) for item in chunk.items]
            chunk.without_files = [_item(**item) for item in chunk.without_files]
        return chunks


def _item(source: str | dict | None, **others: str | None) -> Item:
    return Item(source=TarMember(**source) if isinstance(source, dict) else source, **others)


class _RemoteOutput(Output):
    """The part of an output that the walk uses; another process writes the output."""

    def __init__(self, index: Index, job: RayJobSpec):
        self.journal = None
        self._index, self.files = index, job.files
        self.without_files: list[Item] = []

    def found(self, item: Item, key: str) -> None:
        if self.files is None or self._index.has_failed(key):
            return
        with suppress(ValueError, OSError):  # the other process reports a path that cannot be used
            if not is_missing(self.files.path(item)):
                return
        self.without_files.append(item)

    def take_without_files(self) -> list[Item]:
        taken, self.without_files = self.without_files, []
        return taken


def walk(_: pyarrow.Table, job: RayJobSpec, recorded: "ray.ObjectRef") -> Iterator[pyarrow.Table]:
    """Yield chunks of images to caption, lazily, so that Ray takes one chunk at a time."""
    job.enter_folder()
    index = Index()
    index.load(ray.get(recorded))
    loader = ItemLoader(job.engine.timeouts, num_workers=1)
    output = _RemoteOutput(index, job)
    pending_tasks = PendingTasks(job.engine.settings, job.selection, output, Progress(), loader)
    tasks = iter(pending_tasks)
    try:
        while items := [task.item for task in islice(tasks, CHUNK)]:
            pending_tasks.in_flight.clear()
            counts = pending_tasks.progress.of_the_walk
            yield Chunk(items, without_files=output.take_without_files(), **counts).pack()
        yield Chunk(without_files=output.take_without_files(), **pending_tasks.progress.of_the_walk).pack()
    except (ValueError, OSError, JobError) as error:
        yield Chunk(error=str(error)).pack()
    finally:
        loader.close()


class CaptionActor:
    """A Ray actor with one engine. Ray calls it from several threads, whose chunks share the engine's batches."""

    def __init__(self, job: RayJobSpec):
        job.enter_folder()
        self._error: str | None = None
        try:
            self._engine = EngineWorker(job.engine)
        except (ValueError, TypeError, OSError) as error:  # if it were raised here, Ray would retry for a long time
            self._error = str(error)
        self._id = ray.get_runtime_context().get_actor_id()

    def __call__(self, table: pyarrow.Table) -> Iterator[pyarrow.Table]:
        # A generator, because Ray calls other functions from a single thread only.
        for chunk in Chunk.unpack(table):
            if chunk.error is None:
                chunk.error = self._error
            if chunk.error is None:
                chunk.records = self._captions(chunk.items)
                chunk.actor, chunk.engine_wait_share = self._id, self._engine.engine_wait_share
            yield chunk.pack()

    def _captions(self, items: list[Item]) -> list[dict]:
        replies = [self._engine.submit(item) for item in items]
        return [reply.result() for reply in replies]
