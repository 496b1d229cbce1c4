"""Converts the statistics of engines to Prometheus metrics."""

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
    """Yield each gauge and counter with its values in all engines.

    Args:
        prefix: prefix of the names of the metrics.
        labels: names of the labels.
        each: the label values and the statistics of each engine.
    """
    for kind, measures in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
        for name, (value, text) in measures.items():
            family = kind(prefix + name, text, labels=labels)
            for own_labels, stats in each:
                family.add_metric(own_labels, float(value(stats)))
            yield family
