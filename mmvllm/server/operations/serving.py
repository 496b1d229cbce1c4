"""Serves the routes for operators: health, metrics, load, version, and the reset of the prefix cache."""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client.exposition import choose_encoder

import mmvllm
from mmvllm.engine.health import EngineHealth
from mmvllm.entrypoints.async_llm import AsyncLLM
from mmvllm.server.common.response_models import ERRORS
from mmvllm.server.metrics.metrics import Metrics
from mmvllm.server.operations.protocol import HealthResponse, LoadResponse, VersionResponse


def router(engine: AsyncLLM, metrics: Metrics) -> APIRouter:
    routes = APIRouter(tags=["operations"])
    unhealthy = {503: {"model": HealthResponse, "description": "Engine not ready"}} | ERRORS

    @routes.head("/health/live", include_in_schema=False)
    @routes.get("/health/live", response_model=HealthResponse, responses=unhealthy)
    async def live() -> Response:
        """Liveness: 503 if the engine has stopped or failed, and the server must be restarted."""
        health = engine.health()
        return _health(health, health.is_live)

    @routes.head("/health", include_in_schema=False)
    @routes.head("/health/ready", include_in_schema=False)
    @routes.get("/ping", response_model=HealthResponse, responses=unhealthy)
    @routes.post("/ping", include_in_schema=False)
    @routes.get("/health", response_model=HealthResponse, responses=unhealthy)
    @routes.get("/health/ready", response_model=HealthResponse, responses=unhealthy)
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

    @routes.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}} | ERRORS)
    async def prometheus(request: Request) -> Response:
        """Return metrics in the Prometheus text format."""
        try:
            encode, content_type = choose_encoder(request.headers.get("accept", ""))
        except (TypeError, ValueError):  # the header has a version that is not a number
            encode, content_type = choose_encoder("")
        return Response(encode(metrics.registry), headers={"Content-Type": content_type})

    @routes.get("/load", responses=ERRORS)
    async def load() -> LoadResponse:
        """Return the number of unfinished requests, in vLLM's form for load balancers."""
        return LoadResponse(server_load=engine.num_requests)

    @routes.post("/reset_prefix_cache", responses=ERRORS)
    async def reset_prefix_cache() -> Response:
        """Clear the prefix cache, for example before a benchmark."""
        engine.reset_prefix_cache()
        return Response()

    @routes.get("/version", responses=ERRORS)
    async def version() -> VersionResponse:
        """Return the version of mmvllm."""
        return VersionResponse(version=mmvllm.__version__)

    return routes
