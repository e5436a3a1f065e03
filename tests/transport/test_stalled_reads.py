"""Test that peers that offer long messages but answer no READs keep no memory from others."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, replace

import pytest

from aiordma import ConnectionBrokenError
from aiordma._datapath.memory import Clock
from aiordma._memory.stalled_reads import MIN_BYTES_PER_SECOND, StalledReads
from tests.session.pair import stop

from .connection_factory import (
    NEVER,
    SMALL,
    ConnectionFactory,
    ends,
    pattern,
    pool_statistics,
    yield_loop,
)
from .inside import figures
from .marks import on_pair

pytestmark = on_pair

MIB = 1 << 20
LENGTH = 16 * MIB
HOSTILE = 5
CONFIG = replace(SMALL, pool_limit=4 * LENGTH, fetch_ahead=0, keep_alive=None)


@pytest.mark.any_device
@pytest.mark.parametrize("answers", ["not at all", "at first"])
async def test_stalled_peers_do_not_starve_other_connections_of_memory(
    factory: ConnectionFactory, answers: str
) -> None:
    async with AsyncExitStack() as stack:
        receiving = []
        for _ in range(HOSTILE):
            conn, peer = await stack.enter_async_context(factory.pair(CONFIG))
            peer.send_nowait(bytes(LENGTH)).add_done_callback(lambda it: it.exception())
            while not figures(conn)["unread"]:
                await yield_loop(1)
            stop(peer)
            if answers == "at first":
                # Admit all reads, as if the peer had responded before it was stopped.
                conn._memory.pool._has_spare = lambda size: True  # type: ignore[method-assign]
            receiving.append((conn, peer, asyncio.create_task(conn.recv())))
        conn._memory.pool._stalled_reads.timeout = NEVER if answers == "not at all" else 0.05
        await yield_loop(5)
        data = pattern(LENGTH)
        async with factory.pair(CONFIG) as (client, server):
            sending = asyncio.create_task(client.send(data))
            with await server.recv() as message:
                assert message == data
            await sending
        silent = [task for *_, task in receiving if not task.done()]
        assert len(silent) == HOSTILE if answers == "not at all" else len(silent) < HOSTILE
        for conn, peer, task in receiving:
            peer.abort()
            if task in silent:
                conn.abort()
                await ends(task, ConnectionError)
            else:
                error = await ends(task, ConnectionBrokenError)
                assert "completed too few READs" in str(error)

    async with factory.pair(replace(CONFIG, pool_limit=8 * LENGTH)) as (client, server):
        for _ in range(2):
            before = server._queue.completions
            sending = asyncio.create_task(client.send(bytes(LENGTH)))
            (await server.recv()).release()
            await sending
            assert server._queue.completions - before <= LENGTH // (8 * MIB) + 4
        assert pool_statistics(server).waiting == 0


@dataclass(eq=False)
class Reader:
    rate: float
    progress: int = 0
    broken: bool = False

    def stalled(self, timeout: float) -> None:
        self.broken = True


@pytest.mark.parametrize(
    ("rates", "broken"),
    [
        ([0], [0]),
        ([4 / MIN_BYTES_PER_SECOND], [0]),
        ([0.9], [0]),
        ([1.1], []),
        ([0.6, 0.6], []),
        ([1.1, 0.4, 0.6], []),
        ([2, 4 / MIN_BYTES_PER_SECOND, 0.6], [1]),
    ],
)
def test_peers_below_the_minimum_read_rate_are_disconnected(
    rates: list[float], broken: list[int]
) -> None:
    """Each peer must reach its share of the least rate, in pieces of any size."""
    now = 0.0
    reads = StalledReads([], Clock(lambda: now))
    readers = [Reader(rate) for rate in rates]
    for reader in readers:
        reads.begin(reader)
    for _ in range(40):
        now += 0.5
        for reader in readers:
            reader.progress += int(reader.rate * MIN_BYTES_PER_SECOND / 2)
        reads._check()
    assert [number for number, reader in enumerate(readers) if reader.broken] == broken


async def test_reads_into_user_memory_are_not_tracked_as_pool_reads(
    factory: ConnectionFactory,
) -> None:
    async with factory.pair(CONFIG) as (client, server):
        data = pattern(LENGTH)
        with ExitStack() as stack:
            for _ in range(12):
                stack.enter_context(server.alloc(LENGTH // 4))
            sending = asyncio.create_task(client.send(data))
            receiving = asyncio.create_task(server.recv())
            while not pool_statistics(server).waiting:
                await yield_loop(1)
            receiving.cancel()
            await ends(receiving, asyncio.CancelledError)
            target = bytearray(LENGTH)
            await server.recv_into(target)
            assert target == data
            await sending
        sending = asyncio.create_task(client.send(data))
        with await server.recv() as message:
            assert message == data
        await sending
        assert not server._memory.pool._stalled_reads._readers
        assert server._messages.inbox.fetcher.progress == 2 * LENGTH
