"""Test reads, writes and atomics on the peer's memory."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest

from aiordma import Buffer, BufferStateError, RemoteRangeError, Rights
from aiordma._datapath.rail import RESERVED_ENTRIES
from aiordma.errors import LocalRangeError
from aiordma.mr_pool import LocalMemory

from .connection_factory import (
    ConnectionFactory,
    check_alive,
    ends,
    leases,
    pattern,
    shared,
    yield_loop,
)
from .marks import by_cm, one_loop

if TYPE_CHECKING:
    from typing_extensions import Buffer as BufferLike

STAGED = 64 << 10  # the longest unregistered memory that is copied through the pool
TRANSFER_SIZE = 8 << 20  # the longest single work request


@one_loop
async def test_zero_length_reads_and_writes_succeed(factory: ConnectionFactory) -> None:
    async with factory.sharing(8) as (client, _, _, remote):
        await client.write(b"", remote[3:3])
        await client.read(remote[8:], bytearray())
        await client.read(remote[:0], cast("BufferLike", np.zeros((0, 4))))


@one_loop
@by_cm
async def test_full_send_queue_reserves_entries_for_credits(factory: ConnectionFactory) -> None:
    """This side's operations must not hold back the credits that the peer waits for."""
    async with factory.sharing(100 * 64) as (client, _, there, remote):
        there.view[:] = pattern(len(there))
        parts = [remote[start : start + 64] for start in range(0, len(there), 64)]
        targets = [bytearray(64) for _ in parts]  # more reads than the device has at a time
        reads = [
            asyncio.create_task(client.read(*each)) for each in zip(parts, targets, strict=True)
        ]
        await yield_loop(1)
        assert client._queue.free == RESERVED_ENTRIES
        await asyncio.gather(*reads)
        assert b"".join(targets) == there.view


@one_loop
async def test_slices_select_parts_of_buffers_and_regions(factory: ConnectionFactory) -> None:
    async with factory.sharing(100) as (client, _, there, remote):
        assert len(remote) == len(remote[:]) == 100
        await client.write(b"0123456789", remote[10:50][5:15])
        assert there.view[15:25] == memoryview(b"0123456789")
        with client.alloc(100) as buffer:
            buffer.view[:] = pattern(100)
            await client.write(buffer[20:60][10:20], remote[-10:])
            assert there.view[-10:] == pattern(100)[30:40]
            await client.read(remote[15:25], buffer[:10])
            assert buffer.view[:10] == memoryview(b"0123456789")
            assert buffer.view[10:] == pattern(100)[10:]
        assert repr(remote[10:20])


# ---- refused before anything is posted -----------------------------------------------------------


BAD_SLICES = [
    slice(0, 101),
    slice(101, None),
    slice(-101, None),
    slice(50, 200),
    slice(0, 10, 2),
    slice(None, None, -1),
]


@one_loop
@by_cm
async def test_out_of_range_slices_raise_range_error(factory: ConnectionFactory) -> None:
    async with factory.sharing(100) as (client, server, there, remote):
        with client.alloc(100) as buffer, client.register(bytearray(100)) as region:
            for key in BAD_SLICES:
                with pytest.raises(RemoteRangeError):
                    remote[key]
                with pytest.raises(RemoteRangeError):
                    remote[:][key]
                for memory in (buffer, region, buffer[:]):
                    with pytest.raises(LocalRangeError):
                        memory[key]
            with pytest.raises(RemoteRangeError):
                remote[10:20][5:11]
            with pytest.raises(LocalRangeError):
                buffer[10:20][5:11]
            with pytest.raises(TypeError):
                remote[5]  # type: ignore[index]
        assert not any(there.view)
        await check_alive(client, server)


@one_loop
@by_cm
async def test_mismatched_local_and_remote_lengths_raise_value_error(
    factory: ConnectionFactory,
) -> None:
    async with factory.sharing(100) as (client, server, there, remote):
        text = "local memory has {} bytes, but the peer's memory has 100"
        with pytest.raises(ValueError, match=text.format(99)):
            await client.write(bytes(99), remote)
        with pytest.raises(ValueError, match=text.format(101)):
            await client.read(remote, bytearray(101))
        with pytest.raises(ValueError, match="slice the longer one"):
            await client.write(bytes(STAGED + 1), remote)
        assert not any(there.view)
        await check_alive(client, server)


@pytest.mark.parametrize(
    "access",
    [Rights(0), Rights.READ, Rights.WRITE, Rights.ATOMIC, Rights.READ | Rights.WRITE],
    ids=repr,
)
@one_loop
async def test_operation_without_access_right_raises_remote_range_error(
    factory: ConnectionFactory, access: Rights
) -> None:
    async with factory.sharing(8, access) as (client, server, there, remote):
        assert remote.rights == access
        attempts: dict[Rights, Callable[[], Awaitable[object]]] = {
            Rights.WRITE: lambda: client.write(b"12345678", remote),
            Rights.READ: lambda: client.read(remote, bytearray(8)),
            Rights.ATOMIC: lambda: client.fetch_and_add(remote, 1),
        }
        for right, attempt in attempts.items():
            if right in access:
                await attempt()
            else:
                with pytest.raises(RemoteRangeError) as caught:
                    await attempt()
                assert caught.value.right == (right.name or "").lower()
        if not access & (Rights.WRITE | Rights.ATOMIC):
            assert not any(there.view)
        await check_alive(client, server)


@one_loop
@by_cm
async def test_using_released_memory_raises_buffer_state_error(factory: ConnectionFactory) -> None:
    async with factory.sharing(100) as (client, server, there, remote):
        buffer = client.alloc(100)
        part = buffer[10:20]
        buffer.release()
        region = client.register(bytearray(100))
        region.close()
        before = await leases(client, server)
        used: list[tuple[LocalMemory, int]] = [(buffer, 100), (part, 10), (region, 100)]
        for memory, size in used:
            await ends(client.write(memory, remote[:size]), BufferStateError)
            await ends(client.read(remote[:size], memory), BufferStateError)
            with pytest.raises(BufferStateError):
                _ = memory.view
            await ends(client.send_region(memory), BufferStateError)
        with pytest.raises(BufferStateError):
            buffer[0:1]
        buffer.release()  # again: nothing
        region.close()
        assert await leases(client, server) == before
        assert not any(there.view)
        await check_alive(client, server)


@one_loop
@by_cm
async def test_using_a_region_on_another_connection_raises_value_error(
    factory: ConnectionFactory,
) -> None:
    async with (
        factory.pair() as (client, server),
        factory.pair() as (other, its_peer),
        shared(server, client, 8) as (there, remote),
    ):
        attempts: list[Callable[[], Awaitable[object]]] = [
            lambda: other.write(bytes(8), remote),
            lambda: other.read(remote[:], bytearray(8)),
            lambda: other.fetch_and_add(remote, 1),
            lambda: server.write(bytes(8), remote),
        ]
        for attempt in attempts:
            with pytest.raises(ValueError, match="another connection"):
                await attempt()
        assert not any(there.view)
        await check_alive(client, server)
        await check_alive(other, its_peer)


# ---- atomics -------------------------------------------------------------------------------------


def number(buffer: Buffer, offset: int = 0) -> int:
    return int.from_bytes(buffer.view[offset : offset + 8], sys.byteorder)


async def test_fetch_and_add_returns_the_old_value(factory: ConnectionFactory) -> None:
    async with factory.sharing(16) as (client, _, there, remote):
        assert await client.fetch_and_add(remote[8:16], 5) == 0
        assert await client.fetch_and_add(remote[8:16], -5) == 5
        assert (number(there), number(there, 8)) == (0, 0)
        assert await client.fetch_and_add(remote[8:16], -1) == 0
        assert number(there, 8) == (1 << 64) - 1
        assert await client.fetch_and_add(remote[8:16], (1 << 64) - 1) == (1 << 64) - 1
        assert number(there, 8) == (1 << 64) - 2
        assert client.statistics().atomics == 4


async def test_compare_and_swap_returns_the_old_value(factory: ConnectionFactory) -> None:
    largest = (1 << 64) - 1
    async with factory.sharing(8) as (client, _, there, remote):
        assert await client.compare_and_swap(remote, 0, 42) == 0
        assert number(there) == 42
        assert await client.compare_and_swap(remote, 41, 7) == 42
        assert number(there) == 42
        assert await client.compare_and_swap(remote, 42, largest) == 42
        assert await client.compare_and_swap(remote, largest, 0x0102030405060708) == largest
        assert there.view == (0x0102030405060708).to_bytes(8, sys.byteorder)


@one_loop
@by_cm
async def test_atomics_reject_invalid_ranges_and_values(factory: ConnectionFactory) -> None:
    async with factory.sharing(24) as (client, server, there, remote):
        for part in (remote[4:12], remote[:4], remote[:16], remote, remote[1:9], remote[:0]):
            await ends(client.fetch_and_add(part, 1), RemoteRangeError)
            await ends(client.compare_and_swap(part, 0, 1), RemoteRangeError)
        for value in (1 << 64, -(1 << 63) - 1):
            with pytest.raises(ValueError, match="64"):
                await client.fetch_and_add(remote[:8], value)
        for value in (1 << 64, -1):
            with pytest.raises(ValueError, match="64"):
                await client.compare_and_swap(remote[:8], value, 0)
            with pytest.raises(ValueError, match="64"):
                await client.compare_and_swap(remote[:8], 0, value)
        assert not any(there.view)
        await check_alive(client, server)
