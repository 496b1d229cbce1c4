"""Serves /v1/embeddings and /pooling."""

from functools import partial

from fastapi import APIRouter, Request
from fastapi.responses import Response

from mmvllm.errors import RequestError
from mmvllm.pooling_params import PoolingParams
from mmvllm.sampling_params import SamplingParams
from mmvllm.server.common.descriptions import described_chat, described_prompts
from mmvllm.server.common.jobs import CompletionJob
from mmvllm.server.common.prompts import as_prompts
from mmvllm.server.common.protocol import ChatPrompt
from mmvllm.server.common.response_models import ERRORS
from mmvllm.server.common.serving import Serving
from mmvllm.server.common.tools import prompt_tools
from mmvllm.server.embeddings.builder import EmbeddingResponseBuilder, PoolingResponseBuilder, VectorEncoding
from mmvllm.server.embeddings.protocol import EmbeddingList, EmbeddingRequest, PooledList, PoolingRequest
from mmvllm.server.errors import ApiError
from mmvllm.server.http.auth_and_limits import ByteReservation


def router(serving: Serving) -> APIRouter:
    routes = APIRouter(route_class=serving.route_class, tags=["completions"])

    @routes.post("/v1/embeddings", response_model=EmbeddingList, responses=ERRORS)
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        """Create a vector for each of several inputs, or for a conversation with images and videos."""
        return await serving.respond(partial(embedding_job, serving), body, request.state.reservation)

    @routes.post("/pooling", response_model=PooledList, responses=ERRORS)
    async def pooling(body: PoolingRequest, request: Request) -> Response:
        """Create embeddings, with a response in vLLM's form."""
        return await serving.respond(partial(embedding_job, serving), body, request.state.reservation)

    return routes


def embedding_job(serving: Serving, body: EmbeddingRequest, reservation: ByteReservation) -> CompletionJob:
    """Return the job for the vectors of several inputs, or of one conversation."""
    model, keys = serving.model_of(body.model, body.priority)
    field = "input" if body.messages is None else "messages"
    if (body.input is None) is (body.messages is None):
        raise ApiError(400, f"{field}: give input or messages, and only one of them", param=field)
    pooling = _pooling_params(body, serving.engine.hidden_size)
    kind = PoolingResponseBuilder if isinstance(body, PoolingRequest) else EmbeddingResponseBuilder
    builder = kind(model, field, _encoding_of(body))
    if body.messages is not None:
        if (body.truncate_prompt_tokens or 0) > 0:
            message = "truncate_prompt_tokens is for input; the beginning of a conversation cannot be cut off"
            raise ApiError(400, message, param="truncate_prompt_tokens")
        prompt = serving.prompts.of_conversation(body, prompt_tools(body.tools), reservation, keys=keys)
        described = partial(described_chat, body.messages)
        return CompletionJob([prompt.request], SamplingParams(), builder, described, prompt, pooling=pooling)
    serving.prompts.check_trusted(body)
    _check_chat_fields(body)
    prompts = as_prompts(body.input)
    requests = serving.prompts.of_texts("input", prompts, body, keys)
    described = partial(described_prompts, prompts)
    return CompletionJob(requests, SamplingParams(), builder, described, pooling=pooling)


def _pooling_params(body: EmbeddingRequest, hidden_size: int) -> PoolingParams:
    """Return the pooling parameters of a request."""
    given = {name: getattr(body, name) for name in ("pooling", "normalize", "dimensions")}
    if body.normalize is None:
        given["normalize"] = body.use_activation
    try:
        params = PoolingParams(**{name: value for name, value in given.items() if value is not None})
        params.check_dimensions(hidden_size)
    except RequestError as error:
        raise ApiError(400, str(error), param=error.param) from None
    return params


def _encoding_of(body: EmbeddingRequest) -> VectorEncoding | None:
    """Return the encoding of vectors in base64, or None for lists of numbers."""
    in_base64 = body.encoding_format == "base64"
    for name in ("embed_dtype", "endianness"):
        if getattr(body, name) is not None and not in_base64:
            raise ApiError(400, f'{name} needs encoding_format "base64"', param=name)
    return VectorEncoding(body.embed_dtype or "float32", body.endianness or "little") if in_base64 else None


def _check_chat_fields(body: EmbeddingRequest) -> None:
    """Refuse fields of conversations with `input`: one that isolates, such as cache_salt, must not be ignored."""
    for name in ChatPrompt.model_fields:
        if getattr(body, name):
            raise ApiError(400, f"{name} is for messages, and the request has input; leave it out", param=name)
