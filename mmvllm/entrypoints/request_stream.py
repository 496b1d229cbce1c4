"""The requests of one `LLM` call: prepared ahead of the engine, admitted, computed, and yielded as they end.

source of prepared requests ── plan ──> requests for the engine ── RequestBatch ──> events
                                         └─ Followers, until the prefix cache has the first one's prompt
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from mmvllm.engine.llm_engine import LLMEngine
from mmvllm.engine.request_batch import BEGUN, RequestBatch
from mmvllm.entrypoints.request_queue import (
    AdmissionWindow,
    Params,
    PreparedRequest,
    naming_request,
    params_for,
    request_options,
)
from mmvllm.errors import RequestError
from mmvllm.inputs import EngineInput
from mmvllm.outputs import Delta, RequestOutput
from mmvllm.sampling_params import CHOSEN_AT_END, SamplingParams

Key = tuple[int, int]  # index of the request, and number of its prompt
StreamEvent = RequestOutput | Delta
Events = Iterator[tuple[Key, StreamEvent | None]]  # None for a request without a plan


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request as the engine gets it; see `LLMEngine.add` for `options`."""

    prompt: EngineInput
    params: SamplingParams
    options: Mapping[str, Any] = field(default_factory=dict)


Plan = Callable[[PreparedRequest], Sequence[EngineRequest]]


def one_each(sampling_params: Params, **options: Any) -> Plan:
    """Return the plan of one engine request for each prepared request, with these parameters or its own."""

    def plan(item: PreparedRequest) -> list[EngineRequest]:
        prompt, own = item.engine_input(), item.request if isinstance(item.request, dict) else {}
        params = params_for(sampling_params, item.index, own.get("sampling_params"))
        request_id = {"request_id": own.get("request_id")}
        return [EngineRequest(prompt, params, request_id | request_options(own) | options)]

    return plan


class RequestSource(Protocol):
    """Prepared requests, such as a `Prefetcher` has."""

    @property
    def is_exhausted(self) -> bool: ...

    def get(self, wait: bool) -> PreparedRequest | None: ...

    def close(self) -> None: ...


class Followers:
    """Requests that wait until the prefix cache has the prompt of an earlier one, which begins like theirs."""

    def __init__(self) -> None:
        self._held: dict[Key, deque[tuple[Key, Any]]] = {}  # by the key of the earlier one

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, first: Key, requests: Sequence[Any]) -> None:
        """Hold the further requests of `first`, which have its index and the numbers after its own."""
        if requests:
            self._held[first] = deque(((first[0], number), request) for number, request in enumerate(requests, 1))

    def take(self, has_computed_prompt: Callable[[Key], bool]) -> tuple[Key, Any] | None:
        """Return a request whose earlier one has computed its prompt; None if there is none."""
        first = next(filter(has_computed_prompt, self._held), None)
        if first is None:
            return None
        held = self._held[first]
        follower = held.popleft()
        if not held:
            del self._held[first]
        return follower

    def drop(self, first: Key) -> None:
        """Drop the requests that wait for `first`."""
        self._held.pop(first, None)


class RequestStream:
    """The requests of one call.

    Args:
        plan: returns the engine requests that a prepared request becomes, none or several. The first of several
            computes the prompt; the others follow once the prefix cache has it. A RequestError refuses the request.
        window: limits the requests in the engine.
        streams: yield deltas of new text, rather than an output for each finished request.
        on_error: "raise" raises the error of a request and aborts the others; "return" yields an output with `error`.
        noun: name of a request in messages.
        is_stopped: once it returns True, requests that the engine has not begun are dropped.
    """

    def __init__(
        self,
        engine: LLMEngine,
        source: RequestSource,
        plan: Plan,
        window: AdmissionWindow,
        *,
        streams: bool = False,
        on_error: str = "raise",
        noun: str = "request",
        is_stopped: Callable[[], bool] = lambda: False,
    ):
        self._engine, self._source, self._plan, self._window = engine, source, plan, window
        self._streams, self._on_error, self._noun, self._is_stopped = streams, on_error, noun, is_stopped
        self._batch, self._followers = RequestBatch(engine, streams), Followers()

    def events(self) -> Events:
        """Yield (key, event) until all requests have ended; closing the generator aborts the others."""
        try:
            self._engine.process.check()
            if self._on_error not in ("raise", "return"):
                raise ValueError(f"on_error must be 'raise' or 'return', got {self._on_error!r}")
            while True:
                if self._is_stopped():
                    self._drop_waiting()
                yield from self._admit()
                if not self._batch and self._source.is_exhausted:
                    return
                yield from self._step()
        finally:
            self._source.close()
            self._batch.abort_all()

    def _admit(self) -> Events:
        """Keep the engine supplied; wait for preparation only when there is nothing else to do."""
        while self._has_room():
            if (follower := self._followers.take(self._batch.has_computed_prompt)) is not None:
                key, request = follower
                yield from self._add(key, lambda: [request])  # noqa: B023 - called at once
            elif (item := self._source.get(wait=not self._batch)) is not None:
                own_id = item.request.get("request_id") if isinstance(item.request, dict) else None
                yield from self._add((item.index, 0), lambda: self._plan(item), own_id)
            else:
                return

    def _has_room(self) -> bool:
        """Return whether the engine should take another request; an empty batch takes any, however large."""
        with self._engine.lock:  # a step of another thread may finish requests
            num_bytes = self._engine.scheduler.num_waiting_bytes
        return not self._batch or self._window.has_room(len(self._batch), num_bytes)

    def _add(self, key: Key, plan: Callable[[], Sequence[EngineRequest]], own_id: str | None = None) -> Events:
        """Add the first of the planned requests to the engine, and hold the others."""
        try:
            with naming_request(key[0]):
                requests = plan()
                self._followers.hold(key, requests[1:])
                for first in requests[:1]:
                    if self._streams and first.params.chooses_at_end:
                        raise RequestError(f"stream is True, {CHOSEN_AT_END}", param="stream", value=True)
                    self._batch.add(key, first.prompt, first.params, **first.options)
        except RequestError as error:
            if self._on_error == "raise":
                raise
            yield key, self._batch.failure(self._refused(own_id, error))
        else:
            if not requests:
                yield key, None

    def _refused(self, own_id: str | None, error: RequestError) -> RequestOutput:
        error.request_index = None  # an output belongs to its request
        request_id = self._engine.new_request_id() if own_id is None else own_id
        return RequestOutput(request_id, error=str(error), exception=error.detached())

    def _step(self) -> Events:
        for key, event in self._batch.step():
            if event is BEGUN:
                continue
            if self._on_error == "raise" and (output := output_of(event)) is not None:
                self._check(key, output)
            yield key, event

    def _check(self, key: Key, output: RequestOutput) -> None:
        """Raise RequestError if the request itself is at fault, RuntimeError for other failures."""
        index, noun = key[0], self._noun
        if output.exception is not None:
            output.exception.request_index, output.exception.noun = index, noun
            raise output.exception
        if output.error is not None:
            raise RuntimeError(f"{noun} {index}: {output.error}")

    def _drop_waiting(self) -> None:
        for key in self._batch.waiting():
            self._batch.abort(key)
            self._followers.drop(key)


def output_of(event: StreamEvent | None) -> RequestOutput | None:
    """Return the output of a finished request; None before it finishes."""
    return event.output if isinstance(event, Delta) else event
