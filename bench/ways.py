"""Ways to move messages between two processes, and what a worker can be asked to measure on each.

Every contender carries messages, not bytes: a receiver handles a message when it is complete.  Over
sockets a message is an 8-byte length and its contents, and the client makes that frame before the
clock starts.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from statistics import median
from time import perf_counter
from typing import Any, Protocol

HOST = os.environ.get("BENCH_HOST", "127.0.0.1")
DEVICE = os.environ.get("AIORDMA_DEVICE", "embedded0")
"""The device, and an address that it has."""

Place = int | str
"""A port, or the path of a Unix socket."""

ENOUGH = b"?"
"""A message that a sink answers: everything before it has arrived."""


class Client(Protocol):
    """One connection."""

    async def echo(self, data: bytes) -> bytes | memoryview:
        """One message there and back; the view is good until the next call."""

    async def echo_many(self, data: bytes, count: int, window: int) -> None:
        """`count` messages there and back, `window` of them under way."""

    async def send_many(self, data: bytes, count: int, window: int) -> None:
        """`count` messages one way, and a word that the last one has arrived."""

    async def send_gather(self, data: bytes, count: int, window: int) -> None:
        """As `send_many`, by coroutines that send one each, `window` of them gathered at a time."""

    async def echo_tasks(self, data: bytes, count: int, window: int) -> None:
        """`count` messages there and back by `window` tasks, each with one under way."""

    async def arrays(self, arrays: dict[str, Any]) -> None:
        """All of them, and the answer of a peer that has them as arrays."""


class Way(Protocol):
    """`serve` gives the places of its services, by name, and serves until it is left.

    "echo" answers each message with the same; "sink" takes messages, and answers ENOUGH.
    """

    def prepare(self, data: bytes) -> bytes:
        """What `Client` takes for a message of these contents."""

    def serve(self, folder: str) -> AbstractAsyncContextManager[dict[str, Place]]: ...

    def connect(self, place: Place) -> AbstractAsyncContextManager[Any]:
        """A `Client`, or what jobs of this way alone use."""


class Measuring:
    """Connections that jobs of a kind go on using, and the jobs; each returns seconds for one."""

    def __init__(self, way: Way, places: dict[str, Place], stack: AsyncExitStack) -> None:
        self._way = way
        self._places = places
        self._stack = stack
        self._clients: dict[str, list[Client]] = {}

    async def _connected(self, service: str, count: int = 1) -> list[Client]:
        clients = self._clients.setdefault(service, [])
        while len(clients) < count:
            connecting = self._way.connect(self._places[service])
            clients.append(await self._stack.enter_async_context(connecting))
        return clients[:count]

    async def echo(self, size: int, count: int) -> float:
        """The median of messages there and back, one after another."""
        (client,) = await self._connected("echo")
        data = os.urandom(size)
        prepared = self._way.prepare(data)
        times = []
        for _ in range(count):
            start = perf_counter()
            back = await client.echo(prepared)
            times.append(perf_counter() - start)
            if bytes(back) != data:
                raise ValueError(f"a message of {size} bytes came back different")
        return median(times)

    async def echo_beside(self, size: int, count: int, stream: int) -> float:
        """`echo`, beside messages of `stream` bytes one way on another connection."""
        (other,) = await self._connected("sink")
        prepared = self._way.prepare(os.urandom(stream))
        ends = asyncio.Event()

        async def fill() -> None:
            while not ends.is_set():
                await other.send_many(prepared, 8, 4)

        filling = asyncio.create_task(fill())
        try:
            return await self.echo(size, count)
        finally:
            ends.set()
            await filling

    async def _under_way(self, service: str, kind: str, size: int, **numbers: int) -> float:
        """What `Client` has by this name, with messages of one size."""
        (client,) = await self._connected(service)
        prepared = self._way.prepare(os.urandom(size))
        start = perf_counter()
        await getattr(client, kind)(prepared, **numbers)
        return (perf_counter() - start) / numbers["count"]

    async def echo_many(self, size: int, count: int, window: int) -> float:
        return await self._under_way("echo_many", "echo_many", size, count=count, window=window)

    async def echo_tasks(self, size: int, count: int, window: int) -> float:
        return await self._under_way("echo_many", "echo_tasks", size, count=count, window=window)

    async def send_many(self, size: int, count: int, window: int) -> float:
        return await self._under_way("sink", "send_many", size, count=count, window=window)

    async def send_gather(self, size: int, count: int, window: int) -> float:
        return await self._under_way("sink", "send_gather", size, count=count, window=window)

    async def by_client(self, service: str, do: str, **numbers: Any) -> float:
        """What the client of one way alone can do, by the name of its method."""
        (client,) = await self._connected(service)
        measure: Callable[..., Awaitable[float]] = getattr(client, do)
        return await measure(**numbers)

    async def arrays(self, parts: int, size: int, count: int, into: int) -> float:
        """Seconds for that many numpy arrays, of a size together, and the answer to them."""
        import numpy as np  # noqa: PLC0415 - only this needs it

        (client,) = await self._connected("arrays into" if into else "arrays")
        arrays = {f"{i}": np.full(size // parts // 4, i, np.float32) for i in range(parts)}
        await client.arrays(arrays)
        start = perf_counter()
        for _ in range(count):
            await client.arrays(arrays)
        return (perf_counter() - start) / count

    async def echo_together(self, size: int, count: int, connections: int) -> float:
        """Messages there and back on many connections, one under way on each."""
        prepared = self._way.prepare(os.urandom(size))
        each = count // connections

        async def talk(client: Client) -> None:
            for _ in range(each):
                await client.echo(prepared)

        clients = await self._connected("echo", connections)
        start = perf_counter()
        await asyncio.gather(*(talk(client) for client in clients))
        return (perf_counter() - start) / (each * connections)

    async def connect(self, count: int) -> float:
        """Connections made and closed, one after another, while another one stays."""
        await self._connected("echo")
        start = perf_counter()
        for _ in range(count):
            async with self._way.connect(self._places["echo"]):
                pass
        return (perf_counter() - start) / count

    async def connect_all(self, count: int) -> float:
        """Seconds for each of `count` connections, none of which is closed before all are made."""
        await self._connected("echo")
        start = perf_counter()
        async with AsyncExitStack() as stack:
            for _ in range(count):
                await stack.enter_async_context(self._way.connect(self._places["echo"]))
        return (perf_counter() - start) / count
