"""A captioning job on Ray Data: one worker finds the images, and actors with one engine each caption them.

Ray restarts a lost actor and sends it its images again. Only the process that started the job writes the output, and it
admits every image once, so nothing is recorded twice. mmvllm must be installed on all machines, and paths must be the
same on them. Workers change to the folder in which the job was started, if it exists.
"""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import ray
import ray.data

from mmvllm.captioning.errors import JobError
from mmvllm.captioning.jobs.engine_worker import EngineSpec, finalized
from mmvllm.captioning.jobs.pending_tasks import PendingTasks, Selection
from mmvllm.captioning.jobs.ray_options import RayOptions
from mmvllm.captioning.jobs.ray_worker import CaptionActor, Chunk, RayJobSpec, walk
from mmvllm.captioning.outputs.caption_files import CaptionFiles
from mmvllm.captioning.outputs.index import Index
from mmvllm.errors import ArgumentError
from mmvllm.parallel import ray_session

logger = logging.getLogger(__name__)
MAX_RETRIES = 3  # of a chunk whose actor is lost, which one of its images may cause


class RaySource:
    """Makes the records of pending tasks on Ray, which the constructor starts or joins.

    See `caption_images` for the arguments. Raises ValueError for options that do not fit the job or this machine,
    and ConnectionError if there is no cluster.
    """

    def __init__(
        self,
        engine: EngineSpec,
        selection: Selection,
        files: CaptionFiles | None,
        ordered: bool,
        options: RayOptions,
    ):
        self.engine_wait_share = 0.0
        self._is_stopped = False
        self._options, self._ordered = options, ordered
        self._gpus = _gpus_per_actor(options, engine.engine_args)
        if "-" in map(os.fspath, selection.paths):
            raise ValueError("a list on standard input (-) cannot be read by Ray's workers; give a file")
        engine = replace(engine, num_threads=options.cpus_per_actor)
        self._job = RayJobSpec(engine, selection, files, os.getcwd())
        self._is_ours = not ray.is_initialized()
        if self._is_ours:
            _start(options)
        try:
            self._check_resources()
        except ValueError:
            self.close()
            raise

    def stop(self) -> None:
        """Yield only the records that have arrived; the actors drop images in flight."""
        self._is_stopped = True

    def records(self, tasks: PendingTasks, index: Index) -> Iterator[dict]:
        """Yield a record for every item that `PendingTasks` admits.

        Raises ValueError for wrong paths or a wrong model, JobError if Ray cannot continue.
        """
        shares: dict[str, float] = {}  # by actor
        with closing(self._chunks(index)) as chunks:
            for chunk in chunks:
                if chunk.error is not None:
                    raise ValueError(chunk.error)
                counts = {name: getattr(chunk, name) for name in tasks.progress.of_the_walk}
                tasks.progress.take(**counts)
                shares[chunk.actor] = chunk.engine_wait_share
                self.engine_wait_share = sum(shares.values()) / len(shares)
                for item in chunk.without_files:
                    tasks.restore(item)
                for item, record in zip(chunk.items, chunk.records, strict=True):
                    task = tasks.admit(item)
                    if task is not None:
                        yield finalized(task, record, self._job.engine.settings, index)
                if self._is_stopped:
                    return

    def close(self) -> None:
        """Shut Ray down, unless this process had joined it before; safe to call twice."""
        if self._is_ours:
            ray.shutdown()

    def _chunks(self, index: Index) -> Iterator[Chunk]:
        data = self._dataset(index)
        try:
            for table in data.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
                yield from Chunk.unpack(table)
        except ray.exceptions.RayError as error:
            raise JobError(
                f"Ray cannot continue: {error}. The output is intact; run the same job again to resume. If an engine "
                f"was lost {MAX_RETRIES + 1} times, it may be out of memory, or an image may crash it"
            ) from error

    def _dataset(self, index: Index) -> ray.data.Dataset:
        """Return the lazy data set of packed chunks, which `walk` finds and the actors caption."""
        recorded = ray.put(index.dump(self._job.selection.retry_failed))
        data = ray.data.from_items([None]).map_batches(
            walk, fn_args=(self._job, recorded), batch_format="pyarrow", num_cpus=0
        )
        # On a GPU, this number of chunks fills the engine's window. A CPU gains nothing from larger batches, and with
        # fewer chunks in flight the images are spread more evenly over the actors.
        num_chunks = 8 if self._gpus else 2
        with warnings.catch_warnings(action="ignore"):  # deprecation warnings of Ray
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
        if self._ordered:
            data.context.execution_options.preserve_order = True
        data.context.target_max_block_size = 1  # each row is a block, which is sent on without waiting for others
        return data

    def _check_resources(self) -> None:
        """Refuse a request that Ray cannot fulfill, because it would wait for the resources forever."""
        resources = {"CPU": self._options.cpus_per_actor, "GPU": self._gpus}
        for text in ray_session.missing_resources(self._options.num_actors, "actor", resources):
            if self._is_ours and self._options.address == "local":
                raise ValueError(f"{text}. Give fewer actors, or less to each")
            logger.warning("%s; some actors wait until more are added", text)


def _gpus_per_actor(options: RayOptions, engine_args: dict[str, Any]) -> float:
    gpus, number = options.gpus_per_actor, engine_args.get("tensor_parallel_size", 1)
    if gpus and number > 1:
        raise ArgumentError(
            "{gpus_per_actor} is {share:g}, but an engine with {tensor_parallel_size} {number} takes that many GPUs; "
            "leave it out",
            share=gpus,
            number=number,
        )
    gpus = ray_session.gpus_per_engine(engine_args, gpus)
    if 0 < gpus < 1 and "num_kvcache_blocks" not in engine_args:
        raise ArgumentError("{share:g} GPU per actor: engines that share a GPU need {num_kvcache_blocks}", share=gpus)
    return gpus


def _start(options: RayOptions) -> None:
    """Start or join Ray, without the messages and progress bars of Ray Data."""
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # errors are also raised as exceptions
    warnings.filterwarnings("ignore", module=r"ray\.data\.")
    ray.data.DataContext.get_current().enable_progress_bars = False
    ray_session.start(options.address, options.num_actors * options.cpus_per_actor)
