"""A request's body -> the job to be done, checked as far as that is possible before pictures are fetched."""

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext

from mmvllm.async_llm import AsyncLLM, Request
from mmvllm.fetching import fetch
from mmvllm.media import MediaError
from mmvllm.server import convert
from mmvllm.server.answer import Job
from mmvllm.server.convert import Picture
from mmvllm.server.errors import ApiError, no_such_model
from mmvllm.server.limits import Held
from mmvllm.server.protocol import ChatRequest, CompletionRequest, SamplingRequest
from mmvllm.server.reply import ChatReply, CompletionReply
from mmvllm.server.settings import ServerSettings

FETCHES_AT_ONCE = 16


class Jobs:
    """Makes the jobs of one server. Its methods raise ApiError for what cannot be done."""

    def __init__(self, engine: AsyncLLM, settings: ServerSettings):
        self._engine, self._settings = engine, settings
        self._bounds = convert.Bounds.of(engine.image_config, settings.max_pixels)
        self._lengths = convert.LengthLimit.of(engine.tokenizer, engine.max_model_len)
        self._fetches = asyncio.Semaphore(FETCHES_AT_ONCE)

    def chat(self, body: ChatRequest, held: Held) -> Job:
        """To answer a conversation; the pictures that are fetched for it count as `held`."""
        self._check_model(body)
        params = convert.chat_params(body, self._engine.max_model_len)
        num_turns = len(body.messages)  # the chat template begins each with a token at least
        self._lengths.check("messages", ["".join(convert.texts(body))], num_turns)
        pictures = convert.pictures(body)
        self._check_number(pictures)
        caps = convert.caps(body, pictures, self._bounds)

        async def request() -> Request:
            return convert.chat_request(body, await self._fetch_all(pictures, held), caps)

        reply = ChatReply(body.model, self._engine.tokenizer, params.logprobs)
        return Job([request], params, reply, pictures, **_streaming(body))

    def completion(self, body: CompletionRequest) -> Job:
        """To go on from one prompt or several."""
        self._check_model(body)
        params, prompts = convert.completion_params(body), convert.prompts(body)
        self._lengths.check("prompt", prompts)
        if len(prompts) > self._engine.max_requests:
            message = f"{len(prompts)} prompts, at most {self._engine.max_requests} are taken (--max-waiting)"
            raise ApiError(400, message, param="prompt")
        reply = CompletionReply(body.model, self._engine.tokenizer, params.logprobs)
        return Job(prompts, params, reply, **_streaming(body))

    def _check_model(self, body: SamplingRequest) -> None:
        if body.model not in self._settings.model_names:
            raise no_such_model(body.model, self._settings.model_names)

    def _check_number(self, pictures: Sequence[Picture]) -> None:
        if len(pictures) > self._settings.max_images:
            message = f"{len(pictures)} pictures, at most {self._settings.max_images} are taken (--max-images)"
            raise ApiError(400, message, param="messages")

    async def _fetch_all(self, pictures: Sequence[Picture], held: Held) -> list[bytes]:
        tasks = [asyncio.create_task(self._fetch(picture, held)) for picture in pictures]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _fetch(self, picture: Picture, held: Held) -> bytes:
        is_here = picture.url[:5].lower() == "data:"  # a slow host holds up only those who fetch too
        async with nullcontext() if is_here else self._fetches:
            try:
                data = await fetch(picture.url, self._settings.media)
            except MediaError as error:
                raise ApiError(400, str(error), param=picture.param) from None
        held.take(len(data))
        return data


def _streaming(body: SamplingRequest) -> dict[str, bool]:
    options = body.stream_options
    if options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream: true", param="stream_options")
    return {"streams": bool(body.stream), "includes_usage": bool(options and options.include_usage)}
