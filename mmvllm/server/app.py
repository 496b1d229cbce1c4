"""Builds the FastAPI application of the server: its routes and middleware."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

import mmvllm
from mmvllm.entrypoints.async_llm import AsyncLLM
from mmvllm.media.decoding import MediaDecoder
from mmvllm.server import docs, errors, invocations
from mmvllm.server.chat import serving as chat
from mmvllm.server.common.served_models import ServedModels
from mmvllm.server.common.serving import Serving
from mmvllm.server.completions import serving as completions
from mmvllm.server.embeddings import serving as embeddings
from mmvllm.server.http.auth_and_limits import AuthAndSizeLimitMiddleware, ByteBudget
from mmvllm.server.http.request_id import RequestIdMiddleware
from mmvllm.server.http.trailing_slash import TrailingSlashMiddleware
from mmvllm.server.metrics.metrics import CountingMiddleware, Metrics
from mmvllm.server.models import serving as model_routes
from mmvllm.server.operations import serving as operations
from mmvllm.server.ranking import serving as ranking
from mmvllm.server.responses import serving as responses
from mmvllm.server.settings import ServerSettings
from mmvllm.server.tokenize import serving as tokenize


def build_app(engine: AsyncLLM, settings: ServerSettings) -> FastAPI:
    """Build the ASGI application that serves an engine, and that shuts the engine down when it ends."""

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
    serving = Serving(engine, settings, models, metrics, decoder)
    for route in (chat, completions, responses, embeddings, ranking, invocations, tokenize):
        app.include_router(route.router(serving))
    app.include_router(model_routes.router(models, settings.allow_lora_updating))
    app.include_router(operations.router(engine, metrics))
    docs.add_page(app)
    errors.install(app)
    open_paths = _mount_demo(app, engine, settings, decoder) if settings.demo else ()
    app.add_middleware(
        AuthAndSizeLimitMiddleware,
        api_keys=settings.api_keys,
        max_bytes=settings.body_bytes(engine.takes_videos),
        timeout=settings.body_timeout,
        budget=ByteBudget(settings.max_bodies_bytes),
        open_paths=open_paths,
    )
    if settings.cors_origins or settings.demo:  # without it, gradio's middleware would allow every origin
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
    """Mount the demo page, and return the path prefixes whose request bodies it reads itself."""
    from mmvllm.server import demo  # imports gradio, which only the demo page needs

    demo.mount(app, engine, settings, decoder)
    return (f"{demo.PATH}/",)
