"""Runs a captioning job: finds images and videos, skips the recorded ones, and captions and records the rest."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import fields
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mmvllm.captioning.errors import JobError
from mmvllm.captioning.jobs.captioner import Captioner
from mmvllm.captioning.jobs.endpoint_options import EndpointOptions, check_endpoint
from mmvllm.captioning.jobs.engine_worker import EngineSpec
from mmvllm.captioning.jobs.pending_tasks import PendingTasks, Selection
from mmvllm.captioning.jobs.process_source import ProcessSource
from mmvllm.captioning.jobs.progress import Progress
from mmvllm.captioning.jobs.ray_options import RayOptions
from mmvllm.captioning.jobs.run_options import RunOptions
from mmvllm.captioning.outputs.index import Index
from mmvllm.captioning.outputs.options import OutputOptions
from mmvllm.captioning.outputs.output import Output
from mmvllm.captioning.outputs.record import fitting
from mmvllm.captioning.settings import ENGINE_SETTINGS, CaptionSettings
from mmvllm.captioning.sources.find import find_items
from mmvllm.captioning.sources.loading import ItemLoader
from mmvllm.config import EngineConfig
from mmvllm.entrypoints.llm import LLM
from mmvllm.errors import ArgumentError
from mmvllm.models.folder import model_name
from mmvllm.parallel.placement import Placement, place_engines
from mmvllm.utils.arguments import check_int

if TYPE_CHECKING:
    from mmvllm.captioning.jobs.endpoint import Endpoint


def caption_images(
    paths: str | PathLike | Iterable[str | PathLike],
    *,
    llm: LLM | None = None,
    model: str | PathLike | None = None,
    engine_args: dict[str, Any] | None = None,
    ray: RayOptions | None = None,
    endpoint: str | EndpointOptions | None = None,
    **options: Any,
) -> "CaptionRun":
    """Caption images and videos as `mmvllm caption` does.

    Returns an iterator of records, which are dicts with the keys of `COLUMNS`. An image or clip that cannot be
    captioned has a record with an `error`. Images and clips that are already recorded in `output` are skipped. If you
    do not consume all records, close the run or use it in a `with` statement.

    Args:
        paths: folders, files, glob patterns, lists, tar files and URLs, as on the command line.
        llm: an existing engine, which stays open; without it, an engine is created from `model` and `engine_args`.
        ray: caption on Ray Data; each actor creates an engine from `model` and `engine_args`.
        endpoint: the URL of an OpenAI-compatible server that generates the captions, or `EndpointOptions`; no model is
            loaded here.
        options: fields of `CaptionSettings`, `OutputOptions` and `RunOptions`.

    Raises ValueError for incompatible arguments, and if another run is writing to the output.
    """
    paths = [paths] if isinstance(paths, str | PathLike) else list(paths)
    outputs, run = OutputOptions(**_taken(options, OutputOptions)), RunOptions(**_taken(options, RunOptions))
    settings, engine_args = options, dict(engine_args or {})
    _check_engine(llm, model, engine_args, ray, settings)
    _check_size(run.data_parallel_size, llm, ray)
    endpoint = EndpointOptions(endpoint) if isinstance(endpoint, str) else endpoint
    if endpoint is not None:
        given = {"llm": llm, "model": model, "ray": ray, "worker_processes": run.worker_processes}
        check_endpoint(given | {"data_parallel_size": run.data_parallel_size} | engine_args | settings)
    _check_paths(paths, outputs.path)
    selection, timeouts = Selection(paths, outputs.retry_failed, run.limit, run.shard), run.timeouts
    with ExitStack() as stack:
        server = None if endpoint is None else stack.enter_context(closing(endpoint.connect()))
        settings |= _settings_of(llm, model, server)
        for name in ("lora", "chat_template"):
            if settings.get(name) is not None:
                settings[name] = os.fspath(settings[name])  # records contain text, not paths
        job = CaptionSettings(**settings)
        _check_beam_width(job, engine_args.get("max_num_seqs") if llm is None else llm.engine.max_num_seqs)
        engine_args |= {name: getattr(job, name) for name in ENGINE_SETTINGS}
        out = Output(job, outputs)
        stack.callback(out.close)
        out.reserve(path for path in paths if os.path.isfile(path))
        loader = ItemLoader(timeouts, run.workers, run.accept_truncated)
        stack.callback(loader.close)
        spec = EngineSpec(job, model, engine_args, run.workers, run.worker_processes, timeouts, run.accept_truncated)
        places = _places(run.data_parallel_size, engine_args)
        if ray is not None:
            from mmvllm.captioning.jobs.ray_source import RaySource  # imported here because Ray is optional

            source = RaySource(spec, selection, out.files, run.ordered, ray)
            stack.callback(source.close)
        elif server is not None:
            from mmvllm.captioning.jobs.endpoint_source import EndpointSource  # httpx2 is optional

            source = EndpointSource(server, job, loader, endpoint.concurrency, run.workers, run.ordered)
        elif len(places) > 1:
            source = ProcessSource(spec, places, run.ordered)
            stack.callback(source.close)
        else:
            if llm is None:
                llm = LLM(model, **engine_args)
                stack.callback(llm.exit)
            source = Captioner(llm, job, loader, run.workers, run.worker_processes, run.ordered)
        pending_tasks = PendingTasks(job, selection, out, Progress(job.caption("")), loader)
        return CaptionRun(pending_tasks, source, out, run.fail_fast, stack.pop_all().close)


def _taken(options: dict[str, Any], cls: type) -> dict[str, Any]:
    """Take the fields of a class from the options."""
    return {field.name: options.pop(field.name) for field in fields(cls) if field.name in options}


def _settings_of(llm: LLM | None, model: str | PathLike | None, server: "Endpoint | None") -> dict[str, Any]:
    """Return the settings that the engine or server determines; "auto" stays "auto", as in a run without `llm`."""
    if llm is None:
        return {"model": model_name(model) if server is None else server.model}
    config = llm.engine.config
    return {
        "model": llm.model,
        "dtype": str(config.dtype).removeprefix("torch."),
        "quantization": config.quantization,
        "kv_cache_dtype": config.kv_cache_dtype,
        "lora": None if config.lora is None else os.fspath(config.lora),
        "chat_template": None if config.chat_template is None else os.fspath(config.chat_template),
    }


def _check_engine(
    llm: LLM | None,
    model: str | PathLike | None,
    engine_args: dict[str, Any],
    ray: RayOptions | None,
    settings: dict[str, Any],
) -> None:
    if llm is not None and (model is not None or engine_args):
        raise ArgumentError("give either {llm}, or {model} and {engine_args} to make an engine")
    if llm is not None and ray is not None:
        raise ArgumentError(
            "{llm} cannot be sent to Ray's actors, which make engines of their own; give {model} instead"
        )
    for name in ENGINE_SETTINGS:
        if name in engine_args:
            raise ArgumentError(
                f"{{{name}}} is one of the job's settings; give it as an argument, not in {{engine_args}}"
            )
        if llm is not None and name in settings:
            raise ArgumentError(f"{{{name}}} cannot be combined with {{llm}}, whose setting is used and recorded")


def _check_beam_width(job: CaptionSettings, max_num_seqs: int | None) -> None:
    if job.beam_width is not None and max_num_seqs is not None and job.beam_width > max_num_seqs:
        reason = f"{{beam_width}} is {job.beam_width}, {{max_num_seqs}} is {max_num_seqs}; lower it or raise the limit"
        raise ArgumentError(reason)


def _check_size(data_parallel_size: int | str, llm: LLM | None, ray: RayOptions | None) -> None:
    if data_parallel_size == 1:
        return
    if data_parallel_size != "auto":
        check_int("data_parallel_size", data_parallel_size)
    if llm is not None:
        raise ArgumentError("{llm} is one engine; give {model} instead for {data_parallel_size}")
    if ray is not None:
        raise ArgumentError("{data_parallel_size} is for one machine without Ray; with Ray, give {num_actors}")


def _places(data_parallel_size: int | str, engine_args: dict[str, Any]) -> list[Placement]:
    """Return the placements of several engines; a single engine runs in this process and chooses its device itself."""
    if data_parallel_size == 1:
        return []
    return place_engines(data_parallel_size, EngineConfig.from_arguments("LLM", **engine_args))


def _check_paths(paths: list[str | PathLike], output: Path | None) -> None:
    find_items(paths)  # checks the paths; the search itself begins with the first item
    if output is not None and os.path.isfile(output):
        for path in map(Path, paths):
            if os.path.isfile(path) and path.samefile(output):
                raise ArgumentError("{path} is one of the inputs; choose another {output}", path=output)


class Source(Protocol):
    """A producer of records for pending tasks: an engine here, engines in processes or on Ray, or an endpoint."""

    engine_wait_share: float

    def records(self, tasks: PendingTasks, index: Index) -> Iterator[dict]: ...

    def stop(self) -> None: ...


class CaptionRun:
    """One captioning run, as an iterator of its records; `caption_images` creates it.

    A record is written to the output before it is yielded; its caption file, if there is one, follows within about a
    second.
    """

    def __init__(
        self,
        pending_tasks: PendingTasks,
        source: Source,
        output: Output,
        fail_fast: bool,
        on_close: Callable[[], None],
    ):
        self.settings, self.output, self.progress = pending_tasks.settings, output, pending_tasks.progress
        self._selection, self._source, self._on_close = pending_tasks.selection, source, on_close
        self._records = _recorded(source, pending_tasks, output, self.progress, fail_fast)

    def stop(self) -> None:
        """Take no further images; requests in flight are finished, except in Ray's actors, which drop them.

        May be called from a signal handler.
        """
        self._source.stop()

    @property
    def num_failed(self) -> int:
        """Number of images that this run or an earlier one recorded as failed."""
        return self.progress.num_failed if self.output.journal is None else self.output.index.count_failed()

    def count(self) -> int | None:
        """Count images and videos in a separate search; None if a list can be read only once, as from a pipe."""
        if any(path == Path("-") or path.is_fifo() for path in map(Path, self._selection.paths)):
            return None
        return sum(1 for _ in self._selection.items())

    @property
    def limit(self) -> int | None:
        """Maximum number of images and clips that the run processes, not counting those it skips."""
        return self._selection.limit

    @property
    def retries_failed(self) -> bool:
        """Whether the run processes only images that are recorded as failed."""
        return self._selection.retry_failed

    def close(self) -> None:
        """End the run, and close the output and the engine that it created; safe to call twice."""
        try:
            self._records.close()
        finally:
            self._on_close()

    def __iter__(self) -> Iterator[dict]:
        return self

    def __next__(self) -> dict:
        try:
            return next(self._records)
        except BaseException:  # including StopIteration
            self.close()
            raise

    def __enter__(self) -> "CaptionRun":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self):
        self.close()


def _recorded(
    source: Source, pending_tasks: PendingTasks, output: Output, progress: Progress, fail_fast: bool
) -> Iterator[dict]:
    # Not a method of CaptionRun: a reference cycle would keep a run that is no longer used, and its lock, alive.
    output.begin()
    for record in map(fitting, source.records(pending_tasks, pending_tasks.index)):
        _write(record, pending_tasks, output)
        progress.add(record)
        progress.engine_wait_share = source.engine_wait_share
        if fail_fast and record["error"] is not None:
            source.stop()
        yield record
    output.finish()
    progress.end()


def _write(record: dict, pending_tasks: PendingTasks, output: Output) -> None:
    try:
        output.write(record)
    except JobError as error:
        in_flight = pending_tasks.in_flight.copy()  # the thread that finds images adds entries
        names = [path for key, path in in_flight.items() if output.index.offset(key) is None]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        reason = (
            f"{error}. In flight and not recorded: {', '.join(names[:3])}{more}; remove the cause, then run the same "
            "job again"
        )
        raise JobError(reason, path=error.path, errno=error.errno, unrecorded=names) from error
    del pending_tasks.in_flight[record["key"]]
