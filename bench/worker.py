"""One of two processes that a contender in Python has: its server, or its client.

python -m bench.worker serve WAY LOOP FOLDER      says its places, ends with its input
python -m bench.worker measure WAY LOOP           reads places, then jobs: a line in, seconds out
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from importlib import import_module
from importlib.util import find_spec
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

from .ways import Client, Place, Way

if TYPE_CHECKING:
    from .over_rdma import RDMAClient

# Modules are imported by what uses them: a socket's worker is none of aiordma's.
WAYS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "aiordma": ("over_rdma", "OverRDMA", {}),
    "aiordma sleeping": ("over_rdma", "OverRDMA", {"polling": 0}),
    "aiordma encrypted": ("over_rdma", "OverRDMA", {"encrypt": True}),
    "aiordma exchange": ("over_rdma", "OverRDMA", {"via": "tcp"}),
    "aiordma exchange, a socket each": ("over_rdma", "OverRDMA", {"via": "tcp", "in_band": False}),
    "TCP protocol": ("over_sockets", "OverProtocol", {}),
    "TCP streams": ("over_sockets", "OverStreams", {}),
    "Unix protocol": ("over_sockets", "OverProtocol", {"unix": True}),
    "ucxx": ("over_ucxx", "OverUCXX", {}),
    "ucxx connecting": ("over_ucxx", "OverUCXX", {}),
    "nixl": ("over_nixl", "OverNIXL", {}),
    "Unix streams": ("over_sockets", "OverStreams", {"unix": True}),
}

Job = dict[str, Any]

PR_SET_PDEATHSIG = 1  # prctl(2)


def the_way(name: str) -> Way:
    module, kind, options = WAYS[name]
    return cast(Way, getattr(import_module(f".{module}", __package__), kind)(**options))


def loops() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The event loops there are, by name."""
    found: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.new_event_loop}
    if find_spec("uvloop"):
        import uvloop  # noqa: PLC0415 - it need not be installed

        found["uvloop"] = uvloop.new_event_loop
    return found


class Measuring:
    """Connections that jobs of a kind go on using, and the jobs; each returns seconds for one."""

    def __init__(self, way: Way, places: dict[str, Place], stack: AsyncExitStack) -> None:
        self._way = way
        self._places = places
        self._stack = stack
        self._clients: dict[str, list[Client]] = {}
        self._remote: Any = None

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

    async def echo_many(self, size: int, count: int, window: int) -> float:
        """Messages there and back, `window` under way."""
        (client,) = await self._connected("echo_many")
        prepared = self._way.prepare(os.urandom(size))
        start = perf_counter()
        await client.echo_many(prepared, count, window)
        return (perf_counter() - start) / count

    async def send_many(self, size: int, count: int, window: int) -> float:
        """Messages one way."""
        (client,) = await self._connected("sink")
        prepared = self._way.prepare(os.urandom(size))
        start = perf_counter()
        await client.send_many(prepared, count, window)
        return (perf_counter() - start) / count

    async def send_gather(self, size: int, count: int, window: int) -> float:
        """Messages one way, by `window` coroutines at a time."""
        (client,) = await self._connected("sink")
        prepared = self._way.prepare(os.urandom(size))
        start = perf_counter()
        await client.send_gather(prepared, count, window)
        return (perf_counter() - start) / count

    async def by_client(self, service: str, do: str, **numbers: Any) -> float:
        """What the client of one way alone can do, by the name of its method."""
        (client,) = await self._connected(service)
        measure: Callable[..., Awaitable[float]] = getattr(client, do)
        return await measure(**numbers)

    async def echo_tasks(self, size: int, count: int, window: int) -> float:
        """Messages there and back by `window` tasks on one connection, each with one under way."""
        (client,) = await self._connected("echo_many")
        prepared = self._way.prepare(os.urandom(size))
        start = perf_counter()
        await client.echo_tasks(prepared, count, window)
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

    async def write(self, size: int, count: int, awake: int = 0) -> float:
        """The median of one-sided writes, awaited one after another.

        `awake`: the other process's event loop never sleeps meanwhile.
        """
        client, remote = await self._memory()
        await client.wake(awake)
        times = []
        with client.conn.alloc(size) as buffer:
            target = remote[:size]
            for _ in range(count):
                start = perf_counter()
                await client.conn.write(buffer, target)
                times.append(perf_counter() - start)
        await client.wake(0)
        return median(times)

    async def write_many(self, size: int, count: int, window: int, awake: int = 0) -> float:
        """One-sided writes, `window` of them under way, each awaited by a task."""
        client, remote = await self._memory()
        await client.wake(awake)
        each = count // window
        with client.conn.alloc(size) as buffer:
            target = remote[:size]

            async def write() -> None:
                for _ in range(each):
                    await client.conn.write(buffer, target)

            start = perf_counter()
            await asyncio.gather(*(write() for _ in range(window)))
            taken = perf_counter() - start
        await client.wake(0)
        return taken / (each * window)

    async def write_batch(
        self, size: int, count: int, window: int, under_way: int = 1, awake: int = 0
    ) -> float:
        """One-sided writes in batches of `window`, which `under_way` tasks make."""
        client, remote = await self._memory()
        await client.wake(awake)
        each = count // window // under_way
        with client.conn.alloc(size) as buffer:
            target = remote[:size]

            async def write() -> None:
                for _ in range(each):
                    async with client.conn.batch() as batch:
                        for _ in range(window):
                            batch.write(buffer, target)

            start = perf_counter()
            await asyncio.gather(*(write() for _ in range(under_way)))
            taken = perf_counter() - start
        await client.wake(0)
        return taken / (each * window * under_way)

    async def read(self, size: int, count: int, awake: int = 0) -> float:
        """The median of one-sided reads, awaited one after another; `awake` as for `write`."""
        client, remote = await self._memory()
        await client.wake(awake)
        times = []
        with client.conn.alloc(size) as buffer:
            source = remote[:size]
            for _ in range(count):
                start = perf_counter()
                await client.conn.read(source, buffer)
                times.append(perf_counter() - start)
        await client.wake(0)
        return median(times)

    async def _memory(self) -> tuple[RDMAClient, Any]:
        client = cast("RDMAClient", (await self._connected("memory"))[0])
        if self._remote is None:
            self._remote = await client.conn.recv_region()
        return client, self._remote


async def measure(way: Way) -> None:
    places = json.loads(sys.stdin.readline())
    async with AsyncExitStack() as stack:
        measuring = Measuring(way, places, stack)
        for line in sys.stdin:  # nothing happens meanwhile: a job begins when the last one is done
            job: Job = json.loads(line)
            kind: Callable[..., Awaitable[float]] = getattr(measuring, job.pop("kind"))
            print(await kind(**job), flush=True)


async def serve(way: Way, folder: str) -> None:
    async with way.serve(folder) as places:
        print(json.dumps(places), flush=True)
        await asyncio.to_thread(sys.stdin.read)


def go_on_without_parent() -> None:
    """Stopped while others have their turn, it goes on when what started it has gone, and ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGCONT))


def main(what: str, way: str, loop: str, *folder: str) -> None:
    go_on_without_parent()
    with asyncio.Runner(loop_factory=loops()[loop]) as runner:
        asking = the_way(way)
        runner.run(serve(asking, *folder) if what == "serve" else measure(asking))


if __name__ == "__main__":
    main(*sys.argv[1:])
