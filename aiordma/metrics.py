"""The table of metrics that `aiordma.prometheus` and `aiordma.opentelemetry` export.

Each is computed from a `snapshot`, so they agree with `statistics()`. No metric has a label for a
peer or a connection: nothing bounds how many of these a process meets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from .monitoring import Snapshot

__all__ = ["METRICS", "Metric"]

Rows = Iterable[tuple[tuple[str, ...], float]]


@dataclass(frozen=True)
class Metric:
    """A metric, and how its values are computed from a snapshot."""

    name: str
    """As for Prometheus, without the "_total" of a counter."""
    kind: Literal["counter", "gauge", "histogram"]
    """A counter only grows while the process lives. A histogram has a counter for each value of its
    last label, "le": how many were at most so much, and with "sum" their sum."""
    unit: str
    """The unit of a value; "1" for counts."""
    help: str
    """A description of the metric."""
    labels: tuple[str, ...]
    """The names of the labels that tell its values apart."""
    rows: Callable[[Snapshot], Rows]
    """Labels and values; those with the same labels are added."""

    def values(self, taken: Snapshot) -> dict[tuple[str, ...], float]:
        """The values by their labels."""
        sums: Counter[tuple[str, ...]] = Counter()
        for labels, value in self.rows(taken):
            sums[labels] += value  # type: ignore[assignment]
        return dict(sums)


def _at(value: Any, *path: str) -> Any:
    for key in path:
        value = value[key]
    return value


def _value(*path: str) -> Callable[[Snapshot], Rows]:
    return lambda taken: [((), _at(taken, *path))]


def _keys(part: str, *path: str) -> Callable[[Snapshot], Rows]:
    """The value at `path` of each entry of `part`, by its key."""
    return lambda taken: [((key,), _at(value, *path)) for key, value in _at(taken, part).items()]


def _each(part: str, *path: str, device: str = "device") -> Callable[[Snapshot], Rows]:
    """The value at `path` in each entry of `part`, by device."""
    return lambda taken: [((it[device],), _at(it, *path)) for it in _at(taken, part)]


def _devices(*path: str) -> Callable[[Snapshot], Rows]:
    return _each("devices", *path, device="name")


def _states(taken: Snapshot) -> Rows:
    return [((entry["device"], entry["state"]), 1) for entry in taken["connections"]]


def _latencies(taken: Snapshot) -> Rows:
    for operation, measured in taken["latencies"].items():
        for bound, count in measured["up_to"].items():
            yield (operation, bound), count
        yield (operation, "sum"), measured["seconds"]


BY_DEVICE = ("device",)

# fmt: off
METRICS: tuple[Metric, ...] = (
    Metric("aiordma_messages_sent", "counter", "1", "Messages that peers have taken", (),
        _value("traffic", "messages_sent")),
    Metric("aiordma_messages_received", "counter", "1", "Messages received", (),
        _value("traffic", "messages_received")),
    Metric("aiordma_sent_bytes", "counter", "By", "Bytes of messages sent", (),
        _value("traffic", "bytes_sent")),
    Metric("aiordma_received_bytes", "counter", "By", "Bytes of messages received", (),
        _value("traffic", "bytes_received")),
    Metric("aiordma_reads", "counter", "1", "Reads of peers' memory", (),
        _value("traffic", "reads")),
    Metric("aiordma_writes", "counter", "1", "Writes to peers' memory", (),
        _value("traffic", "writes")),
    Metric("aiordma_atomics", "counter", "1", "Atomic operations on peers' memory", (),
        _value("traffic", "atomics")),
    Metric("aiordma_connection_events", "counter", "1",
        "Connections begun, ended in order and broken; attempts failed", ("event",),
        _keys("connection_events")),
    Metric("aiordma_errors", "counter", "1",
        "Connections broken and attempts failed, by class of the error", ("error",),
        _keys("errors")),
    Metric("aiordma_waits", "counter", "1",
        "Times that a connection waited for credits or the send queue, or a pool for memory",
        ("for",), _keys("waits", "count")),
    Metric("aiordma_wait_seconds", "counter", "s", "How long they waited", ("for",),
        _keys("waits", "seconds")),
    Metric("aiordma_latency_seconds", "histogram", "s",
        "From a post until its completion was taken, of every 17th", ("operation", "le"),
        _latencies),
    Metric("aiordma_objects", "gauge", "1", "Open objects of the verbs", ("class",),
        _keys("objects")),
    Metric("aiordma_connections", "gauge", "1", "Open connections", ("device", "state"), _states),
    Metric("aiordma_handshakes", "gauge", "1", "Handshakes of peers under way", BY_DEVICE,
        _each("listeners", "handshakes")),
    Metric("aiordma_waiting_connections", "gauge", "1", "Connections that wait for accept",
        BY_DEVICE, _each("listeners", "waiting")),
    Metric("aiordma_messages_waiting", "gauge", "1", "Messages that wait for credits or memory",
        BY_DEVICE, _each("connections", "messages_waiting")),
    Metric("aiordma_waiting_for_credits", "gauge", "1", "Messages that wait until peers receive",
        BY_DEVICE, _each("connections", "waiting_for_credits")),
    Metric("aiordma_waiting_for_send_queue", "gauge", "1",
        "Sends and operations that wait for entries of the send queue", BY_DEVICE,
        _each("connections", "waiting_for_send_queue")),
    Metric("aiordma_messages_unread", "gauge", "1", "Messages that were not received yet",
        BY_DEVICE, _each("connections", "messages_unread")),
    Metric("aiordma_outstanding_requests", "gauge", "1",
        "Sends and operations that are posted or wait for the send queue", BY_DEVICE,
        _each("connections", "outstanding")),
    Metric("aiordma_shared_regions", "gauge", "1", "Regions that peers may use", BY_DEVICE,
        _each("connections", "shared_regions")),
    Metric("aiordma_lent_bytes", "gauge", "By", "Memory that peers have borrowed", BY_DEVICE,
        _each("connections", "lent_bytes")),
    Metric("aiordma_pool_registered_bytes", "gauge", "By", "Registered memory of the pool",
        BY_DEVICE, _devices("pool", "registered_bytes")),
    Metric("aiordma_pool_leased_bytes", "gauge", "By", "Leased memory of the pool", BY_DEVICE,
        _devices("pool", "leased_bytes")),
    Metric("aiordma_pool_limit_bytes", "gauge", "By", "Most memory that the pool may register",
        BY_DEVICE, _devices("pool", "limit")),
    Metric("aiordma_pool_waiting", "gauge", "1", "Tasks that wait for memory of the pool",
        BY_DEVICE, _devices("pool", "waiting")),
    Metric("aiordma_registration_cache_bytes", "gauge", "By", "Kept registrations of user memory",
        BY_DEVICE, _devices("registration_cache", "bytes")),
)
# fmt: on
"""Every metric."""
