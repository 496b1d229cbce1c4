"""How far a job has come."""

import time


class Progress:
    """Counters that the job's threads write and anyone may read.

    `engine_wait_share` is the share of the time since the first picture was ready in which the engine had none to work
    on, in [0, 1].
    """

    def __init__(self):
        self.num_captioned = self.num_duplicates = self.num_failed = self.num_skipped = 0
        self.num_tokens = 0  # of captions that the model wrote
        self.engine_wait_share = 0.0
        self._start = time.perf_counter()
        self._end: float | None = None

    @property
    def num_done(self) -> int:
        """Pictures that got a record in this run."""
        return self.num_captioned + self.num_duplicates + self.num_failed

    @property
    def seconds(self) -> float:
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
