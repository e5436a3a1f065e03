"""Test keys of shares whose bind is delayed.

The embedded device stops a send queue between two requests.
"""

from __future__ import annotations

import asyncio
import errno
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest

from aiordma import Connection, ConnectionClosedError, verbs
from aiordma._transport import share_keys
from aiordma._transport.shares import Loan
from aiordma.errors import VerbsError
from tests import combinations

from .connection_factory import (
    ALL,
    BUSY,
    SMALL,
    ConnectionFactory,
    at_rest,
    barrier,
    check_alive,
    ends,
    forged,
    lease_over,
    yield_loop,
)
from .marks import one_loop
from .test_keys_of_others import refused
from .test_leases import computes_until_revoked


@asynccontextmanager
async def stopped(
    client: Connection, server: Connection, held: str
) -> AsyncIterator[Callable[[], Coroutine[Any, Any, None]]]:
    """Stop the server's send queue, and yield a function that restarts it.

    If `held` is "in the backlog", earlier shares fill the queue, so later binds wait in the
    backlog. After the block, check that no objects created in it remain.
    """
    qp = server._endpoint.qp
    assert qp is not None
    await check_alive(client, server)  # creates the windows that messages keep
    await at_rest(client, server)
    before = verbs.live()
    qp.modify(qp_state=verbs.QPState.SQD)
    queued = SMALL.send_queue if held == "in the backlog" else 0
    with server.alloc(8) as other:
        earlier = [server.share(other) for _ in range(queued)]

        async def go_on() -> None:
            qp.modify(qp_state=verbs.QPState.RTS)
            for each in earlier:
                await each.ready()
                each.revoke()

        yield go_on
    await barrier(server)
    await check_alive(client, server)
    assert not Counter(verbs.live()) - Counter(before)


@pytest.mark.any_device
async def test_ready_raises_when_the_connection_ends_before_binding(
    factory: ConnectionFactory,
) -> None:
    async with factory.pair() as (client, _):
        with client.alloc(8) as memory:
            share = client.share(memory)
            waiting = asyncio.create_task(share.ready())
            client.abort()
            await ends(waiting, ConnectionClosedError)
            await ends(share.ready(), ConnectionClosedError)


@pytest.mark.any_device
async def test_failure_to_destroy_a_memory_window_is_reported(
    factory: ConnectionFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the connection must still release everything else."""
    close = verbs.MemoryWindow.close
    async with factory.pair() as (client, server):
        _kept = await client.request_region(64)  # otherwise the region could be returned early
        (loan,) = server._sharing.shares.by_id.values()
        assert isinstance(loan, Loan)
        receiving = asyncio.create_task(server.recv())
        await yield_loop(1)
        refusals = [VerbsError(errno.EBUSY, "ibv_dealloc_mw")]

        def refuse(window: verbs.MemoryWindow) -> None:
            if refusals:
                raise refusals.pop()
            close(window)

        monkeypatch.setattr(verbs.MemoryWindow, "close", refuse)
        server.abort()
        await ends(receiving, ConnectionClosedError)
        await server.close()
        (told,) = combinations.reported
        assert "could not release its memory" in told["message"]
        combinations.reported.clear()
        loan._memory._unpin()
        loan.buffer.release()


@pytest.mark.parametrize("held", ["in the send queue", "in the backlog"])
@pytest.mark.parametrize("how", ["revoked", "cancelled"])
@one_loop
async def test_read_is_refused_when_the_share_was_revoked_before_binding(
    factory: ConnectionFactory, held: str, how: str
) -> None:
    """The bind of the window is still waiting when the share ends. The connection continues."""
    async with factory.pair() as (client, server):
        with server.alloc(8) as buffer:
            async with stopped(client, server, held) as go_on:
                earlier = set(server._sharing.shares.by_id.values())
                if how == "revoked":
                    share = server.share(buffer, access=ALL)
                    share.revoke()
                    assert share.revoked
                    token = share.token
                else:
                    sharing = asyncio.create_task(server.send_region(buffer, access=ALL))
                    await yield_loop(3)
                    [share] = set(server._sharing.shares.by_id.values()) - earlier
                    token = share.token
                    sharing.cancel()
                    with suppress(asyncio.CancelledError):
                        await sharing
                await go_on()
            await refused(client.read(forged(client, token), bytearray(8)))


@one_loop
async def test_region_stays_registered_until_the_bind_of_a_revoked_share_is_processed(
    factory: ConnectionFactory,
) -> None:
    async with factory.pair() as (client, server):
        memory = bytearray(8)
        async with stopped(client, server, "in the send queue") as go_on:
            region = server.register(memory)
            server.share(region).revoke()
            region.close()
            with pytest.raises(BufferError):
                memory.extend(b"!")
            await go_on()
        memory.extend(b"!")


@one_loop
async def test_share_is_revoked_when_lease_expires_before_bind_is_processed(
    factory: ConnectionFactory,
) -> None:
    """The loop is busy and has not seen the bind complete.

    The peer may have received the token in another way.
    """
    async with factory.pair() as (client, server):
        await check_alive(client, server)
        with server.alloc(8) as buffer:
            share = server.share(buffer, access=ALL, lease=0.05)
            computes_until_revoked(share)
            assert server._sharing.shared == 1  # only the loop updates the count
            await barrier(server)
            assert server._sharing.shared == 0
            await check_alive(client, server)
            token = replace(share.token, lease_ms=0)  # for a peer that ignores the lease
            await refused(client.read(forged(client, token), bytearray(8)))


@pytest.mark.parametrize("held", ["in the send queue", "in the backlog"])
@one_loop
async def test_share_is_revoked_when_its_lease_expires_before_binding(
    factory: ConnectionFactory, held: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection continues, whether the loop runs when the lease ends, or is busy and has not
    yet posted the bind.
    """
    if held == "in the send queue":
        monkeypatch.setattr(share_keys, "GRACE", 10 * BUSY)
    async with factory.pair() as (client, server):
        with server.alloc(8) as buffer:
            async with stopped(client, server, held) as go_on:
                share = server.share(buffer, access=ALL, lease=0.001)
                if held == "in the backlog":
                    computes_until_revoked(share)
                else:
                    await lease_over(share)
                assert share.revoked
                await go_on()
                await share.ready()
            token = replace(share.token, lease_ms=0)
            await refused(client.read(forged(client, token), bytearray(8)))


@one_loop
async def test_share_lease_starts_when_its_window_is_bound(factory: ConnectionFactory) -> None:
    """The bind may wait for longer than the lease, but `send_region` must not send a region that
    has ended.
    """
    async with factory.pair() as (client, server):
        qp = server._endpoint.qp
        assert qp is not None
        await at_rest(client, server)
        qp.modify(qp_state=verbs.QPState.SQD)
        with server.alloc(8) as buffer:
            sharing = asyncio.create_task(server.send_region(buffer, lease=0.001))
            await asyncio.sleep(0.005)  # longer than the lease
            [share] = server._sharing.shares.by_id.values()
            assert not share.revoked
            qp.modify(qp_state=verbs.QPState.RTS)
            assert await sharing is share
            await client.recv_region()
            await lease_over(share)
        await check_alive(client, server)
