"""State and helpers that the routes for generation and embeddings share, such as the response to a job."""

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
_BUILDING = ThreadPoolExecutor(1, "mmvllm-build")  # several threads would compete with the event loop for the GIL
# Fields with schemas or grammars, which may take long to check.
_COSTLY = (*StructuredFields.model_fields, "tools", "functions", "text")
MAX_LOGPROBS_OF_CANDIDATES = 2**21  # per request; they take 0.3 GB


class Serving:
    """The engine, settings and models behind the routes of one server; methods raise ApiError for invalid requests."""

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
        """The class of the routes, which determines how they parse request bodies."""
        return LenientRoute if self.settings.ignore_unknown_fields else StrictRoute

    async def respond(self, make: Callable[..., CompletionJob], body: Any, *args: Any) -> JobResponse:
        """Return the response to the job that `make` creates from a body."""
        job = await self.built(make, body, *args)
        return JobResponse(job, self.engine, self.settings, self._metrics, self._decoder, self._log)

    async def built(self, make: Callable[..., T], body: Any, *args: Any) -> T:
        """Return `make(body, *args)`; a thread calls it if that may take long."""
        if not any(getattr(body, name, None) for name in _COSTLY):
            return make(body, *args)
        return await asyncio.get_running_loop().run_in_executor(_BUILDING, make, body, *args)

    async def tokenize(
        self,
        request: Request | Callable[[], Awaitable[Request]],
        format_error: Callable[[ValueError], tuple[str, str | None]],
    ) -> list[int]:
        """Return the prompt tokens that the engine would process; `format_error` words an error for the client."""
        with engine_errors(format_error), self._decoder.session() as load:
            return await self.engine.tokenize(request, timeout=self.settings.request_timeout, load=load)

    def model_of(self, name: str | None, priority: int | None) -> tuple[str, dict[str, Any]]:
        """Return the name of the requested model, and the keys of engine requests for its adapter and the priority."""
        model, adapter = self.models.find(name)
        keys = {"priority": priority, "lora_request": adapter}
        if priority and self.settings.scheduling_policy != "priority":
            message = f"priority must be 0 unless the server has --scheduling-policy priority, got {priority}"
            raise ApiError(400, message, param="priority")
        return model, {name: value for name, value in keys.items() if value}

    def streaming(self, body: SamplingRequest) -> dict[str, bool]:
        """Return the fields of a `CompletionJob` that control streaming."""
        if body.stream and body.prompt_logprobs is not None:  # as in vLLM
            raise ApiError(400, "prompt_logprobs is not supported with stream: true", param="prompt_logprobs")
        if body.stream_options is not None and not body.stream:
            raise ApiError(400, "stream_options needs stream: true", param="stream_options")
        always, options = self.settings.enable_force_include_usage, body.stream_options or StreamOptions()
        return {
            "streams": bool(body.stream),
            "includes_usage": always or bool(options.include_usage),
            "repeats_usage": always or bool(options.include_usage and options.continuous_usage_stats),
        }

    def check_candidates(self, params: SamplingParams, num_prompts: int, builder: ResponseBuilder) -> None:
        """Refuse best_of and beam search if the log-probabilities of all candidates take too much memory.

        The engine keeps them until it chooses among the candidates at the end.
        """
        if not params.chooses_at_end or params.num_logprobs is None:
            return
        num_tokens = num_prompts * params.num_seqs * min(params.max_tokens, self.engine.max_model_len)
        if num_tokens * (1 + params.num_logprobs) > MAX_LOGPROBS_OF_CANDIDATES:
            message = f"best_of and beam search keep at most {MAX_LOGPROBS_OF_CANDIDATES} log-probabilities of all"
            message = f"{message} candidates; lower max_tokens, {builder.logprobs_field} or the number of candidates"
            raise ApiError(400, message, param=builder.logprobs_field)
