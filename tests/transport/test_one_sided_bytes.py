"""Test that the statistics of both sides count the bytes of one-sided operations."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable

import pytest

from aiordma import Connection, RemoteRegion, testing
from aiordma.config import Config
from aiordma.errors import ConnectionBrokenError, RDMAError
from aiordma.transport import Statistics

from .connection_factory import ConnectionFactory, barrier, ends, pattern, shared, yield_loop
from .marks import by_tcp, one_loop

SIZE = (8 << 20) + 1000  # two requests


def one_sided(counts: Statistics) -> tuple[int, int]:
    return counts.bytes_read, counts.bytes_written


def from_the_peer(connection: Connection) -> tuple[int, int]:
    """Return the bytes of local memory read and written by the peer, or zeros if uncounted."""
    counts = connection.statistics()
    total = counts.peer_bytes_read, counts.peer_bytes_written
    (rail,) = connection.rails
    assert (rail.peer_bytes_read or 0, rail.peer_bytes_written or 0) == total
    return total


async def reads(client: Connection, remote: RemoteRegion) -> None:
    await client.read(remote, bytearray(len(remote)))


async def reads_with_progress(client: Connection, remote: RemoteRegion) -> None:
    await client.read(remote, bytearray(len(remote)), progress=lambda _: None)


async def writes(client: Connection, remote: RemoteRegion) -> None:
    await client.write(pattern(len(remote)), remote)


async def writes_and_tells(client: Connection, remote: RemoteRegion) -> None:
    await client.write(pattern(len(remote)), remote, imm=7)


async def both_in_a_batch(client: Connection, remote: RemoteRegion) -> None:
    async with client.batch() as batch:
        batch.write(bytes(100), remote[:100])
        batch.fetch_and_add(remote[800:808], 1)
        batch.read(remote[:30], bytearray(30))
        batch.write(bytes(7), remote[500:507])


async def atomics(client: Connection, remote: RemoteRegion) -> None:
    await client.fetch_and_add(remote[:8], 1)
    await client.compare_and_swap(remote[:8], 1, 2)


async def nothing(client: Connection, remote: RemoteRegion) -> None:
    await client.write(b"", remote[:0])


OPERATIONS: dict[Callable[[Connection, RemoteRegion], Awaitable[None]], tuple[int, int]] = {
    reads: (SIZE, 0),
    reads_with_progress: (SIZE, 0),
    writes: (0, SIZE),
    writes_and_tells: (0, SIZE),
    both_in_a_batch: (30, 107),
    atomics: (0, 0),
    nothing: (0, 0),
}


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda each: each.__name__)
async def test_both_sides_count_one_sided_bytes(
    factory: ConnectionFactory,
    operation: Callable[[Connection, RemoteRegion], Awaitable[None]],
    device_name: str,
) -> None:
    read, written = OPERATIONS[operation]
    counted = device_name.startswith("embedded")
    async with factory.sharing(SIZE) as (client, server, _, remote):
        await operation(client, remote)
        assert one_sided(client.statistics()) == (read, written)
        assert one_sided(server.statistics()) == (0, 0)
        (rail,) = client.rails
        assert (rail.bytes_read, rail.bytes_written) == (read, written)
        assert from_the_peer(server) == ((read, written) if counted else (0, 0))
        assert from_the_peer(client) == (0, 0)
        assert client.statistics().bytes_sent == server.statistics().bytes_received == 0
    # The counts remain after the queue pairs are closed.
    assert one_sided(client.statistics()) == (read, written)
    assert from_the_peer(server) == ((read, written) if counted else (0, 0))


@one_loop
@pytest.mark.parametrize("make", [bytes, bytearray], ids=["read-only", "writable"])
async def test_long_messages_are_not_counted_as_one_sided_bytes(
    factory: ConnectionFactory, make: Callable[[int], bytes | bytearray]
) -> None:
    """The READs of a long message count as bytes of messages only, so that no byte is counted
    twice.
    """
    async with factory.pair() as (client, server):
        for _ in range(3):
            sending = client.send_nowait(make(SIZE))
            (await server.recv()).release()
            await sending
        for conn in (client, server):
            assert one_sided(conn.statistics()) == (0, 0)
            assert from_the_peer(conn) == (0, 0)
        assert client.statistics().bytes_sent == server.statistics().bytes_received == 3 * SIZE
        async with shared(server, client, 500) as (_, remote):  # uses the same queue pair
            await client.read(remote, bytearray(500))
        assert one_sided(client.statistics()) == (500, 0)


@one_loop
async def test_cancelled_read_is_counted_when_the_device_completes_it(
    factory: ConnectionFactory,
) -> None:
    async with factory.sharing(50_000) as (client, _, _, remote):
        with client.alloc(50_000) as target:
            reading = asyncio.create_task(client.read(remote, target))
            await yield_loop(1)  # let it be posted
            cancelled = reading.cancel()  # unless a polling loop has completed it
            await asyncio.wait([reading])
        await barrier(client)
        counts = client.statistics()
        assert one_sided(counts) == (50_000, 0)
        assert counts.reads == (0 if cancelled else 1)


@one_loop
@by_tcp
async def test_failed_read_is_not_counted(factory: ConnectionFactory) -> None:
    async with factory.pair() as (client, server):
        with server.alloc(1000) as there:
            share = await server.send_region(there, lease=None)
            remote = await client.recv_region()
            share.revoke()
            await barrier(client)
            remote._root._usable, remote._root._deadline = True, math.inf  # forge a valid lease
            await ends(client.read(remote, bytearray(1000)), ConnectionBrokenError, RDMAError)
            for conn in (client, server):
                assert one_sided(conn.statistics()) == from_the_peer(conn) == (0, 0)


@one_loop
@by_tcp
@pytest.mark.any_device
async def test_retransmitted_requests_are_counted_once() -> None:
    with testing.faults(seed=3, loss=0.05, duplicate=0.05) as faults:
        config = Config(ack_timeout=0.004, retry_count=7)
        async with testing.connected_pair(config=config, device="embedded0") as (client, server):
            async with shared(server, client, 40_000) as (_, remote):
                for _ in range(200):
                    await client.read(remote, bytearray(40_000))
                    await client.write(bytes(100), remote[:100])
            assert faults.counts().retried > 10
            assert from_the_peer(server) == one_sided(client.statistics()) == (8_000_000, 20_000)
