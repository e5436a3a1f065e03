"""Test that messages continue on another rail when the lead breaks, and that each arrives once."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from aiordma import (
    BufferStateError,
    Config,
    Connection,
    ConnectionBrokenError,
    ConnectionClosedError,
    DeviceEventError,
    LeaseEndedError,
    ProtocolError,
    VerbsError,
    arrays,
)
from aiordma._core import protocol
from aiordma._core.protocol import Message, RailAnswer, RailReady, RegionGrant
from aiordma._core.region import RegionToken
from aiordma._datapath import keys
from aiordma._datapath.rail import SendQueue
from aiordma._native import lib
from aiordma._transport import failover, rails, share_keys
from aiordma._transport.connect_cm import CMLink
from aiordma._transport.rails import AnsweringRails, OfferingRails, Rail, Rails
from aiordma._transport.shares import Share
from aiordma.errors import QuotaError, host_port, work_completion_error
from aiordma.mr_pool import Block, OwnMemory
from aiordma.verbs import EventType, MemoryRegion, MemoryWindow, ProtectionDomain, WCStatus
from aiordma.verbs._memory import memory_region
from aiordma.verbs._memory.memory_region import in_domain
from tests.transport.connection_factory import (
    ALL,
    SMALL,
    ConnectionFactory,
    barrier,
    ends,
    give,
    pattern,
    shared,
    yield_loop,
)
from tests.transport.inside import figures
from tests.transport.marks import by_cm, by_tcp, one_loop

from .joining import THREE, TWO, WAYS, further, joined, lose, next_lead, shown, until_rails

CABLE = "its cable was cut"
MOVED = list(zip(TWO, ("down", "lead"), strict=True))


def cut(*conns: Connection) -> None:
    for conn in conns:
        if not conn._queue.failed:
            conn._queue.rail_broke(ConnectionBrokenError(CABLE))


async def until_moved(*conns: Connection) -> None:
    while any(shown(conn)[:2] != MOVED for conn in conns):
        await yield_loop(1)


async def both_ways(conns: tuple[Connection, Connection], messages: list[bytes]) -> None:
    """Send the messages in both directions. Check that each arrives once and in order."""

    async def receive(conn: Connection) -> None:
        for data in messages:
            with await conn.recv() as message:
                assert message == data

    async with asyncio.TaskGroup() as tasks:
        for conn in conns:
            tasks.create_task(receive(conn))
            for data in messages:
                conn.send_nowait(data)
                await yield_loop(0)


class HeldRails:
    """A patch that keeps rail 1 from coming up until the instance is called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        acknowledged = OfferingRails._on_probe_acknowledged
        self.held: list[Callable[[], None]] = []

        def hold(rails: OfferingRails, rail: Rail) -> None:
            come_up = partial(acknowledged, rails, rail)
            if rail.number == 1:
                self.held.append(come_up)
            else:
                come_up()

        monkeypatch.setattr(OfferingRails, "_on_probe_acknowledged", hold)

    def __call__(self) -> None:
        for come_up in self.held:
            come_up()


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (
            work_completion_error(WCStatus.RETRY_EXC_ERR),
            "its requests were not acknowledged (RETRY_EXC_ERR)",
        ),
        (
            work_completion_error(WCStatus.RNR_RETRY_EXC_ERR),
            "this side had no receive posted for too long (RNR_RETRY_EXC_ERR)",
        ),
        (work_completion_error(WCStatus.WR_FLUSH_ERR), "its queue pair failed"),
        (DeviceEventError("QP_FATAL"), "its queue pair failed"),
        (DeviceEventError("PORT_ERR"), "the port of its device went down (PORT_ERR)"),
        (DeviceEventError("DEVICE_FATAL"), "its device failed (DEVICE_FATAL)"),
        (
            ConnectionBrokenError(CABLE),
            "it received nothing from this side in time, or its link was closed",
        ),
        (VerbsError(12, "ibv_post_recv"), "its device could not carry the connection"),
    ],
    ids=lambda it: type(it).__name__ if isinstance(it, Exception) else "",
)
@one_loop
async def test_lead_failure_cause_is_reported_to_the_peer(
    error: Exception, cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    left = "the rail broke at the peer, and the peer continues on another rail"
    async with joined("tcp") as conns:
        await until_rails(conns)
        conns[0]._queue.rail_broke(error)
        await until_moved(*conns)
        while str(conns[1].rails[0].error) == left:
            await yield_loop(1)
        assert str(conns[1].rails[0].error) == f"{left}: {cause}"
        assert conns[0].rails[0].error is error
        about = f"rail 0 to {conns[1]._owner.name} on {TWO[0]} broke"
    told = [it.getMessage() for it in caplog.records if it.getMessage().startswith(about)]
    assert told == [f"{about}: {left}", f"{about} at the peer: {cause}"]


@one_loop
async def test_lead_failure_has_default_cause_when_peer_gives_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rails, "cause_of", lambda error: 0)
    async with joined("tcp") as conns:
        await until_rails(conns)
        cut(conns[0])
        await until_moved(*conns)
        await both_ways(conns, [b"after"])
        assert str(conns[1].rails[0].error) == failover.LEFT


@pytest.mark.parametrize(
    ("number", "cause"),
    [
        (protocol.RailCause.PORT, "the port of its device went down (PORT_ERR)"),
        (99, "unknown cause 99"),
    ],
)
@one_loop
async def test_secondary_rail_failure_cause_is_reported_to_the_peer(
    number: int, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rails, "cause_of", lambda error: number)
    async with joined("tcp") as conns:
        await until_rails(conns)
        queue = further(conns[0]).queue
        assert queue is not None
        queue.rail_broke(ConnectionBrokenError(CABLE))
        await until_rails(conns, ("lead", "down"))
        assert str(conns[1].rails[1].error) == f"the peer has stopped this rail: {cause}"


@pytest.mark.parametrize("way", WAYS)
@one_loop
async def test_connections_to_one_peer_differ_in_repr_and_log(
    way: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "aiordma.rails")
    async with joined(way) as one, joined(way) as other:
        conns = (*one, *other)
        await until_rails(one)
        await until_rails(other)
        names = [conn._owner.name for conn in conns]
        for conn, name in zip(conns, names, strict=True):
            assert repr(conn) == f"<Connection on {TWO[0]} with {name}, open>"
            local, peer = conn.local_address, conn.peer_address
            addresses = f"{host_port(peer)} from {host_port(local)}" if peer and local else "a peer"
            assert name == f"{addresses} (QP {conn.queue_pair.qp_num})"
        assert len(set(names)) == 4
        cut(one[0], other[0])
        await until_moved(*conns)
        assert [conn._owner.name for conn in conns] == names  # named after the first QP
    told = [it.getMessage() for it in caplog.records]
    for name in (names[0], names[2]):
        assert told.count(f"rail 0 to {name} on {TWO[0]} broke: {CABLE}") == 1


@pytest.mark.parametrize("way", WAYS)
@one_loop
async def test_messages_are_delivered_after_the_lead_breaks(way: str) -> None:
    async with joined(way) as conns:
        await until_rails(conns)
        await both_ways(conns, [b"before"])
        cut(conns[1])
        await both_ways(conns, [b"after", pattern(100)])
        await until_moved(*conns)
        for conn in conns:
            assert conn.device == TWO[1]
            assert conn.rails[0].error is not None
        await both_ways(conns, [bytes([number]) for number in range(100)])


@by_tcp
@one_loop
async def test_long_message_behind_a_long_write_survives_failover() -> None:
    """The READs of the message wait for the end of the write, which the other rail continues."""
    size = 8 << 20
    async with joined("tcp", config=replace(SMALL, lend_quota=size)) as conns:
        await until_rails(conns)
        client, server = conns
        region = await client.request_region(size, access=ALL)
        sending = asyncio.ensure_future(server.send(data := pattern(size)))
        receiving = asyncio.ensure_future(client.recv())
        while not figures(client)["read_ahead"]:
            await yield_loop(1)
        written = pattern(size, 1)
        writing = asyncio.ensure_future(client.write(written, region))
        await yield_loop(2)
        cut(client)
        with await receiving as message:
            assert message == data
        await asyncio.gather(sending, writing)
        await client.read(region, found := bytearray(size))
        assert found == written


@one_loop
async def test_operations_started_during_failover_complete_on_the_new_lead(
    factory: ConnectionFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages that have already arrived are still received, and their receives go to the next
    lead. New operations wait for that lead. If it has no key for a region yet, operations on that
    region fail and can be tried again.
    """
    come_up = HeldRails(monkeypatch)
    async with joined(factory.via) as conns:
        client, server = conns
        await until_rails(conns, ("lead", "connecting"))
        region = await client.request_region(17, access=ALL)
        messages = [bytes([number]) * 600 for number in range(4)]
        await asyncio.gather(*(client.send(data) for data in messages))
        while figures(server)["arrived"] < 4 or not come_up.held:
            await yield_loop(1)
        cut(*conns)
        await yield_loop(5)
        for data in messages:
            with await server.recv() as message:
                assert message == data
        long = pattern(1 << 20)

        async def batch() -> None:
            async with client.batch() as batch:
                batch.write(b"one", region[8:11])

        with server.alloc(5) as memory:
            sharing = asyncio.ensure_future(server.send_region(memory, access=ALL))
            done = asyncio.gather(client.send(long), client.request_region(10))
            refused = [
                asyncio.ensure_future(it)
                for it in (
                    client.fetch_and_add(region[:8], 3), client.write(b"imm", region[14:], imm=7),
                    client.read(region[8:12], bytearray(4)), batch(),
                )
            ]  # fmt: skip
            await yield_loop(5)
            assert not any(task.done() for task in (sharing, done, *refused))
            come_up()
            with await sharing, await server.recv() as message:
                assert message == long
                await done
                for task in refused:
                    assert "try again" in str(await ends(task, BufferStateError))
                while not region._keys:
                    assert not region.ended
                    await yield_loop(1)
                assert await client.fetch_and_add(region[:8], 3) == 0
                await client.write(b"there", await client.recv_region())
                assert bytes(memory.view) == b"there"
        await both_ways(conns, [bytes([number]) for number in range(100)])


@by_tcp
@one_loop
async def test_third_rail_reads_message_when_the_next_lead_cannot_register(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("aiordma.mr_pool.reg_local_dma", lambda _: None)
    async with joined("tcp", THREE, THREE) as conns:
        await until_rails(conns, ["lead", "up", "up"])
        client, server = conns
        endpoint = next_lead(server).endpoint
        assert endpoint is not None
        refusing = endpoint.driver.pool.pd

        def fail(region: MemoryRegion, pd: ProtectionDomain) -> MemoryRegion:
            if pd is refusing and region.length > 5 << 20:
                raise VerbsError(errno.ENOMEM, "ibv_reg_mr")
            return in_domain(region, pd)

        monkeypatch.setattr(keys, "in_domain", fail)
        sending = asyncio.ensure_future(client.send(data := pattern(6 << 20)))
        receiving = asyncio.ensure_future(server.recv())
        while not figures(server)["read_ahead"]:
            await yield_loop(1)
        cut(server)
        with await receiving as message:
            assert message == data
        await sending
        assert sorted(rail.state for rail in server.rails) == ["down", "down", "lead"]


@by_tcp
@one_loop
async def test_message_fails_when_the_next_send_queue_is_too_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Opening a message to the next lead takes one send queue entry for each piece."""
    monkeypatch.delattr(OfferingRails, "begin")
    config = replace(SMALL, fetch_ahead=0, eager_size=1024)
    async with joined("tcp", config=config) as conns:
        client, server = conns
        assert client._rails is not None
        client._rails.config = replace(config, send_queue=8)
        await begin_rails(conns)
        assert client._queue.capacity > 11 + 4 > further(client).queue.capacity  # type: ignore[union-attr]
        sending = asyncio.ensure_future(client.send([pattern(65536, n) for n in range(11)]))
        while not figures(server)["unread"]:
            await yield_loop(1)
        cut(client)
        assert "send queue has too few entries" in str(await ends(sending, ConnectionBrokenError))


@pytest.mark.parametrize("fails", ["no windows", "the second piece, before"])
@by_tcp
@one_loop
async def test_offered_messages_are_received_through_the_next_lead(
    fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next lead uses any kind of key it can make, even if it failed to make one earlier."""
    config = replace(SMALL, fetch_ahead=0, max_message=1 << 30)
    pieces = [pattern(200_000), pattern(400_000)]  # the other rail carries part of them
    async with joined("tcp", config=config) as conns:
        await until_rails(conns)
        client, server = conns
        endpoint = further(client).endpoint
        assert endpoint is not None
        pools = client._memory.pool, endpoint.driver.pool
        with ExitStack() as stack:
            if fails == "no windows":
                for pool in pools:
                    stack.callback(setattr, pool, "has_windows", pool.has_windows)
                    pool.has_windows = False
            else:
                pd, alloc_mw = endpoint.driver.pd, ProtectionDomain.alloc_mw
                errors = [None, OSError(errno.ENOMEM, "no window")]

                def alloc(self: ProtectionDomain, *args: Any) -> MemoryWindow:
                    if self is pd and errors and (error := errors.pop(0)):
                        raise error
                    return alloc_mw(self, *args)

                monkeypatch.setattr(ProtectionDomain, "alloc_mw", alloc)
            sends = [asyncio.ensure_future(client.send(pieces)) for _ in range(3)]
            while figures(server)["unread"] < 3:
                await yield_loop(1)
            assert fails == "no windows" or not errors
            cut(client)
            for _ in sends:
                with await server.recv() as message:
                    assert message == b"".join(pieces)
            await asyncio.gather(*sends)


@pytest.mark.parametrize("ends", [False, True])
@by_tcp
@one_loop
async def test_rail_recovers_after_its_receive_allocation_fails(
    ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answering side has no memory for the rail's receives.

    The rail breaks there, and comes back when there is memory again. With `ends`, the connection
    ends while the answer is being sent.
    """
    monkeypatch.setattr(rails, "FIRST_DELAY", 0)
    monkeypatch.delattr(OfferingRails, "begin")
    async with joined("tcp") as conns:
        client, server = conns
        pool, answer = server._memory.pool, AnsweringRails._answer

        def block(size: int) -> Block:
            monkeypatch.setattr(pool, "_block", take)
            raise QuotaError("none is left")

        def answer_once(*args: Any) -> None:
            monkeypatch.setattr(AnsweringRails, "_answer", answer)
            monkeypatch.setattr(pool, "_block", block)
            answer(*args)

        take = pool._block
        monkeypatch.setattr(AnsweringRails, "_answer", answer_once)
        if ends:
            tell = Rails._send

            def tell_and_end(rails: Rails, message: Message) -> None:
                tell(rails, message)
                if isinstance(message, RailAnswer):
                    server.abort()

            monkeypatch.setattr(Rails, "_send", tell_and_end)
            assert isinstance(client._rails, OfferingRails)
            BEGIN(client._rails)
            while not client.closed:
                await yield_loop(1)
            return
        await begin_rails(conns)
        assert client.rails[1].error is not None
        assert "none is left" in str(server.rails[1].error)
        await both_ways(conns, [b"after", pattern(100_000)])


@by_tcp
@one_loop
async def test_both_sides_choose_the_same_lead(monkeypatch: pytest.MonkeyPatch) -> None:
    come_up = HeldRails(monkeypatch)
    async with joined("tcp", THREE, THREE) as conns:
        await until_rails(conns, ("lead", "connecting", "up"))
        while not come_up.held:
            await yield_loop(1)
        cut(*conns)
        come_up()
        await both_ways(conns, [b"after", pattern(100)])
        await until_rails(conns, ("down", "up", "lead"))


@pytest.mark.any_device
@by_tcp
@one_loop
async def test_device_failure_during_close_releases_message_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The device's driver ends immediately, and its protection domain with it.

    The registration of the message in that domain must be released first.
    """
    monkeypatch.setattr("aiordma.mr_pool.reg_local_dma", lambda _: None)  # as on a card
    async with joined("tcp", config=replace(SMALL, fetch_ahead=0)) as conns:
        await until_rails(conns)
        client, server = conns
        pools = [conn._memory.pool for conn in conns]
        sending = asyncio.ensure_future(client.send(bytes(1 << 20)))
        while not figures(server)["unread"]:
            await yield_loop(1)
        await yield_loop(20)  # the message is opened to that rail too
        assert lib.aiordma_embedded_raise_on(TWO[1].encode(), EventType.DEVICE_FATAL) == 0
        endpoint = further(client).endpoint
        assert endpoint is not None
        endpoint.driver.take_device_events()
        server.abort()
        client.abort()  # the last user of the device
        await ends(sending, ConnectionClosedError)
    assert not any(pool.leases for pool in pools)


@pytest.mark.any_device
@pytest.mark.parametrize("card", [False, True])
@one_loop
async def test_allocation_uses_the_next_lead_after_device_failure(
    factory: ConnectionFactory, monkeypatch: pytest.MonkeyPatch, card: bool
) -> None:
    """Memory allocated before the failure stays usable, too."""
    register, gone = memory_region.reg_mr, []

    def refuse(pd: ProtectionDomain, *args: Any, **options: Any) -> Any:
        if pd in gone:
            raise VerbsError(errno.EIO, "ibv_reg_mr")
        return register(pd, *args, **options)

    monkeypatch.setattr(memory_region, "reg_mr", refuse)
    monkeypatch.setattr(keys, "reg_mr", refuse)
    if card:  # a card has no key for all memory
        monkeypatch.setattr("aiordma.mr_pool.reg_local_dma", lambda _: None)
    size = 9 << 20
    data = [pattern(size, number) for number in range(3)]
    async with AsyncExitStack() as stack:
        conns = await stack.enter_async_context(joined(factory.via, THREE, THREE))
        await until_rails(conns, ["lead", "up", "up"])
        for _ in range(2):
            device = conns[0].device
            before = stack.enter_context(conns[0].alloc(size))
            before.view[:] = pattern(size)
            gone.append(conns[0]._memory.pd)
            assert not lib.aiordma_embedded_raise_on(device.encode(), EventType.DEVICE_FATAL)
            await both_ways(conns, [b"after"])
            while any(conn.device == device for conn in conns):
                await yield_loop(1)
            for conn, peer in (conns, conns[::-1]):
                sending = [conn.send_nowait(it) for it in data]
                messages = [await peer.recv() for _ in sending]
                assert messages == data
                for message in messages:
                    message.release()
                await asyncio.gather(*sending)
                with conn.register(bytearray(size)) as memory, peer.alloc(size) as there:
                    _, remote = await give(peer, conn, there)
                    await conn.write(before, remote)
                    await conn.read(remote, memory)
                    assert memory.view == before.view
                    await conn.write(bytes(size), remote)
                    await conn.read(remote, before)
                    assert before.view == bytes(size)
                    before.view[:] = memory.view


@by_tcp
@one_loop
async def test_tasks_waiting_for_memory_resume_after_failover() -> None:
    config = replace(SMALL, pool_limit=16 << 20)
    async with joined("tcp", config=config) as conns:
        await until_rails(conns)
        with ExitStack() as stack:
            sent = conns[1].send_nowait(data := pattern(3 << 20))
            with suppress(QuotaError):
                while True:
                    stack.enter_context(conns[0].alloc(2 << 20))
            receiving = asyncio.ensure_future(conns[0].recv())
            leasing = asyncio.ensure_future(conns[0].lease(2 << 20))
            await yield_loop(20)
            assert not any([receiving.done(), leasing.done()])
            assert conns[0].pool_statistics().waiting == 2
            cut(conns[0])
            with await receiving as message:
                assert message == data
            (await leasing).release()
            await sent


@by_tcp
@one_loop
async def test_failed_frame_allocation_fails_only_the_write_with_immediate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with joined("tcp") as conns:
        await until_rails(conns)
        client, server = conns
        pool = client._memory.pool
        region, source = await client.request_region(64, access=ALL), client.alloc(8)
        for _ in range(20):  # flush earlier frames from the journal
            await asyncio.gather(client.send(b"m" * 600), server.recv())
        sends = [client.send_nowait(b"m" * 600) for _ in range(8)]  # use all credits
        writing = asyncio.ensure_future(client.write(source, region[:8], imm=7))
        await yield_loop(20)
        assert not writing.done()
        with ExitStack() as stack:
            for _ in range(200):  # leave no small block ready
                stack.enter_context(client.alloc(8))
            monkeypatch.setattr(pool, "_block", take_no_block)
            for _ in sends:
                (await server.recv()).release()
            assert "ibv_reg_mr" in str(await ends(writing, VerbsError))
            monkeypatch.undo()
        source.release()
        await both_ways(conns, [b"after"])


def take_no_block(size: int) -> Block:
    raise VerbsError(errno.ENOMEM, "ibv_reg_mr")


@by_tcp
@one_loop
async def test_open_batch_completes_after_failover() -> None:
    """Operations collected with the keys of the old lead are executed by the new one."""
    async with joined("tcp") as conns:
        await until_rails(conns)
        client, _ = conns
        regions = [await client.request_region(100, access=ALL) for _ in range(2)]
        found = bytearray(3)
        await client.write(b"abc", regions[1][:3])
        async with client.batch() as batch:
            batch.write(b"one", regions[0][:3])
            batch.read(regions[1][:3], found)
            cut(client)
            await until_moved(*conns)
            batch.write(b"two", regions[0][3:6])
            old = batch.fetch_and_add(regions[1][8:16], 5)
        assert found == b"abc"
        assert old.result() == 0
        again = bytearray(6)
        await client.read(regions[0][:6], again)
        assert again == b"onetwo"


@by_tcp
@one_loop
async def test_keep_alive_stops_with_the_broken_lead() -> None:
    async with joined("tcp", config=replace(SMALL, keep_alive=1000.0)) as conns:
        await until_rails(conns)
        cut(conns[0])
        await until_moved(*conns)
        for conn in conns:
            assert conn._keep_alive is not None
            assert conn._keep_alive._timer.cancelled()


@pytest.mark.parametrize("devices", [TWO, THREE], ids=["two", "three"])
@pytest.mark.parametrize("iterations", range(5))
@by_tcp
@one_loop
async def test_shared_memory_fails_over_only_to_rails_that_can_register_it(
    iterations: int, devices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer must be able to use the memory by the new lead.

    The connection breaks if no remaining rail can register the memory.
    """
    make_key = share_keys.make_key

    def fail(queue: SendQueue, *args: Any) -> share_keys.ShareKey:
        if queue.number == 1:
            raise VerbsError(errno.ENOMEM, "ibv_reg_mr")
        return make_key(queue, *args)

    monkeypatch.setattr(share_keys, "make_key", fail)
    async with joined("tcp", devices, devices) as conns:
        await until_rails(conns, ["lead", "up", "up"][: len(devices)])
        owner, user = conns
        with owner.alloc(8) as memory:
            sharing = asyncio.ensure_future(owner.send_region(memory, access=ALL))
            lent = asyncio.ensure_future(user.request_region(8, access=ALL))
            await yield_loop(iterations)
            cut(owner)
            if len(devices) == 2:
                await asyncio.gather(sharing, lent, return_exceptions=True)
                error = await ends(owner.recv(), ConnectionBrokenError)
                assert f"cannot be opened by {TWO[1]}" in str(error)
                return
            with await sharing:
                for region in (await lent, await user.recv_region()):
                    await user.write(b"12345678", region)
        await both_ways(conns, [b"after"])


@by_tcp
@one_loop
async def test_token_of_the_previous_lead_is_rejected_after_failover() -> None:
    """The key in the old token is gone.

    The new token of the same array has a key of the new lead.
    """
    async with joined("tcp") as conns:
        await until_rails(conns)
        user, owner = conns
        with arrays.share(owner, np.arange(3)) as shared_array:  # its Region is already closed
            with owner.alloc(8) as memory:
                share = owner.share(memory, access=ALL)
            await share.ready()
            before = shared_array.token
            cut(user)
            await until_moved(*conns)
            await share.ready()
            await barrier(owner)
            with pytest.raises(LeaseEndedError, match="has ended"):
                arrays.open_array(user, before)
            assert list(await arrays.open_array(user, shared_array.token)) == [0, 1, 2]
            await user.write(b"12345678", user.open_region(share.token))
        await both_ways(conns, [b"after"])


@by_tcp
@one_loop
async def test_repeated_region_grants_raise_protocol_error() -> None:
    """A hostile peer answers one request with many grants, none of which has a key for the lead."""
    async with joined("tcp") as conns:
        await until_rails(conns)
        cut(conns[0])
        await until_moved(*conns)
        asking = asyncio.ensure_future(conns[0].request_region(64, access=ALL))
        await yield_loop(1)
        sharing = conns[0]._sharing
        (asked,) = sharing._requests
        for number in range(SMALL.max_regions + 1):
            sharing.handle_control(RegionGrant(asked, RegionToken(number, 4096, 64, 1, ALL)))
        with pytest.raises(ProtocolError, match="more than once"):
            sharing.handle_control(RegionGrant(asked, RegionToken(99, 4096, 64, 1, ALL)))
        conns[0].abort()
        await ends(asking, ConnectionClosedError)


BEGIN = OfferingRails.begin


def late_keys(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Hold back rail keys, and return a function that sends them. Rails start in `begin_rails`."""
    late: list[tuple[Share, SendQueue]] = []
    tell = Share._announce_key
    monkeypatch.delattr(OfferingRails, "begin")
    monkeypatch.setattr(Share, "_announce_key", lambda share, rail: late.append((share, rail)))

    def tell_keys() -> None:
        for share, rail in late:
            tell(share, rail)

    return tell_keys


async def begin_rails(conns: Sequence[Connection]) -> None:
    assert isinstance(conns[0]._rails, OfferingRails)
    BEGIN(conns[0]._rails)
    await until_rails(conns)


@one_loop
async def test_regions_wait_for_keys_that_arrive_after_failover(
    factory: ConnectionFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rail has just come up, so the peer has had no time to send keys for it."""
    tell_keys = late_keys(monkeypatch)
    async with joined(factory.via) as conns, shared(conns[1], conns[0], 8) as (there, given):
        client = conns[0]
        lent = await client.request_region(32, access=ALL)
        await begin_rails(conns)
        assert lent._keys == given._keys == {}
        open_one = client.batch()
        collected = await open_one.__aenter__()
        collected.write(b"too early", lent[16:25])
        cut(client)
        await until_moved(*conns)
        for region in (lent, given):
            assert not region.ended
            with pytest.raises(
                BufferStateError,
                match=r"the operation was not executed: .* does not have the "
                "key for",
            ):
                await client.write(b"early", region[:5])
        with pytest.raises(
            BufferStateError, match=r"the operation was not executed: .* does not have the key for"
        ):
            collected.write(b"early", lent[:5])
        with pytest.raises(BufferStateError, match=r"the batch was not executed: .* again"):
            await open_one.__aexit__(None, None, None)
        tell_keys()
        while not (lent._keys and given._keys):
            await yield_loop(1)
        await client.write(b"lent", lent[:4])
        assert await client.fetch_and_add(lent[8:16], 7) == 0
        async with client.batch() as batch:
            batch.write(b"given", given[:5])
            batch.read(lent, found := bytearray(32))
        assert found == b"lent" + bytes(4) + (7).to_bytes(8, sys.byteorder) + bytes(16)
        assert bytes(there.view) == b"given" + bytes(3)


@pytest.mark.parametrize(
    "kind",
    ["alloc", "register", pytest.param("register_dmabuf", marks=pytest.mark.needs("dma-buf"))],
)
@by_tcp
@one_loop
async def test_shared_memory_released_by_the_owner_survives_failover(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory stays pinned for the peer, and rails that come up later open it as well."""
    monkeypatch.delattr(OfferingRails, "begin")
    async with joined("tcp") as conns:
        client, server = conns
        with os.fdopen(os.memfd_create("aiordma-test"), "r+b") as file:
            file.truncate(8192)
            made: dict[str, Callable[[], OwnMemory]] = {
                "alloc": partial(server.alloc, 8192),
                "register": partial(server.register, bytearray(8192)),
                "register_dmabuf": partial(server.register_dmabuf, file.fileno(), 8192),
            }
            with made[kind]() as memory:
                await server.send_region(memory[4096:], access=ALL, lease=None)
        region = await client.recv_region()
        await begin_rails(conns)
        cut(client)
        await until_moved(*conns)
        while not region._keys:
            assert not region.ended
            await yield_loop(1)
        await client.write(b"there", region[:5])
        await client.read(region[:5], found := bytearray(5))
        assert found == b"there"


@pytest.mark.parametrize("which", [0, 1], ids=["by this side", "by the peer"])
@by_cm
@one_loop
async def test_connection_survives_when_its_first_rail_disconnects(which: int) -> None:
    """Neither the disconnect of the rail's CM ID nor later events of that ID end the connection."""
    async with joined("cm") as conns:
        await until_rails(conns)
        links = [conn._link for conn in conns]
        addresses = [(conn.local_address, conn.peer_address) for conn in conns]
        link = links[which]
        assert isinstance(link, CMLink)
        link.id.disconnect()
        await both_ways(conns, [b"after", pattern(100)])
        await until_moved(*conns)
        for conn, link, both in zip(conns, links, addresses, strict=True):
            assert isinstance(link, CMLink)
            assert link.id.closed
            assert (conn.local_address, conn.peer_address) == both
        await both_ways(conns, [b"once more"])


@by_cm
@one_loop
async def test_abort_by_the_peer_breaks_every_rail() -> None:
    async with joined("cm", THREE, THREE) as conns:
        await until_rails(conns, ("lead", "up", "up"))
        conns[0].abort()
        error = await ends(conns[1].recv(), ConnectionBrokenError)
        assert "the peer" in str(error)


@by_tcp
@one_loop
async def test_connection_closes_when_its_last_rail_breaks_during_failover(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The connection must not wait for a time limit when no rail is left."""
    monkeypatch.setattr(failover, "MIN_WAIT", 1e6)
    lose(monkeypatch, RailReady)
    async with joined("tcp") as conns:
        await until_rails(conns[:1])
        cut(conns[1])
        await yield_loop(1)
        queue = further(conns[1]).queue
        assert queue is not None
        queue.rail_broke(ConnectionBrokenError("the second one"))
        await yield_loop(2)
        assert conns[1].closed


@by_tcp
@one_loop
async def test_connection_ends_without_leaks_when_the_next_lead_cannot_register(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In each round a different registration fails.

    The messages received before the connection ends are always the first ones sent, without a gap.
    """
    monkeypatch.setattr("aiordma.mr_pool.reg_local_dma", lambda _: None)
    failing: list[ProtectionDomain] = []
    left = 0

    def fail_once(region: MemoryRegion, pd: ProtectionDomain) -> MemoryRegion:
        nonlocal left
        if pd in failing and region.pd is not pd:  # otherwise no registration is needed
            left -= 1
            if left == -1:
                raise VerbsError(errno.ENOMEM, "ibv_reg_mr")
        return in_domain(region, pd)

    monkeypatch.setattr(keys, "in_domain", fail_once)
    config = Config(data_receives=4, control_receives=4, eager_size=1024, max_eager_size=65536)
    for nth in range(100):
        failing.clear()
        async with joined("tcp", config=config) as conns:
            await until_rails(conns)
            await both_ways(conns, [bytes(9000)] * 5)
            client, server = conns
            assert client._rails is not None
            assert client._rails.rails[1].endpoint is not None
            pools = [conn._memory.pool for conn in conns]
            pools.append(client._rails.rails[1].endpoint.driver.pool)
            left, failing[:] = nth, [pools[-1].pd]
            sent = [bytes([number]) for number in range(3)]
            sends = [asyncio.ensure_future(client.send(data)) for data in sent]
            await yield_loop(0)
            cut(server)
            received: list[bytes] = []
            with suppress(ConnectionBrokenError, VerbsError):
                while len(received) < 3:
                    with await server.recv() as message:
                        received.append(bytes(message))
            assert received == sent[: len(received)]
            client.abort()
            server.abort()
            await asyncio.gather(*sends, return_exceptions=True)
        assert not any(pool.leases for pool in pools)
        if left >= 0:
            break  # fewer than n registrations were made
    assert nth > 8  # covers all receives of an idle side
