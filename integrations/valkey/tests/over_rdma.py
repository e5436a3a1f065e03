"""A plugin of pytest for a client's own tests: its plain asyncio connections go over RDMA.

The tests know the TCP port alone (OVER_RDMA=<module>:<TCP port>:<RDMA port>), which stays where a
client is synchronous. Connections by TLS, or to a server that a test has made itself, stay as well.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import os
from typing import Any

from valkey_aiordma import connection, open_connection

# Connections that went over RDMA, counted for the end, so that a run without any is noticed.
taken = itertools.count()


def pytest_configure() -> None:
    module, tcp_port, rdma_port = os.environ["OVER_RDMA"].split(":")
    plain = importlib.import_module(f"{module}.asyncio.connection").Connection
    over_tcp = plain._connect
    vars(connection)["open_connection"] = functools.partial(redirected, int(rdma_port))

    async def _connect(self: Any) -> None:
        if self.port != int(tcp_port) or getattr(self, "ssl_context", None):
            await over_tcp(self)
        else:
            await connection.OverRDMA._connect(self)

    plain._connect = _connect
    plain.device = None


async def redirected(port: int, host: str, _: int, **options: Any) -> Any:
    next(taken)
    return await open_connection(host, port, **options)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"{next(taken)} connections over RDMA")
