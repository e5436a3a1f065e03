"""A pytest plugin that runs a client's own tests with its plain asyncio connections over RDMA.

The tests only know the TCP port (OVER_RDMA=<module>:<TCP port>:<RDMA port>). Synchronous clients,
TLS connections, and connections to servers started by a test still use TCP.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import os
from typing import Any

from valkey_aiordma import connection, open_connection

# The number of RDMA connections, which the terminal summary reports and test_upstream.py checks.
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
