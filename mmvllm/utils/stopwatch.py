"""Timers for the parts of a step and for each run of the ViT."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch

Mark = float | torch.cuda.Event


@dataclass(frozen=True, slots=True)
class Encoding:
    """A run of the ViT; `start_time` is when it was launched, in seconds since the epoch."""

    start_time: float
    begin: Mark
    end: Mark

    def seconds(self) -> float | None:
        """Return the elapsed seconds on the device; None if the run has not finished."""
        if isinstance(self.end, float):
            return self.end - self.begin
        return _seconds(self.begin, self.end) if self.end.query() else None


class Stopwatch:
    """Measures the seconds between marks.

    Args:
        clock: "device" for the time at which the device reaches a mark, on CUDA an event in the stream, which waits for
            nothing; "host" for the CPU time of the calling thread; None to measure nothing.
    """

    def __init__(self, device: torch.device, clock: str | None):
        self._clock, self._on_cuda = clock, device.type == "cuda"
        self._marks = []
        self.encoding: Encoding | None = None  # timed even without a clock, since few steps run the ViT
        self.mark("start")

    def mark(self, name: str) -> None:
        """End the part called `name`, which began at the last mark."""
        if self._clock is not None:
            self._marks.append((name, time.thread_time() if self._clock == "host" else self._device_mark()))

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each part by name; on CUDA, wait until the stream has reached the last mark."""
        return {name: _seconds(begin, end) for (_, begin), (name, end) in pairwise(self._marks)}

    @contextmanager
    def timing_vision(self) -> Iterator[None]:
        """Time the ViT as `encoding`, and as the part "vision"."""
        start_time, begin = time.time(), self._device_mark()
        yield
        self.encoding = Encoding(start_time, begin, self._device_mark())
        self.mark("vision")

    def _device_mark(self) -> Mark:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _seconds(begin: Mark, end: Mark) -> float:
    if isinstance(end, float):
        return end - begin
    end.synchronize()
    return begin.elapsed_time(end) / 1000
