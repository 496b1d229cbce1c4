"""Builds jobs from request bodies, and checks them as far as is possible before images are fetched."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from mmvllm.async_llm import AsyncLLM, Request
from mmvllm.fetching import fetch
from mmvllm.media import MediaError
from mmvllm.sampling_params import SamplingParams
from mmvllm.server import convert
from mmvllm.server.convert import ImageReference
from mmvllm.server.errors import ApiError, model_not_found
from mmvllm.server.limits import ByteReservation
from mmvllm.server.protocol import ChatRequest, CompletionRequest, SamplingRequest
from mmvllm.server.response_builder import ChatResponseBuilder, CompletionResponseBuilder
from mmvllm.server.settings import ServerSettings

MAX_FETCHES = 16


@dataclass(frozen=True, slots=True)
class CompletionJob:
    """The engine requests of one HTTP request, and how to respond."""

    requests: Sequence[Request | Callable[[], Awaitable[Request]]]  # one per prompt, as for `AsyncLLM.generate`
    params: SamplingParams
    builder: ChatResponseBuilder | CompletionResponseBuilder
    images: Sequence[ImageReference] = ()
    streams: bool = False
    includes_usage: bool = False  # in the last chunk
    repeats_usage: bool = False  # in every chunk, as far as it is known

    @property
    def num_choices(self) -> int:
        return len(self.requests) * self.params.n


class JobFactory:
    """Builds the jobs of one server; its methods raise ApiError for invalid requests."""

    def __init__(self, engine: AsyncLLM, settings: ServerSettings):
        self._engine, self._settings = engine, settings
        self._detail_limits = convert.DetailLimits.of(engine.image_config, settings.max_pixels)
        self._length_limit = convert.LengthLimit.of(engine.tokenizer, engine.max_model_len)
        own = engine.sampling_defaults if settings.uses_generation_config else {}
        self._sampling_defaults = {**convert.OPENAI_DEFAULTS, **own}
        self._fetches = asyncio.Semaphore(MAX_FETCHES)

    def chat(self, body: ChatRequest, reservation: ByteReservation) -> CompletionJob:
        """A job for a chat; the images that it fetches are counted in `reservation`."""
        self._check_model(body)
        self._check_special_tokens(body)
        params = convert.chat_params(body, self._engine.max_model_len, self._sampling_defaults)
        num_messages = len(body.messages)  # the chat template starts each of them with at least one token
        self._length_limit.check("messages", ["".join(convert.texts_of(body))], num_messages)
        images = convert.images_of(body)
        self._check_number(images)
        max_pixels = convert.max_pixels_of(body, images, self._detail_limits)

        async def request() -> Request:
            data = await self._fetch_all(images, reservation)
            return convert.chat_request(body, data, max_pixels, self._settings.chat_template_kwargs)

        builder = ChatResponseBuilder(body.model, self._engine.tokenizer, params.logprobs)
        return CompletionJob([request], params, builder, images, **_streaming(body))

    def completion(self, body: CompletionRequest) -> CompletionJob:
        """A job for one or several prompts without a chat template."""
        self._check_model(body)
        params = convert.completion_params(body, self._sampling_defaults)
        prompts = convert.prompts_of(body)
        self._length_limit.check("prompt", prompts)
        if len(prompts) > self._engine.max_requests:
            message = f"{len(prompts)} prompts, at most {self._engine.max_requests} are accepted (max_waiting)"
            raise ApiError(400, message, param="prompt")
        builder = CompletionResponseBuilder(body.model, self._engine.tokenizer, params.logprobs)
        return CompletionJob(prompts, params, builder, **_streaming(body))

    def _check_model(self, body: SamplingRequest) -> None:
        if body.model not in self._settings.model_names:
            raise model_not_found(body.model, self._settings.model_names)

    def _check_special_tokens(self, body: ChatRequest) -> None:
        if body.allow_special_tokens and not self._settings.allow_special_tokens:
            message = "allow_special_tokens is not allowed by this server (--allow-special-tokens); leave it out"
            raise ApiError(400, message, param="allow_special_tokens")

    def _check_number(self, images: Sequence[ImageReference]) -> None:
        if len(images) > self._settings.max_images:
            message = f"{len(images)} images, at most {self._settings.max_images} are accepted (max_images)"
            raise ApiError(400, message, param="messages")

    async def _fetch_all(self, images: Sequence[ImageReference], reservation: ByteReservation) -> list[bytes]:
        tasks = [asyncio.create_task(self._fetch(image, reservation)) for image in images]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _fetch(self, image: ImageReference, reservation: ByteReservation) -> bytes:
        is_inline = image.url[:5].lower() == "data:"  # must not queue behind fetches from a slow host
        async with nullcontext() if is_inline else self._fetches:
            try:
                data = await fetch(image.url, self._settings.media)
            except MediaError as error:
                raise ApiError(400, error.spelled(self._settings.media_names), param=image.param) from None
        reservation.take(len(data))
        return data


def _streaming(body: SamplingRequest) -> dict[str, bool]:
    includes_usage = bool(body.stream_options and body.stream_options.include_usage)
    if includes_usage and not body.stream:
        raise ApiError(400, "stream_options needs stream: true", param="stream_options")
    repeats_usage = includes_usage and bool(body.stream_options.continuous_usage_stats)
    return {"streams": bool(body.stream), "includes_usage": includes_usage, "repeats_usage": repeats_usage}
