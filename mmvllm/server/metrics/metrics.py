"""Prometheus metrics of the server."""

import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mmvllm.entrypoints.async_llm import AsyncLLM
from mmvllm.outputs import Delta, RequestOutput
from mmvllm.sampling_params import SamplingParams
from mmvllm.server.disconnects import CLIENT_DISCONNECTED
from mmvllm.server.metrics.engine_families import engine_families
from mmvllm.server.metrics.vllm_metrics import VllmMetrics
from mmvllm.server.settings import ServerSettings

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2)


class Metrics:
    """The metrics of one server, in a separate registry."""

    def __init__(self, engine: AsyncLLM, settings: ServerSettings):
        self.registry = registry = CollectorRegistry()
        registry.register(_EngineCollector(engine))
        self.responses = Counter(
            "mmvllm_http_responses",
            "HTTP responses by path and status; 499 means that the client disconnected.",
            ["path", "status"],
            registry=registry,
        )
        self.http_seconds = Histogram(
            "mmvllm_http_seconds",
            "Time from a request's head to the end of its response, in seconds.",
            ["path"],
            buckets=SECONDS,
            registry=registry,
        )
        self.completions = Counter(
            "mmvllm_answers", "Finished completions by finish reason.", ["finish_reason"], registry=registry
        )
        self.first_token = _histogram(
            registry, "first_token", "Time to first token, from admission, in seconds.", SECONDS
        )
        self.per_token = _histogram(
            registry, "per_token", "Mean time per output token after the first, in seconds.", TOKEN_SECONDS
        )
        self.end_to_end = _histogram(
            registry, "end_to_end", "Time from admission to the last token, in seconds.", SECONDS
        )
        self._vllm = VllmMetrics(registry, engine, settings) if settings.metrics_names == "vllm" else None

    def observer(self, params: SamplingParams) -> Callable[[int, Delta], None]:
        """Return a function that records the deltas of an HTTP request, each with the index of its choice."""
        observe_vllm = None if self._vllm is None else self._vllm.observer(params)

        def observe(choice: int, delta: Delta) -> None:
            if delta.finish_reason is not None:
                self.completions.labels(delta.finish_reason).inc()
            if delta.output is not None and None not in (delta.output.first_token_time, delta.output.finish_time):
                self._observe_request(delta.output)
            if observe_vllm is not None:
                observe_vllm(choice, delta)

        return observe

    def _observe_request(self, output: RequestOutput) -> None:
        times = output.metrics
        self.first_token.observe(times.time_to_first_token)
        self.end_to_end.observe(times.e2e_time)
        if times.time_per_output_token is not None:
            self.per_token.observe(times.time_per_output_token)


def _histogram(registry: CollectorRegistry, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
    return Histogram(f"mmvllm_{name}_seconds", text, buckets=buckets, registry=registry)


GAUGES = {
    "sequences_waiting": (lambda stats: stats.num_waiting, "Sequences waiting in the engine."),
    "sequences_running": (lambda stats: stats.num_running, "Sequences running in the engine."),
    "engine_released": (
        lambda stats: stats.num_released,
        "1 while the engine has freed its memory, until the next request.",
    ),
    "kv_cache_usage_ratio": (lambda stats: stats.kv_usage, "Fraction of the KV cache blocks in use."),
    "prefix_hit_ratio": (
        lambda stats: stats.prefix_hit_rate or 0.0,
        "Fraction of prompt tokens whose KV came from the prefix cache.",
    ),
    "image_hit_ratio": (
        lambda stats: stats.image_hit_rate or 0.0,
        "Fraction of images that were not encoded, because their embeddings or the prompt's KV were cached.",
    ),
    "prompt_tokens_per_second": (
        lambda stats: stats.prompt_tokens_per_s,
        "Prompt tokens per second, over the last seconds.",
    ),
    "output_tokens_per_second": (
        lambda stats: stats.output_tokens_per_s,
        "Output tokens per second, over the last seconds.",
    ),
}
COUNTERS = {
    "requests_finished": (lambda stats: stats.num_finished, "Finished requests."),
    "prompt_tokens": (lambda stats: stats.num_prompt_tokens, "Prompt tokens of finished requests."),
    "cached_tokens": (
        lambda stats: stats.num_cached_tokens,
        "Prompt tokens of finished requests whose KV came from the prefix cache.",
    ),
    "output_tokens": (lambda stats: stats.num_output_tokens, "Generated tokens."),
    "images": (lambda stats: stats.num_images, "Images, and temporal patches of videos, in requests."),
    "encoded_images": (
        lambda stats: stats.num_encoded_images,
        "Images, and temporal patches, encoded by the vision encoder.",
    ),
    "preemptions": (lambda stats: stats.num_preemptions, "Preempted sequences, whose KV is computed again."),
}


class _EngineCollector:
    """Collects the engine's statistics on each scrape, with the label `engine` if there are several engines."""

    def __init__(self, engine: AsyncLLM):
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        total, health, each = self._engine.stats(), self._engine.health(), self._engine.engine_stats()
        yield _gauge("requests_preparing", "Requests admitted and not yet in the engine.", total.num_preparing)
        yield _gauge("ready", "1 while the engine accepts requests, else 0.", health.is_ready)
        names = [str(i) for i in range(len(each))] if len(each) > 1 else []
        labelled = [*zip([[own] for own in names] or [[]], each, strict=True)]
        yield from engine_families("mmvllm_", GAUGES, COUNTERS, ["engine"] if names else [], labelled)
        if names:
            up = GaugeMetricFamily(
                "mmvllm_engine_up", "1 while the engine serves, 0 while it starts.", labels=["engine"]
            )
            for name, one in zip(names, health.engines, strict=False):  # empty once the server stops
                up.add_metric([name], float(one.is_ready))
            yield up


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"mmvllm_{name}", text, value=float(value))


class CountingMiddleware:
    """Counts and times HTTP responses by path; the status is 499 if the client disconnected before the end."""

    def __init__(self, app: ASGIApp, metrics: Metrics):
        self.app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        status, is_complete, is_disconnected, start = None, False, False, time.perf_counter()

        async def watched_receive() -> Message:
            nonlocal is_disconnected
            message = await receive()
            is_disconnected |= message["type"] == "http.disconnect" and not is_complete
            return message

        async def watched_send(message: Message) -> None:
            nonlocal status, is_complete
            status = message.get("status", status)
            is_complete |= message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        try:
            await self.app(scope, watched_receive, watched_send)
        finally:
            path = _label(scope)
            if is_disconnected and status in (None, 200):  # a refused request has received its response
                status = CLIENT_DISCONNECTED
            self._metrics.responses.labels(path, status or 500).inc()
            self._metrics.http_seconds.labels(path).observe(time.perf_counter() - start)


def _label(scope: Scope) -> str:
    """Return the route's path, or "other" for unknown paths, which must not create time series."""
    path = getattr(scope.get("route"), "path", None)
    if path is None and scope["path"] in scope["app"].openapi()["paths"]:  # refused by a middleware
        path = scope["path"]
    return path or "other"
