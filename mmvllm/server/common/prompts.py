"""Converts conversations and texts to engine requests, and checks as much as possible before it fetches media."""

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Protocol

from mmvllm.entrypoints.async_llm import AsyncLLM, Request
from mmvllm.entrypoints.request_queue import as_request
from mmvllm.processors.chat.length_limit import LengthLimit, Truncation
from mmvllm.server.common.conversation import (
    OPTIONS_OF_TEMPLATE,
    DetailLimits,
    ImageReference,
    chat_request,
    images_of,
    max_pixels_of,
    texts_of,
)
from mmvllm.server.common.media import MediaFetcher
from mmvllm.server.common.messages import InputMessage
from mmvllm.server.common.protocol import ChatPrompt, ProcessorKwargs, TruncationSide
from mmvllm.server.common.videos import VideoOptionLimits, VideoReference, processor_param_of, videos_of
from mmvllm.server.errors import ApiError, engine_errors
from mmvllm.server.http.auth_and_limits import ByteReservation
from mmvllm.server.settings import ServerSettings


@dataclass(frozen=True, slots=True)
class PromptJob:
    """The prompt of a conversation; `request` fetches its images and videos and returns the engine's request."""

    request: Callable[[], Awaitable[Request]]
    images: Sequence[ImageReference]
    videos: Sequence[VideoReference]
    processor_kwargs: ProcessorKwargs | None

    def param_of(self, error: ValueError) -> str | None:
        """Return the request field to which an engine error about an image, a video or the prompt refers, or None."""
        if (i := getattr(error, "image_index", None)) is not None:
            return self.images[i].param
        own = processor_param_of(error, self.processor_kwargs)
        if (i := getattr(error, "video_index", None)) is not None:
            return self.videos[i].option_of(error) or own or self.videos[i].param
        param = getattr(error, "param", None)
        return param if param in OPTIONS_OF_TEMPLATE else own


class Truncatable(Protocol):
    """A request whose prompts may be truncated."""

    @property
    def truncate_prompt_tokens(self) -> int | None: ...

    @property
    def truncation_side(self) -> TruncationSide | None: ...


class PromptFactory:
    """Creates the prompts of one server; raises ApiError for invalid ones."""

    def __init__(self, engine: AsyncLLM, settings: ServerSettings):
        self._engine, self._settings, self._media = engine, settings, MediaFetcher(settings)
        self._detail_limits = DetailLimits.of(engine.image_config, settings.max_pixels)
        self._video_limits = VideoOptionLimits.of(engine.video_config)
        self._length_limit = LengthLimit.of(engine.tokenizer, engine.max_model_len)

    def of_conversation(
        self,
        body: ChatPrompt,
        tools: Sequence[dict],
        reservation: ByteReservation,
        image_params: Sequence[str] | None = None,
        keys: Mapping[str, Any] = MappingProxyType({}),
    ) -> PromptJob:
        """Return the prompt of a conversation; `image_params` are the paths of its images if the request is not a chat.

        `keys` are added to the engine's request, and `reservation` counts the images and videos that it fetches.
        """
        self.check_trusted(body)
        num_messages = len(body.messages)  # the chat template starts each of them with at least one token
        num_characters = sum(map(len, texts_of(body.messages))) + sum(len(json.dumps(tool)) for tool in tools)
        with engine_errors(lambda error: (str(error), "messages")):
            self._length_limit.check_characters(num_characters, num_messages)
        images, videos = self._media_of(body.messages, body.mm_processor_kwargs)
        if image_params is not None:
            images = [replace(image, param=param) for image, param in zip(images, image_params, strict=True)]
        bounds = body.min_pixels, body.max_pixels, body.mm_processor_kwargs
        max_pixels = max_pixels_of(images, self._detail_limits, *bounds)

        async def request() -> Request:
            data = await self._media.fetch_all((*images, *videos), reservation, body.cache_salt)
            parts = [video.part(given) for video, given in zip(videos, data[len(images) :], strict=True)]
            kwargs = self._settings.chat_template_kwargs
            return chat_request(body, data[: len(images)], max_pixels, kwargs, parts, tools) | keys

        return PromptJob(request, images, videos, body.mm_processor_kwargs)

    def of_texts(
        self, param: str, prompts: list[str | list[int]], body: Truncatable, keys: dict[str, Any], room: int = 0
    ) -> list[Request]:
        """Return the engine's requests for prompts, truncated on request; -1 leaves `room` tokens for a completion."""
        most, truncation = self._engine.max_model_len, body.truncate_prompt_tokens
        if truncation is None and body.truncation_side is not None:
            message = "truncation_side needs truncate_prompt_tokens; give both"
            raise ApiError(400, message, param="truncation_side")
        if truncation is None:
            self.check_lengths(param, prompts, room=min(room, 1))
        elif truncation > most:
            message = f"truncate_prompt_tokens must be at most max_model_len, {most}, got {truncation}"
            raise ApiError(400, message, param="truncate_prompt_tokens")
        else:
            cut = Truncation(max(1, most - room) if truncation < 0 else truncation, body.truncation_side or "left")
            keys = keys | {"truncate_prompt_tokens": cut.num_tokens, "truncation_side": cut.side}
            # Truncate token ids here, because the engine would first copy a million of them.
            prompts = [one if isinstance(one, str) else cut.cut(one) for one in prompts]
        return [as_request(prompt) | keys for prompt in prompts] if keys else prompts

    def check_lengths(self, param: str, prompts: Iterable[str | list[int]], room: int = 1) -> None:
        """Raise ApiError for a prompt that leaves fewer than `room` tokens for a completion."""
        with engine_errors(lambda error: (str(error), param)):
            for prompt in prompts:
                self._length_limit.check(prompt, room=room)

    def check_trusted(self, body: ChatPrompt) -> None:
        """Refuse fields that only trusted clients may send."""
        allowed = {
            "allow_special_tokens": (self._settings.allow_special_tokens, "--allow-special-tokens"),
            "chat_template": (self._settings.trust_request_chat_template, "--trust-request-chat-template"),
        }
        for name, (is_allowed, option) in allowed.items():
            if getattr(body, name) and not is_allowed:
                raise ApiError(400, f"{name} is not allowed by this server ({option}); leave it out", param=name)

    def _media_of(
        self, messages: Sequence[InputMessage], kwargs: ProcessorKwargs | None
    ) -> tuple[list[ImageReference], list[VideoReference]]:
        images, videos = images_of(messages), videos_of(messages)
        _check_number("images", images, self._settings.max_images)
        _check_number("videos", videos, self._settings.max_videos)
        if videos and not self._engine.takes_videos:
            raise ApiError(400, "this checkpoint has no token for videos, it cannot take them", param=videos[0].param)
        self._video_limits.check(videos, kwargs)
        return images, videos


def _check_number(noun: str, given: Sequence[object], most: int) -> None:
    if len(given) > most:
        raise ApiError(400, f"{len(given)} {noun}; at most {most} are accepted (max_{noun})", param="messages")


def as_prompts(prompts: str | list) -> list[str | list[int]]:
    """Return the prompts of a field that is a text, token ids, or a list of either."""
    return [prompts] if isinstance(prompts, str) or isinstance(prompts[0], int) else prompts
