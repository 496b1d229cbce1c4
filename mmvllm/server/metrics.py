"""The Prometheus metrics of a server."""

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mmvllm.async_llm import AsyncLLM
from mmvllm.outputs import Delta, RequestOutput

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2)
CLIENT_DISCONNECTED = 499


class Metrics:
    """The metrics of one server, in their own registry."""

    def __init__(self, engine: AsyncLLM):
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

    def observe(self, delta: Delta) -> None:
        """Count the completion, or the request, that ends with this delta."""
        if delta.finish_reason is not None:
            self.completions.labels(delta.finish_reason).inc()
        if delta.output is not None:
            self._observe_request(delta.output)

    def _observe_request(self, output: RequestOutput) -> None:
        begin, first, end = output.arrival_time, output.first_token_time, output.finish_time
        if first is None or end is None:
            return
        self.first_token.observe(first - begin)
        self.end_to_end.observe(end - begin)
        num_tokens = max(len(completion.token_ids) for completion in output.completions)
        if num_tokens > 1:
            self.per_token.observe((end - first) / (num_tokens - 1))


def _histogram(registry: CollectorRegistry, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
    return Histogram(f"mmvllm_{name}_seconds", text, buckets=buckets, registry=registry)


class _EngineCollector:
    """The engine's statistics, collected when the metrics are requested."""

    def __init__(self, engine: AsyncLLM):
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        gauges = {
            "requests_preparing": (stats.num_preparing, "Requests admitted and not yet in the engine."),
            "sequences_waiting": (stats.num_waiting, "Sequences waiting in the engine."),
            "sequences_running": (stats.num_running, "Sequences running in the engine."),
            "kv_cache_usage_ratio": (stats.kv_usage, "Fraction of the KV cache blocks in use."),
            "prefix_hit_ratio": (
                stats.prefix_hit_rate or 0.0,
                "Fraction of prompt tokens whose KV came from the prefix cache.",
            ),
            "image_hit_ratio": (
                stats.image_hit_rate or 0.0,
                "Fraction of images that were not encoded, because their rows or the prompt's KV were cached.",
            ),
            "prompt_tokens_per_second": (stats.prompt_tokens_per_s, "Prompt tokens per second, over the last seconds."),
            "output_tokens_per_second": (stats.output_tokens_per_s, "Output tokens per second, over the last seconds."),
            "ready": (self._engine.health().is_ready, "1 while the engine accepts requests, else 0."),
        }
        counters = {
            "requests_finished": (stats.num_finished, "Finished requests."),
            "prompt_tokens": (stats.num_prompt_tokens, "Prompt tokens of finished requests."),
            "cached_tokens": (
                stats.num_cached_tokens,
                "Prompt tokens of finished requests whose KV came from the prefix cache.",
            ),
            "output_tokens": (stats.num_output_tokens, "Generated tokens."),
            "images": (stats.num_images, "Images, and temporal patches of videos, in requests."),
            "encoded_images": (
                stats.num_encoded_images,
                "Images, and temporal patches, encoded by the vision encoder.",
            ),
            "preemptions": (stats.num_preemptions, "Preempted sequences, whose KV is computed again."),
        }
        for name, (value, text) in gauges.items():
            yield GaugeMetricFamily(f"mmvllm_{name}", text, value=float(value))
        for name, (value, text) in counters.items():
            yield CounterMetricFamily(f"mmvllm_{name}", text, value=value)


class CountingMiddleware:
    """Counts HTTP responses by path and status; 499 if the client disconnected before the end."""

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
            if is_disconnected and status in (None, 200):  # a refused request has got its response
                status = CLIENT_DISCONNECTED
            self._metrics.responses.labels(path, status or 500).inc()
            self._metrics.http_seconds.labels(path).observe(time.perf_counter() - start)


def _label(scope: Scope) -> str:
    """The route's path, or "other", so that requests for unknown paths do not create time series."""
    path = getattr(scope.get("route"), "path", None)
    if path is None and scope["path"] in scope["app"].openapi()["paths"]:  # refused by a middleware
        path = scope["path"]
    return path or "other"
