"""Dispatches each request to an engine, and to another one if the engine dies before the first token.

It has the interface of `EngineThread`. The lock is never held while something is delivered.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import xxhash

from mmvllm.engine.engine_thread import Receiver, RequestEvent, aborted, is_last
from mmvllm.engine.health import EngineHealth, health_of
from mmvllm.engine.request_batch import BEGUN
from mmvllm.engine.stats import EngineStats
from mmvllm.errors import RequestFailed
from mmvllm.inputs import EngineInput
from mmvllm.parallel.data_parallel import DataParallelEngines
from mmvllm.parallel.engine_core import AbortCommand, AddCommand, EngineOutputs, EngineReady, ResetCommand, not_sendable
from mmvllm.parallel.router import BLOCK_TOKENS, Fingerprint, Router, fingerprint
from mmvllm.processes.channel import pickled
from mmvllm.sampling_params import SamplingParams

MAX_LOST_ENGINES = 2  # under a request that was being computed: it may be what ends them


@dataclass(slots=True, eq=False)
class _Assignment:
    """A request, and the engine that has it."""

    key: int
    receiver: Receiver
    prompt: EngineInput | None  # until the first delta: then it cannot be computed again
    params: SamplingParams
    functions: bytes
    options: dict[str, Any]
    fingerprint: Fingerprint
    engine: int | None = None  # while no engine is up
    has_begun: bool = False
    is_aborted: bool = False
    num_lost_engines: int = 0

    def command(self) -> AddCommand:
        receiver = self.receiver
        own = self.params, self.functions, self.options
        return AddCommand(self.key, receiver.request_id, receiver.num_completions, self.prompt, *own)

    def fails_with_engine(self) -> bool:
        """Whether the request ends with the engine that is lost."""
        self.num_lost_engines += self.has_begun
        return self.prompt is None or self.num_lost_engines >= MAX_LOST_ENGINES


class Dispatcher:
    """Serves requests with `DataParallelEngines`, which belong to it from then on.

    Args:
        deliver: called in the thread of an engine with what is new.
        on_failure: called with an error once no engine can be started any more; nothing is delivered after it.
    """

    def __init__(
        self,
        engines: DataParallelEngines,
        deliver: Callable[[list[RequestEvent]], None],
        on_failure: Callable[[BaseException], None],
    ):
        self._engines, self._deliver, self._on_failure = engines, deliver, on_failure
        ready = engines.ready_messages
        num_tokens = min(one.num_blocks * one.block_size for one in ready)  # that an engine may cache
        self._router = Router(engines.size, capacity=max(1, num_tokens // BLOCK_TOKENS))
        self._lock = threading.Lock()
        self._assigned: dict[int, _Assignment] = {}  # by key, in order of arrival
        self._by_receiver: dict[Receiver, _Assignment] = {}
        self._keys = count()
        self._stats = [EngineStats(num_blocks=one.num_blocks) for one in ready]  # of the processes that run
        self._before = [EngineStats()] * engines.size  # totals of those before them
        self._failing: list[str | None] = [None] * engines.size
        engines.listen(self)

    @property
    def num_tracked(self) -> int:
        """Requests in the engines."""
        return len(self._assigned)

    @property
    def is_up(self) -> bool:
        """Whether one of the engines accepts requests."""
        return not all(self._engines.reasons_down())

    def add(self, receiver: Receiver, prompt: EngineInput, params: SamplingParams, **options: Any) -> None:
        """Give an engine a request; a refusal is delivered."""
        try:
            functions = pickled(params.logits_processors)
        except Exception as error:
            self._deliver([(receiver, not_sendable(error))])
            return
        key, params = next(self._keys), replace(params, logits_processors=())
        if params.seed is None:  # each engine would draw the same seeds
            params = replace(params, seed=xxhash.xxh64_intdigest(f"{self._engines.seed}:{key}".encode()))
        items = [(item.offset, item.digest) for item in prompt.mm_items]
        adapter = options.get("lora_request")
        salt = options.get("cache_salt") if adapter is None else f"{adapter.lora_path}\0{options.get('cache_salt')}"
        known = fingerprint(prompt.token_ids, items, salt, params.max_tokens)
        request = _Assignment(key, receiver, prompt, params, functions, options, known)
        with self._lock:
            self._assigned[key] = self._by_receiver[receiver] = request
            self._assign(request)

    def abort(self, receiver: Receiver) -> None:
        """End a request, and deliver what it has so far."""
        if not self._abort(receiver):
            self._deliver(aborted(receiver))  # no engine has it yet, or it has ended
            self._abort(receiver)  # it may have been added meanwhile

    def reset_prefix_cache(self) -> None:
        """Forget the KV of all prompts in all engines that are up; an engine that starts later has none."""
        with self._lock:
            for index, reason in enumerate(self._engines.reasons_down()):
                if not reason:
                    self._engines.send(index, ResetCommand())

    def stop(self) -> None:
        """End the engines."""
        self._engines.exit()

    def stats(self, num_preparing: int) -> EngineStats:
        with self._lock:
            num_unassigned = sum(request.engine is None for request in self._assigned.values())
        return sum(self.engine_stats(), EngineStats(num_preparing=num_preparing + num_unassigned))

    def engine_stats(self) -> list[EngineStats]:
        """Statistics of each engine over all its processes, without requests that are being prepared."""
        with self._lock:
            return [now + before for now, before in zip(self._stats, self._before, strict=True)]

    def health(self) -> EngineHealth:
        return health_of(
            tuple(
                EngineHealth("starting", down) if down else EngineHealth("failing" if failing else "ok", failing)
                for down, failing in zip(self._engines.reasons_down(), self._failing, strict=True)
            )
        )

    def _assign(self, request: _Assignment) -> None:
        request.engine = self._router.choose(request.fingerprint)
        if request.engine is not None:
            self._router.started(request.engine, request.fingerprint)
            self._engines.send(request.engine, request.command())

    def _abort(self, receiver: Receiver) -> bool:
        with self._lock:
            request = self._by_receiver.get(receiver)
            if request is None:
                return False
            request.is_aborted = True
            if request.engine is None:
                self._forget(request)
                return False
            self._engines.send(request.engine, AbortCommand(request.key))
            return True

    def _forget(self, request: _Assignment) -> None:
        """A request has ended, or its engine has."""
        del self._assigned[request.key], self._by_receiver[request.receiver]
        self._release(request)

    def _release(self, request: _Assignment) -> None:
        if request.engine is not None:
            self._router.ended(request.engine, request.fingerprint)
        request.engine, request.has_begun = None, False

    def on_ready(self, index: int, ready: EngineReady) -> None:
        with self._lock:
            self._router.joined(index)
            self._stats[index] = EngineStats(num_blocks=ready.num_blocks)
            for request in self._assigned.values():
                if request.engine is None:
                    self._assign(request)

    def on_outputs(self, index: int, outputs: EngineOutputs) -> None:
        events = []
        with self._lock:
            self._stats[index], self._failing[index] = outputs.stats, outputs.failing
            for key, item in outputs.items:
                if (request := self._assigned.get(key)) is None:
                    continue
                events.append((request.receiver, item))
                if item is BEGUN:
                    request.has_begun = True
                else:
                    request.prompt = None
                if is_last(item):
                    self._forget(request)
        self._deliver(events)

    def on_unsendable(self, index: int, command: AddCommand, error: Exception) -> None:
        with self._lock:
            if (request := self._assigned.get(command.key)) is not None:
                self._forget(request)
        if request is not None:
            self._deliver([(request.receiver, RequestFailed(f"preparation failed: {error}"))])

    def on_lost(self, index: int, reason: str, startup_error: Exception | None) -> None:
        if self._engines.has_failed():
            self._engines.give_up()
            self._on_failure(RuntimeError(f"no engine can be started again: {reason}"))
            return
        with self._lock:
            self._router.lost(index)
            self._before[index] += self._stats[index].totals()
            self._stats[index], self._failing[index] = EngineStats(num_blocks=self._stats[index].num_blocks), None
            events = self._reassign(index, reason)
        self._deliver(events)

    def _reassign(self, index: int, reason: str) -> list[RequestEvent]:
        """Give the requests of an engine that is lost to others; the ends of those that cannot be computed again."""
        events: list[RequestEvent] = []
        lost = [request for request in self._assigned.values() if request.engine == index]
        for request in lost:
            if request.is_aborted:
                self._forget(request)
                events += aborted(request.receiver)
            elif request.fails_with_engine():
                self._forget(request)
                events.append((request.receiver, RequestFailed(f"the engine ended while it computed this: {reason}")))
            else:
                self._release(request)
                self._assign(request)
        return events
