"""Serves /v1/completions."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response

from mmvllm.sampling_params import SamplingParams
from mmvllm.server.common.descriptions import described_prompts
from mmvllm.server.common.jobs import CompletionJob
from mmvllm.server.common.prompts import as_prompts
from mmvllm.server.common.protocol import NO_LIMIT
from mmvllm.server.common.response_models import STREAMS
from mmvllm.server.common.sampling import OPENAI_DEFAULTS, sampling_params
from mmvllm.server.common.serving import Serving
from mmvllm.server.common.structured import structured_field
from mmvllm.server.completions.builder import CompletionResponseBuilder
from mmvllm.server.completions.protocol import Completion, CompletionRequest
from mmvllm.server.errors import ApiError

COMPLETION_TOKENS = 16


def router(serving: Serving) -> APIRouter:
    routes = APIRouter(route_class=serving.route_class, tags=["completions"])

    @routes.post("/v1/completions", response_model=Completion, responses=STREAMS)
    async def completions(body: CompletionRequest) -> Response:
        """Create completions for one or several prompts, without a chat template."""
        return await serving.respond(partial(completion_job, serving), body)

    return routes


def completion_job(serving: Serving, body: CompletionRequest) -> CompletionJob:
    """Return the job for one or several prompts without a chat template."""
    engine = serving.engine
    model, keys = serving.model_of(body.model, body.priority)
    params = completion_params(body, engine.max_model_len, serving.sampling_defaults)
    prompts = as_prompts(body.prompt)
    room = params.max_tokens if params.max_tokens < engine.max_model_len else 1
    requests = serving.prompts.of_texts("prompt", prompts, body, keys, room)
    if len(prompts) > engine.max_requests:
        message = f"{len(prompts)} prompts; at most {engine.max_requests} are accepted (max_waiting)"
        raise ApiError(400, message, param="prompt")
    builder = CompletionResponseBuilder(
        model,
        engine.tokenizer,
        params.num_logprobs,
        body.prompt_logprobs,
        returns_token_ids=bool(body.return_token_ids),
        names_tokens_by_id=bool(body.return_tokens_as_token_ids),
        shows_times=serving.settings.enable_per_request_metrics,
        echoes=bool(body.echo),
        skips_special=params.skip_special_tokens,
    )
    serving.check_candidates(params, len(prompts), builder)
    described, field = partial(described_prompts, prompts), structured_field(body)
    return CompletionJob(requests, params, builder, described, structured=field, **serving.streaming(body))


def completion_params(
    body: CompletionRequest, max_model_len: int, defaults: Mapping[str, Any] = OPENAI_DEFAULTS
) -> SamplingParams:
    """Return the sampling parameters of a completion request, with `defaults` for omitted and null fields."""
    max_tokens = {None: COMPLETION_TOKENS, NO_LIMIT: max_model_len}.get(body.max_tokens, body.max_tokens)
    if max_tokens == 0 and not body.echo and body.prompt_logprobs is None:
        raise ApiError(400, "max_tokens is 0, which needs echo: true or prompt_logprobs", param="max_tokens")
    if body.logprob_token_ids and body.logprobs is None:
        raise ApiError(400, "logprob_token_ids needs logprobs, which may be 0", param="logprob_token_ids")
    own = {}
    if body.echo and (body.logprobs is not None or not max_tokens or body.stream):  # the first delta has the prompt
        own["prompt_logprobs"] = max(body.prompt_logprobs or 0, body.logprobs or 0)
    return sampling_params(body, defaults, max_tokens, body.logprobs, own)
