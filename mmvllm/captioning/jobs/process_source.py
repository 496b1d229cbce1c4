"""A captioning job with several engines on this machine, each in a separate process.

    TaskQueue ── a thread for each engine ── WorkerPool of one process ── exchange ── EngineWorker

Only this process finds images and writes the output. An engine's process that dies, or is killed because it does not
respond, is replaced, and its images are queued again. All processes end with this one. `start_engine` and `exchange`
run in an engine's process.
"""

import atexit
import logging
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from queue import Empty, SimpleQueue

from mmvllm.captioning.errors import JobError
from mmvllm.captioning.jobs.captioner import failure
from mmvllm.captioning.jobs.engine_worker import EngineSpec, EngineWorker, finalized
from mmvllm.captioning.jobs.ordering import in_order
from mmvllm.captioning.jobs.pending_tasks import PendingTasks
from mmvllm.captioning.jobs.task_queue import POLL_SECONDS, TaskQueue, Work
from mmvllm.captioning.outputs.index import Index
from mmvllm.captioning.sources.items import Item
from mmvllm.errors import EngineFailed
from mmvllm.parallel.placement import Placement
from mmvllm.processes.pool import NUM_WORKERS, SILENCE_SECONDS, WorkerDied, WorkerPool, WorkersUnusable
from mmvllm.processes.start import KILL_SECONDS

logger = logging.getLogger(__name__)

CHUNK = 16  # images that an engine takes at once; a small number spreads small jobs over all engines
MAX_DEATHS = 5  # consecutive deaths of an engine's processes without a caption in between

# Set in an engine's process, where `start_engine` and `exchange` are tasks of `WorkerPool`.
_worker: EngineWorker | None = None
_done: "SimpleQueue[tuple[int, Future[dict]]]" = SimpleQueue()


def start_engine(spec: EngineSpec) -> int:
    """Load the model; return the number of images that keep the engine busy."""
    global _worker
    _worker = EngineWorker(spec)
    return _worker.max_requests


def exchange(
    items: list[tuple[int, Item]], is_stopped: bool, seconds: float
) -> tuple[list[tuple[int, dict | None]], float]:
    """Submit numbered images to the engine, and return finished records; waits up to `seconds` for one.

    An image that is dropped, because the job is stopped, has the record None. The second result is the engine's
    `wait_share`. Raises the error that ended the engine.
    """
    if _worker is None:
        raise EngineFailed("the engine's process has ended between two images")
    for number, item in items:
        _worker.submit(item).add_done_callback(partial(_finish, number))
    if is_stopped:
        _worker.stop()
    finished = []
    with suppress(Empty):
        finished.append(_done.get(timeout=seconds))
        while True:
            finished.append(_done.get_nowait())
    records = [(number, None if reply.cancelled() else reply.result()) for number, reply in finished]
    return records, _worker.engine_wait_share


def _finish(number: int, reply: "Future[dict]") -> None:
    _done.put((number, reply))


@dataclass(slots=True)
class _Engine:
    """An engine, across the successive processes that run it."""

    placement: Placement
    spec: EngineSpec
    pool: WorkerPool | None = None  # of the process that runs it now
    in_flight: dict[int, Work] = field(default_factory=dict)
    num_deaths: int = 0  # since its last caption
    is_ready: bool = False  # stays true when its process dies
    wait_share: float = 0.0


class ProcessSource:
    """Makes the records of pending tasks with engines in processes, which the constructor starts and waits for.

    Raises the exceptions of `LLM`, and JobError if the processes end as soon as they begin.
    """

    def __init__(self, spec: EngineSpec, placements: list[Placement], ordered: bool):
        self._settings, self._ordered = spec.settings, ordered
        self._queue = TaskQueue(partial(failure, spec.settings))
        self._changed, self._is_closed = threading.Condition(), False
        cores = max(1, (os.cpu_count() or 1) // len(placements))
        spec = replace(spec, num_workers=spec.num_workers or min(NUM_WORKERS, cores))
        self._engines = [_placed(spec, placement) for placement in placements]
        self._error: BaseException | None = None
        self._threads = [threading.Thread(target=self._run, args=(it,), daemon=True) for it in self._engines]
        for thread in self._threads:
            thread.start()
        try:
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    @property
    def engine_wait_share(self) -> float:
        """Mean share of the time in which the engines waited for images, in [0, 1]."""
        return sum(engine.wait_share for engine in self._engines) / len(self._engines)

    def stop(self) -> None:
        """Finish the requests that the engines have begun, and drop the rest; may be called from a signal handler."""
        self._queue.stop()

    def records(self, tasks: PendingTasks, index: Index) -> Iterator[dict]:
        """Yield a record for every task; a failed task has a record with `error`.

        A separate thread iterates the tasks. Raises JobError if engines die repeatedly.
        """
        if self._ordered:
            made = in_order(self._queue.results, tasks, lambda: self._queue.is_stopped)
        else:
            made = (result for _, result in self._queue.results(tasks))
        with closing(made):
            for task, record in made:
                yield finalized(task, record, self._settings, index)

    def close(self) -> None:
        """End the processes at once; safe to call twice."""
        if self._is_closed:  # at interpreter exit, the threads that hold the locks may be gone
            return
        atexit.unregister(self.close)
        self._queue.stop()
        with self._changed:
            self._is_closed = True
            for engine in self._engines:
                if engine.pool is not None:
                    engine.pool.close()
        for thread in self._threads:  # a thread may already be ending its process
            if thread is not threading.current_thread():
                thread.join(KILL_SECONDS)

    def _wait_until_ready(self) -> None:
        def is_known() -> bool:
            return self._error is not None or all(engine.is_ready for engine in self._engines)

        with self._changed:
            self._changed.wait_for(is_known)
        if self._error is not None:
            raise self._error

    def _run(self, engine: _Engine) -> None:
        """Run an engine in one process after the other, in its thread, until the source is closed."""
        try:
            while not self._is_closed:
                try:
                    with closing(self._pool(engine)) as pool:
                        self._work(engine, pool)
                except (WorkerDied, WorkersUnusable, EngineFailed) as error:
                    self._give_back(engine, error)
        except BaseException as error:
            self._queue.fail(error)
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _pool(self, engine: _Engine) -> WorkerPool:
        with self._changed:
            silence = engine.spec.engine_args.get("step_timeout", SILENCE_SECONDS)
            engine.pool = WorkerPool(1, engine_env=engine.placement.env, silence=silence)
            if self._is_closed:
                engine.pool.close()
            else:  # `close` must run before the pool's exit handler, or a killed process would be replaced
                atexit.unregister(self.close)
                atexit.register(self.close)
            return engine.pool

    def _work(self, engine: _Engine, pool: WorkerPool) -> None:
        most = pool.run(start_engine, engine.spec)
        with self._changed:
            engine.is_ready = True
            self._changed.notify_all()
        while not self._is_closed:
            works = self._queue.take(engine.in_flight, min(CHUNK, most - len(engine.in_flight)))
            if engine.in_flight:
                items = [(work.number, work.task.item) for work in works]
                wait = 0.0 if works else POLL_SECONDS
                records, engine.wait_share = pool.run(exchange, items, self._queue.is_stopped, wait)
                self._queue.finish(engine.in_flight, records)
                if any(record is not None and record["error"] is None for _, record in records):
                    engine.num_deaths = 0

    def _give_back(self, engine: _Engine, error: Exception) -> None:
        """Queue the images of a dead process again; raises JobError if too many processes have died."""
        if self._is_closed:
            return
        self._queue.give_back(engine.in_flight, str(error))
        engine.num_deaths += 1
        if engine.num_deaths >= MAX_DEATHS:
            raise JobError(
                f"an engine's process has died {MAX_DEATHS} times without a caption in between, now: {error}. It may "
                "be out of memory. The output is intact; run the same job again to resume"
            )
        logger.warning("the process of an engine has ended and is started again: %s", error)


def _placed(spec: EngineSpec, placement: Placement) -> _Engine:
    engine_args = spec.engine_args | {"device": placement.device}
    return _Engine(placement, replace(spec, engine_args=engine_args, num_threads=placement.num_threads))
