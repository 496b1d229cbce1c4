"""Prometheus metrics of the statistics of engines."""

from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from mmvllm.engine.stats import EngineStats
from mmvllm.entrypoints.metrics import Measures


def engine_families(
    prefix: str,
    gauges: Measures,
    counters: Measures,
    labels: Sequence[str],
    each: Sequence[tuple[Sequence[str], EngineStats]],
) -> Iterator[Metric]:
    """Yield each metric with the values of all engines.

    Args:
        prefix: the beginning of the metrics' names.
        labels: names of the labels.
        each: for each engine, the values of its labels, and its statistics.
    """
    for kind, measures in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
        for name, (value, text) in measures.items():
            family = kind(prefix + name, text, labels=labels)
            for own_labels, stats in each:
                family.add_metric(own_labels, float(value(stats)))
            yield family
