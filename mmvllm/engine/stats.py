"""What a step did, and how long its parts took."""

import time
from dataclasses import dataclass
from itertools import pairwise

import torch

from mmvllm.engine.scheduler import Schedule, Scheduler


class Stopwatch:
    """Seconds between marks. On CUDA the marks are events in the stream, so that taking the time waits for nothing."""

    def __init__(self, device: torch.device):
        self._on_cuda = device.type == "cuda"
        self._marks = [("start", self._now())]

    def mark(self, name: str) -> None:
        """What was done since the last mark was `name`."""
        self._marks.append((name, self._now()))

    def seconds(self) -> dict[str, float]:
        """By name; on CUDA the stream must have reached the last mark."""
        return {name: self._between(begin, end) for (_, begin), (name, end) in pairwise(self._marks)}

    def _now(self) -> "float | torch.cuda.Event":
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, begin, end) -> float:
        if not self._on_cuda:
            return end - begin
        end.synchronize()
        return begin.elapsed_time(end) / 1000


@dataclass(frozen=True, slots=True)
class StepStats:
    """One step; `seconds` has those of its parts that took place.

    These are "schedule", "pack", "vision", "decoder", "sampling" and "commit". The commit of a step behind which the
    next one was launched already takes none of the device's time, and is left out.
    """

    end: float  # time.perf_counter()
    seconds: dict[str, float]
    num_prefill_tokens: int  # of prompts, or computed again after a preemption
    num_decode_tokens: int
    num_images: int
    num_patches: int
    num_running: int
    num_waiting: int
    num_used_blocks: int


def step_stats(step: Schedule, scheduler: Scheduler, seconds: dict[str, float]) -> StepStats:
    """Call it after the step's commit: who runs and waits is counted then."""
    num_decode_tokens = sum(chunk.decodes for chunk in step.chunks)
    return StepStats(
        end=time.perf_counter(),
        seconds=seconds,
        num_prefill_tokens=step.num_tokens - num_decode_tokens,
        num_decode_tokens=num_decode_tokens,
        num_images=len(step.images_to_encode),
        num_patches=step.num_patches,
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting),
        num_used_blocks=scheduler.block_manager.num_blocks - scheduler.block_manager.num_free_blocks,
    )
