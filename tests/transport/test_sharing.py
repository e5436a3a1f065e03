"""Test regions: sharing with rights and a lease, lending on request, handing over and revoking."""

from __future__ import annotations

import gc
import math
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from aiordma import (
    BufferStateError,
    Connection,
    ConnectionBrokenError,
    ConnectionClosedError,
    RemoteRegion,
    RequestRefusedError,
    Rights,
)
from aiordma._core.protocol import ErrorCode
from aiordma.errors import RemoteAccessError, WorkCompletionError
from conftest import EMBEDDED

from .connection_factory import (
    ALL,
    SMALL,
    ConnectionFactory,
    barrier,
    check_alive,
    ends,
    give,
    lease_over,
    leases,
    pattern,
)
from .marks import on_pair

pytestmark = on_pair

READ_WRITE = Rights.READ | Rights.WRITE


async def check_device_rejects(
    factory: ConnectionFactory, conn: Connection, remote: RemoteRegion
) -> None:
    """Check that the owner's device rejects the key, and that this ends the connection.

    This side's own check is bypassed, so that it sends the read. The rejection also ends the
    owner's connection. If a card reports the end first, the error has no cause.
    """
    remote._root._usable, remote._root._deadline = True, math.inf
    target = bytearray(b"x") * len(remote)
    with pytest.raises((WorkCompletionError, ConnectionBrokenError)) as caught:
        await conn.read(remote, target)
    error = caught.value
    cause = error if isinstance(error, WorkCompletionError) else error.__cause__
    end_was_first = cause is None and factory.device != EMBEDDED
    assert end_was_first or isinstance(cause, RemoteAccessError)
    assert target == b"x" * len(remote)
    await conn.wait_closed()


# ---- shared --------------------------------------------------------------------------------------


async def test_shares_are_read_only_by_default(factory: ConnectionFactory) -> None:
    async with factory.pair() as (client, server):
        with server.register(bytearray(pattern(100))) as memory:
            share = await server.send_region(memory)
            remote = await client.recv_region()
            assert remote.rights == Rights.READ
            target = bytearray(100)
            await client.read(remote, target)
            assert target == pattern(100)
            share.revoke()


async def test_shared_slice_exposes_only_its_own_bytes(factory: ConnectionFactory) -> None:
    """The key covers only the slice, so a user that ignores the length reaches nothing else."""
    async with factory.pair() as (client, server):
        with server.alloc(300) as buffer:
            buffer.view[:] = pattern(300)
            share, remote = await give(server, client, buffer[100:200], Rights.READ)
            target = bytearray(100)
            await client.read(remote, target)
            assert target == pattern(300)[100:200]
            assert share.token.address == buffer.address + 100
            assert share.token.length == 100
            for offset in (-1, 1):
                async with factory.pair() as (user, owner):
                    with owner.alloc(300) as memory:
                        _, bad = await give(owner, user, memory[100:200], Rights.READ)
                        bad.address += offset
                        await check_device_rejects(factory, user, bad)
            await check_alive(client, server)


async def test_device_rejects_access_without_the_required_right(factory: ConnectionFactory) -> None:
    """The user ignores its own rights here, so only the owner's device can refuse."""
    async with factory.sharing(8, Rights.WRITE) as (client, _, _, remote):
        token = remote.token
        object.__setattr__(token, "access", ALL)
        await check_device_rejects(factory, client, remote)


async def test_regions_arrive_in_order(factory: ConnectionFactory) -> None:
    async with factory.pair() as (client, server):
        with server.alloc(100) as buffer:
            for size in range(1, 6):
                await server.send_region(buffer[:size])
            assert [len(await client.recv_region()) for _ in range(5)] == [1, 2, 3, 4, 5]
            assert server._sharing.shared == 5


async def test_device_rejects_access_to_a_revoked_share(factory: ConnectionFactory) -> None:
    async with factory.witness(), factory.pair() as (client, server):
        with server.alloc(100) as buffer:
            share, remote = await give(server, client, buffer)
            await client.read(remote, bytearray(100))
            assert not share.revoked
            share.revoke()
            assert share.revoked
            share.revoke()  # a second revoke does nothing
            assert server._sharing.shared == 0
            await check_device_rejects(factory, client, remote)


async def test_device_rejects_access_after_the_lease_expires(factory: ConnectionFactory) -> None:
    async with factory.witness(), factory.pair() as (client, server):
        with server.alloc(100) as buffer:
            share, remote = await give(server, client, buffer, lease=0.3 * factory.slow)
            assert remote.token.lease_ms == round(300 * factory.slow)
            await lease_over(share)
            assert server._sharing.shared == 0
            await check_device_rejects(factory, client, remote)


# ---- lent ----------------------------------------------------------------------------------------


async def test_request_region_returns_zeroed_memory(factory: ConnectionFactory) -> None:
    async with factory.pair() as (client, server):
        with server.alloc(1000) as dirty:
            dirty.view[:] = pattern(1000)
        remote = await client.request_region(1000)
        assert remote.lent
        assert len(remote) == 1000
        assert remote.rights == READ_WRITE
        target = bytearray(pattern(1000))
        await client.read(remote, target)
        assert not any(target)
        await client.write(pattern(1000), remote)
        await client.read(remote, target)
        assert target == pattern(1000)
        await remote.release()


async def test_request_region_raises_when_the_lend_quota_is_exceeded(
    factory: ConnectionFactory,
) -> None:
    quota = SMALL.lend_quota
    async with factory.witness(), factory.pair() as (client, server):
        with pytest.raises(RequestRefusedError) as caught:
            await client.request_region(quota + 1)
        assert caught.value.code == ErrorCode.QUOTA
        for size in (0, -1, 1 << 64):
            with pytest.raises(ValueError, match="size must be an int from 1 to"):
                await client.request_region(size)
        first = await client.request_region(quota // 2)
        second = await client.request_region(quota // 2)
        await ends(client.request_region(1), RequestRefusedError)
        await first.release()
        third = await client.request_region(quota // 2)
        await ends(client.request_region(1), RequestRefusedError)
        for region in (second, third):
            await region.release()
        whole = await client.request_region(quota)
        await whole.release()
        await check_alive(client, server)


async def test_expired_loan_frees_its_lend_quota(factory: ConnectionFactory) -> None:
    """The end of the loan also ends the access."""
    async with factory.pair() as (client, server):
        remote = await client.request_region(SMALL.lend_quota, lease=0.3 * factory.slow)
        for share in list(server._sharing.shares.by_id.values()):  # may have ended by now
            await lease_over(share)
        again = await client.request_region(SMALL.lend_quota)
        await again.release()
        await check_device_rejects(factory, client, remote)


# ---- handed over ---------------------------------------------------------------------------------


async def test_region_is_unusable_after_hand_over(factory: ConnectionFactory) -> None:
    async with factory.pair() as (client, server):
        remote = await client.request_region(8)
        part = remote[:8]
        await client.hand_over(remote)
        attempts: list[Callable[[], Awaitable[object]]] = [
            lambda: client.read(remote, bytearray(8)),
            lambda: client.write(bytes(8), part),
            lambda: client.hand_over(remote),
            lambda: client.fetch_and_add(part, 1),
        ]
        for attempt in attempts:
            await ends(attempt(), BufferStateError, ValueError)
        await remote.release()  # does nothing after the hand-over
        received = await server.recv_buffer()
        received.view[:] = b"mine now"
        received.release()
        await check_alive(client, server)


async def test_handed_over_memory_uses_lend_quota_until_received(
    factory: ConnectionFactory,
) -> None:
    """Otherwise a peer could take all memory by borrowing and handing over repeatedly."""
    half = SMALL.lend_quota // 2
    async with factory.pair() as (client, server):
        for _ in range(2):
            await client.hand_over(await client.request_region(half))
        await ends(client.request_region(half), RequestRefusedError)
        first = await server.recv_buffer()
        third = await client.request_region(half)
        await ends(client.request_region(half), RequestRefusedError)
        for region in (first, await server.recv_buffer()):
            region.release()
        await third.release()
    few = replace(SMALL, max_regions=2)
    async with factory.pair(few) as (client, server):
        for _ in range(2):
            await client.hand_over(await client.request_region(8))
        with pytest.raises(RequestRefusedError, match="waiting to be received"):
            await client.request_region(8)
        assert not server.closed


async def test_key_is_invalid_after_hand_over(factory: ConnectionFactory) -> None:
    async with factory.pair() as (client, server):
        remote = await client.request_region(8)
        await client.hand_over(remote)
        received = await server.recv_buffer()
        remote._usable = True
        await check_device_rejects(factory, client, remote)
        assert received.view == bytes(8)
        received.release()


async def test_hand_over_rejects_regions_not_borrowed_on_the_connection(
    factory: ConnectionFactory,
) -> None:
    async with factory.sharing(8) as (client, server, _, remote):
        with pytest.raises(ValueError, match="borrowed"):
            await client.hand_over(remote)
        await client.read(remote, bytearray(8))
        async with factory.pair() as (other, its_peer):
            lent = await other.request_region(8)
            with pytest.raises(ValueError, match="another connection"):
                await client.hand_over(lent)
            await check_alive(other, its_peer)
        await check_alive(client, server)


# ---- waiters at the end --------------------------------------------------------------------------


async def test_closing_a_connection_frees_lent_and_handed_over_memory(
    factory: ConnectionFactory,
) -> None:
    """This includes memory that was handed over but never received."""
    async with factory.pair() as (anchor, other):
        before = await leases(anchor, other)
        async with factory.pair() as (client, server):
            kept = await client.request_region(1000)
            never_received = await client.request_region(1000)
            await client.hand_over(never_received)
            await barrier(client)
        del client, server, kept
        gc.collect()
        assert await leases(anchor, other) == before


async def test_recv_region_returns_pending_regions_after_close(factory: ConnectionFactory) -> None:
    async with factory.pair() as (client, server):
        with server.alloc(8) as buffer:
            await server.send_region(buffer)
            await server.close()
            await client.wait_closed()
            remote = await client.recv_region()
            await ends(client.read(remote, bytearray(8)), ConnectionClosedError)
            await ends(client.recv_region(), ConnectionClosedError)
