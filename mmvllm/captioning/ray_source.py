"""A captioning job on Ray Data: one worker finds the pictures, many actors with an engine each caption them.

Ray starts a lost actor anew and gives it its pictures again. Only the process that runs the job writes the output, and
takes every picture once, so nothing is recorded twice. mmvllm must be installed on all machines, and paths must mean
the same there: the folder in which the job was started is entered wherever there is one.
"""

import logging
import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import ray
import ray.data
import torch

from mmvllm.captioning.captioner import Task
from mmvllm.captioning.errors import JobError
from mmvllm.captioning.files import CaptionFiles
from mmvllm.captioning.index import Index, keep_caption
from mmvllm.captioning.ray_worker import CaptionActor, Chunk, Job, walk
from mmvllm.captioning.run import Selection, Worklist
from mmvllm.captioning.settings import CaptionSettings

logger = logging.getLogger(__name__)
MAX_RETRIES = 3  # of a chunk whose actor is lost: a picture may be what ends the process
OBJECT_STORE_BYTES = 256 * 1024 * 1024  # only paths and captions pass through it


@dataclass(frozen=True, slots=True)
class RayOptions:
    """Where a job runs.

    Args:
        address: "local" starts Ray here for this job; "auto", "host:port" or "ray://..." joins a cluster. A Ray that
            this process has joined already is used as it is.
        num_actors: engines.
        cpus_per_actor: CPU cores, and torch threads, of each.
        gpus_per_actor: 0 or 1, or a share of one; by default 1 where the job's device is a GPU. Engines that share a
            GPU need `num_kvcache_blocks` in `engine_args`: each would take all memory that it finds.
    """

    address: str = "local"
    num_actors: int = 1
    cpus_per_actor: int = 1
    gpus_per_actor: float | None = None

    def __post_init__(self):
        for name in ("num_actors", "cpus_per_actor"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least 1")
        if self.gpus_per_actor is not None and not 0 <= self.gpus_per_actor <= 1:
            raise ValueError(f"gpus_per_actor is {self.gpus_per_actor}, must be from 0 to 1: an engine uses one GPU")


class RaySource:
    """Makes records of a worklist on Ray, which is started or joined at once; arguments as `caption_images` has them.

    Raises ValueError for options that do not fit the job or this machine, ConnectionError where there is no cluster.
    """

    def __init__(
        self,
        settings: CaptionSettings,
        selection: Selection,
        model: str | os.PathLike | None,
        engine_args: dict[str, Any],
        files: CaptionFiles | None,
        num_workers: int | None,
        worker_processes: bool,
        options: RayOptions,
    ):
        self.engine_wait_share = 0.0
        self._is_stopped = False
        self._options = options
        self._gpus = _gpus_per_actor(options, engine_args)
        if "-" in map(os.fspath, selection.paths):
            raise ValueError("a list on standard input (-) cannot be read by Ray's workers; give a file")
        here = (options.cpus_per_actor, os.getcwd())
        self._job = Job(settings, selection, model, engine_args, files, num_workers, worker_processes, *here)
        self._is_ours = not ray.is_initialized()
        if self._is_ours:
            _start(options)
        try:
            self._check_resources()
        except ValueError:
            self.close()
            raise

    def stop(self) -> None:
        """Take no more records than those that are here; what is under way elsewhere is dropped."""
        self._is_stopped = True

    def records(self, tasks: Worklist, index: Index) -> Iterator[dict]:
        """A record for every item that the worklist admits.

        Raises ValueError for what was wrong with paths or model, JobError where Ray gives up.
        """
        shares: dict[str, float] = {}  # by actor
        with closing(self._chunks(index)) as chunks:
            for chunk in chunks:
                if chunk.error is not None:
                    raise ValueError(chunk.error)
                tasks.progress.num_skipped = max(tasks.progress.num_skipped, chunk.num_skipped)
                shares[chunk.actor] = chunk.engine_wait_share
                self.engine_wait_share = sum(shares.values()) / len(shares)
                for item, record in zip(chunk.items, chunk.records, strict=True):
                    task = tasks.admit(item)
                    if task is not None:
                        yield _take_over(task, record, self._job.settings, index)
                if self._is_stopped:
                    return

    def close(self) -> None:
        """Leave Ray, unless it was joined before; safe to call twice."""
        if self._is_ours:
            ray.shutdown()

    def _chunks(self, index: Index) -> Iterator[Chunk]:
        recorded = ray.put(index.dump(self._job.selection.retry_failed))
        data = ray.data.from_items([None]).map_batches(
            walk, fn_args=(self._job, recorded), batch_format="pyarrow", num_cpus=0
        )
        # On a GPU, the chunks that an actor works on at once fill the engine's window. A CPU gains nothing from wider
        # batches, and fewer chunks are spread more evenly.
        num_chunks = 8 if self._gpus else 2
        with warnings.catch_warnings(action="ignore"):  # Ray's plans for later versions
            data = data.map_batches(
                CaptionActor,
                fn_constructor_args=(self._job,),
                batch_size=1,
                batch_format="pyarrow",
                compute=ray.data.ActorPoolStrategy(
                    size=self._options.num_actors, max_tasks_in_flight_per_actor=num_chunks
                ),
                num_cpus=self._options.cpus_per_actor,
                num_gpus=self._gpus,
                max_concurrency=num_chunks,
                max_restarts=-1,
                max_task_retries=MAX_RETRIES,
            )
        data.context.target_max_block_size = 1  # every row is a block, and goes on as soon as it is there
        try:
            for table in data.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
                yield from Chunk.unpack(table)
        except ray.exceptions.RayError as error:
            raise JobError(
                f"Ray gave up: {error}. What is recorded stays, and the same again goes on; an engine that is lost "
                f"{MAX_RETRIES + 1} times may be short of memory, or have a picture that ends it"
            ) from error

    def _check_resources(self) -> None:
        """Ray would wait for ever for what it does not have."""
        wanted = {"CPU": self._options.cpus_per_actor, "GPU": self._gpus}
        for name, each in wanted.items():
            needed, there = each * self._options.num_actors, ray.cluster_resources().get(name, 0)
            if needed > there:
                text = f"{self._options.num_actors} actors with {each:g} {name} each need {needed:g}; Ray has {there:g}"
                if self._is_ours and self._options.address == "local":
                    raise ValueError(f"{text}. Give fewer actors, or less to each")
                logger.warning("%s, and some actors wait until there are more", text)


def _take_over(task: Task, record: dict, settings: CaptionSettings, index: Index) -> dict:
    """The actor's record as the output has it. Of equal pictures, the first that comes is the one that others copy."""
    record = record | {"key": task.key, "file": None if record["error"] is not None else task.file}
    if not task.is_picture:
        return record | {"finish_reason": None}
    if task.item.error is not None and record["error"] is None:  # its caption has no place to go
        nothing = dict.fromkeys(("digest", "caption", "duplicate_of", "width", "height", "seconds"))
        counts = dict.fromkeys(("prompt_tokens", "image_tokens", "completion_tokens"), 0)
        return record | nothing | counts | {"error": task.item.error, "finish_reason": "error"}
    if record["error"] is not None or not settings.is_repeatable:
        return record
    original = index.caption(settings.content_key(record["digest"], record["prompt"]))
    if original is None:
        record |= {"duplicate_of": None}
        keep_caption(settings, index, record)
        return record
    same = ("caption", "prompt_tokens", "image_tokens", "completion_tokens", "finish_reason")
    return record | {name: original[name] for name in same} | {"duplicate_of": original["path"], "seconds": 0.0}


def _gpus_per_actor(options: RayOptions, engine_args: dict[str, Any]) -> float:
    device = str(engine_args.get("device", "auto"))
    if ":" in device:
        raise ValueError(f"device is {device!r}, but Ray chooses each actor's GPU; give 'cuda'")
    gpus = options.gpus_per_actor
    if gpus is None:
        gpus = float(device == "cuda" or (device == "auto" and torch.cuda.is_available()))
    if 0 < gpus < 1 and "num_kvcache_blocks" not in engine_args:
        raise ValueError(f"{gpus:g} GPU per actor: engines that share a GPU need num_kvcache_blocks in engine_args")
    return gpus


def _start(options: RayOptions) -> None:
    """Start or join Ray, which says nothing but in its own log files."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # its errors are raised, too
    warnings.filterwarnings("ignore", module=r"ray\.data\.")
    ray.data.DataContext.get_current().enable_progress_bars = False
    quiet = {"logging_level": logging.ERROR, "log_to_driver": False}
    if options.address != "local":
        _check_reachable(options.address)
        ray.init(options.address, **quiet)
        return
    ray.init(
        "local",
        num_cpus=options.num_actors * options.cpus_per_actor,
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        **quiet,
    )


def _check_reachable(address: str) -> None:
    """Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdecimal():
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        except OSError as error:
            raise ValueError(f"address {address}: no Ray cluster answers there ({error})") from None
