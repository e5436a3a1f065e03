"""Metrics for OpenTelemetry. This module needs the extra `aiordma[opentelemetry]`.

Example::

    import aiordma.opentelemetry

    aiordma.opentelemetry.instrument()  # uses the meter provider of the process

`instrument` creates observable instruments, which the SDK queries whenever it exports metrics.
Nothing runs between exports.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

try:
    from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation, get_meter
except ModuleNotFoundError as _missing:
    raise ModuleNotFoundError(
        "aiordma.opentelemetry requires opentelemetry-api, which is not installed; install it "
        "with: pip install 'aiordma[opentelemetry]'",
        name=_missing.name,
    ) from _missing

from .metrics import METRICS, Metric, Rows
from .monitoring import Snapshot, snapshot

__all__ = ["instrument"]


class _Snapshots:
    """The snapshot shared by all metrics of a collection.

    The SDK does not report when a collection starts. A new snapshot is therefore taken when a
    metric reads the current snapshot for a second time. Threads that collect concurrently may take
    more snapshots than necessary. A lock cannot prevent this, because a destructor or a signal
    handler may start a collection while its own thread holds the lock.
    """

    def __init__(self) -> None:
        # The current snapshot, and the names of the metrics that have read it. Both are replaced
        # with a single assignment, because another thread may be reading them.
        self._current: tuple[Snapshot, set[str]] | None = None

    def for_metric(self, name: str) -> Snapshot:
        """Return the current snapshot, or a new one if the metric has already read it."""
        current = self._current
        if current is None or name in current[1]:
            self._current = current = snapshot(), set()
        current[1].add(name)
        return current[0]


def instrument(meter_provider: MeterProvider | None = None) -> None:
    """Create an OpenTelemetry instrument for each of this process's metrics (`aiordma.metrics`).

    An instrument's name is the Prometheus name with its first underscore replaced by a dot, for
    example "aiordma.messages_sent". OpenTelemetry has no observable histograms, so each histogram
    is exported as three counters, whose names end in "_bucket", "_sum" and "_count".

    Call this function only once per provider. The SDK may read the metrics from any thread.

    Args:
        meter_provider: The meter provider to use. Defaults to the global meter provider.
    """
    meter = get_meter("aiordma", meter_provider=meter_provider)
    snapshots = _Snapshots()
    for metric in _counters_and_gauges():
        is_gauge = metric.kind == "gauge"
        make = meter.create_observable_gauge if is_gauge else meter.create_observable_counter
        make(
            metric.name.replace("_", ".", 1),
            [partial(_observe, metric, snapshots)],
            metric.unit,
            metric.help,
        )


def _counters_and_gauges() -> Iterator[Metric]:
    """Yield all metrics, replacing each histogram with "_bucket", "_sum" and "_count" counters."""
    for metric in METRICS:
        if metric.kind != "histogram":
            yield metric
            continue
        *others, _ = metric.labels
        make = partial(replace, metric, kind="counter")
        yield make(name=f"{metric.name}_bucket", unit="1", rows=partial(_buckets, metric))
        for name, unit, le in (("sum", metric.unit, "sum"), ("count", "1", "+Inf")):
            rows = partial(_rows_with_le, metric, le)
            yield make(name=f"{metric.name}_{name}", unit=unit, labels=tuple(others), rows=rows)


def _buckets(metric: Metric, taken: Snapshot) -> Rows:
    return [(labels, count) for labels, count in metric.rows(taken) if labels[-1] != "sum"]


def _rows_with_le(metric: Metric, le: str, taken: Snapshot) -> Rows:
    return [(labels[:-1], value) for labels, value in metric.rows(taken) if labels[-1] == le]


def _observe(
    metric: Metric, snapshots: _Snapshots, options: CallbackOptions
) -> Iterable[Observation]:
    del options
    taken = snapshots.for_metric(metric.name)
    return [
        Observation(value, dict(zip(metric.labels, labels, strict=True)))
        for labels, value in metric.values(taken).items()
    ]
