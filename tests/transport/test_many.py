"""Test that many connections, in sequence and concurrently, leave nothing behind."""

from __future__ import annotations

import asyncio
import gc
import os
from pathlib import Path

import pytest

from aiordma import Connection, Server, start_server
from aiordma.testing import Held

from .connection_factory import SMALL, ConnectionFactory, echo, pattern, pool_statistics, yield_loop
from .marks import one_loop

# Other devices are tested in a virtual machine. It opens only about ten connections per second, and
# its device supports only a few.
IN_A_ROW = {"embedded0": 1000}
FEWER_IN_A_ROW = 60
# The number of bytes by which this process may grow. Heap fragmentation stays below this limit, but
# leaking every connection would exceed it by far. The limit is higher with the address sanitizer,
# which keeps freed memory and stack traces for a while.
GROWTH = (32 if "ASAN_OPTIONS" in os.environ else 4) << 20


async def talk(client: Connection, seed: int) -> None:
    for size in (64, 3000):
        await client.send(pattern(size, seed))
        with await client.recv() as message:
            assert message == pattern(size, seed)


def resident() -> int:
    """Return the resident set size of this process in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def others_end(server: Server, first: asyncio.Task[None]) -> None:
    """Wait until the handlers of all clients but the first have ended."""
    await asyncio.gather(*(task for task in server._tasks if task is not first))


async def check_growth(
    factory: ConnectionFactory, anchor: Connection, before: Held, leases: int
) -> None:
    gc.collect()
    try:
        async with factory.within(2):  # a peer's descriptors close once its end is noticed
            while before.growth(Held.now()):
                await yield_loop(1)
    except TimeoutError:
        pytest.fail(f"left behind:\n{before.growth(Held.now())}")
    assert pool_statistics(anchor).leases <= leases


@one_loop
async def test_sequential_connections_do_not_leak_resources(factory: ConnectionFactory) -> None:
    count = IN_A_ROW.get(factory.device, FEWER_IN_A_ROW)
    async with await start_server(echo, factory.host, 0, config=SMALL, **factory.where) as server:

        async def once(seed: int) -> None:
            async with await factory.connect(server.port) as client:
                await talk(client, seed)
            await others_end(server, first)

        async with await factory.connect(server.port) as anchor:
            await talk(anchor, 0)
            (first,) = server._tasks
            for seed in range(count // 10):  # fill the caches first
                await once(seed)
            await yield_loop(1)
            gc.collect()
            before, memory = Held.now(), resident()
            leases = pool_statistics(anchor).leases
            for seed in range(count - count // 10):
                await once(seed)
            await yield_loop(1)
            await check_growth(factory, anchor, before, leases)
            assert resident() - memory < GROWTH
