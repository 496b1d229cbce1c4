"""Seconds of the steps of an `AsyncLLM` whose streams are all consumed in one event loop."""

import asyncio
import time
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from mmvllm.bench.host_engine import HostCase, StandIn
from mmvllm.bench.host_steps import ROUNDS, HostTimes, median_parts, num_filling_steps, step_parts
from mmvllm.engine.stats import StepStats
from mmvllm.entrypoints.async_llm import AsyncLLM

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
    cpu_times: list[float] = []
    with step_parts(engine._engine, lambda: cpu_times.append(time.thread_time())) as stats:
        received, _ = await _consume(engine, model, case, per_round)
    parts = _parts(stats, cpu_times) | {"receive": _per_step(received[0], received[-1], "loop_seconds")}
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


def _parts(stats: list[StepStats], cpu_times: list[float]) -> dict[str, float]:
    """Return the times of the steps in which all sequences decoded: their parts, and the rest of the thread's work.

    `cpu_times` are the CPU times of the engine's thread at the end of each step.
    """
    most = max(step.num_decode_tokens for step in stats)
    numbers = [i for i, step in enumerate(stats) if i and step.num_decode_tokens == most]
    parts = median_parts([stats[i] for i in numbers])
    whole = median(cpu_times[i] - cpu_times[i - 1] for i in numbers)
    return parts | {"deliver": whole - sum(parts.values())}
