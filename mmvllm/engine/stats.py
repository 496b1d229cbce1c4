"""Statistics of a step, of an engine's current state, and totals."""

import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields
from operator import add

from mmvllm.outputs import RequestOutput
from mmvllm.scheduler.output import SchedulerOutput
from mmvllm.scheduler.scheduler import Scheduler

RATE_WINDOW_S = 10.0
TOTALS = (
    *("num_finished", "num_prompt_tokens", "num_cached_tokens", "num_output_tokens"),
    *("num_images", "num_encoded_images", "num_preemptions", "step_sizes"),
)
STEP_SIZES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # vLLM's bounds


@dataclass(frozen=True, slots=True)
class StepStats:
    """Statistics of one step; `seconds` has the time of each phase that ran, if the executor has a `clock`.

    The phases are "schedule", "pack", "send" (to other ranks), "vision", "copy", "decoder", "sample", "append" and
    "commit". "commit" is left out if the next step was launched before it, because it then takes no device time.
    """

    end: float  # time.perf_counter()
    seconds: dict[str, float]
    num_prefill_tokens: int  # of prompts, or recomputed after a preemption
    num_decode_tokens: int
    num_images: int  # encoded images, and temporal patches of videos
    num_new_images: int  # images of requests that began
    num_patches: int
    num_running: int
    num_waiting: int
    num_used_blocks: int


def step_stats(step: SchedulerOutput, scheduler: Scheduler, seconds: dict[str, float]) -> StepStats:
    """Return the statistics of a step, after its commit: they count the sequences that run and wait now."""
    num_decode_tokens = len(step.decodes)
    return StepStats(
        end=time.perf_counter(),
        seconds=seconds,
        num_prefill_tokens=step.num_tokens - num_decode_tokens,
        num_decode_tokens=num_decode_tokens,
        num_images=len(step.mm_items_to_encode),
        num_new_images=step.num_new_images,
        num_patches=step.num_patches,
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting),
        num_used_blocks=scheduler.block_manager.num_blocks - scheduler.block_manager.num_free_blocks,
    )


@dataclass(frozen=True, slots=True)
class StepSizes:
    """The number of steps by computed tokens: up to each bound in `STEP_SIZES`, and above the last one."""

    counts: tuple[int, ...] = (0,) * (len(STEP_SIZES) + 1)  # each step is counted once
    num_tokens: int = 0  # of all steps

    def __add__(self, other: "StepSizes") -> "StepSizes":
        return StepSizes(tuple(map(add, self.counts, other.counts)), self.num_tokens + other.num_tokens)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """An engine's current state, and `TOTALS` since it started."""

    num_preparing: int = 0  # requests that are admitted but not in the engine yet
    num_waiting: int = 0  # sequences
    num_running: int = 0
    num_used_blocks: int = 0
    num_blocks: int = 0
    num_released: int = 0  # engines that have freed their memory until the next request
    prompt_tokens_per_s: float = 0.0  # computed, over the last seconds
    output_tokens_per_s: float = 0.0
    num_finished: int = 0  # requests
    num_prompt_tokens: int = 0  # of finished requests
    num_cached_tokens: int = 0  # of these prompt tokens
    num_output_tokens: int = 0
    num_images: int = 0  # images, and temporal patches of videos, of requests that have begun
    num_encoded_images: int = 0
    num_preemptions: int = 0
    step_sizes: StepSizes = StepSizes()

    def __add__(self, other: "EngineStats") -> "EngineStats":
        """Add the statistics of two engines, or of two processes of one engine."""
        return EngineStats(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    def totals(self) -> "EngineStats":
        """Return the statistics that remain when the engine ends."""
        return EngineStats(**{name: getattr(self, name) for name in TOTALS})

    @property
    def kv_usage(self) -> float:
        """Share of the KV cache's blocks that sequences hold, in [0, 1]."""
        return self.num_used_blocks / self.num_blocks

    @property
    def prefix_hit_rate(self) -> float | None:
        """Share of prompt tokens that were not computed; None before the first request has finished."""
        return self.num_cached_tokens / self.num_prompt_tokens if self.num_prompt_tokens else None

    @property
    def image_hit_rate(self) -> float | None:
        """Share of `num_images` that were not encoded, because their embeddings or the prompt's KV were cached."""
        return max(0.0, 1 - self.num_encoded_images / self.num_images) if self.num_images else None


class Meter:
    """Counts for `EngineStats`; may be read from any thread."""

    def __init__(self):
        self._lock = threading.Lock()
        self._started = time.perf_counter()
        self._recent_prompt_tokens, self._recent_output_tokens = _RecentSum(), _RecentSum()
        self._finished = self._prompt_tokens = self._cached_tokens = self._output_tokens = 0
        self._images = self._encoded_images = 0
        self._step_counts, self._step_tokens = [0] * (len(STEP_SIZES) + 1), 0

    def add_step(self, step: StepStats) -> None:
        num_tokens = step.num_prefill_tokens + step.num_decode_tokens
        with self._lock:
            self._step_counts[bisect_left(STEP_SIZES, num_tokens)] += 1
            self._step_tokens += num_tokens
            self._images += step.num_new_images
            self._encoded_images += step.num_images
            self._recent_prompt_tokens.add(step.num_prefill_tokens)

    def add_outputs(self, outputs: Sequence[RequestOutput], num_tokens: int) -> None:
        """Count the requests that finished in a step, and the tokens that it generated for all requests."""
        with self._lock:
            self._finished += len(outputs)
            self._prompt_tokens += sum(output.num_prompt_tokens for output in outputs)
            self._cached_tokens += sum(output.num_cached_tokens for output in outputs)
            self._output_tokens += num_tokens
            self._recent_output_tokens.add(num_tokens)

    def stats(self, scheduler: Scheduler, num_preparing: int) -> EngineStats:
        blocks = scheduler.block_manager  # only counts are read, which another thread may change meanwhile
        with self._lock:
            seconds = max(1e-3, min(RATE_WINDOW_S, time.perf_counter() - self._started))
            return EngineStats(
                num_preparing=num_preparing,
                num_waiting=len(scheduler.waiting),
                num_running=len(scheduler.running),
                num_used_blocks=blocks.num_blocks - blocks.num_free_blocks,
                num_blocks=blocks.num_blocks,
                prompt_tokens_per_s=self._recent_prompt_tokens.value() / seconds,
                output_tokens_per_s=self._recent_output_tokens.value() / seconds,
                num_finished=self._finished,
                num_prompt_tokens=self._prompt_tokens,
                num_cached_tokens=self._cached_tokens,
                num_output_tokens=self._output_tokens,
                num_images=self._images,
                num_encoded_images=self._encoded_images,
                num_preemptions=scheduler.num_preemptions,
                step_sizes=StepSizes(tuple(self._step_counts), self._step_tokens),
            )


class _RecentSum:
    """The sum of the counts added in the last seconds; adding and reading take amortized constant time."""

    def __init__(self):
        self._added: deque[tuple[float, int]] = deque()  # (when, count)
        self._sum = 0

    def add(self, count: int) -> None:
        if count:
            self._added.append((time.perf_counter(), count))
            self._sum += count
        self._drop_old()

    def value(self) -> int:
        self._drop_old()
        return self._sum

    def _drop_old(self) -> None:
        begin = time.perf_counter() - RATE_WINDOW_S
        while self._added and self._added[0][0] < begin:
            self._sum -= self._added.popleft()[1]
