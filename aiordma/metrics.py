"""The metrics exported by `aiordma.prometheus` and `aiordma.opentelemetry`.

Each metric is computed from a `snapshot`, so its values agree with `statistics()`. No metric has a
label for the peer or the connection, because the number of peers and connections is unbounded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Literal

from .monitoring import RailState, Snapshot

__all__ = ["METRICS", "Metric"]

Rows = Iterable[tuple[tuple[str, ...], float]]
Entries = Callable[[Snapshot], Iterable[Any]]


@dataclass(frozen=True)
class Metric:
    """A metric, and the function that computes its values from a snapshot."""

    name: str
    """The metric's Prometheus name. For a counter, it does not include the suffix "_total"."""
    kind: Literal["counter", "gauge", "histogram"]
    """The metric type.

    A counter never decreases during the life of the process. A histogram's last label is "le". If
    "le" is a bound, the value is the number of observations up to that bound. If "le" is "sum", the
    value is the sum of all observations.
    """
    unit: str
    """The unit of measurement, or "1" for counts."""
    help: str
    """A description of the metric."""
    labels: tuple[str, ...]
    """The label names."""
    rows: Callable[[Snapshot], Rows]
    """A function that returns pairs of labels and a value. Values with equal labels are added."""

    def values(self, taken: Snapshot) -> dict[tuple[str, ...], float]:
        """Return the metric's values in the snapshot `taken`, keyed by label values."""
        sums: Counter[tuple[str, ...]] = Counter()
        for labels, value in self.rows(taken):
            sums[labels] += value  # type: ignore[assignment]
        return dict(sums)


def _lookup(value: Any, *path: str) -> Any:
    for key in path:
        value = value[key]
    return value


def _value(*path: str) -> Callable[[Snapshot], Rows]:
    return lambda taken: [((), _lookup(taken, *path))]


def _rows_by_key(part: str, *path: str) -> Callable[[Snapshot], Rows]:
    """Create a function that returns a row for each entry of `part`.

    The row consists of the entry's key and the value at `path` within the entry.
    """
    return lambda taken: [
        ((key,), _lookup(value, *path)) for key, value in _lookup(taken, part).items()
    ]


def _device_gauges(
    entries: Entries, *rows: tuple[str, str, str], device_key: str = "device"
) -> list[Metric]:
    """Create a gauge with a `device` label for each (name, path, help).

    `path` locates the value within an entry. The gauge is the sum over a device's entries. An entry
    is skipped if its value is None. `device_key` is the entry's key for the device name. The unit
    is bytes if the name ends with "bytes".
    """

    def sums(path: list[str]) -> Callable[[Snapshot], Rows]:
        return lambda taken: [
            ((it[device_key],), value)
            for it in entries(taken)
            if (value := _lookup(it, *path)) is not None
        ]

    return [
        Metric(f"aiordma_{name}", "gauge", "By" if name.endswith("bytes") else "1", description,
            ("device",), sums(path.split(".")))
        for name, path, description in rows
    ]  # fmt: skip


def _states(entries: Entries) -> Callable[[Snapshot], Rows]:
    return lambda taken: [((it["device"], it["state"]), 1) for it in entries(taken)]


def _rails(taken: Snapshot) -> Iterable[RailState]:
    return (rail for connection in taken["connections"] for rail in connection["rails"])


def _rail_counts(part: str) -> Callable[[Snapshot], Rows]:
    """Create a function that returns the counts in `part` by device, including zeros.

    Without zeros, an alert on `increase` would miss a counter whose first value is 1.
    """
    return lambda taken: [
        *(((it["device"],), 0) for it in _rails(taken)),
        *_rows_by_key(part)(taken),
    ]


def _latencies(taken: Snapshot) -> Rows:
    for operation, measured in taken["latencies"].items():
        for bound, count in measured["up_to"].items():
            yield (operation, bound), count
        yield (operation, "sum"), measured["seconds"]


def _traffic(name: str, description: str, key: str = "") -> Metric:
    rows = _value("traffic", key or name)
    return Metric(
        f"aiordma_{name}", "counter", "By" if "bytes" in name else "1", description, (), rows
    )


_CONNECTIONS: Entries = itemgetter("connections")

METRICS: tuple[Metric, ...] = (
    _traffic("messages_sent", "Messages delivered to peers"),
    _traffic("messages_received", "Messages received"),
    _traffic("sent_bytes", "Bytes of messages sent", "bytes_sent"),
    _traffic("received_bytes", "Bytes of messages received", "bytes_received"),
    _traffic("read_bytes", "Bytes read from peers' memory by one-sided reads", "bytes_read"),
    _traffic("written_bytes", "Bytes written to peers' memory by one-sided writes",
        "bytes_written"),
    _traffic("peer_read_bytes",
        "Bytes that peers have read from this process's memory by one-sided reads",
        "peer_bytes_read"),
    _traffic("peer_written_bytes",
        "Bytes that peers have written to this process's memory by one-sided writes",
        "peer_bytes_written"),
    _traffic("reads", "Reads of peers' memory"),
    _traffic("writes", "Writes to peers' memory"),
    _traffic("atomics", "Atomic operations on peers' memory"),
    Metric("aiordma_connection_events", "counter", "1",
        "Connections that opened, closed or broke, and failed connection attempts", ("event",),
        _rows_by_key("connection_events")),
    Metric("aiordma_errors", "counter", "1",
        "Broken connections and failed connection attempts, by exception class", ("error",),
        _rows_by_key("errors")),
    Metric("aiordma_waits", "counter", "1",
        "Number of waits for credits, the send queue or pool memory",
        ("for",), _rows_by_key("waits", "count")),
    Metric("aiordma_wait_seconds", "counter", "s",
        "Total time spent waiting for credits, the send queue or pool memory", ("for",),
        _rows_by_key("waits", "seconds")),
    Metric("aiordma_rail_failures", "counter", "1", "Broken rails", ("device",),
        _rail_counts("rail_failures")),
    Metric("aiordma_leads_moved", "counter", "1",
        "Broken active rails that were replaced, by the device of the broken rail", ("device",),
        _rail_counts("leads_moved")),
    Metric("aiordma_latency_seconds", "histogram", "s",
        "Time from posting a request to its completion, for every 17th request",
        ("operation", "le"), _latencies),
    Metric("aiordma_objects", "gauge", "1", "Open verbs objects", ("class",),
        _rows_by_key("objects")),
    Metric("aiordma_connections", "gauge", "1", "Open connections", ("device", "state"),
        _states(_CONNECTIONS)),
    Metric("aiordma_rails", "gauge", "1", "Rails of open connections", ("device", "state"),
        _states(_rails)),
    *_device_gauges(
        _rails,
        ("rail_sent_bytes", "bytes_sent",
            "Bytes of messages that open connections sent while the rail was active"),
        ("rail_received_bytes", "bytes_received",
            "Bytes of messages received over rails of open connections"),
        ("rail_read_bytes", "bytes_read",
            "Bytes read from peers' memory over rails of open connections"),
        ("rail_written_bytes", "bytes_written",
            "Bytes written to peers' memory over rails of open connections"),
        ("rail_peer_read_bytes", "peer_bytes_read",
            "Bytes that peers have read over rails of open connections"),
        ("rail_peer_written_bytes", "peer_bytes_written",
            "Bytes that peers have written over rails of open connections"),
    ),
    *_device_gauges(
        itemgetter("listeners"),
        ("handshakes", "handshakes", "Handshakes in progress at listeners"),
        ("waiting_connections", "waiting", "Connections waiting to be accepted"),
    ),
    *_device_gauges(
        _CONNECTIONS,
        ("messages_waiting", "messages_waiting", "Messages waiting for credits or memory"),
        ("waiting_for_credits", "waiting_for_credits", "Messages waiting for peers to receive"),
        ("waiting_for_send_queue", "waiting_for_send_queue",
            "Sends and operations waiting for entries of the send queue"),
        ("messages_unread", "messages_unread", "Messages not yet received by the program"),
        ("outstanding_requests", "outstanding",
            "Sends and operations that are posted or waiting for the send queue"),
        ("shared_regions", "shared_regions", "Regions shared with peers"),
        ("lent_bytes", "lent_bytes", "Bytes of memory borrowed by peers"),
    ),
    *_device_gauges(
        itemgetter("devices"),
        ("pool_registered_bytes", "pool.registered_bytes",
            "Bytes of memory registered by the pool"),
        ("pool_leased_bytes", "pool.leased_bytes", "Bytes of memory leased from the pool"),
        ("pool_limit_bytes", "pool.limit", "Maximum bytes of memory that the pool may register"),
        ("pool_waiting", "pool.waiting", "Tasks waiting for pool memory"),
        ("registration_cache_bytes", "registration_cache.bytes",
            "Bytes of user memory whose registrations are cached"),
        device_key="name",
    ),
)  # fmt: skip
"""All exported metrics."""
