"""One run of requests through an `LLM`, submitted like a user's requests."""

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from mmvllm.engine.stats import StepStats
from mmvllm.entrypoints.llm import LLM
from mmvllm.inputs import EngineInput, Grid
from mmvllm.outputs import RequestOutput
from mmvllm.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Run:
    """Measurements of a run; outputs have the times of each request. Other engines have no steps and no caches."""

    start: float  # in seconds since the epoch, like the times of outputs
    start_counter: float  # the same time on time.perf_counter(), like the ends of steps
    seconds: float  # from submission to the last output
    outputs: list[RequestOutput]
    peak_memory: int
    steps: list[StepStats] = field(default_factory=list)
    grids: list[Grid] = field(default_factory=list)  # of all images
    worker_seconds: float = 0.0  # CPU time of preparation, in all threads
    encoder_lookups: int = 0
    encoder_hits: int = 0
    decode_seconds: list[float] = field(default_factory=list)  # of OpenVINO's steps after the last prompt


class Mmvllm:
    """The engine under test, with the same `run` as `Transformers`."""

    def __init__(self, llm: LLM):
        self.llm = llm

    def run(self, requests: list[dict], output_tokens: int) -> Run:
        """Generate exactly `output_tokens` tokens per request; raise ValueError if they exceed the model's length."""
        engine, device = self.llm.engine, self.llm.engine.model_runner.device
        cache, params = engine.encoder_cache, SamplingParams(max_tokens=output_tokens, ignore_eos=True)
        lookups, hits = cache.num_lookups, cache.num_hits
        reset_peak_memory(device)
        with _recorded(self.llm, output_tokens) as (steps, grids, worker_seconds):
            start_counter, start = now(device), time.time()
            outputs = list(self.llm.stream_multimodal(requests, params))
            seconds = now(device) - start_counter
        return Run(
            start,
            start_counter,
            seconds,
            outputs,
            peak_memory(device),
            steps,
            grids,
            sum(worker_seconds),
            encoder_lookups=cache.num_lookups - lookups,
            encoder_hits=cache.num_hits - hits,
        )


@contextmanager
def _recorded(llm: LLM, output_tokens: int) -> Iterator[tuple[list[StepStats], list[Grid], list[float]]]:
    """Collect the engine's steps, the grids of images, and the CPU seconds of each request's preparation.

    A prompt that leaves no room for `output_tokens` raises ValueError as soon as it is prepared.
    """
    steps, grids, seconds, processor = [], [], [], llm.processor

    def timed(request: dict) -> EngineInput:
        start = time.thread_time()
        prompt = processor(request)
        seconds.append(time.thread_time() - start)
        grids.extend(item.grid for item in prompt.mm_items)
        _check_room(len(prompt.token_ids), output_tokens, llm.engine.max_model_len)
        return prompt

    llm.processor, llm.engine.on_step, llm.engine.executor.clock = timed, steps.append, "device"
    try:
        yield steps, grids, seconds
    finally:
        llm.processor, llm.engine.on_step, llm.engine.executor.clock = processor, None, None


def _check_room(num_prompt_tokens: int, output_tokens: int, max_model_len: int) -> None:
    if num_prompt_tokens + output_tokens > max_model_len:
        raise ValueError(
            f"--output-tokens is {output_tokens}, but a prompt of {num_prompt_tokens} tokens leaves room for "
            f"{max(0, max_model_len - num_prompt_tokens)} up to the model's {max_model_len}; lower it, --prompt-tokens "
            "or --size"
        )


def now(device: torch.device) -> float:
    """Return time.perf_counter() after all work submitted to the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def step_seconds(step: StepStats) -> float:
    return sum(step.seconds.values())


def is_prefill(step: StepStats) -> bool:
    """Return whether a step computed any prompt token, possibly together with decodes."""
    return step.num_prefill_tokens > 0


def reset_peak_memory(device: torch.device) -> None:
    """Reset the peak memory of a GPU, or of the process, which only Linux supports."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory(device: torch.device) -> int:
    """Return the peak bytes since the reset: allocated on a GPU, elsewhere the resident set of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
