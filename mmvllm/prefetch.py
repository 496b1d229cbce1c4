"""Requests prepared in workers, ahead of the engine and bounded.

A feeder thread walks the caller's iterable, which may be endless or slow, and hands requests to a pool. Its workers are
threads, unless the caller has processes made: Pillow, numpy and torch let go of the interpreter lock in their loops, so
preparation runs beside the model. At most `max_requests` are held, and no new one is begun while those held take
`max_bytes`.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import BrokenExecutor, Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

from mmvllm.processors.chat import Prompt

NUM_WORKERS = min(8, os.cpu_count() or 1)
MAX_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request, its place in the caller's order; `prompt.result()` gives the prompt or raises what was wrong."""

    index: int
    request: dict
    prompt: "Future[Prompt]"


def worker_threads(num_workers: int) -> Executor:
    return ThreadPoolExecutor(num_workers, thread_name_prefix="mmvllm-prepare")


class Prefetcher:
    """Walks `requests` and has `prepare` make prompts of them, so many at a time and so many ahead.

    Args:
        in_order: give requests in the caller's order, rather than each as soon as it is prepared.
        make_pool: makes the workers; anew if one has died, a process that a damaged picture killed.
    """

    def __init__(
        self,
        requests: Iterable[dict],
        prepare: Callable[[dict], Prompt],
        max_requests: int,
        max_bytes: int = MAX_BYTES,
        num_workers: int = NUM_WORKERS,
        in_order: bool = True,
        make_pool: Callable[[int], Executor] = worker_threads,
    ):
        self._started: float | None = None  # when `get` first gave something
        self._waited = 0.0  # seconds since then in which it had nothing to give to who could do nothing else
        self._requests, self._prepare = requests, prepare
        self._max_requests, self._max_bytes, self._num_workers = max_requests, max_bytes, num_workers
        self._changed = threading.Condition()
        self._items: deque[Prepared] = deque()
        self._num_preparing = 0
        self._num_bytes = 0
        self._exhausted = self._closed = False
        self._failure: BaseException | None = None
        self._in_order = in_order
        self._make_pool, self._pool = make_pool, make_pool(num_workers)
        self._has_prepared = False
        # A daemon, because an endless iterable may never let it look at `_closed` again.
        threading.Thread(target=self._feed, name="mmvllm-feed", daemon=True).start()

    def get(self, wait: bool) -> Prepared | None:
        """The next prepared request; None if there is none yet and `wait` is false, or none will ever come.

        Raises what the caller's iterable raised, once all before that has been given, if `wait` is true.
        """
        with self._changed:
            start = time.perf_counter()
            if wait:
                self._changed.wait_for(lambda: self._ready() is not None or (self._exhausted and not self._items))
            place = self._ready()
            if self._started is not None:
                self._waited += time.perf_counter() - start
            if place is None:
                if wait and self._failure is not None and not self._items:
                    raise self._failure
                return None
            self._started = self._started or time.perf_counter()
            item = self._items[place]
            del self._items[place]
            self._num_bytes -= _num_bytes(item.prompt)
            self._changed.notify_all()
        return self._alone(item) if _has_died(item.prompt) else item

    @property
    def is_exhausted(self) -> bool:
        """Whether every request has been handed out."""
        with self._changed:
            return self._exhausted and not self._items and self._failure is None

    @property
    def wait_share(self) -> float:
        """Share of the time, since the first request was ready, that was spent waiting for others, in [0, 1]."""
        return 0.0 if self._started is None else self._waited / (time.perf_counter() - self._started)

    def finish(self) -> None:
        """Take no more requests; those that have been taken are still given."""
        with self._changed:
            self._exhausted = True
            self._changed.notify_all()

    def close(self) -> None:
        """Stop preparing; what has been prepared is dropped."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _feed(self) -> None:
        try:
            for index, request in enumerate(self._requests):
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or self._exhausted or self._has_room())
                    if self._closed or self._exhausted:
                        return
                    self._num_preparing += 1
                # Not under our lock: a pool that breaks holds its own while it calls `_on_done`.
                future = self._submit(request)
                with self._changed:
                    self._items.append(Prepared(index, request, future))
                future.add_done_callback(self._on_done)
        except BaseException as error:  # it is the caller's, and is raised again in `get`
            self._failure = error
        finally:
            with self._changed:
                self._exhausted = True
                self._changed.notify_all()

    def _submit(self, request: dict) -> "Future[Prompt]":
        try:
            return self._pool.submit(self._prepare, request)
        except BrokenExecutor:
            self._pool = self._make_pool(self._num_workers)
            return self._pool.submit(self._prepare, request)

    def _alone(self, item: Prepared) -> Prepared:
        """Prepare again, in a worker of its own, what was there when a worker died: one of these is to blame."""
        with self._make_pool(1) as pool:
            future = pool.submit(self._prepare, item.request)
        if _has_died(future) and not self._has_prepared:
            raise RuntimeError(f"workers that prepare pictures end as soon as they begin: {future.exception()}")
        return Prepared(item.index, item.request, future)

    def _has_room(self) -> bool:
        # Only as many are begun as there are workers: how many bytes one takes is known when it is done.
        return (
            len(self._items) < self._max_requests
            and self._num_preparing < self._num_workers
            and self._num_bytes < self._max_bytes
        )

    def _on_done(self, future: "Future[Prompt]") -> None:
        with self._changed:
            self._num_preparing -= 1
            self._num_bytes += _num_bytes(future)
            self._has_prepared |= not _has_died(future)
            self._changed.notify_all()

    def _ready(self) -> int | None:
        """The place of a request that can be given."""
        candidates = islice(self._items, 1) if self._in_order else self._items
        return next((place for place, item in enumerate(candidates) if item.prompt.done()), None)


def _has_died(future: "Future[Prompt]") -> bool:
    return not future.cancelled() and isinstance(future.exception(), BrokenExecutor)


def _num_bytes(future: "Future[Prompt]") -> int:
    failed = future.cancelled() or future.exception() is not None
    return 0 if failed else future.result().num_bytes
