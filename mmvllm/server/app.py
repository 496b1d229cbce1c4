"""The application: routes and middleware."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal

from fastapi import APIRouter, FastAPI, Query, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response
from prometheus_client.exposition import choose_encoder

import mmvllm
from mmvllm.engine.health import EngineHealth
from mmvllm.entrypoints.async_llm import AsyncLLM
from mmvllm.media.decoding import MediaDecoder
from mmvllm.server import docs, errors
from mmvllm.server.body import LenientRoute, StrictRoute
from mmvllm.server.completion_response import CompletionResponse
from mmvllm.server.disconnects import while_connected
from mmvllm.server.errors import ApiError
from mmvllm.server.input_items import page_of_input
from mmvllm.server.jobs import CompletionJob, JobFactory
from mmvllm.server.limits import AuthAndSizeLimitMiddleware, ByteBudget
from mmvllm.server.metrics import CountingMiddleware, Metrics
from mmvllm.server.models import ERRORS, ServedModels, adapters_router, models_router
from mmvllm.server.paths import TrailingSlashMiddleware
from mmvllm.server.protocol import ChatRequest, CompletionRequest, EmbeddingRequest, Invocation, PoolingRequest
from mmvllm.server.ranking import RerankRequest, RerankResponse, ScoreRequest, ScoreResponse
from mmvllm.server.request_id import RequestIdMiddleware
from mmvllm.server.request_log import RequestLog
from mmvllm.server.response_store import ResponseStore, not_stored
from mmvllm.server.responses import (
    ChatCompletion,
    Completion,
    DeletedResponse,
    DetokenizeResponse,
    EmbeddingList,
    HealthResponse,
    InputItems,
    InputTokens,
    LoadResponse,
    PooledList,
    ResponseObject,
    TokenizeResponse,
    TokenizerInfo,
    VersionResponse,
)
from mmvllm.server.responses_request import ResponsesRequest
from mmvllm.server.settings import ServerSettings
from mmvllm.server.token_counter import TokenCounter
from mmvllm.server.tokenizer_info import tokenizer_info as info_of
from mmvllm.server.tokens import DetokenizeRequest, TokenizeRequest

STREAMS = {200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}} | ERRORS


def build_app(engine: AsyncLLM, settings: ServerSettings) -> FastAPI:
    """Build the ASGI application of an engine, which is shut down together with the application."""

    decoder = MediaDecoder(settings.media)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        decoder.start()
        yield
        decoder.close()
        await engine.shutdown(drain=False)

    # FastAPI's documentation pages load scripts from a CDN.
    app = FastAPI(title="mmvllm", version=mmvllm.__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    metrics, models = Metrics(engine, settings), ServedModels(engine, settings)
    jobs = JobFactory(engine, settings, models)
    app.include_router(_completions(engine, settings, metrics, decoder, jobs))
    app.include_router(_stored_responses(jobs.responses))
    app.include_router(_tokens(engine, settings, decoder, jobs))
    app.include_router(models_router(models))
    if settings.allow_lora_updating:
        app.include_router(adapters_router(models))
    app.include_router(_operations(engine, metrics))
    docs.add_page(app)
    errors.install(app)
    open_paths = _mount_demo(app, engine, settings, decoder) if settings.has_demo else ()
    app.add_middleware(
        AuthAndSizeLimitMiddleware,
        api_keys=settings.api_keys,
        max_bytes=settings.body_bytes(engine.takes_videos),
        timeout=settings.body_timeout,
        budget=ByteBudget(settings.max_bodies_bytes),
        open_paths=open_paths,
    )
    if settings.cors_origins or settings.has_demo:  # the page's own middleware would allow every origin
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
        )
    app.add_middleware(CountingMiddleware, metrics=metrics)
    app.add_middleware(TrailingSlashMiddleware, but=open_paths)
    app.add_middleware(RequestIdMiddleware)
    return app


def _mount_demo(app: FastAPI, engine: AsyncLLM, settings: ServerSettings, decoder: MediaDecoder) -> Sequence[str]:
    """Returns the path prefixes of the demo, which reads request bodies itself."""
    from mmvllm.server import demo  # imports gradio, which is needed for the demo only

    demo.mount(app, engine, settings, decoder)
    return (f"{demo.PATH}/",)


def _route_class(settings: ServerSettings) -> type[StrictRoute]:
    return LenientRoute if settings.ignores_unknown_fields else StrictRoute


def _completions(
    engine: AsyncLLM, settings: ServerSettings, metrics: Metrics, decoder: MediaDecoder, jobs: JobFactory
) -> APIRouter:
    router = APIRouter(route_class=_route_class(settings), tags=["completions"])
    log = RequestLog(settings.log_requests)

    def response(job: CompletionJob) -> CompletionResponse:
        return CompletionResponse(job, engine, settings, metrics, decoder, log)

    @router.post("/v1/chat/completions", response_model=ChatCompletion, responses=STREAMS)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Create a completion for a conversation, whose images and videos are parts `image_url` and `video_url`."""
        return response(await jobs.built(jobs.chat, body, request.state.reservation))

    @router.post("/v1/completions", response_model=Completion, responses=STREAMS)
    async def completions(body: CompletionRequest) -> Response:
        """Create completions for one or several prompts, without a chat template."""
        return response(await jobs.built(jobs.completion, body))

    @router.post("/v1/responses", response_model=ResponseObject, responses=STREAMS)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """Create a response as OpenAI's Responses API has it."""
        return response(await jobs.built(jobs.response, body, request.state.reservation))

    @router.post("/v1/embeddings", response_model=EmbeddingList, responses=ERRORS)
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        """Create a vector for each of several inputs, or for a conversation with images and videos."""
        return response(await jobs.built(jobs.embeddings, body, request.state.reservation))

    @router.post("/pooling", response_model=PooledList, responses=ERRORS)
    async def pooling(body: PoolingRequest, request: Request) -> Response:
        """Create embeddings, in vLLM's own form."""
        return response(await jobs.built(jobs.embeddings, body, request.state.reservation))

    @router.post("/rerank", response_model=RerankResponse, responses=ERRORS)
    @router.post("/v1/rerank", response_model=RerankResponse, responses=ERRORS)
    @router.post("/v2/rerank", response_model=RerankResponse, responses=ERRORS)
    async def rerank(body: RerankRequest) -> Response:
        """Sort documents by the cosine similarity of their embeddings to that of a query."""
        return response(await jobs.built(jobs.ranking, body))

    @router.post("/score", response_model=ScoreResponse, responses=ERRORS)
    @router.post("/v1/score", response_model=ScoreResponse, responses=ERRORS)
    async def score(body: ScoreRequest) -> Response:
        """Return the cosine similarity of the embeddings of pairs of texts."""
        return response(await jobs.built(jobs.ranking, body))

    @router.post("/invocations", response_model=ChatCompletion | Completion | EmbeddingList, responses=STREAMS)
    async def invocations(body: Invocation, request: Request) -> Response:
        """Create what a body with `messages`, `prompt` or `input` asks for, at the path that SageMaker calls."""
        return response(await jobs.built(jobs.invocation, body, request.state.reservation))

    return router


def _stored_responses(stored: ResponseStore) -> APIRouter:
    router = APIRouter(prefix="/v1/responses", tags=["completions"], responses=ERRORS)

    def missing(response_id: str) -> ApiError:
        return ApiError(404, not_stored("response", response_id), param="response_id")

    @router.get("/{response_id}", response_model=ResponseObject)
    async def response(response_id: str, request: Request, stream: bool = False) -> Response:
        """A response that is stored."""
        if stream:  # which clients would read without a word as an empty stream
            raise ApiError(
                400, "stream is not supported here, a stored response is complete; leave it out", param="stream"
            )
        if (found := stored.get(response_id)) is None:
            raise missing(response_id)
        request.state.reservation.take(len(found.response))  # until the client has read it
        return Response(found.response, media_type="application/json")

    @router.get("/{response_id}/input_items", response_model=InputItems)
    async def input_items(
        response_id: str,
        request: Request,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: Annotated[str | None, Query(description="The id of the last item that is known.")] = None,
    ) -> Response:
        """The items of the input of a stored response."""
        if (found := stored.get(response_id)) is None:
            raise missing(response_id)
        request.state.reservation.take(found.size)  # which the response may have again, with all images
        page = await asyncio.to_thread(page_of_input, found, response_id, limit, order, after)
        return Response(page, media_type="application/json")

    @router.post("/{response_id}/cancel", response_model=ResponseObject)
    async def cancel(response_id: str) -> Response:
        """Refused: responses are complete when they are stored, since none is made in the background."""
        if stored.get(response_id) is None:
            raise missing(response_id)
        raise ApiError(
            400, f"{response_id} is complete and cannot be cancelled; DELETE removes it", param="response_id"
        )

    @router.delete("/{response_id}")
    async def delete(response_id: str) -> DeletedResponse:
        """Delete a stored response."""
        if not stored.remove(response_id):
            raise missing(response_id)
        return DeletedResponse(id=response_id)

    return router


def _tokens(engine: AsyncLLM, settings: ServerSettings, decoder: MediaDecoder, jobs: JobFactory) -> APIRouter:
    router = APIRouter(route_class=_route_class(settings), tags=["tokens"], responses=ERRORS)
    tokens = TokenCounter(engine, settings, decoder, jobs)

    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest, request: Request) -> TokenizeResponse:
        """The tokens of a text, or of a conversation with all tokens of its images and videos."""
        return await while_connected(request.receive, tokens.tokenize(body, request.state.reservation))

    @router.post("/v1/responses/input_tokens")
    async def count_input(body: ResponsesRequest, request: Request) -> InputTokens:
        """The number of tokens of the prompt that POST /v1/responses would have."""
        return await while_connected(request.receive, tokens.count_input(body, request.state.reservation))

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> DetokenizeResponse:
        """The text of tokens."""
        return tokens.detokenize(body)

    if settings.shows_tokenizer:

        @router.get("/tokenizer_info")
        async def tokenizer_info() -> TokenizerInfo:
            """The tokenizer's configuration and the chat template."""
            return info_of(engine.tokenizer)

    return router


def _operations(engine: AsyncLLM, metrics: Metrics) -> APIRouter:
    router = APIRouter(tags=["operations"])
    unhealthy = {503: {"model": HealthResponse, "description": "Engine not ready"}} | ERRORS

    @router.head("/health/live", include_in_schema=False)
    @router.get("/health/live", response_model=HealthResponse, responses=unhealthy)
    async def live() -> Response:
        """Liveness: 503 if the engine has stopped or failed, so that the server must be restarted."""
        health = engine.health()
        return _health(health, health.is_live)

    @router.head("/health", include_in_schema=False)
    @router.head("/health/ready", include_in_schema=False)
    @router.get("/ping", response_model=HealthResponse, responses=unhealthy)
    @router.post("/ping", include_in_schema=False)
    @router.get("/health", response_model=HealthResponse, responses=unhealthy)
    @router.get("/health/ready", response_model=HealthResponse, responses=unhealthy)
    async def ready() -> Response:
        """Readiness: 503 if the engine does not accept requests."""
        health = engine.health()
        return _health(health, health.is_ready)

    def _health(health: EngineHealth, is_ok: bool) -> Response:
        content: dict[str, Any] = {"status": health.status, "reason": health.reason}
        if health.engines:
            content["engines"] = [
                {"engine": str(i), "status": one.status, "reason": one.reason} for i, one in enumerate(health.engines)
            ]
        return JSONResponse(content, 200 if is_ok else 503)

    @router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}} | ERRORS)
    async def prometheus(request: Request) -> Response:
        """Metrics in the Prometheus text format."""
        try:
            encode, content_type = choose_encoder(request.headers.get("accept", ""))
        except (TypeError, ValueError):  # a version that is no number
            encode, content_type = choose_encoder("")
        return Response(encode(metrics.registry), headers={"Content-Type": content_type})

    @router.get("/load", responses=ERRORS)
    async def load() -> LoadResponse:
        """The requests that have not ended, as vLLM counts them for load balancers."""
        return LoadResponse(server_load=engine.num_requests)

    @router.post("/reset_prefix_cache", responses=ERRORS)
    async def reset_prefix_cache() -> Response:
        """Forget the keys and values of all prompts, for example before a measurement."""
        engine.reset_prefix_cache()
        return Response()

    @router.get("/version", responses=ERRORS)
    async def version() -> VersionResponse:
        """The version of mmvllm."""
        return VersionResponse(version=mmvllm.__version__)

    return router
