"""Counters of a running job."""

import time


class Progress:
    """Counters that the job's threads write and any thread may read.

    `engine_wait_share` is the share of the time since the first image was prepared in which the engine had no image to
    work on, in [0, 1].
    """

    def __init__(self):
        self.num_captioned = self.num_duplicates = self.num_failed = self.num_skipped = 0
        self.num_tokens = 0  # of captions that the model wrote
        self.engine_wait_share = 0.0
        self._start = time.perf_counter()
        self._end: float | None = None

    @property
    def num_done(self) -> int:
        """Number of images recorded in this run."""
        return self.num_captioned + self.num_duplicates + self.num_failed

    @property
    def seconds(self) -> float:
        """Time since the start of the run, or its duration once it has ended."""
        return (self._end or time.perf_counter()) - self._start

    def add(self, record: dict) -> None:
        if record["error"] is not None:
            self.num_failed += 1
        elif record["duplicate_of"] is not None:
            self.num_duplicates += 1
        else:
            self.num_captioned += 1
            self.num_tokens += record["completion_tokens"]

    def end(self) -> None:
        self._end = time.perf_counter()
