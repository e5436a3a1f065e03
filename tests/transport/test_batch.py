"""Test batches of operations, writes that notify the peer, and the progress of long transfers."""

from __future__ import annotations

import asyncio
import sys

import pytest

from aiordma import BufferStateError, Config, LeaseEndedError, RemoteRangeError, Rights
from aiordma.errors import ConnectionClosedError, RemoteAccessError

from .connection_factory import (
    ALL,
    ALONE,
    SMALL,
    ConnectionFactory,
    at_rest,
    check_alive,
    ends,
    give,
    leases,
    pattern,
    write_as_it_ends,
    yield_loop,
)
from .marks import by_cm, by_tcp, one_loop

TRANSFER_SIZE = 8 << 20  # the longest single work request


# ---- batches -------------------------------------------------------------------------------------


async def test_batch_completes_when_its_block_exits(factory: ConnectionFactory) -> None:
    async with factory.sharing(4096) as (client, _, there, remote):
        there.view[:8] = (7).to_bytes(8, "little")
        target = bytearray(100)
        with client.alloc(100) as pooled:
            pooled.view[:] = pattern(100)
            async with client.batch() as batch:
                batch.write(pattern(1000), remote[100:1100])
                batch.write(pooled, remote[2000:2100])
                old = batch.fetch_and_add(remote[:8], 5)
                batch.read(remote[100:200], target)
                swapped = batch.compare_and_swap(remote[:8], 12, 99)
                assert len(batch) == 5
        assert there.view[100:1100] == pattern(1000)
        assert there.view[2000:2100] == pattern(100)
        assert old.result() == 7
        assert swapped.result() == 12
        assert int.from_bytes(there.view[:8], "little") == 99
        assert target == pattern(1000)[:100]
        counts = client.statistics()
        assert (counts.writes, counts.reads, counts.atomics) == (2, 1, 2)


@one_loop
@by_cm
async def test_batch_uses_one_doorbell_and_one_completion(factory: ConnectionFactory) -> None:
    async with factory.sharing(64) as (client, server, _, remote):
        queue = client._queue

        async def several() -> None:
            async with client.batch() as batch:
                for number in range(5):
                    batch.write(b"12345678", remote[8 * number : 8 * number + 8])
                batch.read(remote[:8], bytearray(8))
                batch.fetch_and_add(remote[:8], 1)

        async def as_many_as_there_are_entries() -> None:
            with client.alloc(8) as memory:
                async with client.batch() as batch:
                    for _ in range(SMALL.send_queue):
                        batch.write(memory, remote[:8])

        for collected in (several, as_many_as_there_are_entries):
            await at_rest(client, server)
            before = queue.completions
            await collected()
            assert queue.completions == before + 1


@one_loop
async def test_rejected_batch_read_leaves_its_target_unchanged(factory: ConnectionFactory) -> None:
    async with factory.sharing(64) as (client, _, _, remote):
        with client.alloc(64) as earlier:  # the pool gives its memory again
            earlier.view[:] = b"x" * 64
        target = bytearray(64)
        async with client.batch() as batch:
            with pytest.raises(ValueError, match="slice the longer one"):
                batch.read(remote[:10], target)
        assert target == bytes(64)


@one_loop
@by_cm
async def test_batch_releases_its_buffers_when_the_block_exits(factory: ConnectionFactory) -> None:
    """Buffers are held whether they are passed by name or by position, registered or not."""
    async with factory.sharing(64) as (client, _, there, remote):
        with client.alloc(8) as pooled:
            pooled.view[:] = b"12345678"
            before = sys.getrefcount(pooled)
            async with client.batch() as batch:
                batch.write(pooled, remote[:8])
                batch.write(source=pooled, target=remote[8:16])
                batch.write(source=b"ABCDEFGH", target=remote[16:24])
                with pytest.raises(TypeError, match="argument"):
                    batch.write(pooled)  # type: ignore[call-arg]
                assert len(batch) == 3
            assert there.view[:24] == 2 * b"12345678" + b"ABCDEFGH"
            async with client.batch() as batch:
                batch.read(source=remote[16:24], target=pooled)
            assert bytes(pooled.view) == b"ABCDEFGH"
            assert sys.getrefcount(pooled) == before


@pytest.mark.parametrize("how", ["released", "handed over"])
@one_loop
async def test_batch_fails_when_its_region_is_released_inside_the_block(
    factory: ConnectionFactory, how: str
) -> None:
    async with factory.pair() as (client, server):
        lent = await client.request_region(64)

        async def collect() -> None:
            async with client.batch() as batch:
                batch.read(lent[:8], bytearray(8))
                await (lent.release() if how == "released" else client.hand_over(lent))

        assert "given up> cannot be used" in str(await ends(collect(), BufferStateError))
        await check_alive(client, server)


@one_loop
async def test_queued_write_fails_when_its_region_is_released(factory: ConnectionFactory) -> None:
    """The write waits for a receive of the peer. The message that ends the region does not."""
    async with factory.pair() as (client, server):
        lent = await client.request_region(8)
        sending = [
            asyncio.create_task(client.send(bytes(ALONE))) for _ in range(2 * SMALL.data_receives)
        ]
        writing = asyncio.create_task(client.write(bytes(8), lent, imm=1))
        await yield_loop(1)
        await lent.release()
        for task in sending:
            (await server.recv()).release()
            await task
        await ends(writing, BufferStateError)
        await check_alive(client, server)


@one_loop
async def test_exception_discards_the_batch(factory: ConnectionFactory) -> None:
    async with factory.sharing(64) as (client, server, there, remote):
        before = await leases(client, server)
        old = []

        async def fail() -> None:
            async with client.batch() as batch:
                batch.write(b"written", remote[:7])
                old.append(batch.fetch_and_add(remote[8:16], 1))
                raise LookupError

        await ends(fail(), LookupError)
        assert old[0].cancelled()
        assert await leases(client, server) == before
        await check_alive(client, server)
        assert not any(there.view)


@one_loop
async def test_batch_rejects_operations_with_missing_rights_or_wrong_length(
    factory: ConnectionFactory,
) -> None:
    async with factory.sharing(64, Rights.WRITE) as (client, _, there, remote):
        async with client.batch() as batch:
            with pytest.raises(RemoteRangeError):
                batch.read(remote[:8], bytearray(8))
            with pytest.raises(RemoteRangeError):
                batch.fetch_and_add(remote[:8], 1)
            with pytest.raises(ValueError, match="slice"):
                batch.write(b"long", remote[:3])
            batch.write(b"good", remote[:4])
        assert bytes(there.view[:4]) == b"good"


@one_loop
async def test_batch_raises_lease_ended_error_when_the_lease_has_ended(
    factory: ConnectionFactory,
) -> None:
    """The peer's device would refuse such an operation, which would break the connection."""
    async with factory.pair() as (client, server):
        region = await client.request_region(64, access=ALL)
        await ends(write_as_it_ends(client, region, b"late"), LeaseEndedError)
        await check_alive(client, server)


@one_loop
async def test_batch_rejects_operations_outside_its_block(factory: ConnectionFactory) -> None:
    async with factory.sharing(64) as (client, _, _, remote):
        batch = client.batch()
        with pytest.raises(BufferStateError):
            batch.write(b"x", remote[:1])
        async with batch:
            await ends(batch.__aenter__(), BufferStateError)
        async with batch:  # again, and empty
            pass


@one_loop
async def test_batch_raises_connection_closed_error_after_close(factory: ConnectionFactory) -> None:
    async with factory.sharing(64) as (client, _, _, remote):

        async def close_inside() -> None:
            async with client.batch() as batch:
                batch.write(b"x", remote[:1])
                batch.fetch_and_add(remote[8:16], 1)
                await client.close()

        await ends(close_inside(), ConnectionClosedError)
        with pytest.raises(ConnectionClosedError):
            client.batch()


@one_loop
async def test_failing_batch_operation_prevents_later_operations(
    factory: ConnectionFactory,
) -> None:
    """The device reports the failure for a request that was not signaled."""
    async with factory.pair() as (client, server):
        with server.alloc(64) as buffer, server.alloc(8) as other, client.alloc(8) as source:
            source.view[:] = bytes([1]) * 8
            share, remote = await give(server, client, buffer)
            gone, revoked = await give(server, client, other)
            gone.revoke()
            old = []

            async def use() -> None:
                async with client.batch() as batch:
                    for number in range(3):
                        batch.write(source, remote[8 * number : 8 * number + 8])
                    batch.write(source, revoked)
                    old.append(batch.fetch_and_add(remote[24:32], 1))
                    batch.write(source, remote[32:40])

            await ends(use(), RemoteAccessError)
            await client.wait_closed()
            assert isinstance(old[0].exception(), RemoteAccessError)
            assert buffer.view[:24] == bytes([1]) * 24
            assert not any(buffer.view[24:])
            share.revoke()
            before = await leases(client, server)
        assert await leases(client, server) == before - 3  # no request holds any of them


# ---- writes with immediate data ------------------------------------------------------------------


# ---- long transfers ------------------------------------------------------------------------------


@one_loop
@by_tcp
async def test_long_transfers_report_progress(factory: ConnectionFactory) -> None:
    """test_order.py tests the progress of a write with immediate data."""
    size = 2 * TRANSFER_SIZE + 5
    async with factory.sharing(size, config=Config()) as (client, _, there, remote):
        heard: list[int] = []
        data, target = pattern(size), bytearray(size)
        await client.write(data, remote, progress=heard.append)
        assert there.view == data
        await client.read(remote, target, progress=heard.append)
        assert target == data
        assert heard == 2 * [TRANSFER_SIZE, 2 * TRANSFER_SIZE, size]
