"""Seconds of the steps of an `AsyncLLM` whose streams are all consumed in one event loop."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from mmvllm.bench.host_engine import HostCase, StandIn
from mmvllm.bench.host_steps import ROUNDS, HostTimes, median_parts, num_filling_steps, step_parts
from mmvllm.engine.stats import StepStats
from mmvllm.entrypoints.async_llm import AsyncLLM
from mmvllm.scheduler.detokenizer import TokenDecoder

SPARE_STEPS = 50  # requests reach the engine one by one


@dataclass(frozen=True, slots=True)
class _Received:
    """The times at which the first stream received a delta."""

    seconds: float
    cpu_seconds: float  # of the process
    loop_seconds: float  # CPU time of the event loop's thread
    num_tokens: int


async def measure_streams(engine: AsyncLLM, model: StandIn, case: HostCase, steps: int) -> HostTimes:
    """Run a case's requests as streams for `steps` steps in rounds, and again for a round to measure the parts."""
    received, num_tokens = await _consume(engine, model, case, steps)
    per_round = len(received) // ROUNDS
    rounds = [received[i * per_round : (i + 1) * per_round] for i in range(ROUNDS)]
    with _timed(engine) as timers:
        received, _ = await _consume(engine, model, case, per_round)
    parts = timers.parts() | {"receive": _per_step(received[0], received[-1], "loop_seconds")}
    cpu_seconds = median(_per_step(one[0], one[-1], "cpu_seconds") for one in rounds)
    return HostTimes(min(map(_median_step, rounds)), cpu_seconds, parts, num_tokens)


async def _consume(engine: AsyncLLM, model: StandIn, case: HostCase, steps: int) -> tuple[list[_Received], int]:
    """Consume all streams; return the deltas of the first in its last `steps` steps, and the number of all tokens."""
    counts, received = [0] * case.sequences, []
    max_tokens = num_filling_steps(case) + case.sequences + SPARE_STEPS + steps

    async def consume(index: int, prompt: list[int]) -> None:
        async for delta in engine.generate(prompt, case.params(index, max_tokens)):
            counts[index] += len(delta.token_ids)
            if index == 0:
                received.append(_Received(time.perf_counter(), time.process_time(), time.thread_time(), counts[0]))

    prompts = [model.prompt(case.context).token_ids for _ in counts]
    await asyncio.gather(*(consume(index, prompt) for index, prompt in enumerate(prompts)))
    return received[-steps - 2 : -1], sum(counts)  # without the last delta, which has the request's output


def _per_step(begin: _Received, end: _Received, name: str) -> float:
    return (getattr(end, name) - getattr(begin, name)) / (end.num_tokens - begin.num_tokens)


def _median_step(received: list[_Received]) -> float:
    return median(_per_step(begin, end, "seconds") for begin, end in pairwise(received))


class _Timers:
    """Seconds of each step of the engine's thread: CPU time after `engine.step`, and its part for detokenizing."""

    def __init__(self, stats: list[StepStats]):
        self.stats, self.delivering, self.detokenizing = stats, [], [0.0]

    def parts(self) -> dict[str, float]:
        """Return the times of the steps in which all sequences decoded."""
        most = max(step.num_decode_tokens for step in self.stats)
        numbers = [i for i, step in enumerate(self.stats) if step.num_decode_tokens == most]
        detokenize = median(self.detokenizing[i] for i in numbers)
        deliver = median(self.delivering[i] - self.detokenizing[i] for i in numbers)
        return median_parts([self.stats[i] for i in numbers]) | {"detokenize": detokenize, "deliver": deliver}


@contextmanager
def _timed(engine: AsyncLLM) -> Iterator[_Timers]:
    """Measure the parts of each step."""
    thread, decode = engine._thread, TokenDecoder.decode
    run_step, engine_step = thread._step, engine._engine.step

    def timed_decode(decoder: TokenDecoder, token_ids: list[int]) -> str:
        start = time.perf_counter()
        text = decode(decoder, token_ids)
        timers.detokenizing[-1] += time.perf_counter() - start
        return text

    def timed_engine_step() -> Any:
        result = engine_step()
        timers.delivering.append(-time.thread_time())
        return result

    def timed_step() -> None:
        run_step()
        timers.delivering[-1] += time.thread_time()
        timers.detokenizing.append(0.0)

    with step_parts(engine._engine) as stats:
        timers = _Timers(stats)
        thread._step, engine._engine.step, TokenDecoder.decode = timed_step, timed_engine_step, timed_decode
        try:
            yield timers
        finally:
            del thread._step, engine._engine.step
            TokenDecoder.decode = decode
