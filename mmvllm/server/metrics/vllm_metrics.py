"""Metrics of the server under vLLM's names, which dashboards and autoscalers expect.

Metrics of engines have the labels `model_name` and `engine`; metrics of requests have `model_name`.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from mmvllm.engine.stats import STEP_SIZES, EngineStats
from mmvllm.entrypoints.async_llm import AsyncLLM
from mmvllm.entrypoints.metrics import COUNTERS, GAUGES, PREFIX
from mmvllm.outputs import Delta, RequestOutput
from mmvllm.sampling_params import SamplingParams
from mmvllm.server.metrics.engine_families import engine_families
from mmvllm.server.settings import ServerSettings

T = TypeVar("T")
SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
SMALL_COUNTS = (1, 2, 5, 10, 20)
ENGINE_LABELS = ["model_name", "engine"]
# By name: a function that returns the value, the bounds of the buckets, and the help text.
Histograms = Mapping[str, tuple[Callable[[T], float | None], tuple[float, ...], str]]
REQUEST_HISTOGRAMS: Histograms[RequestOutput] = {
    "time_to_first_token_seconds": (
        lambda out: out.metrics.time_to_first_token,
        SECONDS,
        "Time from admission to the first token.",
    ),
    "e2e_request_latency_seconds": (
        lambda out: out.metrics.e2e_time,
        SECONDS,
        "Time from admission to the last token.",
    ),
    "request_queue_time_seconds": (
        lambda out: out.metrics.time_in_queue,
        SECONDS,
        "Time from the end of a request's preparation until it is first scheduled.",
    ),
    "request_prefill_time_seconds": (
        lambda out: out.metrics.prefill_time,
        SECONDS,
        "Time from when a request is first scheduled until its first token.",
    ),
    "request_inference_time_seconds": (
        lambda out: out.metrics.inference_time,
        SECONDS,
        "Time from when a request is first scheduled until its last token.",
    ),
    "request_decode_time_seconds": (
        lambda out: out.metrics.decode_time,
        SECONDS,
        "Time from the first token of a request to its last.",
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
    "request_num_preemptions": (lambda out: out.num_preemptions, (0, *SMALL_COUNTS), "Preemptions of a request."),
}
PARAMETER_HISTOGRAMS: Histograms[SamplingParams] = {
    "request_params_n": (lambda params: params.n, SMALL_COUNTS, "The parameter n of a request."),
    "request_params_max_tokens": (lambda params: params.max_tokens, TOKENS, "The parameter max_tokens of a request."),
}
_REASONS = {"eos": "stop", "aborted": "abort"}  # other reasons have the same name in vLLM


class VllmMetrics:
    """The metrics of one server under vLLM's names, registered in the server's registry."""

    def __init__(self, registry: CollectorRegistry, engine: AsyncLLM, settings: ServerSettings):
        self._engine, self._model_name = engine, settings.model_names[0]

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"{PREFIX}{name}", text, ["model_name"], buckets=buckets, registry=registry)

        self._histograms = {
            name: histogram(name, text, buckets)
            for name, (_, buckets, text) in {**REQUEST_HISTOGRAMS, **PARAMETER_HISTOGRAMS}.items()
        }
        self._gaps = histogram("inter_token_latency_seconds", "Time between the tokens of a completion.", SECONDS)
        labels = ["model_name", "finished_reason"]
        self._success = Counter(f"{PREFIX}request_success", "Finished completions.", labels, registry=registry)
        registry.register(self)

    def observer(self, params: SamplingParams) -> Callable[[int, Delta], None]:
        """Return a function that records the deltas of an HTTP request, each with the index of its choice."""
        times: dict[int, float] = {}  # of the last token of each choice

        def observe(choice: int, delta: Delta) -> None:
            if delta.token_ids:
                now = time.perf_counter()
                if choice in times:
                    for _ in delta.token_ids:  # they share a delta if their text or the event loop was not ready
                        self._gaps.labels(self._model_name).observe((now - times[choice]) / len(delta.token_ids))
                times[choice] = now
            if delta.finish_reason is not None:
                reason = _REASONS.get(delta.finish_reason, delta.finish_reason)
                self._success.labels(self._model_name, reason).inc()
            if delta.output is not None and None not in (delta.output.first_token_time, delta.output.finish_time):
                self._measure(REQUEST_HISTOGRAMS, delta.output)
                self._measure(PARAMETER_HISTOGRAMS, params)

        return observe

    def _measure(self, histograms: Histograms[T], source: T) -> None:
        for name, (value, _, _) in histograms.items():
            if (measured := value(source)) is not None:
                self._histograms[name].labels(self._model_name).observe(measured)

    def collect(self) -> Iterator[Metric]:
        """Yield the engines' statistics; prometheus_client calls this on each scrape."""
        each, num_preparing = self._engine.engine_stats(), self._engine.stats().num_preparing
        labels = [[self._model_name, str(i)] for i in range(len(each))]
        preparing = [num_preparing] + [0] * (len(each) - 1)
        waiting = [
            replace(stats, num_waiting=stats.num_waiting + number)
            for stats, number in zip(each, preparing, strict=True)
        ]
        yield from engine_families(PREFIX, GAUGES, COUNTERS, ENGINE_LABELS, [*zip(labels, waiting, strict=True)])
        yield self._waiting_by_reason(labels, each, preparing)
        yield self._step_sizes(labels, each)
        yield self._cache_config(labels, each)
        yield self._rejections()

    def _waiting_by_reason(
        self, labels: Sequence[list[str]], each: Sequence[EngineStats], preparing: Sequence[int]
    ) -> Metric:
        text = "Sequences waiting for room in the engine (capacity), and requests in preparation (deferred)."
        names = [*ENGINE_LABELS, "reason"]
        family = GaugeMetricFamily(f"{PREFIX}num_requests_waiting_by_reason", text, labels=names)
        for own, stats, deferred in zip(labels, each, preparing, strict=True):
            family.add_metric([*own, "capacity"], stats.num_waiting)
            family.add_metric([*own, "deferred"], deferred)
        return family

    def _step_sizes(self, labels: Sequence[list[str]], each: Sequence[EngineStats]) -> Metric:
        text = "Tokens that a step computed."
        family = HistogramMetricFamily(f"{PREFIX}iteration_tokens_total", text, labels=ENGINE_LABELS)
        bounds = [*(f"{bound:.1f}" for bound in STEP_SIZES), "+Inf"]
        for own, stats in zip(labels, each, strict=True):
            counts = accumulate(stats.step_sizes.counts)
            family.add_metric(own, [*zip(bounds, counts, strict=True)], stats.step_sizes.num_tokens)
        return family

    def _rejections(self) -> Metric:
        text = "Requests refused because too many were waiting."
        family = CounterMetricFamily(f"{PREFIX}admission_rejections", text, labels=["model_name", "reason"])
        family.add_metric([self._model_name, "max_waiting"], self._engine.num_refused)
        return family

    def _cache_config(self, labels: Sequence[list[str]], each: Sequence[EngineStats]) -> Metric:
        config = self._engine.config
        facts = {
            "block_size": self._engine.block_size,
            "cache_dtype": config.kv_cache_dtype,
            "enable_prefix_caching": config.enable_prefix_caching,
            "gpu_memory_utilization": config.gpu_memory_utilization,
        }
        names = [*ENGINE_LABELS, *facts, "num_gpu_blocks"]
        family = GaugeMetricFamily(
            f"{PREFIX}cache_config_info", "Configuration of the KV cache; the labels are the values.", labels=names
        )
        for own, stats in zip(labels, each, strict=True):
            family.add_metric([*own, *map(str, facts.values()), str(stats.num_blocks)], 1)
        return family
