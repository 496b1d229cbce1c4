"""Builds jobs from request bodies, and checks them as far as is possible before images and videos are fetched."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from mmvllm.async_llm import AsyncLLM, Request
from mmvllm.fetching import fetch
from mmvllm.intake import as_request
from mmvllm.media import Kind, MediaError
from mmvllm.sampling_params import SamplingParams
from mmvllm.server import convert
from mmvllm.server.convert import ImageReference
from mmvllm.server.errors import ApiError
from mmvllm.server.limits import ByteReservation
from mmvllm.server.models import ServedModels
from mmvllm.server.protocol import ChatRequest, CompletionRequest, ProcessorKwargs, SamplingRequest
from mmvllm.server.response_builder import ChatResponseBuilder, CompletionResponseBuilder
from mmvllm.server.settings import ServerSettings
from mmvllm.server.videos import VideoOptionLimits, VideoReference, param_of, videos_of

MAX_FETCHES = 16
MAX_VIDEO_FETCHES = 4  # what they hold counts in the byte budget once it is complete


@dataclass(frozen=True, slots=True)
class CompletionJob:
    """The engine requests of one HTTP request, and how to respond."""

    requests: Sequence[Request | Callable[[], Awaitable[Request]]]  # one per prompt, as for `AsyncLLM.generate`
    params: SamplingParams
    builder: ChatResponseBuilder | CompletionResponseBuilder
    images: Sequence[ImageReference] = ()
    videos: Sequence[VideoReference] = ()
    processor_kwargs: ProcessorKwargs | None = None
    streams: bool = False
    includes_usage: bool = False  # in the last chunk
    repeats_usage: bool = False  # in every chunk, as far as it is known

    @property
    def num_choices(self) -> int:
        return len(self.requests) * self.params.n

    def param_of(self, error: ValueError) -> str:
        """The field of the request to which an error of the engine refers."""
        if (i := getattr(error, "image_index", None)) is not None:
            return self.images[i].param
        if (i := getattr(error, "video_index", None)) is not None:
            return param_of(error, self.videos[i], self.processor_kwargs)
        return "model" if getattr(error, "param", None) == "lora_request" else self.builder.prompt_field


class JobFactory:
    """Builds the jobs of one server; its methods raise ApiError for invalid requests."""

    def __init__(self, engine: AsyncLLM, settings: ServerSettings, models: ServedModels):
        self._engine, self._settings, self._models = engine, settings, models
        self._detail_limits = convert.DetailLimits.of(engine.image_config, settings.max_pixels)
        self._length_limit = convert.LengthLimit.of(engine.tokenizer, engine.max_model_len)
        own = engine.sampling_defaults if settings.uses_generation_config else {}
        self._sampling_defaults = {**convert.OPENAI_DEFAULTS, **own}
        self._video_limits = VideoOptionLimits.of(engine.video_config)
        self._fetches = asyncio.Semaphore(MAX_FETCHES)
        self._video_fetches = asyncio.Semaphore(MAX_VIDEO_FETCHES)

    def chat(self, body: ChatRequest, reservation: ByteReservation) -> CompletionJob:
        """A job for a chat; the images and videos that it fetches are counted in `reservation`."""
        adapter = self._models.adapter_of(body.model)
        self._check_special_tokens(body)
        params = convert.chat_params(body, self._engine.max_model_len, self._sampling_defaults)
        num_messages = len(body.messages)  # the chat template starts each of them with at least one token
        self._length_limit.check("messages", ["".join(convert.texts_of(body))], num_messages)
        images, videos = self._media(body)
        max_pixels = convert.max_pixels_of(body, images, self._detail_limits)

        async def request() -> Request:
            fetches = [self._fetch(image.url, image.param, reservation) for image in images]
            fetches += [self._fetch_video(video, reservation) for video in videos]
            data = await _all(fetches)
            parts = [video.part(given) for video, given in zip(videos, data[len(images) :], strict=True)]
            kwargs = self._settings.chat_template_kwargs
            made = convert.chat_request(body, data[: len(images)], max_pixels, kwargs, parts)
            return made | {"lora_request": adapter}

        builder = ChatResponseBuilder(body.model, self._engine.tokenizer, params.logprobs)
        media = {"images": images, "videos": videos, "processor_kwargs": body.mm_processor_kwargs}
        return CompletionJob([request], params, builder, **media, **_streaming(body))

    def completion(self, body: CompletionRequest) -> CompletionJob:
        """A job for one or several prompts without a chat template."""
        adapter = self._models.adapter_of(body.model)
        params = convert.completion_params(body, self._sampling_defaults)
        prompts = convert.prompts_of(body)
        self._length_limit.check("prompt", prompts)
        if len(prompts) > self._engine.max_requests:
            message = f"{len(prompts)} prompts, at most {self._engine.max_requests} are accepted (max_waiting)"
            raise ApiError(400, message, param="prompt")
        builder = CompletionResponseBuilder(body.model, self._engine.tokenizer, params.logprobs)
        requests = [as_request(prompt) | {"lora_request": adapter} for prompt in prompts] if adapter else prompts
        return CompletionJob(requests, params, builder, **_streaming(body))

    def _check_special_tokens(self, body: ChatRequest) -> None:
        if body.allow_special_tokens and not self._settings.allow_special_tokens:
            message = "allow_special_tokens is not allowed by this server (--allow-special-tokens); leave it out"
            raise ApiError(400, message, param="allow_special_tokens")

    def _media(self, body: ChatRequest) -> tuple[list[ImageReference], list[VideoReference]]:
        images, videos = convert.images_of(body), videos_of(body)
        self._check_number("images", images, self._settings.max_images)
        self._check_number("videos", videos, self._settings.max_videos)
        if videos and not self._engine.takes_videos:
            raise ApiError(400, "this checkpoint has no token for videos, it cannot take them", param=videos[0].param)
        self._video_limits.check(videos, body.mm_processor_kwargs)
        return images, videos

    def _check_number(self, noun: str, given: Sequence[object], most: int) -> None:
        if len(given) > most:
            raise ApiError(400, f"{len(given)} {noun}, at most {most} are accepted (max_{noun})", param="messages")

    async def _fetch_video(self, video: VideoReference, reservation: ByteReservation) -> bytes | list[bytes]:
        if video.has_frames:
            return [await self._fetch(frame, video.param, reservation) for frame in video.frames]
        return await self._fetch(video.url, video.param, reservation, "video")

    async def _fetch(self, url: str, param: str, reservation: ByteReservation, kind: Kind = "image") -> bytes:
        is_inline = url[:5].lower() == "data:"  # must not queue behind fetches from a slow host
        turn = self._fetches if kind == "image" else self._video_fetches
        async with nullcontext() if is_inline else turn:
            try:
                data = await fetch(url, self._settings.media, kind)
            except MediaError as error:
                raise ApiError(400, error.spelled(self._settings.media_names), param=param) from None
        reservation.take(len(data))
        return data


async def _all(fetches: Sequence[Coroutine[Any, Any, Any]]) -> list:
    """What they return; the first error cancels the others."""
    tasks = [asyncio.create_task(one) for one in fetches]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _streaming(body: SamplingRequest) -> dict[str, bool]:
    includes_usage = bool(body.stream_options and body.stream_options.include_usage)
    if includes_usage and not body.stream:
        raise ApiError(400, "stream_options needs stream: true", param="stream_options")
    repeats_usage = includes_usage and bool(body.stream_options.continuous_usage_stats)
    return {"streams": bool(body.stream), "includes_usage": includes_usage, "repeats_usage": repeats_usage}
