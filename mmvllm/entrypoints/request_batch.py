"""Tracks the requests of one `LLM` call from the engine's admission to the caller."""

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from mmvllm.engine.llm_engine import LLMEngine
from mmvllm.engine.output_processor import DeltaStream
from mmvllm.errors import RequestError
from mmvllm.inputs import EngineInput
from mmvllm.outputs import Delta, RequestOutput
from mmvllm.sampling_params import CHOSEN_AT_END, SamplingParams
from mmvllm.scheduler.sequence import SequenceGroup

StreamEvent = RequestOutput | Delta


class RequestBatch:
    """The requests of one call that are in flight, by index.

    Calls may be interleaved, from open generators or from threads: each call gets the outputs of its requests, even
    if another call ran the step.

    Args:
        lock: held by every user of the engine.
        give_way: called before each step, without the lock.
        streams: yield deltas of new text, rather than an output for each finished request.
        noun: name of a request in messages.
        options: options of `LLMEngine.add` for all requests.
    """

    def __init__(
        self,
        engine: LLMEngine,
        lock: threading.RLock,
        give_way: Callable[[], None],
        *,
        streams: bool = False,
        noun: str = "request",
        options: Mapping[str, Any] = MappingProxyType({}),
    ):
        self._engine, self._lock, self._give_way = engine, lock, give_way
        self._streams, self.noun, self._options = streams, noun, options
        self.groups: dict[Hashable, SequenceGroup] = {}
        self._deltas: dict[int, DeltaStream] = {}

    def add(self, index: Hashable, prompt: EngineInput, params: SamplingParams, **options: Any) -> None:
        """Add a request to the engine; see `LLMEngine.add` for `options`."""
        if self._streams and params.chooses_at_end:
            raise RequestError(f"stream is True, {CHOSEN_AT_END}", param="stream", value=True)
        with self._lock:
            group = self.groups[index] = self._engine.add(prompt, params, **self._options, **options)
            if self._streams:
                self._deltas[index] = self._engine.delta_stream(group)

    def step(self) -> list[tuple[int, StreamEvent]]:
        """Run one step, unless a request of this call has already finished; return (index, event) pairs."""
        self._give_way()
        with self._lock:
            self._engine.check_alive()
            if all(group.output is None for group in self.groups.values()):
                self._engine.step()
            return self._take_events()

    def refusal(self, output: RequestOutput) -> StreamEvent:
        """Return the event for a request that the engine refused."""
        if not self._streams:
            return output
        return Delta(output.request_id, 0, "", [], finish_reason="error", output=output)

    def abort_waiting(self) -> None:
        """Abort the requests that the engine has not begun."""
        self._abort([index for index, group in self.groups.items() if not group.has_begun])

    def abort(self) -> None:
        self._abort([*self.groups])

    def _take_events(self) -> list[tuple[int, StreamEvent]]:
        events = [(index, delta) for index, stream in self._deltas.items() for delta in stream.deltas()]
        finished = [(index, group.output) for index, group in self.groups.items() if group.output is not None]
        for index, _ in finished:
            del self.groups[index]
            self._deltas.pop(index, None)
        return events if self._streams else finished

    def _abort(self, indices: list[int]) -> None:
        with self._lock:
            for index in indices:
                group = self.groups.pop(index)
                self._deltas.pop(index, None)
                if group.output is None:  # a newer request may have a finished request's id
                    self._engine.abort_request(group.request_id)


def output_of(event: StreamEvent | None) -> RequestOutput | None:
    """Return the output of a finished request; None before it finishes."""
    return event.output if isinstance(event, Delta) else event


def without_errors(events: Iterable[tuple[int, StreamEvent]], noun: str) -> Iterator[tuple[int, StreamEvent]]:
    """Yield events; raises RequestError if a request itself is at fault, RuntimeError for other failures."""
    for index, event in events:
        output = output_of(event)
        if output is not None and output.error is not None:
            if output.exception is None:
                raise RuntimeError(f"{noun} {index}: {output.error}")
            output.exception.request_index, output.exception.noun = index, noun
            raise output.exception
        yield index, event
