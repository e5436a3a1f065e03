"""Carry tcp:// over RDMA in this process, and tls:// over RDMA with certificates and a key.

distributed's TCP classes are replaced when their module is imported. Processes started by a test do
the same, because of a .pth file in the environment.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, ClassVar

NAME = "distributed.comm.tcp"
# The tls:// tests require encryption. Over rdma://, encryption also requires a key.
KEYS: dict[str, dict[str, Any]] = {"TCP": {}, "TLS": {"auth": bytes(range(32)), "encrypt": True}}


def replace(tcp: Any) -> None:
    """Replace the TCP and TLS classes of the module `tcp` with RDMA classes."""
    from dask_aiordma import backend  # noqa: PLC0415 - would import distributed too early

    class Connector(backend.RDMAConnector):
        key: ClassVar[dict[str, Any]]

        async def connect(self, *arguments: Any, **named: Any) -> backend.RDMA:
            return await super().connect(*arguments, **{**named, **self.key})

    class Listener(backend.RDMAListener):
        key: ClassVar[dict[str, Any]]

        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **{**named, **self.key})

    class Backend(backend.RDMABackend):
        _connector_class: Any
        _listener_class: Any

        def get_connector(self) -> Any:
            return self._connector_class()

        def get_listener(self, *arguments: Any, **named: Any) -> Any:
            return self._listener_class(*arguments, **named)

    for name, key in KEYS.items():
        prefix = f"{name.lower()}://"
        comm = type(name, (backend.RDMA,), {})
        shared = {"prefix": prefix, "comm_class": comm, "key": key}
        connector = type(f"{name}Connector", (Connector,), shared)
        listener = type(f"{name}Listener", (Listener,), shared)
        # distributed's tests monkeypatch these attributes.
        own = {"_connector_class": connector, "_listener_class": listener}
        for new in (comm, connector, listener, type(f"{name}Backend", (Backend,), own)):
            new.__module__ = NAME
            setattr(tcp, new.__name__, new)


class Finder(importlib.abc.MetaPathFinder):
    """A finder that loads the TCP module as usual, and then replaces its classes."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != NAME:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            replace(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Finder())
