"""Serves /invocations, the route that SageMaker calls; the body decides between chat, completion and embeddings."""

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Discriminator, Tag

from mmvllm.server.chat.protocol import ChatCompletion, ChatRequest
from mmvllm.server.chat.serving import chat_job
from mmvllm.server.common.jobs import CompletionJob
from mmvllm.server.common.response_models import STREAMS
from mmvllm.server.common.serving import Serving
from mmvllm.server.completions.protocol import Completion, CompletionRequest
from mmvllm.server.completions.serving import completion_job
from mmvllm.server.embeddings.protocol import EmbeddingList, EmbeddingRequest
from mmvllm.server.embeddings.serving import embedding_job
from mmvllm.server.http.auth_and_limits import ByteReservation


def _tag(body: Any) -> str:
    if not isinstance(body, dict):
        return "a chat"
    has_prompt, has_input = (body.get(field) is not None for field in ("prompt", "input"))
    return "a completion" if has_prompt else "embeddings" if has_input else "a chat"


Invocation = Annotated[
    Annotated[ChatRequest, Tag("a chat")]
    | Annotated[CompletionRequest, Tag("a completion")]
    | Annotated[EmbeddingRequest, Tag("embeddings")],
    Discriminator(_tag),
]


def router(serving: Serving) -> APIRouter:
    routes = APIRouter(route_class=serving.route_class, tags=["completions"])

    @routes.post("/invocations", response_model=ChatCompletion | Completion | EmbeddingList, responses=STREAMS)
    async def invocations(body: Invocation, request: Request) -> Response:
        """Create a chat (`messages`), a completion (`prompt`) or embeddings (`input`), at SageMaker's path."""
        return await serving.respond(partial(_job, serving), body, request.state.reservation)

    return routes


def _job(serving: Serving, body: Invocation, reservation: ByteReservation) -> CompletionJob:
    if isinstance(body, CompletionRequest):
        return completion_job(serving, body)
    make = chat_job if isinstance(body, ChatRequest) else embedding_job
    return make(serving, body, reservation)
