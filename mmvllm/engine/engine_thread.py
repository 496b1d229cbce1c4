"""The thread that owns an engine: it adds requests, steps, delivers new outputs, and frees an idle engine's memory."""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from mmvllm.engine.gc_utils import collect_everything
from mmvllm.engine.health import EngineHealth
from mmvllm.engine.llm_engine import LLMEngine
from mmvllm.engine.request_batch import BEGUN, Event, RequestBatch, Started
from mmvllm.engine.stats import EngineStats
from mmvllm.errors import EngineFailed, RequestFailed, first_line
from mmvllm.inputs import EngineInput
from mmvllm.outputs import CompletionOutput, Delta, RequestOutput
from mmvllm.processes.ranks import RanksFailed
from mmvllm.sampling_params import SamplingParams

logger = logging.getLogger(__name__)


class ReleasableEngine:
    """An engine that releases its memory while it is idle, and is reloaded for the next request.

    Only the thread that owns the engine calls it; other threads may read `engine` and `is_released`. A released engine
    has freed its weights and caches and has ended its worker processes; its configs and its tokenizer remain.

    Args:
        after: seconds without work after which the engine is released; None never releases it.
        on_made: called with each engine before it gets requests.
    """

    def __init__(self, engine: LLMEngine, after: float | None, on_made: Callable[[LLMEngine], None]):
        self.engine, self.is_released = engine, False
        self.failure: str | None = None  # why the last attempt to reload it failed
        self._after, self._on_made = after, on_made
        on_made(engine)

    @property
    def seconds_to_wait(self) -> float | None:
        """Seconds to wait for work before calling `release`; None waits forever."""
        return None if self.is_released else self._after

    def release(self) -> None:
        """Free the memory; the engine must have no requests."""
        self.is_released = True
        self.engine.exit()
        collect_everything(self.engine.device)
        logger.info("the engine has had no request for %g s and has released its memory", self._after)

    def load(self) -> None:
        """Reload the engine if it is released; raise RequestFailed if that fails, but a later call may succeed."""
        if not self.is_released:
            return
        begin, self.failure = time.perf_counter(), None
        try:
            engine = self.engine.reload()
        except Exception as error:  # for example because another program has taken the memory
            self.failure = f"the released model cannot be loaded again: {first_line(error)}"
        if self.failure is not None:  # outside the handler: the error's frames hold what was loaded
            collect_everything(self.engine.device)
            raise RequestFailed(self.failure)
        self._on_made(engine)
        self.engine, self.is_released = engine, False
        logger.info("the released engine was loaded again in %.1f s", time.perf_counter() - begin)


class Receiver(Protocol):
    """The receiver of one request's deltas."""

    request_id: str
    arrival_time: float
    num_completions: int
    ended: Future[None]  # done when no more deltas are wanted


Item = Delta | Exception | Started
RequestEvent = tuple[Receiver, Item]


def is_last(item: Item) -> bool:
    """Return whether a request ends with this item."""
    return isinstance(item, Exception) or (item is not BEGUN and item.output is not None)


class EngineThread:
    """Runs an engine in a thread; no other thread may use the engine from then on.

    Args:
        deliver: called in the thread with the new events after a step.
        on_failure: called with the error that ended the engine, or the thread; nothing is delivered after it.
        release_after: seconds without requests after which the engine's memory is freed until the next request.
    """

    def __init__(
        self,
        engine: LLMEngine,
        deliver: Callable[[list[RequestEvent]], None],
        on_failure: Callable[[BaseException], None],
        release_after: float | None = None,
    ):
        self.is_up = True  # while it accepts requests
        self.failing: str | None = None  # why requests failed in the last step
        self._deliver, self._on_failure = deliver, on_failure
        self._changed = threading.Condition()
        self._commands: list[Callable[[], None]] = []
        self._stopped = False
        self._held = ReleasableEngine(engine, release_after, self._watch)
        self._thread = threading.Thread(target=self._run, name="mmvllm-engine", daemon=True)
        self._thread.start()

    @property
    def num_tracked(self) -> int:
        """Number of requests in the engine."""
        return len(self._requests)

    def add(self, receiver: Receiver, prompt: EngineInput, params: SamplingParams, **options: Any) -> None:
        """Add a request to the engine; an error is delivered to its receiver."""
        self._post(partial(self._add, receiver, prompt, params, options))

    def abort(self, receiver: Receiver) -> None:
        """End a request before the next step, and deliver its output so far."""
        self._post(partial(self._abort, receiver))

    def reset_prefix_cache(self) -> None:
        """Clear the prefix cache before any request that is added from now on."""
        self._post(lambda: self._engine.reset_prefix_cache())

    def stop(self) -> None:
        """End the thread after the current step, and then the engine."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join()
        self._engine.exit()

    def stats(self, num_preparing: int) -> EngineStats:
        return replace(self._engine.stats(num_preparing), num_released=int(self._held.is_released))

    def engine_stats(self) -> list[EngineStats]:
        """Return statistics of each engine, without requests in preparation."""
        return [self.stats(0)]

    def health(self) -> EngineHealth:
        reason = self.failing or self._held.failure
        return EngineHealth("ok" if reason is None else "failing", reason)

    @property
    def _engine(self) -> LLMEngine:
        return self._held.engine

    def _watch(self, engine: LLMEngine) -> None:
        """Follow the requests of an engine, and detect the end of its processes, even while no step runs."""
        self._requests = RequestBatch(engine, streams=True)
        worker_group = engine.model_runner.worker_group
        worker_group.on_failure = lambda: self._post(partial(self._check, engine))
        self._post(partial(self._check, engine))  # a process may have ended before `on_failure` was set

    def _check(self, engine: LLMEngine) -> None:
        if engine is self._engine and not self._held.is_released:  # otherwise its processes have been ended
            engine.model_runner.worker_group.check()

    def _post(self, command: Callable[[], None]) -> None:
        with self._changed:
            self._commands.append(command)
            self._changed.notify()

    def _run(self) -> None:
        try:
            while self._run_commands():
                if not self._engine.is_finished():
                    self._step()
        except BaseException as error:
            # The cause of EngineFailed is the reason.
            reason = (error.__cause__ or error) if isinstance(error, EngineFailed) else error
            if isinstance(reason, RanksFailed):  # the traceback only shows where it was noticed
                logger.error("the engine failed: %s", reason)
            else:
                logger.exception("the engine failed")
            self._on_failure(reason)

    def _run_commands(self) -> bool:
        """Wait for commands or work, and run the commands; return False once the thread must stop."""
        with self._changed:
            has_work = self._changed.wait_for(
                lambda: self._commands or self._stopped or not self._engine.is_finished(), self._held.seconds_to_wait
            )
            commands, self._commands = self._commands, []
            stopped = self._stopped
        if not has_work:
            self._held.release()
        for command in commands:
            command()
        return not stopped

    def _add(self, receiver: Receiver, prompt: EngineInput, params: SamplingParams, options: dict[str, Any]) -> None:
        if receiver.ended.done():  # aborted while the command was queued
            return
        try:
            self._held.load()
            self._requests.add(receiver, prompt, params, receiver.request_id, **options)
        except (ValueError, RequestFailed) as error:
            self._deliver([(receiver, error)])
        except Exception as error:  # a bug: other requests are not affected
            self._deliver([(receiver, RequestFailed(f"preparation failed: {type(error).__name__}: {error}"))])

    def _abort(self, receiver: Receiver) -> None:
        events = self._requests.abort(receiver)
        if events is None:  # not in the engine yet, or finished
            self._deliver(aborted(receiver))
        else:
            self._deliver([(receiver, _item(event)) for event in events])

    def _step(self) -> None:
        events = [(receiver, _item(event)) for receiver, event in self._requests.step()]
        self.failing = next((str(item) for _, item in events if isinstance(item, RequestFailed)), None)
        self._deliver(events)


def _item(event: Event) -> Item:
    output = event.output if isinstance(event, Delta) else None
    if output is None or output.error is None:
        return event
    return output.exception or RequestFailed(output.error)


def aborted(receiver: Receiver) -> list[RequestEvent]:
    """Return the last deltas of a request that is aborted while the engine does not have it."""
    request_id, number = receiver.request_id, receiver.num_completions
    completions = [CompletionOutput("", [], "aborted", index=index) for index in range(number)]
    output = RequestOutput(request_id, completions, arrival_time=receiver.arrival_time, finish_time=time.time())
    outputs = [None] * (number - 1) + [output]
    return [(receiver, Delta(request_id, i, "", [], None, "aborted", outputs[i])) for i in range(number)]
