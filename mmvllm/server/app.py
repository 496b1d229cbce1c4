"""The application: routes, and what lies before them."""

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from fastapi import APIRouter, FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response
from prometheus_client.exposition import choose_encoder

import mmvllm
from mmvllm.async_llm import AsyncLLM
from mmvllm.async_llm import Health as EngineHealth
from mmvllm.server import errors
from mmvllm.server.answer import Answer
from mmvllm.server.body import StrictRoute
from mmvllm.server.errors import no_such_model
from mmvllm.server.jobs import Jobs
from mmvllm.server.limits import ByteBudget, Gate
from mmvllm.server.metrics import CountingMiddleware, Metrics
from mmvllm.server.protocol import ChatRequest, CompletionRequest
from mmvllm.server.request_id import RequestIdMiddleware
from mmvllm.server.responses import ChatCompletion, Completion, ErrorResponse, Health, ModelCard, ModelList, Version
from mmvllm.server.settings import ServerSettings

FAILS = {"default": {"model": ErrorResponse, "description": "What went wrong, in OpenAI's shape"}}
STREAMS = {200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}} | FAILS


def build_app(engine: AsyncLLM, settings: ServerSettings) -> FastAPI:
    """The ASGI application over an engine, which it shuts down when it ends itself."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await engine.shutdown(drain=False)

    # The pages that show the API would load scripts from elsewhere.
    app = FastAPI(title="mmvllm", version=mmvllm.__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    metrics = Metrics(engine)
    app.include_router(_answers(engine, settings, metrics))
    app.include_router(_models(engine, settings))
    app.include_router(_state(engine, metrics))
    errors.install(app)
    open_paths = _mount_demo(app, engine, settings) if settings.has_demo else ()
    app.add_middleware(
        Gate,
        api_keys=settings.api_keys,
        max_bytes=settings.max_body_bytes,
        timeout=settings.body_timeout,
        budget=ByteBudget(settings.max_bodies_bytes),
        open_paths=open_paths,
    )
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.cors_origins, allow_methods=["GET", "POST"], allow_headers=["*"]
        )
    app.add_middleware(CountingMiddleware, metrics=metrics)
    app.add_middleware(RequestIdMiddleware)
    return app


def _mount_demo(app: FastAPI, engine: AsyncLLM, settings: ServerSettings) -> Sequence[str]:
    """Returns the paths below which the demo reads bodies itself."""
    from mmvllm.server import demo  # only who wants it needs gradio

    demo.mount(app, engine, settings)
    return (f"{demo.PATH}/",)


def _answers(engine: AsyncLLM, settings: ServerSettings, metrics: Metrics) -> APIRouter:
    router = APIRouter(prefix="/v1", route_class=StrictRoute, tags=["answers"])
    jobs = Jobs(engine, settings)

    @router.post("/chat/completions", response_model=ChatCompletion, responses=STREAMS)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation, with pictures as `image_url` parts."""
        return Answer(jobs.chat(body, request.state.held), engine, settings, metrics)

    @router.post("/completions", response_model=Completion, responses=STREAMS)
    async def completions(body: CompletionRequest) -> Response:
        """Go on from a prompt, or from several, without a chat template."""
        return Answer(jobs.completion(body), engine, settings, metrics)

    return router


def _models(engine: AsyncLLM, settings: ServerSettings) -> APIRouter:
    router = APIRouter(prefix="/v1/models", tags=["models"], responses=FAILS)
    created = int(time.time())
    cards = {
        name: ModelCard(id=name, created=created, max_model_len=engine.max_model_len) for name in settings.model_names
    }

    @router.get("")
    async def models() -> ModelList:
        """The model that is served, by each of its names."""
        return ModelList(data=[*cards.values()])

    @router.get("/{model:path}")
    async def model(model: str) -> ModelCard:
        """The model by one name; 404 for one that it does not have."""
        if model not in cards:
            raise no_such_model(model, settings.model_names)
        return cards[model]

    return router


def _state(engine: AsyncLLM, metrics: Metrics) -> APIRouter:
    router = APIRouter(tags=["state"])
    unhealthy = {503: {"model": Health, "description": "Not so"}} | FAILS

    @router.head("/health/live", include_in_schema=False)
    @router.get("/health/live", response_model=Health, responses=unhealthy)
    async def live() -> Response:
        """Whether the engine still serves what it has; if not, only a new start helps."""
        health = engine.health()
        return _health(health, health.is_live)

    @router.head("/health", include_in_schema=False)
    @router.head("/health/ready", include_in_schema=False)
    @router.get("/health", response_model=Health, responses=unhealthy)
    @router.get("/health/ready", response_model=Health, responses=unhealthy)
    async def ready() -> Response:
        """Whether the engine takes requests."""
        health = engine.health()
        return _health(health, health.is_ready)

    def _health(health: EngineHealth, is_well: bool) -> Response:
        return JSONResponse({"status": health.status, "reason": health.reason}, 200 if is_well else 503)

    @router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}} | FAILS)
    async def prometheus(request: Request) -> Response:
        """Counts and times, for Prometheus."""
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(metrics.registry), headers={"Content-Type": content_type})

    @router.get("/version", responses=FAILS)
    async def version() -> Version:
        """The version of mmvllm."""
        return Version(version=mmvllm.__version__)

    return router
