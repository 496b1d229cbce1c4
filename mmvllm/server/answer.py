"""From a job to its HTTP response, whole or streamed, while the client is there."""

import asyncio
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mmvllm.async_llm import AsyncLLM, Request
from mmvllm.errors import DeadlineExceeded, EngineUnavailable, PromptTooLong, RequestFailed
from mmvllm.outputs import Delta
from mmvllm.sampling_params import SamplingParams
from mmvllm.server.convert import Picture
from mmvllm.server.errors import CONTEXT_LENGTH_EXCEEDED, ApiError, from_bug, from_engine
from mmvllm.server.limits import ClientGone
from mmvllm.server.metrics import Metrics
from mmvllm.server.reply import ChatReply, Choice, CompletionReply, usage_of
from mmvllm.server.settings import ServerSettings
from mmvllm.server.sse import EventStream


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be answered, and how."""

    requests: Sequence[Request | Callable[[], Awaitable[Request]]]  # as `AsyncLLM.generate` takes them
    params: SamplingParams
    reply: ChatReply | CompletionReply
    pictures: Sequence[Picture] = ()
    streams: bool = False
    includes_usage: bool = False

    @property
    def num_choices(self) -> int:
        return len(self.requests) * self.params.n


class Answer(Response):
    """The response to a job. It is worked on while it is sent; if the client hangs up, its requests are aborted.

    Errors raise ApiError, and so get a status of their own; in a stream that has begun, they are sent as an event.
    """

    def __init__(self, job: Job, engine: AsyncLLM, settings: ServerSettings, metrics: Metrics):
        super().__init__()
        self._job, self._engine, self._settings, self._metrics = job, engine, settings, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = self._stream if self._job.streams else self._whole
        try:
            await _while_connected(receive, work(send))
        except ClientGone:
            return  # there is nobody to answer

    async def _whole(self, send: Send) -> None:
        job, outputs = self._job, []
        choices = [Choice(index) for index in range(job.num_choices)]
        async with aclosing(self._deltas()) as deltas:
            async for index, delta in deltas:
                choices[index].add(delta)
                if delta.output is not None:
                    outputs.append(delta.output)
        content = job.reply.whole(choices, usage_of(outputs)).model_dump_json().encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    async def _stream(self, send: Send) -> None:
        async with aclosing(self._deltas()) as deltas, EventStream(send) as events:
            try:
                await self._send_all(events, deltas)
            except ApiError as error:
                if not events.is_open:
                    raise
                await events.data(error.body().decode())
            except Exception:
                if events.is_open:
                    await events.data(from_bug().body().decode())
                raise  # into the log
            else:
                await events.data("[DONE]")

    async def _send_all(self, events: EventStream, deltas: AsyncGenerator[tuple[int, Delta], None]) -> None:
        job, outputs, has_begun = self._job, [], False
        no_usage = {"usage": None} if job.includes_usage else {}
        async for index, delta in deltas:
            if not has_begun:  # only now is it sure that there is something to say
                has_begun = True
                for chunk in job.reply.opening(job.num_choices):
                    await events.data(chunk | no_usage)
            await events.data(job.reply.chunk(index, delta) | no_usage)
            if delta.output is not None:
                outputs.append(delta.output)
        if job.includes_usage:
            await events.data(job.reply.usage_chunk(usage_of(outputs)))

    async def _deltas(self) -> AsyncGenerator[tuple[int, Delta], None]:
        """(choice, delta) of all prompts as they come; raises ApiError alone."""
        job, settings = self._job, self._settings
        streams = [
            self._engine.generate(request, job.params, timeout=settings.request_timeout, load=settings.media.load)
            for request in job.requests
        ]
        try:
            async with aclosing(_merged(streams)) as deltas:
                async for prompt, delta in deltas:
                    _check(delta)
                    self._metrics.observe(delta)
                    yield prompt * job.params.n + delta.index, delta
        except (EngineUnavailable, RequestFailed, DeadlineExceeded) as error:
            raise from_engine(error) from error
        except ValueError as error:
            code = CONTEXT_LENGTH_EXCEEDED if isinstance(error, PromptTooLong) else None
            raise ApiError(400, str(error), param=self._param(str(error)), code=code) from error

    def _param(self, message: str) -> str:
        """Which field the engine's refusal is about."""
        match = re.match(r"image (\d+): ", message)
        if match and int(match[1]) < len(self._job.pictures):
            return self._job.pictures[int(match[1])].param
        return self._job.reply.prompt_field


def _check(delta: Delta) -> None:
    if delta.finish_reason == "aborted":  # by whom else; a client that gave up is not told
        raise RequestFailed("the answer was cut off by the operator")


async def _while_connected(receive: Receive, work: Awaitable[None]) -> None:
    """Do the work, which is cancelled if the client hangs up; then, raises ClientGone."""
    task, gone = asyncio.ensure_future(work), asyncio.create_task(_hangs_up(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _hangs_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _merged(streams: Sequence[AsyncGenerator[Delta, None]]) -> AsyncGenerator[tuple[int, Delta], None]:
    """(which stream, delta) of all streams as they come; the first error ends all."""
    queue: asyncio.Queue[tuple[int, Delta | Exception | None]] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(i, stream, queue)) for i, stream in enumerate(streams)]
    try:
        num_open = len(tasks)
        while num_open:
            i, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield i, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(i: int, stream: AsyncGenerator[Delta, None], queue: asyncio.Queue) -> None:
    try:
        async with aclosing(stream):
            async for delta in stream:
                queue.put_nowait((i, delta))
    except Exception as error:
        queue.put_nowait((i, error))
    else:
        queue.put_nowait((i, None))
