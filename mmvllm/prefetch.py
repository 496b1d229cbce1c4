"""Requests prepared in worker threads, ahead of the engine and bounded.

A feeder thread walks the caller's iterable, which may be endless or slow, and hands requests to a pool; results come
out in order. Pillow, numpy and torch let go of the interpreter lock in their loops, so preparation runs beside the
model. At most `max_requests` are held, and no new one is begun while those held take `max_bytes`.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from mmvllm.processors.chat import Prompt

NUM_WORKERS = min(8, os.cpu_count() or 1)
MAX_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request in the caller's order; `prompt.result()` gives the prompt or raises what was wrong."""

    index: int
    request: dict
    prompt: "Future[Prompt]"


class Prefetcher:
    def __init__(
        self,
        requests: Iterable[dict],
        prepare: Callable[[dict], Prompt],
        max_requests: int,
        max_bytes: int = MAX_BYTES,
        num_workers: int = NUM_WORKERS,
    ):
        self.waited_seconds = 0.0  # that `get` had nothing to give to who could do nothing else
        self._requests, self._prepare = requests, prepare
        self._max_requests, self._max_bytes, self._num_workers = max_requests, max_bytes, num_workers
        self._changed = threading.Condition()
        self._items: deque[Prepared] = deque()
        self._num_preparing = 0
        self._num_bytes = 0
        self._exhausted = self._closed = False
        self._failure: BaseException | None = None
        self._pool = ThreadPoolExecutor(num_workers, thread_name_prefix="mmvllm-prepare")
        # A daemon, because an endless iterable may never let it look at `_closed` again.
        threading.Thread(target=self._feed, name="mmvllm-feed", daemon=True).start()

    def get(self, wait: bool) -> Prepared | None:
        """The next prepared request; None if there is none yet and `wait` is false, or none will ever come.

        Raises what the caller's iterable raised.
        """
        with self._changed:
            if wait:
                start = time.perf_counter()
                self._changed.wait_for(lambda: self._is_head_ready() or (self._exhausted and not self._items))
                self.waited_seconds += time.perf_counter() - start
            if not self._is_head_ready():
                if self._failure is not None and not self._items:
                    raise self._failure
                return None
            item = self._items.popleft()
            self._num_bytes -= _num_bytes(item.prompt)
            self._changed.notify_all()
            return item

    @property
    def is_exhausted(self) -> bool:
        """Whether every request has been handed out."""
        with self._changed:
            return self._exhausted and not self._items and self._failure is None

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
                    self._changed.wait_for(lambda: self._closed or self._has_room())
                    if self._closed:
                        return
                    future = self._pool.submit(self._prepare, request)
                    self._num_preparing += 1
                    self._items.append(Prepared(index, request, future))
                future.add_done_callback(self._on_done)
        except BaseException as error:  # it is the caller's, and is raised again in `get`
            self._failure = error
        finally:
            with self._changed:
                self._exhausted = True
                self._changed.notify_all()

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
            self._changed.notify_all()

    def _is_head_ready(self) -> bool:
        return bool(self._items) and self._items[0].prompt.done()


def _num_bytes(future: "Future[Prompt]") -> int:
    failed = future.cancelled() or future.exception() is not None
    return 0 if failed else future.result().num_bytes
