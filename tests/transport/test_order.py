"""Test operations that wait for room in the send queue, and their cancellation.

Random programs (programs.py) check that data written before a message has arrived when the message
does.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace

import pytest

from .connection_factory import SMALL, ConnectionFactory, check_alive, leases, pattern, yield_loop
from .marks import on_pair

pytestmark = on_pair

# The shortest possible send queue, and more receives at the peer than the queue has entries.
SHORT = replace(SMALL, send_queue=8, data_receives=64)

CELL = 256
FILLED = b"x" * CELL


async def test_hand_over_waits_for_earlier_writes(factory: ConnectionFactory) -> None:
    """A write after the hand-over would use a key that no longer works, which would break the
    connection.
    """
    async with factory.pair(SHORT) as (client, server):
        remote = await client.request_region(CELL * 30)
        writes = [
            asyncio.create_task(client.write(FILLED, remote[CELL * n : CELL * (n + 1)]))
            for n in range(30)
        ]
        handing = asyncio.create_task(client.hand_over(remote))
        await asyncio.gather(*writes, handing)
        with await server.recv_buffer() as buffer:
            assert buffer.view == FILLED * 30
        await check_alive(client, server)


# ---- what is not awaited any more ----------------------------------------------------------------


async def test_message_arrives_after_an_earlier_long_write_with_immediate(
    factory: ConnectionFactory,
) -> None:
    """The write takes several work requests, and the message must follow the last of them."""
    size = (8 << 20) + 1
    done: list[int] = []
    async with factory.sharing(size) as (client, server, there, remote):
        data = pattern(size)
        writing = asyncio.create_task(client.write(data, remote, imm=1, progress=done.append))
        sending = asyncio.create_task(client.send(b"after it"))
        first = await server.recv()
        assert (first.imm, first.written) == (1, 1)
        assert there.view == data
        assert bytes(await server.recv()) == b"after it"
        await asyncio.gather(writing, sending)
        assert done == [8 << 20, size]


@pytest.mark.parametrize("operation", ["write", "imm", "progress", "atomic", "batch"])
async def test_operation_cancelled_before_posting_is_not_executed(
    factory: ConnectionFactory, operation: str
) -> None:
    """It must also release its memory, and must not hold up the operations behind it."""
    async with factory.sharing(512, config=SHORT) as (client, server, there, remote):
        before = await leases(client, server)
        memory = bytearray(b"y" * 8)
        region = client.register(memory)
        target = remote[:8]

        async def work() -> None:
            match operation:
                case "write":
                    await client.write(region, target)
                case "imm":
                    await client.write(region, target, imm=1)
                case "progress":
                    await client.write(region, target, progress=lambda done: None)
                case "atomic":
                    await client.fetch_and_add(target, 1)
                case _:
                    async with client.batch() as batch:
                        batch.write(region, target)
                        batch.fetch_and_add(target, 1)

        ahead = [asyncio.create_task(client.read(remote[256:], bytearray(256))) for _ in range(20)]
        doomed = [asyncio.create_task(work()) for _ in range(3)]
        last = asyncio.create_task(client.write(b"z" * 8, remote[8:16]))
        await yield_loop(1)
        assert client._queue.backlog.is_waiting
        for task in doomed:
            task.cancel()
        region.close()
        await asyncio.wait(doomed)
        with suppress(asyncio.CancelledError):
            await doomed[0]
        del task
        doomed.clear()
        memory.extend(b"it is not pinned any more")
        await asyncio.gather(*ahead, last)
        ahead.clear()
        assert bytes(there.view[:16]) == bytes(8) + b"z" * 8
        assert await leases(client, server) == before
        assert client._queue.free == client._queue.capacity
        await check_alive(client, server)


async def test_recv_region_skips_a_region_whose_send_was_cancelled(
    factory: ConnectionFactory,
) -> None:
    """The key of the region no longer works."""
    async with factory.sharing(256, config=SHORT) as (client, server, _, remote):
        with client.alloc(8) as first, client.alloc(16) as second:
            ahead = [asyncio.create_task(client.read(remote, bytearray(256))) for _ in range(20)]
            doomed = asyncio.create_task(client.send_region(first))
            await yield_loop(1)
            doomed.cancel()
            await asyncio.wait([doomed])
            share = await client.send_region(second)
            assert len(await server.recv_region()) == 16
            share.revoke()
            assert not client._sharing.shared
            await asyncio.gather(*ahead)
        await check_alive(client, server)
