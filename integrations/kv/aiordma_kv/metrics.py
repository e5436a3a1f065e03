"""The metrics of a store and of aiordma for Prometheus. This module needs prometheus_client."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, core, make_wsgi_app

from aiordma.errors import host_port
from aiordma.prometheus import Collector

from .server import Store


class _StoreCollector:
    def __init__(self, store: Store) -> None:
        self._store = store

    def collect(self) -> Iterator[core.Metric]:
        stats = self._store.stats()
        clients = stats.pop("clients")
        for name, value in stats.items():
            is_total = name in ("hits", "misses", "evictions")
            kind = core.CounterMetricFamily if is_total else core.GaugeMetricFamily
            yield kind(f"aiordma_kv_{name}", f"{name} of the store".replace("_", " "), value)
        for name in next(iter(clients.values()), ()):
            text = f"{name} of each client host".replace("_", " ")
            family = core.CounterMetricFamily(f"aiordma_kv_client_{name}", text, labels=["client"])
            for client, counters in clients.items():
                family.add_metric([client], counters[name])
            yield family


class _Handler(WSGIRequestHandler):
    timeout = 5  # seconds to wait for a request

    def log_message(self, *_: object) -> None:
        pass


class _Server(WSGIServer):
    """Serves one request at a time, so that idle connections use up no descriptors."""

    def handle_error(self, *_: object) -> None:
        pass


def serve_metrics(store: Store, host: str, port: int) -> str:
    """Serve metrics in another thread until the process ends. Returns the URL."""
    registry = CollectorRegistry()
    registry.register(_StoreCollector(store))
    registry.register(Collector())
    _Server.address_family = socket.getaddrinfo(host, port)[0][0]
    server = _Server((host, port), _Handler)
    server.set_app(make_wsgi_app(registry))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://{host_port((host, server.server_port))}/metrics"
