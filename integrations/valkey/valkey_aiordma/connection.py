"""The common part of the connection classes for both clients."""

from __future__ import annotations

import asyncio
from typing import Any

from .stream import open_connection


class OverRDMA:
    """A mixin for a client's ``Connection`` that connects to the server's RDMA port.

    ``device`` names the RDMA device, as in :func:`aiordma.connect`. With ``socket_keepalive``, a
    command is sent every three seconds, so that an idle connection notices when the server's
    machine is gone. The other socket options have no effect.
    """

    # Of the client's class; Any, since the two clients do not declare the same.
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
