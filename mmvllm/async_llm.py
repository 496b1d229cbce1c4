"""`AsyncLLM`: one engine for many at once, each of whom sees the answer while it forms.

    generate() ── admitted, or "busy" ── prepared in a pool ── engine thread ── deltas ── the caller's event loop

The engine belongs to a thread of its own. A request has a `_Stream` from its admission until it ends, in whatever way:
its last delta, an error, an abort, the deadline, or a caller who is gone. Ending it is one place, `_end`.
"""

import asyncio
import atexit
import threading
import time
import uuid
import weakref
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from PIL.Image import Image

from mmvllm.engine.engine_thread import EngineThread, Event
from mmvllm.engine.sequence import SequenceGroup
from mmvllm.engine.stats import EngineStats
from mmvllm.errors import DeadlineExceeded, EngineBusy, EngineFailed, EngineStopped, EngineUnavailable, RequestFailed
from mmvllm.llm import LLM, params_for, request_options
from mmvllm.outputs import Delta
from mmvllm.prefetch import MAX_BYTES, NUM_WORKERS, worker_threads
from mmvllm.processors.chat import Prompt, parse_request
from mmvllm.processors.load import load_image
from mmvllm.sampling_params import SamplingParams

Request = dict | str | list[int]


@dataclass(frozen=True, slots=True)
class Health:
    """How an engine is: "ok", "failing" (requests failed in the last step), "draining", "stopped" or "failed"."""

    status: str
    reason: str | None = None

    @property
    def is_live(self) -> bool:
        """Whether it still serves what it has."""
        return self.status not in ("stopped", "failed")

    @property
    def is_ready(self) -> bool:
        """Whether it takes requests."""
        return self.status in ("ok", "failing")


class _Stream:
    """A request from its admission to its end. `get` belongs to the event loop that asked."""

    def __init__(self, request_id: str, num_answers: int, loop: asyncio.AbstractEventLoop):
        self.request_id, self.num_answers, self.loop = request_id, num_answers, loop
        self.arrival_time = time.time()
        self.group: SequenceGroup | None = None  # written by the engine's thread
        self.is_prepared = False
        self.num_bytes = 0  # of its pictures, prepared
        self.ended: Future[None] = Future()
        self._items: asyncio.Queue[Delta | Exception] = asyncio.Queue()

    @property
    def has_begun(self) -> bool:
        return self.group is not None and self.group.has_begun

    def put(self, item: Delta | Exception) -> None:
        self._items.put_nowait(item)

    async def get(self) -> Delta:
        item = await self._items.get()
        if isinstance(item, Exception):
            raise item
        return item


class AsyncLLM:
    """A model that answers many requests at once, from any number of tasks, event loops and threads.

    Args:
        model: as for `LLM`.
        max_waiting: how many requests more than `max_num_seqs` may be here; one more is refused with `EngineBusy`.
        engine_args: the arguments of `LLM`.

    Use it as `async with AsyncLLM(...) as engine`, or call `shutdown` in the end.
    """

    def __init__(self, model: str | Path | None = None, *, max_waiting: int = 256, **engine_args: Any):
        self._llm = LLM(model, **engine_args)
        engine = self._llm.engine
        self.model, self.tokenizer = self._llm.model, self._llm.tokenizer
        self.image_config = engine.image_config
        self.max_model_len, self.max_num_seqs = engine.max_model_len, engine.config.max_num_seqs
        self.max_requests = self.max_num_seqs + max_waiting
        self._changed = threading.Condition()  # guards what follows
        self._streams: dict[str, _Stream] = {}  # those that have not ended, in order of arrival
        self._queued: dict[_Stream, Callable[[], None]] = {}  # of these, who bring pictures that nobody prepares yet
        self._num_preparing = 0  # pictures, in the pool
        self._status, self._reason = "ok", None
        self._pool = worker_threads(NUM_WORKERS + 1)  # one more than pictures may have: text waits for none
        self._thread = EngineThread(engine, self._deliver, self._fail)
        self._closing = threading.Lock()
        # After the engine's own, so before it: those run in reverse order, and the thread still uses the engine.
        atexit.register(_close_if_alive, weakref.ref(self))

    async def generate(
        self,
        request: Request | Callable[[], Awaitable[Request]],
        sampling_params: SamplingParams | dict | None = None,
        request_id: str | None = None,
        *,
        timeout: float | None = None,
        load: Callable[[Any], Image] = load_image,
    ) -> AsyncGenerator[Delta, None]:
        """Answer one request, piece by piece. Cancelling the task, or closing the generator, aborts the request.

        Args:
            request: as for `LLM.generate_multimodal`; or a string or token ids, to which no chat template is applied;
                or an async function that gives one of these, without parameters and id, called once there is a place
                for it: to fetch pictures.
            timeout: seconds from now until the answer must be complete.
            load: reads the request's pictures, in a thread; `mmvllm.media.MediaPolicy.load` for those of strangers.

        Raises ValueError for a bad request, `EngineBusy`, `EngineStopped` or `EngineFailed` if it cannot be taken or
        finished, `RequestFailed` if it fails through no fault of its own, `DeadlineExceeded`, and whatever `request`
        raises. An aborted request ends with a delta whose `finish_reason` is "aborted".
        """
        own = request if isinstance(request, dict) else {}
        params = params_for(sampling_params, 0, own.get("sampling_params"))
        stream = self._admit(own.get("request_id") if request_id is None else request_id, params.n)
        timer = coming = None
        try:
            if timeout is not None:
                error = DeadlineExceeded(f"the answer was not complete after {timeout:g} seconds")
                timer = stream.loop.call_later(timeout, self._end, stream, error)
            if callable(request):
                coming = asyncio.create_task(self._queue_when_here(stream, request, params, load))
            else:
                self._queue(stream, request, params, load)
            while True:
                delta = await stream.get()
                yield delta
                if delta.output is not None:
                    return
        finally:
            for begun in filter(None, (timer, coming)):
                begun.cancel()
            self._end(stream)

    async def abort(self, request_id: str) -> bool:
        """End a request; False if there is none of that id. On return its blocks and pictures are free."""
        with self._changed:
            stream = self._streams.get(request_id)
        if stream is None:
            return False
        self._thread.abort(stream)
        await asyncio.shield(asyncio.wrap_future(stream.ended))  # it is not ours to cancel
        return True

    def position(self, request_id: str) -> int | None:
        """Its place among those that wait, by arrival: 1 if it is the next, 0 if it runs; None if it is not here."""
        with self._changed:
            stream = self._streams.get(request_id)
            if stream is None or stream.has_begun:
                return None if stream is None else 0
            # One look at each: the engine's thread may begin any of them meanwhile.
            earlier = takewhile(lambda other: other is not stream, self._streams.values())
            return 1 + sum(not other.has_begun for other in earlier)

    def stats(self) -> EngineStats:
        """What it does now, and totals."""
        with self._changed:
            num_preparing = sum(not stream.is_prepared for stream in self._streams.values())
        return self._thread.stats(num_preparing)

    def health(self) -> Health:
        """Whether it serves, and if not, why."""
        with self._changed:
            if self._status == "ok" and self._thread.failing is not None:
                return Health("failing", self._thread.failing)
            return Health(self._status, self._reason)

    async def shutdown(self, drain: bool = True, timeout: float | None = None) -> None:
        """Take no more requests, and free the engine once those in flight are finished.

        Without `drain`, or after `timeout` seconds, they end with `EngineStopped`. A second call may be less patient.
        """
        await asyncio.to_thread(self._close, drain, timeout)

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        await self.shutdown(drain=error is None)

    def _admit(self, request_id: str | None, num_answers: int) -> _Stream:
        request_id = f"request-{uuid.uuid4().hex}" if request_id is None else request_id
        if not isinstance(request_id, str):
            raise ValueError(f"request_id is {request_id!r:.100}, must be str or None")
        with self._changed:
            self._end_lost()
            self._check_room()
            if request_id in self._streams:
                raise ValueError(f"request_id {request_id!r} is already in flight")
            stream = self._streams[request_id] = _Stream(request_id, num_answers, asyncio.get_running_loop())
        return stream

    def _check_room(self) -> None:
        if self._status == "failed":
            raise EngineFailed(f"the engine broke: {self._reason}")
        if self._status != "ok":
            raise EngineStopped("the engine is shutting down and takes no more requests")
        if len(self._streams) >= self.max_requests:
            raise EngineBusy(len(self._streams), self.max_requests)

    async def _queue_when_here(self, stream: _Stream, request: Callable[[], Awaitable[Request]], *rest: Any) -> None:
        try:
            fetched = await request()
            _check_fetched(fetched)
            self._queue(stream, fetched, *rest)
        except Exception as error:  # it is the caller's, and is raised again in `generate`
            self._end(stream, error)
        except BaseException as error:  # cancelled, and not by `generate`, which would wait for ever
            self._end(stream, RequestFailed(f"the request did not come: {type(error).__name__}"))
            raise

    def _queue(self, stream: _Stream, request: Request, params: SamplingParams, load: Callable[[Any], Image]) -> None:
        prepare = partial(self._prepare, stream, request, params, load)
        has_pictures = _has_pictures(request)
        with self._changed:
            if stream.ended.done():  # and with the last one the pool goes
                return
            if has_pictures:
                self._queued[stream] = prepare
                self._prepare_next()
            else:
                self._pool.submit(prepare)

    def _prepare_next(self) -> None:
        """Have pictures prepared while those of requests that wait for the engine leave room for more."""
        while self._queued and self._num_preparing < NUM_WORKERS:
            if sum(stream.num_bytes for stream in self._streams.values() if not stream.has_begun) >= MAX_BYTES:
                return
            prepare = self._queued.pop(next(iter(self._queued)))
            self._num_preparing += 1
            self._pool.submit(prepare).add_done_callback(self._on_prepared)

    def _on_prepared(self, _: Future) -> None:
        with self._changed:
            self._num_preparing -= 1
            self._prepare_next()

    def _prepare(self, stream: _Stream, request: Request, params: SamplingParams, load: Callable[[Any], Image]) -> None:
        """Make a prompt of a request and give it to the engine; in a thread of the pool."""
        try:
            prompt = self._prompt(request, load)
            options = request_options(request) if isinstance(request, dict) else {}
        except ValueError as error:
            self._end(stream, error)
        except Exception as error:  # a mistake of ours, or of the caller's `load`: still the request's own affair
            self._end(stream, RequestFailed(f"preparation failed: {type(error).__name__}: {error}"))
        else:
            with self._changed:
                stream.is_prepared, stream.num_bytes = True, prompt.num_bytes
                if not stream.ended.done():
                    self._thread.add(stream, prompt, params, arrival_time=stream.arrival_time, **options)

    def _prompt(self, request: Request, load: Callable[[Any], Image]) -> Prompt:
        if isinstance(request, list):
            return Prompt(request)
        return self._llm.processor({"text": request} if isinstance(request, str) else request, load)

    def _deliver(self, events: list[Event]) -> None:
        """Hand out what is new, with one wake-up for each event loop."""
        by_loop = defaultdict(list)
        with self._changed:
            for stream, item in events:
                if not stream.ended.done():
                    by_loop[stream.loop].append((stream, item))
                    if isinstance(item, Exception) or item.output is not None:
                        self._forget(stream)
            self._prepare_next()  # requests that begin make room
        for loop, items in by_loop.items():
            self._send(loop, items)

    def _end(self, stream: _Stream, error: Exception | None = None) -> None:
        """End a request that may be anywhere on its way, unless it has ended."""
        with self._changed:
            if stream.ended.done():
                return
            self._forget(stream)
            self._thread.abort(stream)
        if error is not None:
            self._send(stream.loop, [(stream, error)])

    def _forget(self, stream: _Stream) -> None:
        del self._streams[stream.request_id]
        self._queued.pop(stream, None)
        stream.ended.set_result(None)
        self._changed.notify_all()

    def _send(self, loop: asyncio.AbstractEventLoop, items: list[tuple[_Stream, Delta | Exception]]) -> None:
        try:
            loop.call_soon_threadsafe(_put_all, items)
        except RuntimeError:  # the loop is closed, and who waited is gone
            for stream, _ in items:
                self._end(stream)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._status, self._reason = "failed", f"{type(error).__name__}: {error}"
        self._end_all(EngineFailed, f"the engine broke: {self._reason}")

    def _end_lost(self) -> None:
        """End requests whose loop was closed while they were fetched; those that go on end with their next delta."""
        for stream in [*self._streams.values()]:
            if stream.loop.is_closed():
                self._end(stream)

    def _end_all(self, kind: type[EngineUnavailable], reason: str) -> None:
        with self._changed:
            for stream in [*self._streams.values()]:
                self._end(stream, kind(reason))

    def _close(self, drain: bool, timeout: float | None = None) -> None:
        with self._changed:
            if self._status == "ok":
                self._status = "draining"
            if drain:
                self._end_lost()
                self._changed.wait_for(lambda: not self._streams, timeout)
        self._end_all(EngineStopped, "the engine was shut down before the answer was complete")
        with self._changed:
            self._pool.shutdown(wait=False, cancel_futures=True)
        with self._closing:
            self._thread.stop()
            self._llm.exit()
        with self._changed:
            if self._status == "draining":
                self._status = "stopped"


def _check_fetched(request: Request) -> None:
    for name in ("request_id", "sampling_params"):
        if isinstance(request, dict) and request.get(name) is not None:
            raise ValueError(f"a request that is fetched brings {name}, which is needed before; give it to `generate`")


def _has_pictures(request: Request) -> bool:
    try:
        return isinstance(request, dict) and bool(parse_request(request)[1])
    except ValueError:  # which it will say itself when it is prepared
        return False


def _put_all(items: list[tuple[_Stream, Delta | Exception]]) -> None:
    for stream, item in items:
        stream.put(item)


def _close_if_alive(ref: "weakref.ref[AsyncLLM]") -> None:
    engine = ref()
    if engine is not None:
        engine._close(drain=False)
