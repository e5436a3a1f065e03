"""Tests that metrics agree with `statistics()` after a known load, for each exporter."""

from __future__ import annotations

import asyncio
import importlib
import json
import re
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, NumberDataPoint
from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.parser import text_string_to_metric_families

import aiordma
from aiordma import Connection, testing
from aiordma._transport import observation
from aiordma.errors import RejectedError
from aiordma.metrics import METRICS
from aiordma.monitoring import snapshot
from aiordma.opentelemetry import instrument
from aiordma.prometheus import Collector

from .test_monitoring import load


@pytest.mark.any_device
@pytest.mark.parametrize(
    ("module", "package"), [("prometheus", "prometheus_client"), ("opentelemetry", "opentelemetry")]
)
def test_import_error_suggests_the_missing_extra(
    monkeypatch: pytest.MonkeyPatch, module: str, package: str
) -> None:
    monkeypatch.delitem(sys.modules, f"aiordma.{module}")
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError, match=rf"pip install 'aiordma\[{module}\]'"):
        importlib.import_module(f"aiordma.{module}")


Values = dict[tuple[str, frozenset[tuple[str, str]]], float]

TRAFFIC = {
    "messages_sent": "messages_sent",
    "messages_received": "messages_received",
    "bytes_sent": "sent_bytes",
    "bytes_received": "received_bytes",
    "reads": "reads",
    "writes": "writes",
    "atomics": "atomics",
    "bytes_read": "read_bytes",
    "bytes_written": "written_bytes",
    "peer_bytes_read": "peer_read_bytes",
    "peer_bytes_written": "peer_written_bytes",
}


def scrape(port: int) -> Values:
    """Return the values that Prometheus would scrape."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=100) as answer:
        text = answer.read().decode()
    return {
        (sample.name.removesuffix("_total"), frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def export(reader: InMemoryMetricReader) -> Values:
    data = reader.get_metrics_data()
    assert data is not None
    return {
        (metric.name.replace(".", "_"), labels(point)): point.value
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        for point in metric.data.data_points
        if isinstance(point, NumberDataPoint)
    }


def labels(point: NumberDataPoint) -> frozenset[tuple[str, str]]:
    return frozenset((name, str(value)) for name, value in (point.attributes or {}).items())


async def agrees(collect: Callable[[], Values], device: str) -> None:
    """Check the metrics while a pair of connections is open, and after both have ended."""
    before = await asyncio.to_thread(collect)
    async with testing.connected_pair(device=device) as ends:
        await load(*ends)
        during = await asyncio.to_thread(collect)
        pool = ends[0].pool_statistics()
        same = frozenset({("device", device)})
        assert during["aiordma_pool_registered_bytes", same] == pool.registered_bytes
        assert during["aiordma_pool_limit_bytes", same] == pool.limit
        assert during["aiordma_connections", same | {("state", "OPEN")}] == 2
        assert added(before, during) == counted(ends)
    del ends
    after = await asyncio.to_thread(collect)
    assert added(during, after) == dict.fromkeys(TRAFFIC, 0)
    event = "aiordma_connection_events"
    for name in ("begun", "ended"):
        label = frozenset({("event", name)})
        assert after[event, label] - before[event, label] == 2
    assert not any(name == "aiordma_connections" for name, _ in after)
    waited = {dict(keys)["for"] for name, keys in after if name == "aiordma_wait_seconds"}
    assert waited == {"credits", "send queue", "memory"}
    measured = snapshot()["latencies"]
    assert latencies(after) == {
        (part, operation, le): value
        for operation, found in measured.items()
        for part, le, value in (
            ("sum", None, found["seconds"]),
            ("count", None, found["up_to"]["+Inf"]),
            *(("bucket", float(bound), count) for bound, count in found["up_to"].items()),
        )
    }


def latencies(values: Values) -> dict[tuple[str, str, float | None], float]:
    """Return the latency metrics, keyed by histogram series, operation and bucket bound."""
    found = {}
    for (name, keys), value in values.items():
        _, is_one, part = name.partition("aiordma_latency_seconds_")
        if is_one:
            attributes = dict(keys)
            le = attributes.pop("le", None)
            operation = attributes.pop("operation")
            assert not attributes
            found[part, operation, float(le) if le else None] = value
    return found


def added(before: Values, after: Values) -> dict[str, float]:
    keys = {name: (f"aiordma_{metric}", frozenset[Any]()) for name, metric in TRAFFIC.items()}
    return {name: after[key] - before[key] for name, key in keys.items()}


def counted(ends: tuple[Connection, Connection]) -> dict[str, int]:
    return {name: sum(getattr(end.statistics(), name) for end in ends) for name in TRAFFIC}


@pytest.mark.any_device
async def test_prometheus_agrees_with_statistics(device_name: str) -> None:
    registry = CollectorRegistry()
    registry.register(Collector())
    server, thread = start_http_server(0, "127.0.0.1", registry)
    try:
        await agrees(lambda: scrape(server.server_port), device_name)
    finally:
        await asyncio.to_thread(server.shutdown)
        server.server_close()
        thread.join()


@pytest.mark.any_device
async def test_opentelemetry_agrees_with_statistics(device_name: str) -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    instrument(provider)
    try:
        await agrees(lambda: export(reader), device_name)
    finally:
        provider.shutdown()


@pytest.mark.any_device
async def test_collection_takes_one_snapshot(
    device_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []

    def snapshot() -> aiordma.monitoring.Snapshot:
        taken.append(aiordma.snapshot())
        return taken[-1]

    monkeypatch.setattr("aiordma.opentelemetry.snapshot", snapshot)
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    instrument(provider)
    for _ in range(3):
        export(reader)
    provider.shutdown()
    assert len(taken) == 3


ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "monitoring.md").read_text()


@pytest.mark.any_device
async def test_dashboard_and_alerts_query_existing_series(device_name: str) -> None:
    """They use only labels that the series have. The dashboard shows every series."""
    registry = CollectorRegistry()
    registry.register(Collector())
    where: Any = {"device": device_name}
    async with (
        await aiordma.start_server(Connection.wait_closed, "127.0.0.1", **where) as server,
        await aiordma.connect("127.0.0.1", server.port, **where),
    ):
        with pytest.raises(RejectedError):
            await aiordma.connect("127.0.0.1", 1, **where)
        observation.rail_broke("embedded0")
        observation.lead_moved("embedded0")
        text = generate_latest(registry).decode()
    scraped = text_string_to_metric_families(text)
    there = {each.name: {*each.labels, "instance"} for it in scraped for each in it.samples}

    panels = json.loads((ROOT / "examples" / "grafana-dashboard.json").read_text())["panels"]
    assert len({tuple(it["gridPos"].values()) for it in panels}) == len(panels)
    assert {it["fieldConfig"]["defaults"]["unit"] for it in panels} == {
        *("mps", "Bps", "ops", "s", "short", "bytes")
    }
    targets = [target for panel in panels for target in panel["targets"]]
    shown = {it["expr"]: re.findall(r"{{(\w+)}}", it["legendFormat"]) for it in targets}
    alerts = re.findall(r"^ +expr: (.+)$", PAGE, re.MULTILINE)
    assert len(alerts) == 4
    queried = set()
    for query in (*shown, *alerts):
        names = re.findall(r"\baiordma_\w+", query)
        for name in names:
            is_gauge = not name.endswith(("_total", "_bucket", "_sum", "_count"))
            assert is_gauge != ("rate(" in query or "increase(" in query), query
            kept = {label for by in re.findall(r"by \((.+?)\)", query) for label in by.split(", ")}
            asked = {*re.findall(r"(\w+)=~?\"", query)} - {"job", "instance"}
            assert (kept | asked) <= there[name], query
            assert {*shown.get(query, ())} <= kept, query
        if query in shown:
            queried |= {*names}
    assert queried == there.keys()


def test_metrics_page_lists_every_metric() -> None:
    lists = re.findall(r"^- (counter|histogram|gauge): (.*?)(?=^- |^$)", PAGE, re.M | re.S)
    assert [
        (name, kind, labels)
        for kind, text in lists
        for name, labels in re.findall(r"`(aiordma_\w+)(?:{(.+?)})?`", text)
    ] == [
        (
            metric.name + ("_total" if metric.kind == "counter" else ""),
            metric.kind,
            ", ".join(metric.labels),
        )
        for metric in METRICS
    ]
