"""The metrics of a server by the names that they have in vLLM: dashboards and autoscalers are made for these.

Counters and gauges have the labels `model_name` and `engine`; what is measured of requests has `model_name`.
"""

from collections.abc import Iterator
from dataclasses import replace

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import Metric

from mmvllm.async_llm import AsyncLLM
from mmvllm.engine.stats import EngineStats
from mmvllm.outputs import Delta, RequestOutput
from mmvllm.server.engine_families import engine_families
from mmvllm.server.settings import ServerSettings

GAUGES = {
    "num_requests_running": (lambda stats: stats.num_running, "Sequences running in the engine."),
    "num_requests_waiting": (
        lambda stats: stats.num_waiting,
        "Sequences waiting in the engine; those that wait for preparation count with engine 0.",
    ),
    "kv_cache_usage_perc": (lambda stats: stats.kv_usage, "Fraction of the KV cache in use, from 0 to 1."),
    "engine_sleep_state": (lambda stats: stats.num_released, "1 while the engine has freed its memory."),
}
COUNTERS = {
    "prompt_tokens": (lambda stats: stats.num_prompt_tokens, "Prompt tokens of finished requests."),
    "generation_tokens": (lambda stats: stats.num_output_tokens, "Generated tokens."),
    "prefix_cache_queries": (
        lambda stats: stats.num_prompt_tokens,
        "Prompt tokens of finished requests, which were looked for in the prefix cache.",
    ),
    "prefix_cache_hits": (lambda stats: stats.num_cached_tokens, "Those whose KV came from the prefix cache."),
    "mm_cache_queries": (lambda stats: stats.num_images, "Images, and temporal patches of videos, in requests."),
    "mm_cache_hits": (
        lambda stats: max(0, stats.num_images - stats.num_encoded_images),
        "Those that were not encoded, because their rows or the prompt's KV were cached.",
    ),
    "num_preemptions": (lambda stats: stats.num_preemptions, "Preempted sequences, whose KV is computed again."),
}
SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
HISTOGRAMS = {
    "time_to_first_token_seconds": (lambda out: out.metrics.time_to_first_token, SECONDS, "From admission."),
    "e2e_request_latency_seconds": (lambda out: out.metrics.e2e_time, SECONDS, "From admission to the last token."),
    "request_queue_time_seconds": (
        lambda out: out.metrics.time_in_queue,
        SECONDS,
        "From when a request was prepared until it was first scheduled.",
    ),
    "request_prefill_time_seconds": (
        lambda out: out.metrics.prefill_time,
        SECONDS,
        "From when a request was first scheduled until its first token.",
    ),
    "request_decode_time_seconds": (
        lambda out: out.metrics.decode_time,
        SECONDS,
        "From the first token of a request to its last.",
    ),
    "request_time_per_output_token_seconds": (
        lambda out: out.metrics.time_per_output_token,
        SECONDS,
        "Mean time per output token of a request after the first.",
    ),
    "request_prompt_tokens": (lambda out: out.num_prompt_tokens, TOKENS, "Prompt tokens of a request."),
    "request_generation_tokens": (
        lambda out: sum(len(completion.token_ids) for completion in out.completions),
        TOKENS,
        "Generated tokens of a request.",
    ),
}
_REASONS = {"eos": "stop", "aborted": "abort"}  # others have the same name


class VllmMetrics:
    """The metrics of one server by vLLM's names, in a registry."""

    def __init__(self, registry: CollectorRegistry, engine: AsyncLLM, settings: ServerSettings):
        self._engine, self._model_name = engine, settings.model_names[0]
        self._histograms = {
            name: Histogram(f"vllm:{name}", text, ["model_name"], buckets=buckets, registry=registry)
            for name, (_, buckets, text) in HISTOGRAMS.items()
        }
        labels = ["model_name", "finished_reason"]
        self._success = Counter("vllm:request_success", "Finished completions.", labels, registry=registry)
        registry.register(self)

    def observe(self, delta: Delta) -> None:
        """Count the completion that ends with this delta."""
        if delta.finish_reason is not None:
            reason = _REASONS.get(delta.finish_reason, delta.finish_reason)
            self._success.labels(self._model_name, reason).inc()

    def observe_request(self, output: RequestOutput) -> None:
        """Measure a finished request."""
        for name, (value, _, _) in HISTOGRAMS.items():
            if (measured := value(output)) is not None:
                self._histograms[name].labels(self._model_name).observe(measured)

    def collect(self) -> Iterator[Metric]:
        """The engines' statistics, as prometheus_client asks for them."""
        each = [([self._model_name, str(i)], stats) for i, stats in enumerate(self._engine_stats())]
        return engine_families("vllm:", GAUGES, COUNTERS, ["model_name", "engine"], each)

    def _engine_stats(self) -> list[EngineStats]:
        first, *others = self._engine.engine_stats()
        waiting = first.num_waiting + self._engine.stats().num_preparing
        return [replace(first, num_waiting=waiting), *others]
