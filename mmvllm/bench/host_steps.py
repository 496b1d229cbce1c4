"""Measures an engine's steps in rounds, and separately the parts of steps."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from cProfile import Profile
from dataclasses import dataclass
from statistics import median

from mmvllm.bench.host_engine import MAX_BATCHED_TOKENS, HostCase, StandIn
from mmvllm.engine.llm_engine import LLMEngine
from mmvllm.engine.stats import StepStats
from mmvllm.inputs import EngineInput
from mmvllm.scheduler.sequence import SequenceGroup

ROUNDS = 3


@dataclass(frozen=True, slots=True)
class HostTimes:
    """Times in seconds: the lowest medians of the rounds, because other processes only add time."""

    seconds: float
    cpu_seconds: float  # of the engine's thread, or of the process with streams
    parts: dict[str, float]
    num_tokens: int  # generated in the steps of all rounds


def num_filling_steps(case: HostCase) -> int:
    """Return an upper bound of the steps until every sequence decodes."""
    return case.sequences if case.kind == "mixed" else case.sequences * (case.context + 1) // MAX_BATCHED_TOKENS + 2


def measure_steps(engine: LLMEngine, model: StandIn, case: HostCase, steps: int, profile: Profile | None) -> HostTimes:
    """Run a case's requests for `steps` steps in rounds, and for another round to measure the parts."""
    requests = _Requests(engine, model, case, max_tokens=num_filling_steps(case) + steps * 2 + ROUNDS)
    requests.start()
    before, per_round = requests.num_tokens, -(-steps // ROUNDS)
    rounds = [[requests.step() for _ in range(per_round)] for _ in range(ROUNDS)]
    num_tokens = requests.num_tokens - before
    with step_parts(engine) as stats:
        adding = [requests.step().adding for _ in range(per_round)]
    if profile is not None and case.kind == "decode":
        with profile:
            for _ in range(per_round):
                engine.step()
    requests.stop()
    parts = {"add": median(adding)} if case.kind == "mixed" else {}
    seconds, cpu_seconds = (
        min(median(getattr(step, name) for step in one) for one in rounds) for name in ("seconds", "cpu_seconds")
    )
    return HostTimes(seconds, cpu_seconds, parts | median_parts(stats), num_tokens)


@contextmanager
def step_parts(engine: LLMEngine, on_step: Callable[[], None] = lambda: None) -> Iterator[list[StepStats]]:
    """Collect the engine's steps, with the CPU time of their parts on any device; `on_step` is called after each."""
    stats: list[StepStats] = []

    def collect(step: StepStats) -> None:
        stats.append(step)
        on_step()

    before, engine.on_step, engine.executor.clock = engine.on_step, collect, "host"
    try:
        yield stats
    finally:
        engine.on_step, engine.executor.clock = before, None


def median_parts(stats: list[StepStats]) -> dict[str, float]:
    """Return the median seconds of each part that took place in any step."""
    names = dict.fromkeys(name for step in stats for name in step.seconds)
    return {name: median(step.seconds.get(name, 0.0) for step in stats) for name in names}


@dataclass(frozen=True, slots=True)
class _Step:
    """The seconds and the CPU time of a step and of adding the request before it, and the CPU time of adding."""

    seconds: float
    cpu_seconds: float
    adding: float


class _Requests:
    """The requests of a case, whose sequences all run."""

    def __init__(self, engine: LLMEngine, model: StandIn, case: HostCase, max_tokens: int):
        self._engine, self._model, self._case = engine, model, case
        # One request arrives in each mixed step; one finishes if each runs for as many steps as there are requests.
        self._max_tokens = case.sequences if case.kind == "mixed" else max_tokens
        self._groups: list[SequenceGroup] = []

    def start(self) -> None:
        if self._case.kind == "mixed":
            for _ in range(self._case.sequences):
                self.step()
            return
        for _ in range(self._case.sequences):
            self._add(self._model.prompt(self._case.context))
        while not all(group.first_seq.num_completion_tokens for group in self._groups):
            self._engine.step()

    def step(self) -> "_Step":
        """Add a request if one arrives, and run a step."""
        prompt = self._model.prompt(self._case.context) if self._case.kind == "mixed" else None
        start, cpu_start = time.perf_counter(), time.thread_time()
        if prompt is not None:
            self._add(prompt)
        adding = time.thread_time() - cpu_start
        self._engine.step()
        return _Step(time.perf_counter() - start, time.thread_time() - cpu_start, adding)

    def stop(self) -> None:
        for group in self._groups:
            if group.output is None:
                self._engine.abort_request(group.request_id)

    @property
    def num_tokens(self) -> int:
        return sum(group.first_seq.num_completion_tokens for group in self._groups)

    def _add(self, prompt: EngineInput) -> None:
        self._groups.append(self._engine.add(prompt, self._case.params(len(self._groups), self._max_tokens)))
