"""A captioning job from start to end: find pictures, leave out what is recorded, caption the rest, record it."""

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import xxhash

from mmvllm.captioning.captioner import Captioner, Task
from mmvllm.captioning.errors import JobError
from mmvllm.captioning.files import SUFFIXES as FILE_SUFFIXES
from mmvllm.captioning.find import find_items
from mmvllm.captioning.index import Index
from mmvllm.captioning.items import Item
from mmvllm.captioning.names import SUFFIXES
from mmvllm.captioning.output import Output
from mmvllm.captioning.progress import Progress
from mmvllm.captioning.settings import CaptionSettings
from mmvllm.llm import LLM
from mmvllm.models.weights import model_name

if TYPE_CHECKING:
    from mmvllm.captioning.ray_source import RayOptions


def caption_images(
    paths: str | PathLike | Iterable[str | PathLike],
    *,
    llm: LLM | None = None,
    model: str | PathLike | None = None,
    engine_args: dict[str, Any] | None = None,
    output: str | PathLike | None = None,
    format: str | None = None,
    output_dir: str | PathLike | None = None,
    overwrite: bool = False,
    append_anyway: bool = False,
    skip_existing: bool = False,
    retry_failed: bool = False,
    fail_fast: bool = False,
    limit: int | None = None,
    shard: tuple[int, int] | None = None,
    workers: int | None = None,
    worker_processes: bool = False,
    ray: "RayOptions | None" = None,
    **settings: Any,
) -> "CaptionRun":
    """Caption pictures as `mmvllm caption` does; returns an iterator of records, dicts with the keys of `COLUMNS`.

    A bad picture is a record with `error`. With `output`, what is recorded there already is not done again. Close the
    run, or use it in a `with`, where not all records are taken.

    Args:
        paths: folders, files, globs, lists, tars and URLs, as on the command line.
        llm: an engine to use, which stays open; without one, one is made of `model` and `engine_args` of `LLM`.
        output: the file to record in; None records nothing.
        format: "jsonl", "csv", "parquet", "txt" or "webdataset-json"; by default what the name of `output` says.
        output_dir: where "txt" and "webdataset-json" put their files; None is beside the pictures.
        overwrite, append_anyway: begin an output anew, or add to one that was made with other settings.
        skip_existing: leave pictures whose caption file is there.
        retry_failed: take only pictures that an earlier run recorded as failed.
        fail_fast: stop at the first failure.
        limit: take at most so many pictures that are not recorded yet.
        shard: (i, n) with 1 <= i <= n: the i-th of n parts, by a hash of each path.
        workers: threads that prepare pictures, by default as many as there are cores, at most 8.
        worker_processes: prepare in processes instead, which one interpreter's lock does not hold up.
        ray: caption on Ray Data, with engines of their own made of `model` and `engine_args`.
        settings: of `CaptionSettings`: prompt, system, max_tokens, temperature, seed, min_pixels, max_pixels, prefix,
            suffix, trigger_word, dtype.

    Raises ValueError for arguments that do not fit together, and for an output that belongs to another run.
    """
    paths = [paths] if isinstance(paths, str | PathLike) else list(paths)
    output, output_dir = (None if path is None else Path(path) for path in (output, output_dir))
    engine_args = dict(engine_args or {})
    _check_arguments(paths, llm, model, engine_args, output, ray)
    job = CaptionSettings(
        model=llm.model if llm is not None else model_name(model),
        caption_files=None if format not in FILE_SUFFIXES else f"{format} {output_dir or 'beside the pictures'}",
        **settings,
    )
    selection = Selection(paths, retry_failed, limit, shard)
    with ExitStack() as stack:
        out = Output(job, output, format, output_dir, overwrite, append_anyway, skip_existing, retry_failed)
        stack.callback(out.close)
        out.reserve(path for path in paths if os.path.isfile(path))
        if ray is not None:
            from mmvllm.captioning.ray_source import RaySource

            engine_args["dtype"] = job.dtype
            source = RaySource(job, selection, model, engine_args, out.files, workers, worker_processes, ray)
            stack.callback(source.close)
        else:
            if llm is None:
                llm = LLM(model, dtype=job.dtype, **engine_args)
                stack.callback(llm.exit)
            source = Captioner(llm, job, workers, worker_processes)
        return CaptionRun(job, selection, source, out, fail_fast, stack.pop_all().close)


def _check_arguments(
    paths: list[str | PathLike],
    llm: LLM | None,
    model: str | PathLike | None,
    engine_args: dict[str, Any],
    output: Path | None,
    ray: "RayOptions | None",
) -> None:
    if llm is not None and (model is not None or engine_args):
        raise ValueError("give either llm, or model and engine_args to make one of")
    if llm is not None and ray is not None:
        raise ValueError(
            "llm stays in this process, Ray's actors make engines of their own; give model and engine_args"
        )
    if "dtype" in engine_args:
        raise ValueError("dtype is one of the job's settings; give it outside engine_args")
    find_items(paths)  # which checks them, and finds nothing yet
    if output is not None and output.is_file():
        for path in map(Path, paths):
            if path.is_file() and path.samefile(output):
                raise ValueError(f"{output} is to be read; choose another output")


@dataclass(frozen=True, slots=True)
class Selection:
    """Which pictures a run takes."""

    paths: list[str | PathLike]
    retry_failed: bool = False
    limit: int | None = None
    shard: tuple[int, int] | None = None

    def __post_init__(self):
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit is {self.limit}, must be at least 1")
        if self.shard is not None and not 1 <= self.shard[0] <= self.shard[1]:
            raise ValueError(f"shard is {self.shard[0]}/{self.shard[1]}, must be I/N with 1 <= I <= N")

    def items(self) -> Iterator[Item]:
        """Those of this shard, in the order in which they are found."""
        num_found = 0
        for item in find_items(self.paths):
            num_found += 1
            if self.shard is None or _shard_of(item.path, self.shard[1]) == self.shard[0]:
                yield item
        if not num_found:
            names = ", ".join(map(str, self.paths))
            raise ValueError(f"{names} has no pictures ({', '.join(sorted(SUFFIXES))})")


class Worklist:
    """The tasks of a run, in the order in which their pictures are found; each is given once."""

    def __init__(self, settings: CaptionSettings, selection: Selection, output: Output, progress: Progress):
        self.settings, self.selection = settings, selection
        self._output, self.progress = output, progress
        self.under_way: dict[str, str] = {}  # key -> path of what has been given and is not recorded yet

    @property
    def index(self) -> Index:
        return self._output.index

    def __iter__(self) -> Iterator[Task]:
        num_given = 0
        for item in self.selection.items():
            task = self.admit(item)
            if task is not None:
                yield task
                num_given += 1
            if num_given == self.selection.limit:
                return

    def admit(self, item: Item) -> Task | None:
        """The task of captioning an item; None if that is recorded or given already, or its caption file is there."""
        key, is_picture = self.settings.key(item), item.error is None
        if self._output.skips(item) or not self.index.claim(key, self.selection.retry_failed and is_picture):
            self.progress.num_skipped += 1
            return None
        self.under_way[key] = item.path
        try:
            return Task(item, key, self._output.claim_file(item), is_picture)
        except ValueError as error:
            return Task(dataclasses.replace(item, source=None, error=str(error)), key)


class Source(Protocol):
    """What makes records of a worklist: an engine here, or many elsewhere."""

    engine_wait_share: float

    def records(self, tasks: Worklist, index: Index) -> Iterator[dict]: ...

    def stop(self) -> None: ...


class CaptionRun:
    """An iterator of records, made by `caption_images`.

    Each is in the output before it is given; its caption file, if one is wanted, follows within about a second.
    """

    def __init__(
        self,
        settings: CaptionSettings,
        selection: Selection,
        source: Source,
        output: Output,
        fail_fast: bool,
        on_close: Callable[[], None],
    ):
        self.settings, self.output, self.progress = settings, output, Progress()
        self._selection, self._source, self._on_close = selection, source, on_close
        worklist = Worklist(settings, selection, output, self.progress)
        self._records = _recorded(source, worklist, output, self.progress, fail_fast)

    def stop(self) -> None:
        """Take no further pictures; those that the engine has begun are finished, but not those of Ray's actors.

        May be called from a signal handler.
        """
        self._source.stop()

    @property
    def num_failed(self) -> int:
        """Pictures whose record says that they failed, in this run or an earlier one."""
        return self.progress.num_failed if self.output.journal is None else self.output.index.count_failed()

    def count(self) -> int | None:
        """How many pictures there are to find, walked anew; None for a list that can be read but once."""
        if any(path == Path("-") or path.is_fifo() for path in map(Path, self._selection.paths)):
            return None
        return sum(1 for _ in self._selection.items())

    @property
    def limit(self) -> int | None:
        """How many pictures the run takes at most, besides those it skips."""
        return self._selection.limit

    def close(self) -> None:
        """End the run now and let go of output and engine; safe to call twice."""
        try:
            self._records.close()
        finally:
            self._on_close()

    def __iter__(self) -> Iterator[dict]:
        return self

    def __next__(self) -> dict:
        try:
            return next(self._records)
        except BaseException:  # the end of the iteration, too
            self.close()
            raise

    def __enter__(self) -> "CaptionRun":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self):
        self.close()


def _recorded(
    source: Source, worklist: Worklist, output: Output, progress: Progress, fail_fast: bool
) -> Iterator[dict]:
    # No method of the run: it would keep alive what nobody needs any more, and with it the lock on the output.
    output.begin()
    for record in source.records(worklist, worklist.index):
        _write(record, worklist, output)
        progress.add(record)
        progress.engine_wait_share = source.engine_wait_share
        if fail_fast and record["error"] is not None:
            source.stop()
        yield record
    output.finish()
    progress.end()


def _write(record: dict, worklist: Worklist, output: Output) -> None:
    try:
        output.write(record)
    except JobError as error:
        under_way = worklist.under_way.copy()  # to which the thread that finds pictures adds meanwhile
        names = [path for key, path in under_way.items() if output.index.line(key) is None]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise JobError(
            f"{error}. Not recorded, though begun: {', '.join(names[:3])}{more}; mend it and run the same again"
        ) from error
    del worklist.under_way[record["key"]]


def _shard_of(path: str, num_shards: int) -> int:
    return 1 + xxhash.xxh3_64_intdigest(path.encode("utf-8", "surrogatepass")) % num_shards
