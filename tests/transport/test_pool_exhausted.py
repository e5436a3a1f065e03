"""Test that tasks wait for memory when the pool has reached its limit, but never forever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from aiordma import Connection, ConnectionBrokenError, ConnectionClosedError, RequestRefusedError
from aiordma.errors import QuotaError

from .connection_factory import (
    SMALL,
    ConnectionFactory,
    barrier,
    ends,
    pattern,
    shared,
    take_all,
    yield_loop,
)
from .marks import on_pair

pytestmark = on_pair

LIMIT = 4 << 20
CONFIG = replace(SMALL, pool_limit=LIMIT, fetch_ahead=1 << 20)
LONG = 100_000  # length of a fetched message


@asynccontextmanager
async def exhausted(
    factory: ConnectionFactory,
) -> AsyncIterator[tuple[Connection, Connection, Held]]:
    """Yield two ends that share a pool, and the buffers that exhaust it."""
    async with factory.pair(CONFIG) as (client, server):
        held = Held(client)
        try:
            yield client, server, held
        finally:
            held.release()


class Held:
    """The buffers that take up the whole pool."""

    def __init__(self, conn: Connection) -> None:
        self._conn = conn
        self._buffers = take_all(conn)

    async def until_waiting(self, count: int) -> None:
        """Wait for `count` tasks to need memory, and for both ends to process earlier messages."""
        while self._conn.pool_statistics().waiting < count:  # noqa: ASYNC110 - nothing tells it
            await asyncio.sleep(0)
        with pytest.raises(RequestRefusedError, match="limited"):
            await barrier(self._conn)

    def release(self) -> None:
        for buffer in self._buffers:
            buffer.release()
        self._buffers.clear()


async def test_recv_into_succeeds_when_the_pool_is_exhausted(factory: ConnectionFactory) -> None:
    async with factory.pair(CONFIG) as (client, server):
        sending = asyncio.create_task(client.send(pattern(LONG)))
        await yield_loop(1)
        held = Held(client)
        await held.until_waiting(1)
        memory = bytearray(LONG)
        assert (await server.recv_into(memory)).length == LONG
        assert memory == pattern(LONG)
        await sending
        held.release()
        while client.pool_statistics().waiting:  # noqa: ASYNC110 - nothing tells it
            await asyncio.sleep(0)


async def test_lease_waits_until_pool_memory_is_available(factory: ConnectionFactory) -> None:
    async with exhausted(factory) as (client, server, held):
        leasing = [asyncio.create_task(conn.lease(1 << 20)) for conn in (client, server)]
        await held.until_waiting(2)
        with pytest.raises(QuotaError, match="2 tasks are waiting"):
            client.alloc(1)
        held.release()
        for task in leasing:
            (await task).release()


async def test_task_waiting_for_a_lease_does_not_block_messages(factory: ConnectionFactory) -> None:
    """A task that holds memory which another one waits for must be able to send before it releases
    the memory.
    """
    async with factory.pair(CONFIG) as (client, server):
        with client.alloc(1 << 20) as buffer:
            leasing = asyncio.create_task(server.lease(4 << 20))
            await yield_loop(3)
            assert client.pool_statistics().waiting == 1
            sending = asyncio.create_task(client.send(buffer.view[:100]))
            with await server.recv() as message:
                assert len(message) == 100
            await sending
        leasing.cancel()
        await asyncio.wait([leasing])


async def test_tasks_waiting_for_memory_fail_when_the_connection_is_aborted(
    factory: ConnectionFactory,
) -> None:
    async with factory.pair(CONFIG) as (anchor, _), factory.pair(CONFIG) as (client, server):
        async with shared(server, client, 8) as (_, remote):
            held = Held(client)
            waiting = [
                asyncio.create_task(ends(each, ConnectionClosedError, ConnectionBrokenError))
                for each in (
                    client.send(b"x"),
                    client.lease(1),
                    client.fetch_and_add(remote[:], 1),
                    client.write(b"12345678", remote[:]),
                    client.recv(),
                )
            ]
            await held.until_waiting(4)
            before = client.pool_statistics().waiting
            client.abort()
            assert client.pool_statistics().waiting == before - 1  # only the message has left yet
            await asyncio.gather(*waiting)
            await server.wait_closed()
        held.release()
        assert anchor.pool_statistics().waiting == 0


@pytest.mark.parametrize("fetch_ahead", [0, 1 << 30])
async def test_message_larger_than_the_pool_raises_quota_error(
    factory: ConnectionFactory, fetch_ahead: int
) -> None:
    """The error is raised immediately, and `recv_into` can still receive the message."""
    size = LIMIT + 1
    async with factory.pair(replace(CONFIG, fetch_ahead=fetch_ahead)) as (client, server):
        early = [asyncio.create_task(ends(server.recv(), QuotaError)) for _ in range(2)]
        sending = asyncio.create_task(client.send(pattern(size)))
        for task in early:
            error = await task
            assert isinstance(error, QuotaError)
            assert error.limit == LIMIT
        with pytest.raises(QuotaError, match="pool_limit"):
            await server.recv()
        behind = asyncio.create_task(client.send(b"behind"))
        memory = bytearray(size)
        assert (await server.recv_into(memory)).length == size
        assert memory == pattern(size)
        assert bytes(await server.recv()) == b"behind"
        await asyncio.gather(sending, behind)
        with pytest.raises(QuotaError, match="pool_limit"):
            await client.lease(size)
