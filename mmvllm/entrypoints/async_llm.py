"""`AsyncLLM` serves many concurrent requests with one or more engines, and streams their completions.

    generate() ── admitted, or EngineBusy ── prepared in a pool ── engine thread ── deltas ── the caller's event loop

A single engine on one device runs in a thread; several engines, or one with several ranks, run in processes. Each
request has a `_Stream` from its admission to its end: the last delta, an error, an abort, the deadline or a
cancellation. Only `_forget` marks a stream as ended.
"""

import asyncio
import atexit
import threading
import time
import uuid
import weakref
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from dataclasses import asdict
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from mmvllm.config import EngineArgs, EngineConfig
from mmvllm.engine.engine_thread import EngineThread, RequestEvent, is_last
from mmvllm.engine.health import EngineHealth
from mmvllm.engine.llm_engine import LLMEngine
from mmvllm.engine.request_batch import BEGUN
from mmvllm.engine.stats import EngineStats
from mmvllm.entrypoints.request_queue import (
    AdmissionWindow,
    PreparationQueue,
    Request,
    RequestPreparer,
    check_lengths,
    check_processor_kwargs,
    params_for,
    request_options,
    slowest_media,
    with_own_token_ids,
)
from mmvllm.entrypoints.tracing import check_endpoint, ended_output, make_tracer
from mmvllm.errors import (
    DeadlineExceeded,
    EngineBusy,
    EngineFailed,
    EngineStopped,
    EngineUnavailable,
    ParameterError,
    RequestError,
    RequestFailed,
    RequestsAborted,
    first_line,
    without_frames,
)
from mmvllm.inputs import EngineInput
from mmvllm.lora import LoRARequest, adapter_name
from mmvllm.models.folder import model_name
from mmvllm.outputs import Delta, EmbeddingOutput
from mmvllm.parallel.data_parallel import DataParallelEngines
from mmvllm.parallel.dispatcher import Dispatcher
from mmvllm.pooling_params import PoolingParams
from mmvllm.processors.videos.load import Load
from mmvllm.sampling.grammar_matcher import TakesLonger
from mmvllm.sampling_params import SamplingParams, with_defaults
from mmvllm.structured.params import StructuredOutputsParams
from mmvllm.utils.arguments import check_int
from mmvllm.utils.forks import OwnProcess

Give = Callable[[Request, EngineInput], None]  # receives a prepared request in a worker thread

MAX_UNREAD_BYTES = 256 << 20
UNREAD = "unread"  # `param` of the error about unread deltas, which no parameter causes
TOO_MUCH_UNREAD = "too many bytes of completions are unread; read them faster, or request less at once"


class _Stream:
    """A request from its admission to its end. `get` is awaited in the request's event loop."""

    def __init__(self, request_id: str, num_completions: int, loop: asyncio.AbstractEventLoop):
        self.request_id, self.num_completions, self.loop = request_id, num_completions, loop
        self.arrival_time = time.time()
        self.is_prepared = self.has_begun = False
        self.num_bytes = 0  # of its media, once prepared
        self.trace_headers: Mapping[str, str] | None = None
        self.adapter_name: str | None = None  # once fetched
        self.prompt_token_ids: list[int] = []  # once prepared
        self.keeps_logprobs, self.limits_unread = True, False
        self._num_given = self._num_taken = 0  # bytes; the latter is written in the event loop only
        self._is_dropped = False
        self.has_ended = False  # guarded by the engine's lock
        self.ended: Future[None] = Future()  # done when the request has ended
        self._items: deque[Delta | EngineInput | Exception] = deque()  # this and the next: in the event loop only
        self._waiter: asyncio.Future[None] | None = None  # of the only task that calls `get`

    @property
    def num_unread(self) -> int:
        """Bytes of the deltas that the caller has not taken; 0 once deltas are dropped."""
        return 0 if self._is_dropped else self._num_given - self._num_taken

    def count(self, delta: Delta) -> int:
        """Count a delta before it is put, in the engine's thread; return its bytes."""
        size = delta.num_bytes if self.limits_unread else 0
        self._num_given += size
        return size

    def drop(self) -> None:
        """Ignore all further deltas; the error that is put next replaces the deltas that have not been taken."""
        self._is_dropped = True

    def put(self, item: Delta | EngineInput | Exception) -> None:
        if self._is_dropped:
            if not isinstance(item, Exception):
                return
            self._items.clear()
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> Any:
        if not self._items:
            self._waiter = self.loop.create_future()
            await self._waiter
        item = self._items.popleft()
        if self.limits_unread and isinstance(item, Delta):
            self._num_taken += item.num_bytes
        try:
            if isinstance(item, Exception):
                raise item
            return item
        finally:
            del item  # else an error and this frame, which holds the request, keep each other alive


class AsyncLLM:
    """A model that serves many concurrent requests, from any number of tasks, event loops and threads.

    Args:
        model, processor, video_backend, mm_processor_kwargs, engine_args: see `LLM`.
        otlp_traces_endpoint: see `LLM`. Admitted requests that fail before they reach an engine are traced as well.
        max_waiting: requests admitted beyond `max_num_seqs`; further requests are refused with `EngineBusy`.
        data_parallel_size: number of engines. Each runs in a separate process with the `engine_args`, and has
            `tensor_parallel_size` CUDA devices, from `device` on, or a share of the CPU's threads. A request goes to
            an engine that has much of it cached, within a limit on the load. An engine whose process ends is restarted:
            another engine computes its requests that have no token yet, and the others end with `RequestFailed`.
            A single engine with a `tensor_parallel_size` above 1 also runs in processes and is restarted.
        release_after: seconds without requests after which the weights and caches are freed. The next request waits
            until the model is reloaded from its files. The results of random sampling do not change.
        trusts_grammars: False if untrusted clients write the grammars of `SamplingParams.structured`: each new one is
            compiled in a separate process first, and refused if this takes too much time or memory.

    Use it as `async with AsyncLLM(...) as engine`, or call `shutdown` at the end.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        processor: Any = None,
        video_backend: str = "pyav",
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        otlp_traces_endpoint: str | None = None,
        max_waiting: int = 256,
        data_parallel_size: int = 1,
        release_after: float | None = None,
        trusts_grammars: bool = True,
        **engine_args: Any,
    ):
        check_int("data_parallel_size", data_parallel_size)
        if release_after is not None and not 0 < release_after < threading.TIMEOUT_MAX:
            raise ParameterError("release_after", release_after, "a number of seconds above 0, or None")
        check_endpoint(otlp_traces_endpoint)
        check_processor_kwargs(mm_processor_kwargs)
        config = EngineConfig.from_arguments("AsyncLLM", model, **engine_args)
        # If one of the processes that share a model is lost, all of them are restarted together.
        in_processes = data_parallel_size > 1 or config.tensor_parallel_size > 1
        engine = (
            DataParallelEngines(model, config, data_parallel_size, release_after)
            if in_processes
            else LLMEngine(model, config)
        )
        self._engine, self.config = engine, config
        try:
            self._preparer = RequestPreparer(engine, processor, video_backend, mm_processor_kwargs)
        except BaseException:
            engine.exit()
            raise
        self.model, self.tokenizer = model_name(model), engine.tokenizer
        self._tracer = make_tracer(otlp_traces_endpoint, self.model)
        self.image_config, self.video_config = engine.image_config, engine.video_config
        rules = self.media_rules = engine.media_rules  # None for a text-only checkpoint
        self.takes_videos = rules is not None and rules.takes_videos
        self.sampling_defaults = dict(engine.model_config.sampling_defaults)  # of generation_config.json
        self.hidden_size = engine.model_config.hidden_size  # of embeddings
        self.max_model_len, self.max_num_seqs = engine.max_model_len, engine.max_num_seqs
        self.block_size = engine.block_size  # of the KV cache
        self.max_requests = self.max_num_seqs + max_waiting
        self.admission = AdmissionWindow(self.max_requests)
        self.num_refused = 0  # requests refused with EngineBusy
        self._changed = threading.Condition()  # guards the following fields
        self._streams: dict[str, _Stream] = {}  # requests that have not ended, by arrival
        self._limited: weakref.WeakSet[_Stream] = weakref.WeakSet()  # with `limits_unread`, also after their end
        self._num_unread = 0  # an upper bound on their unread bytes; `_drop_unread` makes it exact
        self._preparation = PreparationQueue(self._changed, self._num_waiting_bytes)
        # Slow untrusted grammars have a separate thread, so that other grammars do not wait for them.
        self._grammars, self._slow_grammars = (ThreadPoolExecutor(n, "mmvllm-grammar") for n in (2, 1))
        if not trusts_grammars:
            engine.grammars.distrust()
        self._process = OwnProcess()
        self._status, self._reason = "ok", None
        connections = self._deliver, self._fail
        self._thread = (
            Dispatcher(engine, *connections) if in_processes else EngineThread(engine, *connections, release_after)
        )
        self._closing = threading.Lock()
        # Registered after the engine's exit handler, and therefore run before it: the thread still uses the engine.
        atexit.register(_close_if_alive, weakref.ref(self))

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> "AsyncLLM":
        """Create an engine from vLLM-style arguments."""
        return cls(**asdict(args))

    def default_sampling_params(self, **changes: Any) -> SamplingParams:
        """Return mmvllm's default sampling parameters, overridden by the checkpoint's and then by `changes`."""
        return SamplingParams(**with_defaults(changes, self.sampling_defaults))

    async def generate(
        self,
        request: Request | Callable[[], Awaitable[Request]],
        sampling_params: SamplingParams | dict | None = None,
        request_id: str | None = None,
        *,
        timeout: float | None = None,
        load: Load | None = None,
        trace_headers: Mapping[str, str] | None = None,
        pooling: PoolingParams | None = None,
        keeps_logprobs: bool = True,
        limits_unread: bool = False,
    ) -> AsyncGenerator[Delta, None]:
        """Stream the completions of one request. Cancelling the task, or closing the generator, aborts the request.

        Args:
            request: a dict as for `LLM.generate_multimodal`; a string or token ids, without a chat template; or an
                async function that returns one of these, for example after fetching images. It is called once the
                request is admitted; a dict that it returns has no `request_id` and no `sampling_params`. Images are
                read in a thread and must not change meanwhile.
            timeout: seconds from now until the request must be complete.
            load: reads the request's images and videos in a thread; for untrusted media, use a session of
                `mmvllm.media.decoding.MediaDecoder`.
            trace_headers: W3C Trace Context headers (`traceparent`, `tracestate`) of the request's trace.
            pooling: generate no tokens; the only delta has an output with the prompt's `embedding`.
            keeps_logprobs: False returns log-probabilities of completions in deltas only, which saves memory.
            limits_unread: limit memory for untrusted clients: once the unread deltas of all such requests exceed
                `MAX_UNREAD_BYTES`, the request with the most unread bytes ends with RequestError.

        Raises ValueError for a bad request, `EngineBusy`, `EngineStopped` or `EngineFailed` if it cannot be admitted or
        finished, `RequestFailed` if the device or the preparation fails, `DeadlineExceeded`, and whatever `request`
        raises. An aborted request ends with a delta whose `finish_reason` is "aborted". With `best_of` and `beam_width`
        each completion has one delta, at the end.
        """
        own = request if isinstance(request, dict) else {}
        check_lengths(sampling_params, 1)
        params = params_for(sampling_params, 0, own.get("sampling_params"))
        stream = self._admit(own.get("request_id") if request_id is None else request_id, params.n)
        stream.trace_headers = own.get("trace_headers") if trace_headers is None else trace_headers
        stream.keeps_logprobs, stream.limits_unread = keeps_logprobs, limits_unread
        if limits_unread:
            with self._changed:
                self._limited.add(stream)
        output = error_type = None

        def give(request: Request, prompt: EngineInput) -> None:
            self._engine.grammars.check(params.structured)  # again if it was evicted: the engine's thread never waits
            self._hand_over(stream, params, request, prompt, pooling)

        if params.structured is not None and not self._engine.grammars.has(params.structured):
            request = partial(self._with_grammar, with_own_token_ids(request), params.structured)
        try:
            with self._running(stream, request, give, timeout, load):
                while output is None:
                    delta = await stream.get()
                    delta.prompt_token_ids, output = stream.prompt_token_ids, delta.output
                    yield delta
        except Exception as error:
            error_type = type(error).__name__
            raise
        finally:
            if self._tracer is not None:
                output = output or ended_output(stream.request_id, stream.arrival_time, params.n, error_type)
                self._tracer.record(params, stream.trace_headers, output, error_type, stream.adapter_name)

    async def _with_grammar(
        self, request: Request | Callable[[], Awaitable[Request]], structured: StructuredOutputsParams
    ) -> Request:
        """Return the request once its grammar is compiled, in threads where only requests with grammars wait."""
        run, check = asyncio.get_running_loop().run_in_executor, self._engine.grammars.check
        try:
            await run(self._grammars, partial(check, structured, is_quick=True))
        except TakesLonger:
            await run(self._slow_grammars, check, structured)
        if callable(request):
            return await request()
        if not isinstance(request, dict):
            return request
        own = ("request_id", "sampling_params")  # already read by `generate`
        return {name: value for name, value in request.items() if name not in own}

    async def tokenize(
        self,
        request: Request | Callable[[], Awaitable[Request]],
        *,
        timeout: float | None = None,
        load: Load | None = None,
    ) -> list[int]:
        """Return the prompt's token ids, with the chat template applied and media placeholders expanded.

        Arguments and errors are as for `generate`; no token is generated.
        """
        stream = self._admit(None, 1)

        def give(_: Request, prompt: EngineInput) -> None:
            self._send(stream.loop, [(stream, prompt)])

        with self._running(stream, request, give, timeout, load):
            return (await stream.get()).token_ids

    def load_adapter(self, lora_request: LoRARequest) -> None:
        """Read an adapter ahead of its first request, in any thread; raises RequestError if it cannot be used."""
        self._engine.load_adapter(lora_request)

    async def embed(
        self,
        request: Request | Callable[[], Awaitable[Request]],
        *,
        pooling: str = "last",
        normalize: bool = True,
        dimensions: int | None = None,
        request_id: str | None = None,
        timeout: float | None = None,
        load: Load | None = None,
    ) -> EmbeddingOutput:
        """Return the embedding of one request, like `LLM.embed`; cancelling the task aborts the request.

        The other arguments and the errors are as for `generate`; an aborted request raises `RequestsAborted`.
        """
        params = PoolingParams(pooling=pooling, normalize=normalize, dimensions=dimensions)
        deltas = self.generate(request, None, request_id, timeout=timeout, load=load, pooling=params)
        async with aclosing(deltas):
            output = (await anext(deltas)).output
        if output.finish_reason == "aborted":
            raise RequestsAborted(f"request {output.request_id!r}: aborted", [output])
        return EmbeddingOutput.of(output)

    async def abort(self, request_id: str) -> bool:
        """End a request; False if there is none with this id. On return its blocks and media are freed."""
        self._process.check()
        with self._changed:
            stream = self._streams.get(request_id)
        if stream is None:
            return False
        self._thread.abort(stream)
        await asyncio.shield(asyncio.wrap_future(stream.ended))  # cancelling this call must not cancel it
        return True

    def reset_prefix_cache(self) -> bool:
        """Clear the prefix cache for all requests prepared from now on; return True, like vLLM's method."""
        self._process.check()
        self._thread.reset_prefix_cache()
        return True

    def position(self, request_id: str) -> int | None:
        """Return a request's position in the queue, by arrival: 1 is next, 0 is running; None if it is unknown."""
        with self._changed:
            stream = self._streams.get(request_id)
            if stream is None or stream.has_begun:
                return None if stream is None else 0
            # Each flag is read once: the engine's thread may begin any request meanwhile.
            earlier = takewhile(lambda other: other is not stream, self._streams.values())
            return 1 + sum(not other.has_begun for other in earlier)

    @property
    def num_requests(self) -> int:
        """The number of requests that were admitted and have not ended."""
        return len(self._streams)

    def stats(self) -> EngineStats:
        """Return the current state and the totals of all engines."""
        with self._changed:
            num_preparing = sum(not stream.is_prepared for stream in self._streams.values())
        return self._thread.stats(num_preparing)

    def engine_stats(self) -> list[EngineStats]:
        """Return the current state and totals of each engine; requests in preparation belong to none."""
        return self._thread.engine_stats()

    def health(self) -> EngineHealth:
        """Return whether requests are served, and if not, why."""
        with self._changed:
            health = EngineHealth(self._status, self._reason)
        return self._thread.health() if health.status == "ok" else health

    async def shutdown(self, drain: bool = True, timeout: float | None = None) -> None:
        """Accept no more requests, and free the engine once those in flight are finished.

        Without `drain`, or after `timeout` seconds, they end with `EngineStopped`. A second call may shorten the wait.
        """
        await asyncio.to_thread(self._close, drain, timeout)

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        await self.shutdown(drain=error is None)

    def _admit(self, request_id: str | None, num_completions: int) -> _Stream:
        self._process.check()
        request_id = f"request-{uuid.uuid4().hex}" if request_id is None else request_id
        if not isinstance(request_id, str):
            raise ParameterError("request_id", request_id, "str or None")
        with self._changed:
            self._end_lost()
            self._check_room()
            if request_id in self._streams:
                message = f"request_id {request_id!r} is already in flight"
                raise RequestError(message, param="request_id", value=request_id)
            stream = self._streams[request_id] = _Stream(request_id, num_completions, asyncio.get_running_loop())
        return stream

    def _check_room(self) -> None:
        if self._status == "failed":
            raise EngineFailed(f"the engine failed: {self._reason}")
        if self._status != "ok":
            raise EngineStopped("the engine is shutting down and accepts no more requests")
        if not self._thread.is_up:
            raise EngineUnavailable("no engine is up; the engines are restarting, try again later")
        if not self.admission.has_room(len(self._streams), num_waiting_bytes=0):  # the byte limit only delays requests
            self.num_refused += 1
            raise EngineBusy(len(self._streams), self.admission.max_requests)

    @contextmanager
    def _running(
        self,
        stream: _Stream,
        request: Request | Callable[[], Awaitable[Request]],
        give: Give,
        timeout: float | None,
        load: Load | None,
    ) -> Iterator[None]:
        """Fetch, prepare and hand over an admitted request, which ends with the context."""
        timer = fetching = None
        try:
            if timeout is not None:
                timer = stream.loop.call_later(timeout, self._end, stream, _deadline_exceeded(timeout))
            if callable(request):
                fetching = asyncio.create_task(self._queue_when_fetched(stream, request, give, load))
            else:
                self._queue(stream, request, give, load)
            yield
        finally:
            for pending in filter(None, (timer, fetching)):
                pending.cancel()
            self._end(stream)

    async def _queue_when_fetched(self, stream: _Stream, request: Callable[[], Awaitable[Request]], *rest: Any) -> None:
        try:
            fetched = await request()
            _check_fetched(fetched)
            self._queue(stream, fetched, *rest)
        except Exception as error:  # of the caller's function, or about its request; `generate` raises it
            self._end(stream, error)
        except BaseException as error:  # cancelled by others: `generate` would wait forever
            self._end(stream, RequestFailed(f"the request could not be fetched: {type(error).__name__}"))
            raise

    def _queue(self, stream: _Stream, request: Request, give: Give, load: Load | None) -> None:
        request, stream.adapter_name = with_own_token_ids(request), adapter_name(request)
        prepare, media = partial(self._prepare, stream, request, give, load), slowest_media(request)
        with self._changed:
            if not stream.has_ended:  # else the pool may be shut down
                self._preparation.submit(stream, prepare, media)

    def _num_waiting_bytes(self) -> int:
        return sum(stream.num_bytes for stream in self._streams.values() if not stream.has_begun)

    def _prepare(self, stream: _Stream, request: Request, give: Give, load: Load | None) -> None:
        """Prepare a request and hand it over, in a worker thread."""
        try:
            give(request, self._preparer.prepare(request, load))
        except ValueError as error:
            self._end(stream, without_frames(error))
        except MemoryError:  # without its frames, which hold what filled the memory
            self._end(stream, MemoryError("not enough memory to prepare the request"))
        except Exception as error:  # a bug in mmvllm or in the caller's `load`; other requests are not affected
            self._end(stream, RequestFailed(f"preparation failed: {type(error).__name__}: {error}"))

    def _hand_over(
        self,
        stream: _Stream,
        params: SamplingParams,
        request: Request,
        prompt: EngineInput,
        pooling: PoolingParams | None,
    ) -> None:
        """Add a prepared request to the engine, unless it has ended."""
        options = request_options(request) if isinstance(request, dict) else {}
        if stream.trace_headers is not None:
            options["trace_headers"] = stream.trace_headers
        if pooling is not None:
            options["pooling"] = pooling
        if not stream.keeps_logprobs:
            options["keeps_logprobs"] = False
        stream.prompt_token_ids = prompt.token_ids
        with self._changed:
            stream.is_prepared, stream.num_bytes = True, prompt.num_bytes
            if not stream.has_ended:
                self._thread.add(stream, prompt, params, arrival_time=stream.arrival_time, **options)

    def _deliver(self, events: list[RequestEvent]) -> None:
        """Send events to their streams, with one wake-up per event loop."""
        by_loop = defaultdict(list)
        with self._changed:
            for event in events:
                stream, item = event
                if item is BEGUN:
                    stream.has_begun = True
                elif not stream.has_ended:
                    if isinstance(item, Delta):
                        self._num_unread += stream.count(item)
                    by_loop[stream.loop].append(event)
                    if is_last(item):
                        self._forget(stream)
            self._preparation.advance()  # requests that have begun make room
        for loop, items in by_loop.items():
            self._send(loop, items)
        if self._num_unread > MAX_UNREAD_BYTES:
            self._drop_unread()

    def _drop_unread(self) -> None:
        """End requests in order of their unread bytes until the limit holds; only drop deltas of ended requests."""
        with self._changed:
            unread = {stream: stream.num_unread for stream in self._limited}  # read once: callers take more meanwhile
            self._num_unread = sum(unread.values())
            largest = iter(sorted(unread, key=unread.__getitem__, reverse=True))
            while self._num_unread > MAX_UNREAD_BYTES:
                stream = next(largest)
                self._num_unread -= unread[stream]
                stream.drop()
                error = RequestError(TOO_MUCH_UNREAD, param=UNREAD)
                if stream.has_ended:
                    self._send(stream.loop, [(stream, error)])
                else:
                    self._end(stream, error)

    def _end(self, stream: _Stream, error: Exception | None = None) -> None:
        """End a request at any stage, unless it has ended."""
        with self._changed:
            if stream.has_ended:
                return
            self._forget(stream)
            self._thread.abort(stream)
        if error is not None:
            self._send(stream.loop, [(stream, error)])

    def _forget(self, stream: _Stream) -> None:
        del self._streams[stream.request_id]
        self._preparation.discard(stream)
        stream.has_ended = True
        stream.ended.set_result(None)
        self._changed.notify_all()

    def _send(
        self, loop: asyncio.AbstractEventLoop, items: list[tuple[_Stream, Delta | EngineInput | Exception]]
    ) -> None:
        try:
            loop.call_soon_threadsafe(_put_all, items)
        except RuntimeError:  # the loop is closed
            for stream, _ in items:
                self._end(stream)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._status, self._reason = "failed", first_line(error)
        self._end_all(EngineFailed, f"the engine failed: {self._reason}")

    def _end_lost(self) -> None:
        """End requests whose event loop was closed while they were fetched; others end with their next delta."""
        for stream in [*self._streams.values()]:
            if stream.loop.is_closed():
                self._end(stream)

    def _end_all(self, kind: type[EngineUnavailable], reason: str) -> None:
        with self._changed:
            for stream in [*self._streams.values()]:
                self._end(stream, kind(reason))

    def _close(self, drain: bool, timeout: float | None = None) -> None:
        if not self._process.is_here:
            return
        with self._changed:
            if self._status == "ok":
                self._status = "draining"
            if drain:
                self._end_lost()
                self._changed.wait_for(lambda: not self._streams, timeout)
        self._end_all(EngineStopped, "the engine was shut down before the completion was finished")
        with self._changed:
            self._preparation.shutdown()
            for threads in (self._grammars, self._slow_grammars):
                threads.shutdown(wait=False, cancel_futures=True)
        with self._closing:
            self._thread.stop()
            self._engine.exit()
            self._engine.grammars.close()
            if self._tracer is not None:
                self._tracer.shutdown()
        with self._changed:
            if self._status == "draining":
                self._status = "stopped"


def _deadline_exceeded(timeout: float) -> DeadlineExceeded:
    return DeadlineExceeded(f"the completion was not finished after {timeout:g} seconds")


def _check_fetched(request: Request) -> None:
    for name in ("request_id", "sampling_params"):
        if isinstance(request, dict) and request.get(name) is not None:
            raise RequestError(f"a fetched request must not contain {name}; pass it to `generate`", param=name)


def _put_all(items: list[tuple[_Stream, Delta | EngineInput | Exception]]) -> None:
    for stream, item in items:
        stream.put(item)


def _close_if_alive(ref: "weakref.ref[AsyncLLM]") -> None:
    engine = ref()
    if engine is not None:
        engine._close(drain=False)
