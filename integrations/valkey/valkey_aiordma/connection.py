"""Code shared by the connection classes for valkey-py and redis-py."""

from __future__ import annotations

import asyncio
from typing import Any

from .stream import open_connection


class OverRDMA:
    """A mixin that makes a client's ``Connection`` use the server's RDMA port.

    ``device`` is the RDMA device's name, as for :func:`aiordma.connect`. If ``socket_keepalive`` is
    True, the connection sends a command every three seconds. A failure of the server's machine is
    therefore detected even while the connection is idle. ``socket_timeout`` and
    ``socket_connect_timeout`` work as usual. Other TCP options have no effect.
    """

    # The client's `Connection` class defines these attributes. valkey-py and redis-py declare
    # different types for them.
    host: Any
    port: Any
    socket_connect_timeout: Any
    socket_keepalive: Any
    _reader: Any
    _writer: Any

    def __init__(self, *, device: str | None = None, **options: Any) -> None:
        self.device = device
        super().__init__(**options)

    async def _connect(self) -> None:
        async with asyncio.timeout(self.socket_connect_timeout):
            self._reader, self._writer = await open_connection(
                self.host, self.port, device=self.device, keepalive=bool(self.socket_keepalive)
            )
