"""Builds jobs from request bodies, and checks them as far as is possible before images and videos are fetched."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary, WeakValueDictionary

from mmvllm.entrypoints.async_llm import UNREAD, AsyncLLM, Request
from mmvllm.entrypoints.intake import as_request
from mmvllm.media.fetching import fetch
from mmvllm.media.policy import MAX_URL_LENGTH, Kind, MediaError
from mmvllm.pooling_params import PoolingParams
from mmvllm.processors.chat.length_limit import LengthLimit, Truncation
from mmvllm.sampling_params import SamplingParams
from mmvllm.server import convert
from mmvllm.server.chat_builder import ChatResponseBuilder
from mmvllm.server.completion_builder import CompletionResponseBuilder
from mmvllm.server.convert import ImageReference
from mmvllm.server.descriptions import described_chat, described_prompts
from mmvllm.server.embedding_response import EmbeddingResponseBuilder, PoolingResponseBuilder
from mmvllm.server.errors import ApiError, engine_errors, renamed_errors
from mmvllm.server.functions import FUNCTIONS_IN_CHATS, has_functions, with_functions_as_tools
from mmvllm.server.limits import ByteReservation
from mmvllm.server.media_store import MediaStore, size_of
from mmvllm.server.models import ServedModels
from mmvllm.server.protocol import (
    ChatPrompt,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    Invocation,
    PoolingRequest,
    ProcessorKwargs,
    SamplingRequest,
    StreamOptions,
)
from mmvllm.server.ranking import RankingResponseBuilder, RerankRequest, ScoreRequest, TextsRequest
from mmvllm.server.response_builder import ResponseBuilder
from mmvllm.server.response_object import REPEATED, ResponseObjectBuilder
from mmvllm.server.response_store import ResponseStore, memory_of, not_stored
from mmvllm.server.responses_as_chat import (
    NAMES_IN_CHATS,
    as_chat,
    image_params_of,
    messages_of,
)
from mmvllm.server.responses_request import Item, ItemReference, ResponsesRequest
from mmvllm.server.settings import ServerSettings
from mmvllm.server.structured import StructuredField, StructuredFields, structured_field
from mmvllm.server.tokens import TokenizeChat, TokenizeText
from mmvllm.server.tools import ToolUse, demands_call, prompt_tools, use_of
from mmvllm.server.videos import VideoOptionLimits, VideoReference, processor_param_of, videos_of

_BUILDING = ThreadPoolExecutor(1, "mmvllm-build")  # several threads would make the event loop wait for each of them
# Fields whose schemas and grammars are looked into.
_COSTLY = (*StructuredFields.model_fields, "tools", "functions", "text")
MAX_LOGPROBS_OF_CANDIDATES = 2**21  # of a request: 0.3 GB
MAX_FETCHES, MAX_VIDEO_FETCHES = 16, 4


@dataclass(frozen=True, slots=True)
class PromptJob:
    """A prompt that is made of a conversation once its images and videos have been fetched."""

    request: Callable[[], Awaitable[Request]]
    images: Sequence[ImageReference]
    videos: Sequence[VideoReference]
    processor_kwargs: ProcessorKwargs | None

    def param_of(self, error: ValueError) -> str | None:
        """The field of an image or a video, or an option of the prompt, to which an error of the engine refers."""
        if (i := getattr(error, "image_index", None)) is not None:
            return self.images[i].param
        own = processor_param_of(error, self.processor_kwargs)
        if (i := getattr(error, "video_index", None)) is not None:
            return self.videos[i].option_of(error) or own or self.videos[i].param
        param = getattr(error, "param", None)
        return param if param in convert.OPTIONS_OF_TEMPLATE else own


@dataclass(frozen=True, slots=True)
class CompletionJob:
    """The engine requests of one HTTP request, and how to respond."""

    requests: Sequence[Request | Callable[[], Awaitable[Request]]]  # one per prompt, as for `AsyncLLM.generate`
    params: SamplingParams
    builder: ResponseBuilder | ResponseObjectBuilder | EmbeddingResponseBuilder | RankingResponseBuilder
    described: Callable[[], Any]  # the prompts, for the log
    prompt: PromptJob | None = None  # of a conversation
    structured: StructuredField | None = None
    streams: bool = False
    includes_usage: bool = False  # in the last chunk
    repeats_usage: bool = False  # in every chunk, as far as it is known
    pooling: PoolingParams | None = None  # where embeddings are wanted
    fields: Sequence[str] | None = None  # that the prompts come from, where the builder's is not that of all

    @property
    def num_images(self) -> int:
        return len(self.prompt.images) if self.prompt else 0

    @property
    def num_videos(self) -> int:
        return len(self.prompt.videos) if self.prompt else 0

    @property
    def num_choices(self) -> int:
        return len(self.requests) * self.params.n

    def spelled(self, error: ValueError, index: int = 0) -> tuple[str, str | None]:
        """The message of an error of the engine about one prompt, and the field of the request to which it refers."""
        return (self.structured and self.structured.spelled(error)) or (str(error), self._param_of(error, index))

    def _param_of(self, error: ValueError, index: int) -> str | None:
        if self.prompt is not None and (param := self.prompt.param_of(error)) is not None:
            return param
        own = getattr(error, "param", None)
        if own == "lora_request":
            return "model"
        if own == UNREAD:
            return None
        if self.fields is not None:
            return self.fields[index]
        return own if own in convert.PARAMS_OF_BOTH_APIS else self.builder.prompt_field


class JobFactory:
    """Builds the jobs of one server; its methods raise ApiError for invalid requests."""

    def __init__(self, engine: AsyncLLM, settings: ServerSettings, models: ServedModels):
        self._engine, self._settings, self._models = engine, settings, models
        self.responses = ResponseStore(settings.max_stored_bytes, settings.stored_seconds)
        self._detail_limits = convert.DetailLimits.of(engine.image_config, settings.max_pixels)
        self._length_limit = LengthLimit.of(engine.tokenizer, engine.max_model_len)
        own = engine.sampling_defaults if settings.uses_generation_config else {}
        self._sampling_defaults = {**convert.OPENAI_DEFAULTS, **own}
        self._video_limits = VideoOptionLimits.of(engine.video_config)
        self._kept_media = MediaStore(settings.max_kept_media_bytes)
        self._fetches, self._video_fetches = FetchTurns(MAX_FETCHES), FetchTurns(MAX_VIDEO_FETCHES)

    async def built(self, make: Callable[..., CompletionJob], body: Any, *args: Any) -> CompletionJob:
        """What `make`, a method of the factory, makes of a body; a thread calls it if that may take long."""
        if not any(getattr(body, name, None) for name in _COSTLY):
            return make(body, *args)
        return await asyncio.get_running_loop().run_in_executor(_BUILDING, make, body, *args)

    def invocation(self, body: Invocation, reservation: ByteReservation) -> CompletionJob:
        """A job for a chat, for prompts or for embeddings, whichever the body is."""
        if isinstance(body, CompletionRequest):
            return self.completion(body)
        make = self.chat if isinstance(body, ChatRequest) else self.embeddings
        return make(body, reservation)

    def chat(self, body: ChatRequest, reservation: ByteReservation) -> CompletionJob:
        """A job for a chat; the images and videos that it fetches are counted in `reservation`."""
        model, keys = self._model(body)
        calls_functions = has_functions(body)
        with renamed_errors(FUNCTIONS_IN_CHATS) if calls_functions else nullcontext():
            body = with_functions_as_tools(body)
            use = self._tool_use(body)
        prompt = self.prompt(body, use.tools, reservation, keys=keys)
        shown = use.params.num_logprobs, body.prompt_logprobs, *_named(body), self._settings.shows_times
        boxes = body.mmvllm.boxes if body.mmvllm else None
        options = {"use": use, "calls_functions": calls_functions, "boxes": boxes, "echoed": convert.echoed_text(body)}
        builder = ChatResponseBuilder(model, self._engine.tokenizer, *shown, **options)
        field = use.field or structured_field(body)
        if use.field and calls_functions:
            field = field.renamed(FUNCTIONS_IN_CHATS)
        self._check_candidates(use.params, 1, builder)
        described = partial(described_chat, body)
        return CompletionJob([prompt.request], use.params, builder, described, prompt, field, **self._streaming(body))

    def response(self, body: ResponsesRequest, reservation: ByteReservation) -> CompletionJob:
        """A job for a request of OpenAI's Responses API."""
        model, keys = self._model(body)
        given, earlier = self._resolved(body.items, reservation), self._earlier(body.previous_response_id, reservation)
        messages = messages_of(given, earlier)
        with renamed_errors(NAMES_IN_CHATS):
            chat = as_chat(body, messages)
            use = self._tool_use(chat)
            prompt = self.prompt(chat, use.tools, reservation, image_params_of(given, earlier), keys)
        if use.names and body.num_logprobs is not None:
            message = "log-probabilities are shown of texts; leave out top_logprobs and include, or the tools"
            raise ApiError(400, message, param="top_logprobs" if body.top_logprobs else "include")
        repeated = body.model_dump(include=REPEATED, by_alias=True)
        reservation.take(memory_of(repeated))  # which may be most of the body
        is_stored = body.store is not False and self.responses.accepts(messages, repeated)
        store = partial(self.responses.add, messages=messages, given=messages_of(given)) if is_stored else None
        builder = ResponseObjectBuilder(model, self._engine.tokenizer, body, use.params, use, store)
        field = use.field or structured_field(chat).renamed(NAMES_IN_CHATS)
        described, streams = partial(described_chat, chat), bool(body.stream)
        return CompletionJob([prompt.request], use.params, builder, described, prompt, field, streams)

    def _earlier(self, response_id: str | None, reservation: ByteReservation) -> Sequence[dict]:
        """The messages of the stored conversation that a request continues."""
        if response_id is None:
            return ()
        if (stored := self.responses.get(response_id, renews=True)) is None:
            message = f"{not_stored('response', response_id)}; send the conversation as a whole"
            raise ApiError(400, message, param="previous_response_id", code="previous_response_not_found")
        reservation.take(stored.size)
        return stored.messages

    def _resolved(self, items: Sequence[Item], reservation: ByteReservation) -> list[Item]:
        """Replace each reference by the item of a stored response that it names, of which the prompt has the text."""
        made = []
        for i, item in enumerate(items):
            found = item
            if isinstance(item, ItemReference):
                if (found := self.responses.output_item(item.id)) is None:
                    raise ApiError(400, not_stored("item", item.id), param=f"input[{i}].id")
                reservation.take(memory_of(found.model_dump()))
            made.append(found)
        return made

    def tokens(self, body: TokenizeChat | TokenizeText, reservation: ByteReservation) -> PromptJob | str:
        """The prompt whose tokens are asked for."""
        self.check_model(body.model)
        if isinstance(body, TokenizeChat):
            return self.prompt(body, prompt_tools(body.tools), reservation)
        self._check_lengths("prompt", [body.prompt])
        return body.prompt

    def _tool_use(self, body: ChatRequest) -> ToolUse:
        if body.tools and demands_call(body.tool_choice):  # a format is that of messages: there is none
            body = body.model_copy(update={"response_format": None})
        params = convert.chat_params(body, self._engine.max_model_len, self._sampling_defaults)
        return use_of(body.tools, body.tool_choice, body.parallel_tool_calls, params, self._engine.tokenizer)

    def embeddings(self, body: EmbeddingRequest, reservation: ByteReservation) -> CompletionJob:
        """A job for the vectors of several inputs, or of one conversation."""
        model, keys = self._model(body)
        field = "input" if body.messages is None else "messages"
        if (body.input is None) is (body.messages is None):
            raise ApiError(400, f"{field}: give input or messages, one of them", param=field)
        pooling = convert.pooling_params(body, self._engine.hidden_size)
        kind = PoolingResponseBuilder if isinstance(body, PoolingRequest) else EmbeddingResponseBuilder
        builder = kind(model, field, convert.encoding_of(body))
        if body.messages is not None:
            if (body.truncate_prompt_tokens or 0) > 0:
                message = "truncate_prompt_tokens is for input; the beginning of a conversation cannot be cut off"
                raise ApiError(400, message, param="truncate_prompt_tokens")
            prompt = self.prompt(body, prompt_tools(body.tools), reservation, keys=keys)
            described = partial(described_chat, body)
            return CompletionJob([prompt.request], SamplingParams(), builder, described, prompt, pooling=pooling)
        self._check_trusted(body)
        _check_chat_fields(body)
        prompts = convert.prompts_of(body)
        requests = self._requests("input", prompts, body, keys)
        described = partial(described_prompts, prompts)
        return CompletionJob(requests, SamplingParams(), builder, described, pooling=pooling)

    def ranking(self, body: RerankRequest | ScoreRequest) -> CompletionJob:
        """A job for the vectors of texts that are compared."""
        model, keys = self._model(body)
        (first, queries), (second, documents) = body.sides()
        requests = [*self._requests(first, queries, body, keys), *self._requests(second, documents, body, keys)]
        builder = RankingResponseBuilder(model, body, len(queries), second)
        fields = [*_numbered(first, queries), *_numbered(second, documents)]
        described = partial(described_prompts, queries + documents)
        pooling = PoolingParams(pooling=body.pooling or "last")
        return CompletionJob(requests, SamplingParams(), builder, described, pooling=pooling, fields=fields)

    def prompt(
        self,
        body: ChatPrompt,
        tools: Sequence[dict],
        reservation: ByteReservation,
        image_params: Sequence[str] | None = None,
        keys: Mapping[str, Any] = MappingProxyType({}),
    ) -> PromptJob:
        """The prompt of a conversation; `image_params` are the paths of its images where they are not those of chats.

        The engine's request has `keys`, too. The images and videos that it fetches are counted in `reservation`.
        """
        self._check_trusted(body)
        num_messages = len(body.messages)  # the chat template starts each of them with at least one token
        num_characters = sum(map(len, convert.texts_of(body))) + sum(len(json.dumps(tool)) for tool in tools)
        with engine_errors(lambda error: (str(error), "messages")):
            self._length_limit.check_characters(num_characters, num_messages)
        images, videos = self._media(body)
        if image_params is not None:
            images = [replace(image, param=param) for image, param in zip(images, image_params, strict=True)]
        max_pixels = convert.max_pixels_of(body, images, self._detail_limits)

        async def request() -> Request:
            media = (*images, *videos)
            fetched = await _all([self._fetch_given(one, reservation) for one in media])
            data = [self._kept(*both, reservation, body.cache_salt) for both in zip(media, fetched, strict=True)]
            parts = [video.part(given) for video, given in zip(videos, data[len(images) :], strict=True)]
            kwargs = self._settings.chat_template_kwargs
            return convert.chat_request(body, data[: len(images)], max_pixels, kwargs, parts, tools) | keys

        return PromptJob(request, images, videos, body.mm_processor_kwargs)

    def completion(self, body: CompletionRequest) -> CompletionJob:
        """A job for one or several prompts without a chat template."""
        model, keys = self._model(body)
        params = convert.completion_params(body, self._engine.max_model_len, self._sampling_defaults)
        prompts = convert.prompts_of(body)
        room = params.max_tokens if params.max_tokens < self._engine.max_model_len else 1
        requests = self._requests("prompt", prompts, body, keys, room)
        if len(prompts) > self._engine.max_requests:
            message = f"{len(prompts)} prompts, at most {self._engine.max_requests} are accepted (max_waiting)"
            raise ApiError(400, message, param="prompt")
        shown = params.num_logprobs, body.prompt_logprobs, *_named(body), self._settings.shows_times
        options = {"echoes": bool(body.echo), "skips_special": params.skip_special_tokens}
        builder = CompletionResponseBuilder(model, self._engine.tokenizer, *shown, **options)
        self._check_candidates(params, len(prompts), builder)
        described, field = partial(described_prompts, prompts), structured_field(body)
        return CompletionJob(requests, params, builder, described, structured=field, **self._streaming(body))

    def _check_candidates(self, params: SamplingParams, num_prompts: int, builder: ResponseBuilder) -> None:
        """Raise ApiError for completions among which the engine chooses at their end, until when nothing is sent, if
        their log-probabilities take too much memory."""
        if not params.chooses_at_end or params.num_logprobs is None:
            return
        num_tokens = num_prompts * params.num_seqs * min(params.max_tokens, self._engine.max_model_len)
        if num_tokens * (1 + params.num_logprobs) > MAX_LOGPROBS_OF_CANDIDATES:
            message = f"best_of and beam search keep at most {MAX_LOGPROBS_OF_CANDIDATES} log-probabilities of all"
            message = f"{message} candidates; lower max_tokens, {builder.logprobs_field} or the number of candidates"
            raise ApiError(400, message, param=builder.logprobs_field)

    def _streaming(self, body: SamplingRequest) -> dict[str, bool]:
        if body.stream and body.prompt_logprobs is not None:  # as in vLLM
            raise ApiError(400, "prompt_logprobs is not supported with stream: true", param="prompt_logprobs")
        if body.stream_options is not None and not body.stream:
            raise ApiError(400, "stream_options needs stream: true", param="stream_options")
        always, options = self._settings.always_includes_usage, body.stream_options or StreamOptions()
        return {
            "streams": bool(body.stream),
            "includes_usage": always or bool(options.include_usage),
            "repeats_usage": always or bool(options.include_usage and options.continuous_usage_stats),
        }

    def _model(
        self, body: SamplingRequest | EmbeddingRequest | ResponsesRequest | TextsRequest
    ) -> tuple[str, dict[str, Any]]:
        """The name of the model that a request asks for, and keys of the engine's requests."""
        model, adapter = self._models.find(body.model)
        keys = {"priority": body.priority, "lora_request": adapter}
        if body.priority and self._settings.scheduling_policy != "priority":
            message = f"priority is {body.priority}, must be 0 unless the server has --scheduling-policy priority"
            raise ApiError(400, message, param="priority")
        return model, {name: value for name, value in keys.items() if value}

    def check_model(self, name: str | None) -> None:
        """Raises ApiError for a name under which neither the model nor an adapter is served."""
        self._models.find(name)

    def _check_lengths(
        self, param: str, prompts: Iterable[str | list[int]], num_extra_tokens: int = 0, room: int = 1
    ) -> None:
        with engine_errors(lambda error: (str(error), param)):
            for prompt in prompts:
                self._length_limit.check(prompt, num_extra_tokens, room)

    def _requests(
        self,
        param: str,
        prompts: list[str | list[int]],
        body: CompletionRequest | EmbeddingRequest | TextsRequest,
        keys: dict[str, Any],
        room: int = 0,
    ) -> list[Request]:
        """The engine's requests for prompts, cut if that is asked for: -1 leaves `room` tokens for a completion."""
        most, truncation = self._engine.max_model_len, body.truncate_prompt_tokens
        if truncation is None and body.truncation_side is not None:
            message = "truncation_side needs truncate_prompt_tokens; give both"
            raise ApiError(400, message, param="truncation_side")
        if truncation is None:
            self._check_lengths(param, prompts, room=min(room, 1))
        elif truncation > most:
            message = f"truncate_prompt_tokens must be at most max_model_len, {most}, got {truncation}"
            raise ApiError(400, message, param="truncate_prompt_tokens")
        else:
            cut = Truncation(max(1, most - room) if truncation < 0 else truncation, body.truncation_side or "left")
            keys = keys | {"truncate_prompt_tokens": cut.num_tokens, "truncation_side": cut.side}
            # A million of them would be copied before they are cut.
            prompts = [one if isinstance(one, str) else cut.cut(one) for one in prompts]
        return [as_request(prompt) | keys for prompt in prompts] if keys else prompts

    def _check_trusted(self, body: ChatPrompt) -> None:
        """Refuse what only clients may send that the server trusts."""
        allowed = {
            "allow_special_tokens": (self._settings.allow_special_tokens, "--allow-special-tokens"),
            "chat_template": (self._settings.trusts_request_templates, "--trust-request-chat-template"),
        }
        for name, (is_allowed, option) in allowed.items():
            if getattr(body, name) and not is_allowed:
                raise ApiError(400, f"{name} is not allowed by this server ({option}); leave it out", param=name)

    def _media(self, body: ChatPrompt) -> tuple[list[ImageReference], list[VideoReference]]:
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

    async def _fetch_given(
        self, one: ImageReference | VideoReference, reservation: ByteReservation
    ) -> bytes | list[bytes] | None:
        """The encoded image or video; None for one that has a uuid only."""
        if one.url is None:
            return None
        if isinstance(one, VideoReference):
            return await self._fetch_video(one, reservation)
        return await self._fetch(one.url, one.param, reservation)

    def _kept(
        self,
        one: ImageReference | VideoReference,
        data: bytes | list[bytes] | None,
        reservation: ByteReservation,
        cache_salt: str | None,
    ) -> bytes | list[bytes]:
        """Keep the data of an image or video that has a uuid; without data, return what was kept under it."""
        if one.uuid is None:
            return data
        noun = "video" if isinstance(one, VideoReference) else "image"
        key = repr((noun, reservation.client, cache_salt, one.uuid))
        if data is not None:
            self._kept_media.keep(key, data)
            return data
        if (kept := self._kept_media.get(key)) is None:
            message = f"no {noun} is kept under the uuid {one.uuid!r:.100}; send the {noun} and its uuid again"
            raise ApiError(400, message, param=f"{one.path}.uuid")
        reservation.take(size_of(kept))
        return kept

    async def _fetch_video(self, video: VideoReference, reservation: ByteReservation) -> bytes | list[bytes]:
        if video.has_frames:
            limit = self._settings.media.total_timeout
            try:
                async with asyncio.timeout(limit):
                    return [await self._fetch(frame, video.param, reservation) for frame in video.frames]
            except TimeoutError:
                message = f"the frames took longer than {limit:g} s together"
                raise ApiError(400, message, param=video.param) from None
        return await self._fetch(video.url, video.param, reservation, "video")

    async def _fetch(self, url: str, param: str, reservation: ByteReservation, kind: Kind = "image") -> bytes:
        is_inline = url[:5].lower() == "data:"  # must not queue behind fetches from a slow host
        turns = self._fetches if kind == "image" else self._video_fetches
        async with nullcontext() if is_inline else turns.turn(url, reservation):
            try:
                return await fetch(url, self._settings.media, kind, reservation.take)
            except MediaError as error:
                raise ApiError(400, error.spelled(self._settings.media_names), param=param) from None


class FetchTurns:
    """Limits how many fetches run at a time: half of them from one host, a quarter for one request.

    Hosts that are slow then delay other requests less.
    """

    def __init__(self, number: int):
        self._number, self._all = number, asyncio.Semaphore(number)
        self._by_host: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._by_request: WeakKeyDictionary[object, asyncio.Semaphore] = WeakKeyDictionary()

    @asynccontextmanager
    async def turn(self, url: str, request: object) -> AsyncIterator[None]:
        """Wait until a URL may be fetched for a request."""
        try:
            host = urlsplit(url[:MAX_URL_LENGTH]).hostname or ""
        except ValueError:  # of a URL that will be refused
            host = ""
        of_host = self._by_host.setdefault(host, asyncio.Semaphore(self._number // 2))
        of_request = self._by_request.setdefault(request, asyncio.Semaphore(self._number // 4))
        async with of_request, of_host, self._all:
            yield


def _numbered(field: str, texts: Sequence[str]) -> list[str]:
    """The path of each text of a field."""
    return [f"{field}[{i}]" for i in range(len(texts))] if len(texts) > 1 else [field]


def _named(body: SamplingRequest) -> tuple[bool, bool]:
    """Whether a response has token ids, and names tokens by them."""
    return bool(body.return_token_ids), bool(body.return_tokens_as_token_ids)


def _check_chat_fields(body: EmbeddingRequest) -> None:
    """Fields of conversations have no effect on `input`; one that isolates, such as cache_salt, must not be lost."""
    for name in ChatPrompt.model_fields:
        if getattr(body, name):
            raise ApiError(400, f"{name} is for messages, and the request has input; leave it out", param=name)


async def _all(fetches: Sequence[Coroutine[Any, Any, Any]]) -> list:
    """What they return; the first error cancels the others."""
    tasks = [asyncio.create_task(one) for one in fetches]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
