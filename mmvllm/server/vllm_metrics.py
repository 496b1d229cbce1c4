"""The metrics of a server by the names that they have in vLLM: dashboards and autoscalers are made for these.

Counters and gauges have the labels `model_name` and `engine`; what is measured of requests has `model_name`.
"""

from collections.abc import Iterator
from dataclasses import replace

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import Metric

from mmvllm.async_llm import AsyncLLM
from mmvllm.engine.stats import EngineStats
from mmvllm.metrics import COUNTERS, GAUGES, PREFIX
from mmvllm.outputs import Delta, RequestOutput
from mmvllm.server.engine_families import engine_families
from mmvllm.server.settings import ServerSettings

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
            name: Histogram(f"{PREFIX}{name}", text, ["model_name"], buckets=buckets, registry=registry)
            for name, (_, buckets, text) in HISTOGRAMS.items()
        }
        labels = ["model_name", "finished_reason"]
        self._success = Counter(f"{PREFIX}request_success", "Finished completions.", labels, registry=registry)
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
        return engine_families(PREFIX, GAUGES, COUNTERS, ["model_name", "engine"], each)

    def _engine_stats(self) -> list[EngineStats]:
        first, *others = self._engine.engine_stats()
        waiting = first.num_waiting + self._engine.stats().num_preparing
        return [replace(first, num_waiting=waiting), *others]
