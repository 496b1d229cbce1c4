"""Ranks as threads of the test's process, which start in no time; other tests cover what processes add."""

import multiprocessing
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from mmvllm.worker import multiprocess_group, rank_process
from mmvllm.worker.model_runner import ModelRunner


class RankThread(threading.Thread):
    """Has what is used of a process."""

    exitcode = 0

    def __init__(self, pipe: Connection, *arguments: Any):
        super().__init__(daemon=True)
        self._pipe = pipe.__class__(pipe._handle)  # the caller closes its own
        pipe._handle = None
        self._arguments, (self.sentinel, self._ended) = arguments, multiprocessing.Pipe()
        self.start()

    def run(self) -> None:
        with self._ended, self._pipe, suppress(SystemExit):
            rank_process.serve_rank(self._pipe, *self._arguments)

    def kill(self) -> None:
        """Its pipe is closed, so it ends."""


def use_rank_threads(monkeypatch) -> None:
    """Engines of this test run their further ranks in threads."""
    monkeypatch.setattr(multiprocess_group, "_start_process", RankThread)


class FailingOnce:
    """Makes one rank fail in its n-th step from now on, before or after it has encoded images."""

    def __init__(self, monkeypatch, rank: int, step: int, error: Exception, method: str, min_size: int = 2):
        self.rank, self.step, self.error, self.steps = rank, step, error, 0
        self.has_failed = False
        real = getattr(ModelRunner, method)

        def run(runner, *arguments):
            if runner.ranks.rank == self.rank and runner.ranks.size >= min_size and not self.has_failed:
                self.steps += 1
                if self.steps == self.step:
                    self.has_failed = True
                    raise self.error
            return real(runner, *arguments)

        monkeypatch.setattr(ModelRunner, method, run)
