"""The ways of sending messages between two processes, and the jobs that a worker can measure.

All contenders transfer messages, not just bytes: a receiver handles a message once it is complete.
Over sockets, a message is sent as its length (8 bytes) followed by its contents. The client builds
this frame before the measurement starts.
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
"""The device's name, and one of its addresses."""

Place = int | str
"""A service's address: a port, or the path of a Unix socket."""

SYNC_MESSAGE = b"?"
"""A message to which a sink responds once all earlier messages have arrived."""


class Client(Protocol):
    """A client with one connection to a service."""

    async def echo(self, data: bytes) -> bytes | memoryview:
        """Send a message and return the response. A view is valid only until the next call."""

    async def echo_many(self, data: bytes, count: int, window: int) -> None:
        """Send `count` messages and receive the responses, with `window` messages in flight."""

    async def send_many(self, data: bytes, count: int, window: int) -> None:
        """Send `count` messages, `window` at a time, and wait until all have arrived."""

    async def send_gather(self, data: bytes, count: int, window: int) -> None:
        """Send `count` messages, gathering `window` single-message coroutines at a time."""

    async def echo_tasks(self, data: bytes, count: int, window: int) -> None:
        """Send `count` messages and receive the responses in `window` tasks.

        Each task has one message in flight.
        """

    async def arrays(self, arrays: dict[str, Any]) -> None:
        """Send all arrays, and wait for the peer to acknowledge them."""


class Way(Protocol):
    """A transport to compare.

    `serve` starts the services and yields their addresses by name. The "echo" service returns each
    message. The "sink" service discards all messages, and responds only to SYNC_MESSAGE.
    """

    def prepare(self, data: bytes) -> bytes:
        """Convert a message's contents to the form expected by `Client`."""

    def serve(self, folder: str) -> AbstractAsyncContextManager[dict[str, Place]]: ...

    def connect(self, place: Place) -> AbstractAsyncContextManager[Any]:
        """Connect to a service, and yield a client.

        The client implements the `Client` methods that the transport supports. It may have
        additional methods for use with `Measuring.by_client`.
        """


class Measuring:
    """The jobs that a worker can run, and the connections they share.

    Each job returns the time per operation in seconds.
    """

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
        """Run round trips one after another and return their median duration."""
        (client,) = await self._connected("echo")
        data = os.urandom(size)
        prepared = self._way.prepare(data)
        times = []
        for _ in range(count):
            start = perf_counter()
            back = await client.echo(prepared)
            times.append(perf_counter() - start)
            if bytes(back) != data:
                raise ValueError(f"the echo of a {size}-byte message differs from the original")
        return median(times)

    async def echo_beside(self, size: int, count: int, stream: int) -> float:
        """Run `echo` while messages of `stream` bytes are being sent on another connection."""
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

    async def _time_client_method(
        self, service: str, kind: str, size: int, **numbers: int
    ) -> float:
        """Return the time per message of the `Client` method `kind`, in seconds."""
        (client,) = await self._connected(service)
        prepared = self._way.prepare(os.urandom(size))
        start = perf_counter()
        await getattr(client, kind)(prepared, **numbers)
        return (perf_counter() - start) / numbers["count"]

    async def echo_many(self, size: int, count: int, window: int) -> float:
        return await self._time_client_method(
            "echo_many", "echo_many", size, count=count, window=window
        )

    async def echo_tasks(self, size: int, count: int, window: int) -> float:
        return await self._time_client_method(
            "echo_many", "echo_tasks", size, count=count, window=window
        )

    async def send_many(self, size: int, count: int, window: int) -> float:
        return await self._time_client_method("sink", "send_many", size, count=count, window=window)

    async def send_gather(self, size: int, count: int, window: int) -> float:
        return await self._time_client_method(
            "sink", "send_gather", size, count=count, window=window
        )

    async def by_client(self, service: str, do: str, **numbers: Any) -> float:
        """Call a method that only this transport's client has. `do` is the name of the method."""
        (client,) = await self._connected(service)
        measure: Callable[..., Awaitable[float]] = getattr(client, do)
        return await measure(**numbers)

    async def arrays(self, parts: int, size: int, count: int, into: int) -> float:
        """Measure how long it takes to send `parts` NumPy arrays and receive a response.

        The arrays have a total size of `size` bytes. If `into` is nonzero, the server receives all
        arrays into the same memory.
        """
        import numpy as np  # noqa: PLC0415 - only this job needs it

        (client,) = await self._connected("arrays into" if into else "arrays")
        arrays = {f"{i}": np.full(size // parts // 4, i, np.float32) for i in range(parts)}
        await client.arrays(arrays)
        start = perf_counter()
        for _ in range(count):
            await client.arrays(arrays)
        return (perf_counter() - start) / count

    async def echo_together(self, size: int, count: int, connections: int) -> float:
        """Measure concurrent round trips on several connections.

        Each connection has one message in flight.
        """
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
        """Open and close connections one after another while another connection stays open."""
        await self._connected("echo")
        start = perf_counter()
        for _ in range(count):
            async with self._way.connect(self._places["echo"]):
                pass
        return (perf_counter() - start) / count

    async def connect_all(self, count: int) -> float:
        """Open `count` connections, then close all of them, and return the time per connection."""
        await self._connected("echo")
        start = perf_counter()
        async with AsyncExitStack() as stack:
            for _ in range(count):
                await stack.enter_async_context(self._way.connect(self._places["echo"]))
        return (perf_counter() - start) / count
