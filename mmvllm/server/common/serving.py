"""What the routes share that give the engine work: its settings and limits, and how a job becomes a response."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from mmvllm.entrypoints.async_llm import AsyncLLM, Request
from mmvllm.media.decoding import MediaDecoder
from mmvllm.sampling_params import SamplingParams
from mmvllm.server.common.job_response import JobResponse
from mmvllm.server.common.jobs import CompletionJob
from mmvllm.server.common.prompts import PromptFactory
from mmvllm.server.common.protocol import SamplingRequest, StreamOptions
from mmvllm.server.common.request_log import RequestLog
from mmvllm.server.common.response_builder import ResponseBuilder
from mmvllm.server.common.sampling import OPENAI_DEFAULTS
from mmvllm.server.common.served_models import ServedModels
from mmvllm.server.common.structured import StructuredFields
from mmvllm.server.errors import ApiError, engine_errors
from mmvllm.server.http.body import LenientRoute, StrictRoute
from mmvllm.server.metrics.metrics import Metrics
from mmvllm.server.settings import ServerSettings

T = TypeVar("T")
_BUILDING = ThreadPoolExecutor(1, "mmvllm-build")  # several threads would make the event loop wait for each of them
# Fields whose schemas and grammars are looked into.
_COSTLY = (*StructuredFields.model_fields, "tools", "functions", "text")
MAX_LOGPROBS_OF_CANDIDATES = 2**21  # of a request: 0.3 GB


class Serving:
    """The engine as the routes of one server see it; methods raise ApiError for invalid requests."""

    def __init__(
        self, engine: AsyncLLM, settings: ServerSettings, models: ServedModels, metrics: Metrics, decoder: MediaDecoder
    ):
        self.engine, self.settings, self.models = engine, settings, models
        self.prompts = PromptFactory(engine, settings)
        own = engine.sampling_defaults if settings.uses_generation_config else {}
        self.sampling_defaults = {**OPENAI_DEFAULTS, **own}
        self._metrics, self._decoder, self._log = metrics, decoder, RequestLog(settings.log_requests)

    @property
    def route_class(self) -> type[StrictRoute]:
        """How the bodies of requests are read."""
        return LenientRoute if self.settings.ignores_unknown_fields else StrictRoute

    async def respond(self, make: Callable[..., CompletionJob], body: Any, *args: Any) -> JobResponse:
        """The response to the job that `make` makes of a body."""
        job = await self.built(make, body, *args)
        return JobResponse(job, self.engine, self.settings, self._metrics, self._decoder, self._log)

    async def built(self, make: Callable[..., T], body: Any, *args: Any) -> T:
        """What `make` makes of a body; a thread calls it if that may take long."""
        if not any(getattr(body, name, None) for name in _COSTLY):
            return make(body, *args)
        return await asyncio.get_running_loop().run_in_executor(_BUILDING, make, body, *args)

    async def tokenize(
        self,
        request: Request | Callable[[], Awaitable[Request]],
        format_error: Callable[[ValueError], tuple[str, str | None]],
    ) -> list[int]:
        """The tokens that the engine would be given; `format_error` writes an error for the client."""
        with engine_errors(format_error), self._decoder.session() as load:
            return await self.engine.tokenize(request, timeout=self.settings.request_timeout, load=load)

    def model_of(self, name: str | None, priority: int | None) -> tuple[str, dict[str, Any]]:
        """The name of the model that a request asks for, and keys of the engine's requests."""
        model, adapter = self.models.find(name)
        keys = {"priority": priority, "lora_request": adapter}
        if priority and self.settings.scheduling_policy != "priority":
            message = f"priority must be 0 unless the server has --scheduling-policy priority, got {priority}"
            raise ApiError(400, message, param="priority")
        return model, {name: value for name, value in keys.items() if value}

    def streaming(self, body: SamplingRequest) -> dict[str, bool]:
        """The fields of a job that say how its response is streamed."""
        if body.stream and body.prompt_logprobs is not None:  # as in vLLM
            raise ApiError(400, "prompt_logprobs is not supported with stream: true", param="prompt_logprobs")
        if body.stream_options is not None and not body.stream:
            raise ApiError(400, "stream_options needs stream: true", param="stream_options")
        always, options = self.settings.always_includes_usage, body.stream_options or StreamOptions()
        return {
            "streams": bool(body.stream),
            "includes_usage": always or bool(options.include_usage),
            "repeats_usage": always or bool(options.include_usage and options.continuous_usage_stats),
        }

    def check_candidates(self, params: SamplingParams, num_prompts: int, builder: ResponseBuilder) -> None:
        """Refuse completions among which the engine chooses at their end, until when nothing is sent, if their
        log-probabilities take too much memory."""
        if not params.chooses_at_end or params.num_logprobs is None:
            return
        num_tokens = num_prompts * params.num_seqs * min(params.max_tokens, self.engine.max_model_len)
        if num_tokens * (1 + params.num_logprobs) > MAX_LOGPROBS_OF_CANDIDATES:
            message = f"best_of and beam search keep at most {MAX_LOGPROBS_OF_CANDIDATES} log-probabilities of all"
            message = f"{message} candidates; lower max_tokens, {builder.logprobs_field} or the number of candidates"
            raise ApiError(400, message, param=builder.logprobs_field)
