"""Metrics for Prometheus. This module needs the extra `aiordma[prometheus]`.

Example::

    from prometheus_client import REGISTRY, start_http_server
    from aiordma.prometheus import Collector

    REGISTRY.register(Collector())
    start_http_server(9400, "127.0.0.1")  # runs in a separate thread

Each scrape takes one `aiordma.snapshot`. Nothing runs between scrapes.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

try:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
except ModuleNotFoundError as _missing:
    raise ModuleNotFoundError(
        "aiordma.prometheus requires prometheus_client, which is not installed; install it "
        "with: pip install 'aiordma[prometheus]'",
        name=_missing.name,
    ) from _missing

from .metrics import METRICS
from .monitoring import snapshot

__all__ = ["Collector"]

_Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
_SCALARS = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}


class Collector:
    """A collector for this process's metrics (`aiordma.metrics`).

    Pass the collector to `registry.register`. The registry calls the collector's methods on every
    scrape until you call `registry.unregister`. A scrape can run in any thread.
    """

    def describe(self) -> Iterator[_Family]:
        """Yield the metrics without values. The registry uses them to check for duplicate names."""
        for metric in METRICS:
            if metric.kind == "histogram":
                # prometheus_client adds the last label, "le", to each bucket.
                yield HistogramMetricFamily(metric.name, metric.help, labels=metric.labels[:-1])
            else:
                yield _SCALARS[metric.kind](metric.name, metric.help, labels=metric.labels)

    def collect(self) -> Iterator[_Family]:
        """Yield the metrics with their current values."""
        taken = snapshot()
        for metric, family in zip(METRICS, self.describe(), strict=True):
            values = metric.values(taken).items()
            if isinstance(family, HistogramMetricFamily):
                # The rows of a histogram are its buckets, followed by the sum of all observations.
                for labels, group in groupby(values, key=lambda it: it[0][:-1]):
                    *buckets, (_, total) = ((key[-1], value) for key, value in group)
                    family.add_metric(labels, buckets, total)
            else:
                for labels, value in values:
                    family.add_metric(labels, value)
            yield family
