"""Test leases on both sides: that they end on time, what the user of a region is told, and
renewals.
"""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from aiordma import Connection, LeaseEndedError, RemoteRegion, RequestRefusedError, Rights, Share
from aiordma._core.protocol import ErrorCode
from aiordma._datapath.memory import Clock
from aiordma._transport import lease_thread
from aiordma._transport.lease_thread import Deadline
from aiordma.config import DEFAULT
from aiordma.errors import BufferStateError, RDMAError

from .connection_factory import (
    BUSY,
    SMALL,
    ConnectionFactory,
    at_rest,
    barrier,
    check_alive,
    give,
    lease_over,
    leases,
    no_more_threads,
    pattern,
    shared,
    yield_loop,
)
from .marks import on_device, on_pair
from .test_lease_thread import thread_ends

pytestmark = on_pair

LONG = 3600.0
SHORT = 1e-3


def computes_until_revoked(share: Share) -> None:
    """Block the event loop until the share is revoked, as a long computation would."""
    limit = time.monotonic() + 10 * BUSY
    while not share.revoked:
        assert time.monotonic() < limit


async def receive_all(conn: Connection) -> None:
    async for message in conn:
        message.release()


async def refused(conn: Connection, remote: RemoteRegion) -> None:
    """Check that operations on the region fail without being posted."""
    region_id = remote.token.region_id
    posted = conn._queue.completions
    part = remote[:8]
    attempts: list[Callable[[], Awaitable[object]]] = [
        lambda: conn.read(remote, bytearray(len(remote))),
        lambda: conn.write(bytes(8), part),
        lambda: conn.write(bytes(8), part, imm=1),
        lambda: conn.fetch_and_add(part, 1),
        lambda: conn.compare_and_swap(part, 0, 1),
        lambda: remote.renew(1),
    ]
    for attempt in attempts:
        with pytest.raises(LeaseEndedError, match=f"{region_id:#x}") as caught:
            await attempt()
        assert caught.value.region_id == region_id
    with conn.alloc(len(remote)) as local:
        async with conn.batch() as batch:
            with pytest.raises(LeaseEndedError):
                batch.read(remote, local)
            with pytest.raises(LeaseEndedError):
                batch.write(local, remote)
    assert conn._queue.completions == posted
    assert remote.ended
    assert remote.lease_remaining == 0
    await remote.release()  # does nothing


@on_device
async def test_lease_ends_while_the_owner_event_loop_is_blocked(factory: ConnectionFactory) -> None:
    async with factory.pair() as (client, server):
        with server.alloc(100) as buffer:
            share, remote = await give(server, client, buffer, lease=LONG)
            share._restart_lease(0.05)  # the loop does not run until the lease ends
            computes_until_revoked(share)
            assert server._sharing.shared == 1  # only the loop updates the count
            await remote.wait_ended()
            await refused(client, remote)
            await barrier(client)
            assert server._sharing.shared == 0
        await check_alive(client, server)


@pytest.mark.parametrize("end", ["revoked", "its own clock", "lent"])
async def test_wait_ended_returns_when_the_share_ends(factory: ConnectionFactory, end: str) -> None:
    async with factory.pair() as (client, server):
        with server.alloc(100) as buffer:
            if end == "lent":
                remote = await client.request_region(100)
                (share,) = server._sharing.shares.by_id.values()
            else:
                lease = None if end == "revoked" else 0.05 * factory.slow
                share, remote = await give(server, client, buffer, lease=lease)
            assert (remote.lease_remaining is None) == (end != "its own clock")
            waiting = asyncio.create_task(remote.wait_ended())
            await yield_loop(2)
            if end == "its own clock":
                server._sharing.notify = lambda message: lambda: None  # type: ignore[method-assign]
            else:
                assert not remote.ended
                share.revoke()
            await waiting
            await remote.wait_ended()  # returns immediately
            await refused(client, remote)
            share.revoke()
        await check_alive(client, server)


async def test_regions_end_when_the_connection_is_aborted(factory: ConnectionFactory) -> None:
    async with factory.pair() as (client, server):
        with server.alloc(8) as buffer:
            _, remote = await give(server, client, buffer, lease=LONG)
            waiting = asyncio.create_task(remote.wait_ended())
            await yield_loop(2)
            server.abort()
            await waiting
            assert remote.ended
            async with remote:
                pass  # the end of the block has nothing to release


async def test_renewed_borrower_lease_never_outlasts_the_owner_lease(
    factory: ConnectionFactory,
) -> None:
    async with (
        factory.pair() as (client, server),
        await client.request_region(8, lease=LONG) as remote,
    ):
        (share,) = server._sharing.shares.by_id.values()
        before = remote._clock.now()
        await remote.renew(2 * LONG)
        assert share._deadline is not None
        assert before + 2 * LONG <= remote._deadline <= share._deadline.when
        await remote.renew(LONG)  # the owner keeps its later deadline
        assert remote._deadline <= remote._clock.now() + LONG < share._deadline.when
        await remote.renew(None)
        assert remote.lease_remaining is None
        assert share._deadline is None


async def test_owner_can_renew_a_share_until_its_lease_ends(factory: ConnectionFactory) -> None:
    async with factory.pair() as (client, server):
        with server.alloc(8) as buffer:
            share, remote = await give(server, client, buffer, lease=LONG)
            for lease in (2 * LONG, LONG / 2):
                await share.renew(lease)
                await barrier(client)
                assert remote.lease_remaining is not None
                assert lease - 60 * BUSY < remote.lease_remaining <= lease
                assert remote.lease_left is not None  # previous name
                assert remote.lease_left <= remote.lease_remaining
                assert share._deadline is not None
                assert lease - 60 * BUSY < share._deadline.when - remote._clock.now() <= lease
            await share.renew(None)
            await barrier(client)
            assert remote.lease_remaining is None
            waiting = asyncio.create_task(remote.wait_ended())
            await yield_loop(2)
            await share.renew(0.01)  # end the lease soon and notify the user
            await waiting
            await lease_over(share)
            with pytest.raises(BufferStateError, match="has ended"):
                await share.renew(1)
            with pytest.raises(ValueError, match="lease"):
                await share.renew(0)
            await refused(client, remote)


@on_device
async def test_lease_is_refused_when_the_lease_thread_cannot_start(
    factory: ConnectionFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This applies to new leases, and to renewing a share that had no lease before.

    Both sides are told.
    """
    why = "cannot share the memory: .*can't start new thread"
    async with factory.pair() as (client, server):
        before = await leases(client, server)
        with server.alloc(8) as buffer:
            share, remote = await give(server, client, buffer)
            lent = await client.request_region(8)
            thread_ends()  # the thread of an earlier test
            with monkeypatch.context() as patch:
                patch.setattr(threading.Thread, "start", no_more_threads)
                with pytest.raises(RDMAError, match=why):
                    server.share(buffer, lease=LONG)
                with pytest.raises(RDMAError, match=why):
                    await server.send_region(buffer, lease=LONG)
                with pytest.raises(RDMAError, match=why):
                    await share.renew(LONG)
                with pytest.raises(RequestRefusedError, match=why) as caught:
                    await client.request_region(8, lease=LONG)
                assert caught.value.code == ErrorCode.INTERNAL
            assert share.revoked
            await remote.wait_ended()
            await refused(client, remote)
            assert server._sharing.shared == 1
            lent._drop()
            share, remote = await give(server, client, buffer, lease=LONG)
            assert share._deadline is not None
            share.revoke()
            remote._mark_unusable()
        while server._sharing.shared:
            await yield_loop(1)
        assert await leases(client, server) == before
        await check_alive(client, server)


async def test_loan_ends_when_its_renewal_fails(
    factory: ConnectionFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with factory.pair() as (client, server):
        lent = await client.request_region(8, lease=LONG)
        with monkeypatch.context() as patch:

            def schedule(clock: Clock, when: float, action: Callable[[], None]) -> Deadline:
                raise RDMAError("no thread")

            patch.setattr(lease_thread, "schedule", schedule)
            with pytest.raises(RequestRefusedError, match="no thread") as caught:
                await lent.renew(2 * LONG)
        assert caught.value.code == ErrorCode.INTERNAL
        await lent.wait_ended()
        assert not server._sharing.shared
        await check_alive(client, server)


async def test_default_lease_comes_from_the_config_of_the_caller(
    factory: ConnectionFactory,
) -> None:
    """`lease=None` in a call means that the lease never ends."""
    assert DEFAULT.lease == 60
    ours, theirs = replace(SMALL, lease=LONG), replace(SMALL, lease=2 * LONG)
    async with factory.pair(ours, server=theirs) as (client, server):
        with server.alloc(8) as buffer:
            await server.send_region(buffer)
            async with (
                await client.recv_region() as shown,
                client.open_region(server.share(buffer).token) as opened,
                await client.request_region(8) as lent,
                await client.request_region(8, lease=None) as endless,
            ):
                lengths = [it.token.lease_ms for it in (shown, opened, lent, endless)]
                assert lengths == [2000 * LONG, 2000 * LONG, 1000 * LONG, 0]


async def test_renewal_by_the_user_is_refused_for_regions_not_borrowed(
    factory: ConnectionFactory,
) -> None:
    async with factory.sharing(8) as (client, server, _, remote):
        with pytest.raises(RequestRefusedError, match="only the owner") as caught:
            await remote.renew(1)
        assert caught.value.code == ErrorCode.ACCESS
        lent = await client.request_region(8)
        next(reversed(server._sharing.shares.by_id.values()))._end(notify=False)
        with pytest.raises(RequestRefusedError, match="ended") as caught:
            await lent.renew(1)
        assert caught.value.code == ErrorCode.UNKNOWN_REGION
        lent._mark_unusable()
        await check_alive(client, server)


@pytest.fixture
def late_grants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grant each region 20 times `SHORT` after its request."""
    on_ready = Share._on_ready

    def ready_late(share: Share, callback: Callable[[], None]) -> None:
        def late() -> None:
            asyncio.get_running_loop().call_later(20 * SHORT, callback)

        on_ready(share, late)

    monkeypatch.setattr(Share, "_on_ready", ready_late)


@pytest.mark.usefixtures("late_grants")
async def test_loan_lease_starts_when_its_key_is_ready(factory: ConnectionFactory) -> None:
    """The owner may be busy for longer than the lease before that, and the request must not fail
    because of it.
    """
    async with factory.pair() as (_, client):
        remote = await client.request_region(100, lease=SHORT)
        assert len(remote) == 100


@pytest.mark.usefixtures("late_grants")
async def test_borrower_counts_the_lease_from_its_request(factory: ConnectionFactory) -> None:
    async with (
        factory.pair() as (_, client),
        await client.request_region(8, lease=10 * SHORT + LONG) as remote,
    ):
        assert remote.lease_remaining is not None
        assert remote.lease_remaining <= LONG


async def test_requested_lease_is_capped_at_max_lease(factory: ConnectionFactory) -> None:
    async with factory.pair(SMALL, server=replace(SMALL, max_lease=LONG)) as (client, server):
        for asked in (None, 2 * LONG, LONG, LONG / 2):
            async with await client.request_region(8, lease=asked) as remote:
                granted = min(LONG, asked or LONG)
                assert remote.token.lease_ms == round(1000 * granted)
                await remote.renew(asked)
                assert remote.lease_remaining is not None
                assert remote.lease_remaining <= granted
        with server.alloc(8) as buffer:  # unrequested shares of the owner have no limit
            share, shown = await give(server, client, buffer, lease=2 * LONG)
            assert shown.token.lease_ms == 2000 * LONG
            share.revoke()


async def test_region_request_is_refused_for_rights_beyond_max_rights(
    factory: ConnectionFactory,
) -> None:
    config = replace(SMALL, max_rights=Rights.READ | Rights.WRITE)
    async with factory.pair(SMALL, server=config) as (client, server):
        with pytest.raises(RequestRefusedError, match=r"ATOMIC.*max_rights") as caught:
            await client.request_region(8, access=Rights.READ | Rights.ATOMIC)
        assert caught.value.code == ErrorCode.ACCESS
        async with await client.request_region(8) as remote:
            await client.write(bytes(8), remote)
        await check_alive(client, server)


async def test_loan_is_returned_when_its_block_exits(factory: ConnectionFactory) -> None:
    async with factory.pair() as (client, _):
        for _ in range(3):
            async with await client.request_region(SMALL.lend_quota):
                pass


async def test_loan_is_returned_when_garbage_collected(factory: ConnectionFactory) -> None:
    async with factory.pair() as (client, server):
        before = await leases(client, server)
        for _ in range(3):
            remote = await client.request_region(SMALL.lend_quota)
            await yield_loop(1)  # the handle that has resumed this task refers to the result
            del remote
            gc.collect()
            await yield_loop(1)
        await barrier(client)
        assert await leases(client, server) == before


async def test_dropped_loan_stays_valid_until_its_cancelled_write_completes(
    factory: ConnectionFactory,
) -> None:
    """The device still uses the memory of a cancelled write until the write is done."""
    async with factory.witness(), factory.pair() as (client, _):
        remote = await client.request_region(SMALL.lend_quota)
        with client.alloc(SMALL.lend_quota) as source:
            writing = asyncio.create_task(client.write(source, remote))
            await yield_loop(1)
            writing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await writing
            del remote, writing
            await at_rest(client)
            await yield_loop(1)
            gc.collect()
            await yield_loop(1)
            await barrier(client)


@pytest.mark.parametrize("imm", [None, 7])
async def test_writes_queued_when_the_lease_ends_are_not_posted(
    factory: ConnectionFactory, imm: int | None
) -> None:
    """Writes that were posted before the end complete."""
    count = 3 * SMALL.send_queue
    async with factory.sharing(8) as (client, server, _, remote):
        with client.register(bytearray(8)) as source:
            writes = [
                asyncio.create_task(client.write(source, remote, imm=imm)) for _ in range(count)
            ]

            async def end() -> None:
                remote._on_revoked()

            await asyncio.create_task(end())
            receiving = asyncio.create_task(receive_all(server))
            results = await asyncio.gather(*writes, return_exceptions=True)
            done = results.count(None)
            assert 0 < done < count
            assert all(isinstance(result, LeaseEndedError) for result in results[done:])
            receiving.cancel()
            await asyncio.wait([receiving])
        await check_alive(client, server)


@pytest.mark.parametrize("before", range(4))
async def test_message_queued_after_a_refused_write_is_sent(
    factory: ConnectionFactory, before: int
) -> None:
    """The message waits for a write that never completes, because it is refused before it is
    posted.

    Messages and operations take turns for free entries, and `before` varies whose turn it is.
    """
    async with (
        factory.pair(replace(SMALL, send_queue=8, keep_alive=None)) as (client, server),
        shared(server, client, 8) as (_, kept),
        shared(server, client, 8) as (_, ended),
    ):
        with client.register(bytearray(8)) as source:
            for _ in range(before):
                await client.write(source, kept)
                await at_rest(client)

            async def fill() -> None:
                async with client.batch() as batch:
                    for _ in range(8):
                        batch.write(source, kept)

            filling = asyncio.create_task(fill())
            writing = asyncio.create_task(client.write(source, ended))
            sending = asyncio.create_task(client.send(b"behind"))

            async def end() -> None:
                ended._deadline = ended._clock.now()  # without any notification

            await asyncio.create_task(end())
            await filling
            with pytest.raises(LeaseEndedError):
                await writing
            assert await server.recv() == b"behind"
            await sending


async def test_opening_a_token_twice_returns_the_same_region(factory: ConnectionFactory) -> None:
    async with factory.pair() as (client, server):
        with server.alloc(8) as buffer, server.share(buffer) as share:
            first = client.open_region(share.token)
            assert client.open_region(share.token.pack()) is first
            share.revoke()
            await first.wait_ended()
            with pytest.raises(LeaseEndedError, match="has ended"):
                client.open_region(share.token)


@on_device
async def test_concurrent_revoke_and_lease_end_release_all_memory(
    factory: ConnectionFactory,
) -> None:
    """The lease thread may end the share while the loop revokes it."""
    chance = random.Random(18)
    async with factory.pair() as (client, server):
        before = await leases(client, server)
        for _ in range(100):
            with server.alloc(1000) as buffer:
                share = server.share(buffer, lease=0.001)
                if chance.random() < 0.8:
                    await share.ready()
                time.sleep(chance.random() * 0.002)  # noqa: ASYNC251 - the loop does not see it
                if chance.random() < 0.5:
                    share.revoke()
                    assert share.revoked
                else:
                    await lease_over(share)
        while server._sharing.shared:
            await yield_loop(1)
        assert await leases(client, server) == before
        await check_alive(client, server)


@on_device
async def test_shared_memory_is_not_reused_before_the_loop_handles_lease_end(
    factory: ConnectionFactory,
) -> None:
    """The lease thread ends the key, but the pool must not hand out the memory before the loop has
    processed that.
    """
    async with factory.pair() as (_, server):
        buffer = server.alloc(1000)
        buffer.view[:] = pattern(1000)
        view = buffer.view
        share = server.share(buffer, lease=LONG)
        await share.ready()
        buffer.release()
        view.release()
        share._restart_lease(0.05)  # the loop does not run until the lease ends
        computes_until_revoked(share)
        others = [server.alloc(1000) for _ in range(20)]
        assert all(other.address != share.token.address for other in others)
        for other in others:
            other.release()
