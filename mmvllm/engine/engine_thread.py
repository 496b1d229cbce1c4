"""The thread that owns an engine: it takes requests, steps while there is work, and hands out what is new."""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

from mmvllm.engine.llm_engine import LLMEngine
from mmvllm.engine.sequence import Sequence, SequenceGroup
from mmvllm.engine.stats import EngineStats, Meter
from mmvllm.errors import RequestFailed
from mmvllm.outputs import CompletionOutput, Delta, RequestOutput
from mmvllm.processors.chat import Prompt
from mmvllm.sampling_params import SamplingParams

logger = logging.getLogger(__name__)


class Receiver(Protocol):
    """Who waits for the `num_answers` answers to a request; `group` is written here, once the engine has it."""

    request_id: str
    arrival_time: float
    num_answers: int
    group: SequenceGroup | None
    ended: Future[None]  # done once nobody waits any more


Event = tuple[Receiver, Delta | Exception]


class _Answer:
    """One sequence, and how much of it has been handed out."""

    def __init__(self, seq: Sequence, index: int):
        self.seq, self.index = seq, index
        self.has_ended = False  # whether its last delta has been handed out
        self._num_sent, self._num_sent_chars = 0, 0

    def delta(self) -> Delta | None:
        """What can be said of an answer that goes on."""
        text = self.seq.answer_text
        settled = text.num_settled
        return self._take(text.text[:settled]) if settled > self._num_sent_chars else None

    def last_delta(self, completion: CompletionOutput, output: RequestOutput | None) -> Delta:
        self.has_ended = True
        return self._take(completion.text, finish_reason=completion.finish_reason, output=output)

    def _take(self, text: str, **rest: Any) -> Delta:
        seq, start = self.seq, self._num_sent
        token_ids = seq.token_ids[seq.num_prompt_tokens + start :]
        logprobs = None if seq.sampling_params.logprobs is None else seq.logprobs[start:]
        new = text[self._num_sent_chars :]
        self._num_sent, self._num_sent_chars = start + len(token_ids), len(text)
        return Delta(seq.request_id, self.index, new, token_ids, logprobs, **rest)


class _Request:
    """A request in the engine."""

    def __init__(self, receiver: Receiver, group: SequenceGroup, complete: Callable[[Sequence], CompletionOutput]):
        self.receiver, self._group, self._complete = receiver, group, complete
        self._is_counted, self._num_tokens = False, 0
        self._answers = [_Answer(seq, index) for index, seq in enumerate(group.seqs)]

    def count(self, meter: Meter) -> int:
        """Look at what the last step did; return the number of new tokens."""
        if not self._is_counted and self._group.has_begun:
            self._is_counted = True
            meter.add_begun(self._group)
        before, self._num_tokens = self._num_tokens, sum(seq.num_completion_tokens for seq in self._group.seqs)
        return self._num_tokens - before

    def events(self, output: RequestOutput | None) -> list[Event]:
        """What is new, all that is left if the request has its `output`."""
        if output is not None and output.error is not None:
            return [(self.receiver, RequestFailed(output.error))]
        answers = [answer for answer in self._answers if not answer.has_ended]
        deltas = [self._delta(answer, output if answer is answers[-1] else None) for answer in answers]
        return [(self.receiver, delta) for delta in deltas if delta is not None]

    def _delta(self, answer: _Answer, output: RequestOutput | None) -> Delta | None:
        if not answer.seq.is_finished:
            return answer.delta()
        completion = self._complete(answer.seq) if output is None else output.completions[answer.index]
        return answer.last_delta(completion, output)


class EngineThread:
    """Runs an engine, which nobody else may touch from then on.

    Args:
        deliver: takes what is new after a step; called in the thread.
        on_failure: told what broke the engine, or the thread; nothing is delivered any more.
    """

    def __init__(
        self,
        engine: LLMEngine,
        deliver: Callable[[list[Event]], None],
        on_failure: Callable[[BaseException], None],
    ):
        self.failing: str | None = None  # why requests failed in the last step
        self._engine, self._deliver, self._on_failure = engine, deliver, on_failure
        self._scheduler = engine.scheduler
        self._requests: dict[str, _Request] = {}
        self._meter = Meter()
        engine.on_step = self._meter.add_step
        self._changed = threading.Condition()
        self._commands: list[Callable[[], None]] = []
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="mmvllm-engine", daemon=True)
        self._thread.start()

    def add(self, receiver: Receiver, prompt: Prompt, params: SamplingParams, **options: Any) -> None:
        """Give the engine a request; what is wrong with it is delivered."""
        self._post(partial(self._add, receiver, prompt, params, options))

    def abort(self, receiver: Receiver) -> None:
        """End a request before the next step, and deliver what it has so far."""
        self._post(partial(self._abort, receiver))

    def stop(self) -> None:
        """End the thread after the step that runs."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join()

    def stats(self, num_preparing: int) -> EngineStats:
        return self._meter.stats(self._scheduler, num_preparing)

    def _post(self, command: Callable[[], None]) -> None:
        with self._changed:
            self._commands.append(command)
            self._changed.notify()

    def _run(self) -> None:
        try:
            while self._obey():
                if not self._engine.is_finished():
                    self._advance()
        except BaseException as error:
            logger.exception("the engine broke")
            self._on_failure(error)

    def _obey(self) -> bool:
        """Wait for something to do and do what was asked; False once that was to stop."""
        with self._changed:
            self._changed.wait_for(lambda: self._commands or self._stopped or not self._engine.is_finished())
            commands, self._commands = self._commands, []
            stopped = self._stopped
        for command in commands:
            command()
        return not stopped

    def _add(self, receiver: Receiver, prompt: Prompt, params: SamplingParams, options: dict[str, Any]) -> None:
        if receiver.ended.done():  # aborted while this was on its way
            return
        request_id = receiver.request_id
        try:
            self._engine.add_request(
                prompt.token_ids, params, request_id, **options, **prompt.multimodal, follow_text=True
            )
        except ValueError as error:
            self._deliver([(receiver, error)])
            return
        except Exception as error:  # a mistake of ours, and not the affair of other requests
            self._deliver([(receiver, RequestFailed(f"preparation failed: {type(error).__name__}: {error}"))])
            return
        group = self._scheduler.groups[request_id]
        receiver.group = group
        self._requests[request_id] = _Request(receiver, group, self._engine.completion)

    def _abort(self, receiver: Receiver) -> None:
        request = self._requests.get(receiver.request_id)
        if request is None or request.receiver is not receiver:  # not here yet, or no more
            self._deliver(_aborted(receiver))
            return
        del self._requests[receiver.request_id]
        output = self._engine.abort_request(receiver.request_id)
        self._deliver(request.events(output))

    def _advance(self) -> None:
        outputs, _ = self._engine.step()
        finished = {output.request_id: output for output in outputs}
        events, num_new = [], 0
        for request_id, request in [*self._requests.items()]:
            num_new += request.count(self._meter)
            output = finished.get(request_id)
            events += request.events(output)
            if output is not None:
                self._meter.add_finished(output)
                del self._requests[request_id]
        self.failing = next((output.error for output in outputs if output.error is not None), None)
        self._meter.add_output_tokens(num_new)
        self._deliver(events)


def _aborted(receiver: Receiver) -> list[Event]:
    """The end of a request that the engine does not have."""
    completions = [CompletionOutput("", [], "aborted") for _ in range(receiver.num_answers)]
    output = RequestOutput(
        receiver.request_id, completions, arrival_time=receiver.arrival_time, finish_time=time.time()
    )
    last = receiver.num_answers - 1
    return [
        (receiver, Delta(receiver.request_id, i, "", [], finish_reason="aborted", output=output if i == last else None))
        for i in range(receiver.num_answers)
    ]
