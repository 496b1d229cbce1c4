"""Serves /rerank and /score."""

from collections.abc import Sequence
from functools import partial

from fastapi import APIRouter
from fastapi.responses import Response

from mmvllm.pooling_params import PoolingParams
from mmvllm.sampling_params import SamplingParams
from mmvllm.server.common.descriptions import described_prompts
from mmvllm.server.common.jobs import CompletionJob
from mmvllm.server.common.response_models import ERRORS
from mmvllm.server.common.serving import Serving
from mmvllm.server.ranking.builder import RankingResponseBuilder
from mmvllm.server.ranking.protocol import RerankRequest, RerankResponse, ScoreRequest, ScoreResponse


def router(serving: Serving) -> APIRouter:
    routes = APIRouter(route_class=serving.route_class, tags=["completions"])

    @routes.post("/rerank", response_model=RerankResponse, responses=ERRORS)
    @routes.post("/v1/rerank", response_model=RerankResponse, responses=ERRORS)
    @routes.post("/v2/rerank", response_model=RerankResponse, responses=ERRORS)
    async def rerank(body: RerankRequest) -> Response:
        """Sort documents by the cosine similarity of their embeddings to a query's."""
        return await serving.respond(partial(ranking_job, serving), body)

    @routes.post("/score", response_model=ScoreResponse, responses=ERRORS)
    @routes.post("/v1/score", response_model=ScoreResponse, responses=ERRORS)
    async def score(body: ScoreRequest) -> Response:
        """Return the cosine similarity of the embeddings of pairs of texts."""
        return await serving.respond(partial(ranking_job, serving), body)

    return routes


def ranking_job(serving: Serving, body: RerankRequest | ScoreRequest) -> CompletionJob:
    """Return the job for the vectors of the texts to compare."""
    model, keys = serving.model_of(body.model, body.priority)
    (first, queries), (second, documents) = body.sides()
    texts = serving.prompts.of_texts
    requests = [*texts(first, queries, body, keys), *texts(second, documents, body, keys)]
    builder = RankingResponseBuilder(model, body, len(queries), second)
    fields = [*_numbered(first, queries), *_numbered(second, documents)]
    described = partial(described_prompts, queries + documents)
    pooling = PoolingParams(pooling=body.pooling or "last")
    return CompletionJob(requests, SamplingParams(), builder, described, pooling=pooling, fields=fields)


def _numbered(field: str, texts: Sequence[str]) -> list[str]:
    """Return the request path of each text of a field."""
    return [f"{field}[{i}]" for i in range(len(texts))] if len(texts) > 1 else [field]
