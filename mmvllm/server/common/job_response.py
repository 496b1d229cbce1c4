"""The HTTP response to a job: whole or streamed, and aborted when the client disconnects."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mmvllm.entrypoints.async_llm import AsyncLLM
from mmvllm.entrypoints.tracing import trace_headers_of
from mmvllm.errors import RequestFailed
from mmvllm.media.decoding import MediaDecoder
from mmvllm.outputs import Delta, num_logprobs
from mmvllm.processors.videos.load import Load
from mmvllm.server.common.jobs import CompletionJob
from mmvllm.server.common.request_log import RequestLog, RequestRecord
from mmvllm.server.common.response_builder import ChoiceBuffer, RunningUsage, usage_of
from mmvllm.server.disconnects import CLIENT_DISCONNECTED, ClientDisconnected, while_connected
from mmvllm.server.errors import ApiError, engine_errors, internal_error
from mmvllm.server.http.sse import EventStream, event_text
from mmvllm.server.metrics.metrics import Metrics
from mmvllm.server.settings import ServerSettings

T = TypeVar("T")
MANY_VALUES = 2_000  # log-probabilities or elements of vectors, which are serialized in a few milliseconds
MAX_QUEUED = 16  # deltas of all prompts; more of them wait in the engine's streams, which count them
_MAKING = ThreadPoolExecutor(1, "mmvllm-response")  # several threads would compete with the event loop for the GIL


class JobResponse(Response):
    """The response to a job, generated while it is sent; if the client disconnects, its engine requests are aborted.

    Errors raise ApiError, which determines the status; once a stream has started, they are sent as an event instead.
    """

    def __init__(
        self,
        job: CompletionJob,
        engine: AsyncLLM,
        settings: ServerSettings,
        metrics: Metrics,
        decoder: MediaDecoder,
        log: RequestLog,
    ):
        super().__init__()
        self._job, self._engine, self._settings, self._metrics = job, engine, settings, metrics
        self._decoder, self._log = decoder, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = self._stream if self._job.streams else self._whole
        headers = trace_headers_of(Headers(scope=scope))
        self._record = RequestRecord(self._job, scope["state"]["request_id"], headers)
        self._reservation, self._num_held = scope["state"]["reservation"], 0
        try:
            await while_connected(receive, work(send))
        except ClientDisconnected:
            self._record.status = CLIENT_DISCONNECTED
        except Exception as error:
            self._record.fail(error if isinstance(error, ApiError) else internal_error())
            raise
        finally:
            self._log.write(self._record)

    async def _whole(self, send: Send) -> None:
        content = await self._gathered()
        self._record.forget_logprobs()
        self._hold(len(content))
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    async def _gathered(self) -> bytes:
        """Return the body of the response once all deltas have arrived."""
        job = self._job
        choices = [ChoiceBuffer(index) for index in range(job.num_choices)]
        async with aclosing(self._deltas()) as deltas:
            async for index, delta in deltas:
                choices[index].add(delta)
                if delta.output is not None:
                    first = index - delta.index
                    for choice in choices[first : first + job.params.n]:
                        choice.output = delta.output
        return await _made(partial(self._content, choices), job.builder.num_values)

    def _hold(self, num_bytes: int) -> None:
        """Count the most bytes that wait to be sent at a time; a slow client keeps them in memory."""
        if num_bytes > self._num_held:
            self._reservation.hold(num_bytes - self._num_held)
            self._num_held = num_bytes

    def _content(self, choices: Sequence[ChoiceBuffer]) -> bytes:
        response = self._job.builder.whole(choices, usage_of(self._record.outputs))
        return response.__pydantic_serializer__.to_json(response)  # `model_dump_json` would decode these bytes

    async def _stream(self, send: Send) -> None:
        async with aclosing(self._deltas()) as deltas, EventStream(send) as events:
            try:
                await self._send_all(events, deltas)
            except ApiError as error:
                if not events.is_open:
                    raise
                self._record.fail(error)
                await events.data(self._job.builder.error_chunk(error))
            except Exception:
                if events.is_open:
                    await events.data(self._job.builder.error_chunk(internal_error()))
                raise  # to be logged
            else:
                if self._job.builder.end is not None:
                    await events.data(self._job.builder.end)

    async def _send_all(self, events: EventStream, deltas: AsyncGenerator[tuple[int, Delta], None]) -> None:
        job, has_started = self._job, False
        usage = {"usage": None} if job.includes_usage else {}
        running = RunningUsage(job.params.n)
        async for index, delta in deltas:
            if not has_started:  # only now, so that an error before the first delta still determines the status
                has_started = True
                if job.repeats_usage:
                    usage = {"usage": running.count_prompt(index, delta)}
                first = job.builder.first_chunks(job.num_choices, delta)
                await self._write(events, [event_text(chunk | usage) for chunk in first])
            if job.repeats_usage:
                usage = {"usage": running.add(index, delta)}
            make = partial(_texts, job.builder.chunks, index, delta, usage=usage)
            texts = await _made(make, num_logprobs(delta.logprobs) + num_logprobs(delta.prompt_logprobs))
            await self._write(events, texts)
            await asyncio.sleep(0)  # let other tasks run: a fast client never pauses a stream with much to send
        last = partial(_texts, job.builder.last_chunks, usage_of(self._record.outputs), job.includes_usage, usage={})
        await self._write(events, await _made(last, job.builder.num_values))

    async def _write(self, events: EventStream, texts: Sequence[str]) -> None:
        pieces = [text.encode() for text in texts]
        self._hold(sum(map(len, pieces)))
        for piece in pieces:
            await events.write(piece)

    async def _deltas(self) -> AsyncGenerator[tuple[int, Delta], None]:
        """Yield (choice, delta) of all prompts in the order of arrival; raises only ApiError."""
        observe = None if self._job.pooling is not None else self._metrics.observer(self._job.params)
        # The session abandons its work when the client disconnects or the deadline passes.
        prompt = 0
        with engine_errors(lambda error: self._job.format_error(error, prompt)), self._decoder.session() as load:
            # A request may have more inputs to embed than the engine admits; completions have few prompts.
            most = len(self._job.requests) if self._job.pooling is None else self._engine.max_num_seqs
            async with aclosing(_merged(self._streams(load), len(self._job.requests), most)) as deltas:
                async for prompt, delta in deltas:
                    if isinstance(delta, Exception):
                        try:
                            raise delta
                        finally:
                            del delta  # otherwise the error and this frame keep each other alive
                    _check(delta)
                    choice = prompt * self._job.params.n + delta.index
                    if observe is not None:
                        observe(choice, delta)
                    if delta.output is not None:
                        self._record.outputs.append(delta.output)
                    self._job.builder.count(delta, self._job.streams)
                    yield choice, delta

    def _streams(self, load: Load) -> Iterator[AsyncGenerator[Delta, None]]:
        """Return the stream of deltas of each prompt."""
        job = self._job
        keys = {"timeout": self._settings.request_timeout, "load": load, "trace_headers": self._record.trace_headers}
        keys |= {"pooling": job.pooling, "limits_unread": True}
        keys["keeps_logprobs"] = job.params.chooses_at_end  # the final deltas then have all of them at once
        return (self._engine.generate(request, job.params, **keys) for request in job.requests)


async def _made(make: Callable[[], T], num_values: int) -> T:
    """Return `make()`, called in a thread if it takes long, so that the event loop continues."""
    if num_values < MANY_VALUES:
        return make()
    return await asyncio.get_running_loop().run_in_executor(_MAKING, make)


def _texts(chunks: Callable[..., list[dict]], *args: Any, usage: dict) -> list[str]:
    return [event_text(chunk | usage) for chunk in chunks(*args)]


def _check(delta: Delta) -> None:
    if delta.finish_reason == "aborted":  # not by the client, whose disconnect ends the response
        raise RequestFailed("the request was aborted by the operator")


async def _merged(
    streams: Iterator[AsyncGenerator[Delta, None]], number: int, most: int
) -> AsyncGenerator[tuple[int, Delta | Exception], None]:
    """Yield (index of the stream, delta) of `number` streams in the order of arrival; the first error is the last item.

    At most `most` streams are read at a time, each in a task; thousands of tasks would keep the event loop busy.
    """
    queue: asyncio.Queue[tuple[int, Delta | Exception | None]] = asyncio.Queue(MAX_QUEUED)
    numbered = enumerate(streams)
    tasks = [asyncio.create_task(_forward_all(numbered, queue)) for _ in range(min(most, number))]
    try:
        num_open = number
        while num_open:
            i, item = await queue.get()
            if item is None:
                num_open -= 1
            else:
                yield i, item
            if isinstance(item, Exception):
                return
    finally:
        item = None  # otherwise an error and this frame keep each other alive
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _forward_all(streams: Iterator[tuple[int, AsyncGenerator[Delta, None]]], queue: asyncio.Queue) -> None:
    """Put the deltas of each stream, and then None, into the queue; put an error as the last item."""
    for i, stream in streams:
        try:
            async with aclosing(stream):
                async for delta in stream:
                    await queue.put((i, delta))
        except Exception as error:
            await queue.put((i, error))
            return
        await queue.put((i, None))
