"""Offer this process's objects to other processes, and read objects of other processes.

A process that returns objects runs one server. A receiving process opens one connection to the
server, requests each object by its ID, and gets tokens for reading the object's memory over RDMA.
The server has a random key, which is part of the metadata that Ray stores for each object.
Therefore, only processes that have the metadata can connect.

All code except `offer` and `withdraw` runs in `aiordma.blocking`'s event loop.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import ray

from aiordma import Config, Connection, Rights, blocking, rpc, start_server

# Disable polling, because it would take cores from the actors.
CONFIG = Config(polling=0)
# Arrays of up to MAX_BATCHED_SIZE bytes are read in batches of BATCH arrays.
MAX_BATCHED_SIZE = 1 << 20
BATCH = 256


class Address(NamedTuple):
    """The address of a process that offers objects, and the key that authenticates clients."""

    host: str
    port: int
    key: bytes


class OfferedObject:
    """An offered object's memory, and the shares granted to each connection."""

    def __init__(self, memory: Sequence[memoryview]) -> None:
        self.memory = memory
        self._shared: dict[Connection, tuple[list[bytes], ExitStack]] = {}

    def share(self, conn: Connection) -> list[bytes]:
        """Share the object's memory with a connection's peer, and return the access tokens."""
        if conn not in self._shared:
            with ExitStack() as stack:
                regions = [stack.enter_context(conn.register(it)) for it in self.memory]
                shares = [conn.share(it, access=Rights.READ, lease=None) for it in regions]
                for share in shares:
                    stack.enter_context(share)
                self._shared[conn] = [it.token.pack() for it in shares], stack.pop_all()
        return self._shared[conn][0]

    def revoke(self, *conns: Connection) -> None:
        """Revoke the shares of the given connections, or all shares if no connection is given."""
        for conn in conns or list(self._shared):
            if conn in self._shared:
                self._shared.pop(conn)[1].close()


class Endpoint:
    """The objects offered by this process, and its connections to other processes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._address: Address | None = None
        self._offered: dict[str, OfferedObject] = {}
        self._clients: dict[Address, asyncio.Task[rpc.Client]] = {}

    # ---- objects of this process ----

    def offer(self, object_id: str, memory: Sequence[memoryview]) -> Address:
        """Allow other processes to read an object's memory until `withdraw` is called.

        This method is thread-safe.
        """
        with self._lock:
            if self._address is None:
                self._address = blocking.call(self._serve, ray.util.get_node_ip_address())
        self._offered.setdefault(object_id, OfferedObject(memory))
        return self._address

    def withdraw(self, object_id: str) -> None:
        """Stop offering an object and release its memory. This method is thread-safe."""
        offered = self._offered.pop(object_id, None)
        if offered is not None:
            blocking.call(offered.revoke)

    async def _serve(self, host: str) -> Address:
        key = secrets.token_bytes(32)
        self._server = await start_server(
            self._serve_connection, host, via="tcp", auth=key, config=CONFIG
        )
        return Address(host, self._server.port, key)

    async def _serve_connection(self, conn: Connection) -> None:
        try:
            await rpc.serve(conn, {"open": partial(self._open, conn)})
        finally:
            for offered in list(self._offered.values()):
                offered.revoke(conn)

    async def _open(self, conn: Connection, object_id: str) -> list[bytes]:
        return self._offered[object_id].share(conn)

    # ---- objects of other processes ----

    async def read(self, address: Address, object_id: str, memory: Sequence[memoryview]) -> None:
        """Read another process's object into `memory`.

        The buffers in `memory` must have the same lengths as the object's arrays.
        """
        client = await self._client(address)
        conn = client.connection
        tokens = await client.call("open", object_id)
        short = []
        for token, target in zip(tokens, memory, strict=True):
            region = conn.open_region(token)
            if len(target) > MAX_BATCHED_SIZE:
                await conn.read(region, target)
            else:
                short.append((region, target))
        for first in range(0, len(short), BATCH):
            async with conn.batch() as batch:
                for region, target in short[first : first + BATCH]:
                    batch.read(region, target)

    async def _client(self, address: Address) -> rpc.Client:
        connecting = self._clients.get(address)
        if connecting is None or _has_ended(connecting):
            for other in [it for it, task in self._clients.items() if _has_ended(task)]:
                del self._clients[other]
            connecting = self._clients[address] = asyncio.create_task(
                rpc.connect(address.host, address.port, via="tcp", auth=address.key, config=CONFIG)
            )
        return await asyncio.shield(connecting)


def _has_ended(connecting: asyncio.Task[rpc.Client]) -> bool:
    return connecting.done() and (
        connecting.exception() is not None or connecting.result().connection.closed
    )
