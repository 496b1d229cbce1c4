"""Engine statistics as metrics with vLLM's names, for `LLM.get_metrics` and the server."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mmvllm.engine.stats import EngineStats

Measures = Mapping[str, tuple[Callable[[EngineStats], float], str]]  # by name: how to read the value, and its help text

PREFIX = "vllm:"
GAUGES: Measures = {
    "num_requests_running": (lambda stats: stats.num_running, "Sequences running in the engine."),
    "num_requests_waiting": (
        lambda stats: stats.num_waiting,
        "Sequences waiting in the engine; requests in preparation count for engine 0.",
    ),
    "kv_cache_usage_perc": (lambda stats: stats.kv_usage, "Fraction of the KV cache in use, from 0 to 1."),
    "engine_sleep_state": (lambda stats: stats.num_released, "1 while the engine has freed its memory."),
}
COUNTERS: Measures = {
    "prompt_tokens": (lambda stats: stats.num_prompt_tokens, "Prompt tokens of finished requests."),
    "generation_tokens": (lambda stats: stats.num_output_tokens, "Generated tokens."),
    "prefix_cache_queries": (
        lambda stats: stats.num_prompt_tokens,
        "Prompt tokens of finished requests, all looked up in the prefix cache.",
    ),
    "prefix_cache_hits": (lambda stats: stats.num_cached_tokens, "Prompt tokens whose KV came from the prefix cache."),
    "mm_cache_queries": (lambda stats: stats.num_images, "Images, and temporal patches of videos, in requests."),
    "mm_cache_hits": (
        lambda stats: max(0, stats.num_images - stats.num_encoded_images),
        "Images and temporal patches that were not encoded: their embeddings or the prompt's KV were cached.",
    ),
    "num_preemptions": (lambda stats: stats.num_preemptions, "Preempted sequences, whose KV is computed again."),
}


@dataclass(frozen=True, slots=True)
class Metric:
    """A value with vLLM's name for it, and its labels `model_name` and `engine`."""

    name: str
    labels: dict[str, str]
    value: float


class Gauge(Metric):
    """A metric of the current state."""


class Counter(Metric):
    """A total since the engine was first loaded; sleeping does not reset it."""


def read_metrics(stats: EngineStats, labels: dict[str, str]) -> list[Metric]:
    """Return the metrics of one engine."""
    return [
        kind(PREFIX + name, labels, value(stats))
        for kind, measures in ((Gauge, GAUGES), (Counter, COUNTERS))
        for name, (value, _) in measures.items()
    ]
