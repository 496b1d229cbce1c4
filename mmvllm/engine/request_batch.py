"""Follows the requests that one caller has in an engine, from their admission to their last event."""

from collections.abc import Hashable
from enum import Enum
from typing import Any

from mmvllm.engine.llm_engine import LLMEngine
from mmvllm.engine.output_processor import DeltaStream
from mmvllm.inputs import EngineInput
from mmvllm.outputs import Delta, RequestOutput
from mmvllm.sampling_params import SamplingParams
from mmvllm.scheduler.sequence import SequenceGroup, SequenceStatus


class Started(Enum):
    """`BEGUN` is the first event of a request that the engine has begun to compute."""

    BEGUN = "begun"


BEGUN = Started.BEGUN
Event = RequestOutput | Delta | Started


class RequestBatch:
    """The requests of one caller that are in flight, by key.

    Callers may share an engine, from open generators or from threads: each gets the events of the requests it added,
    whichever caller ran the step.

    Args:
        streams: the events of a request are deltas of new text, rather than its output once it has finished. A request
            that fails has a single delta with the output.
    """

    def __init__(self, engine: LLMEngine, streams: bool = False):
        self._engine, self._streams = engine, streams
        self._requests: dict[Hashable, _Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def add(
        self, key: Hashable, prompt: EngineInput, params: SamplingParams, request_id: str | None = None, **options: Any
    ) -> None:
        """Add a request to the engine; see `LLMEngine.add` for `options` and errors."""
        with self._engine.lock:
            group = self._engine.add(prompt, params, request_id, **options)
            self._requests[key] = _Request(group, self._engine.delta_stream(group) if self._streams else None)

    def step(self) -> list[tuple[Hashable, Event]]:
        """Run one step, unless a request has already ended; return (key, event) pairs."""
        with self._engine.lock:
            self._engine.check_alive()
            if all(request.group.output is None for request in self._requests.values()):
                self._engine.step()
            return self._take_events()

    def abort(self, key: Hashable) -> list[Event] | None:
        """End a request, and return the events that are left; None if it is unknown or its last event was taken."""
        request = self._requests.pop(key, None)
        if request is None:
            return None
        with self._engine.lock:
            if request.group.output is None:  # otherwise a newer request may have its id
                self._engine.abort_request(request.group.request_id)
            return self._events(request)

    def abort_all(self) -> None:
        for key in [*self._requests]:
            self.abort(key)

    def waiting(self) -> list[Hashable]:
        """Return the requests that the engine has not begun."""
        return [key for key, request in self._requests.items() if not request.group.has_begun]

    def has_computed_prompt(self, key: Hashable) -> bool:
        """Return whether the prefix cache has a request's prompt, or the request has ended."""
        request = self._requests.get(key)
        return request is None or request.group.first_seq.first_token_time is not None

    def failure(self, output: RequestOutput) -> RequestOutput | Delta:
        """Return the only event of a request that fails or is refused."""
        if not self._streams:
            return output
        return Delta(output.request_id, 0, "", [], finish_reason="error", output=output)

    def _take_events(self) -> list[tuple[Hashable, Event]]:
        events: list[tuple[Hashable, Event]] = []
        finished = []
        for key, request in self._requests.items():
            if not request.has_begun:
                if not request.begins():
                    continue
                events.append((key, BEGUN))
            events += ((key, event) for event in self._events(request))
            if request.group.output is not None:
                finished.append(key)
        for key in finished:
            del self._requests[key]
        return events

    def _events(self, request: "_Request") -> list[Event]:
        output = request.group.output
        if output is not None and output.error is not None:
            return [self.failure(output)]
        if request.stream is not None:
            return request.stream.deltas()
        return [] if output is None else [output]


class _Request:
    """A request in the engine."""

    __slots__ = ("group", "has_begun", "stream")

    def __init__(self, group: SequenceGroup, stream: DeltaStream | None):
        self.group, self.stream, self.has_begun = group, stream, False

    def begins(self) -> bool:
        """Update and return whether the request has begun."""
        # Cheap even for many waiting requests: the first sequence begins first.
        self.has_begun = self.group.seqs[0].status is not SequenceStatus.WAITING
        return self.has_begun
