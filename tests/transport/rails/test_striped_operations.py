"""Test long reads and writes striped over two rails, and the operations that follow them."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import pytest

from aiordma import (
    Config,
    Connection,
    ConnectionBrokenError,
    ConnectionClosedError,
    LeaseEndedError,
    RemoteRegion,
    Rights,
)
from aiordma._core import protocol
from aiordma._datapath.rail import SendQueue
from aiordma._transport import share_keys
from aiordma._transport.rails import AnsweringRails, OfferingRails, Rails
from aiordma.errors import RemoteAccessError, VerbsError
from aiordma.mr_pool import LocalMemory
from tests.transport.connection_factory import check_alive, ends, pattern, shared, yield_loop
from tests.transport.marks import by_tcp, one_loop

from .joining import WAYS, joined, until_rails

MB = 1 << 20
CUT = ConnectionBrokenError("its cable")
# The errors of an operation whose peer aborts the connection.
BROKEN = (ConnectionBrokenError, RemoteAccessError)


class Ends(NamedTuple):
    """A connection with two rails, and memory shared by the server."""

    client: Connection
    server: Connection
    there: LocalMemory
    remote: RemoteRegion


@asynccontextmanager
async def sharing(size: int, way: str = "tcp") -> AsyncIterator[Ends]:
    async with joined(way) as conns:
        await until_rails(conns)
        async with shared(conns[1], conns[0], size) as (there, remote):
            yield Ends(*conns, there, remote)


def second(conn: Connection) -> SendQueue:
    assert conn._rails is not None
    _, rail = conn._rails.rails
    assert rail.queue is not None
    return rail.queue


def posted(conn: Connection) -> int:
    """Return the number of requests completed on the second rail."""
    return second(conn).completions


@pytest.mark.parametrize("way", WAYS)
async def test_both_rails_carry_long_operations(way: str) -> None:
    size = 20 * MB + 5
    data = pattern(size)
    async with sharing(size, way) as (client, _, there, remote):
        before = posted(client)
        done: list[int] = []
        await client.write(data, remote, progress=done.append)
        assert there.view == data
        assert posted(client) > before
        assert done == sorted(done)
        assert done[-1] == size
        before = posted(client)
        found = bytearray(size)
        await client.read(remote, found)
        assert found == data
        assert posted(client) > before


async def test_short_writes_and_opened_regions_use_only_the_lead() -> None:
    async with sharing(MB) as (client, server, _, remote):
        before = posted(client)
        await client.write(pattern(MB // 2 - 1), remote[: MB // 2 - 1])
        with (
            server.register(bytearray(MB)) as memory,
            server.share(memory, access=Rights.WRITE) as share,
        ):
            await share.ready()
            await client.write(bytes(MB), client.open_region(share.token))
        assert posted(client) == before


async def test_writes_are_retried_only_after_peer_stops_the_broken_rail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with sharing(8 * MB) as (client, server, there, remote):
        told: list[Any] = []
        down = Rails._on_rail_down
        other = await client.request_region(100)
        handlers = {**AnsweringRails.handlers, protocol.RailDown: lambda *args: told.append(args)}
        monkeypatch.setattr(AnsweringRails, "handlers", handlers)
        data = pattern(8 * MB)
        writing = asyncio.ensure_future(client.write(data, remote))
        while not second(client).outstanding:
            await yield_loop(1)
        releasing = asyncio.ensure_future(
            other.release()
        )  # the release waits, but the report of the rail's end does not
        await yield_loop(1)
        second(client).rail_broke(CUT)
        sending = client.send_nowait(b"behind it")
        while not told or client._queue.outstanding > 1:
            await yield_loop(1)
        await yield_loop(20)
        assert not writing.done()
        assert not sending.done()
        assert not releasing.done()
        monkeypatch.undo()
        (args,) = told
        assert args[0] is server._rails
        down(*args)
        with await server.recv():
            assert there.view == data
        await asyncio.gather(writing, sending, releasing)


async def test_striped_write_fails_when_its_lease_is_revoked() -> None:
    async with sharing(16 * MB) as (client, _, _, remote):
        writing = asyncio.ensure_future(client.write(bytes(16 * MB), remote))
        behind = asyncio.ensure_future(client.send_nowait(b"goes on"))
        await yield_loop(1)
        remote._on_revoked()
        await ends(writing, LeaseEndedError)
        await behind


async def test_keys_for_unknown_rails_and_regions_are_ignored() -> None:
    """One key is for a rail that is not up.

    The other two are for regions that this connection has not received.
    """
    async with sharing(MB) as (client, server, _, remote):
        with server.register(bytearray(MB)) as memory, server.share(memory) as share:
            foreign = client.open_region(share.token)
            number = remote.token.region_id
            for key in ((number, 9), (share.token.region_id, 1), (number + 1000, 1)):
                await server._sharing.send(protocol.RegionKey(0, *key, 1))
            await server.send(b"behind them")
            (await client.recv()).release()
            assert list(remote._keys or ()) == [1]
            assert foreign._keys is None
            await check_alive(client, server)


@pytest.mark.parametrize("windows", [True, False])
async def test_new_rail_receives_keys_for_memory_shared_earlier(
    monkeypatch: pytest.MonkeyPatch, windows: bool
) -> None:
    """The owner sends the keys after RailReady, because the peer does not know the rail before
    that.
    """
    if not windows:
        monkeypatch.setattr("aiordma.mr_pool.offers_windows", lambda *_: False)
    begin = OfferingRails.begin
    monkeypatch.delattr(OfferingRails, "begin")
    async with joined("tcp") as conns, shared(*conns, MB) as (_, remote):
        assert isinstance(conns[0]._rails, OfferingRails)
        begin(conns[0]._rails)
        await until_rails(conns)
        await yield_loop(20)
        assert list(remote._keys or ()) == [1]


async def test_region_grant_waits_for_the_keys_of_all_rails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The memory is granted only when the binds of all its keys have completed."""
    held: list[Callable[[], None]] = []
    done = share_keys.KeyRequest.done

    def hold(bind: share_keys.KeyRequest, number: int) -> None:
        if bind.key._queue.number:
            held.append(partial(done, bind, number))
        else:
            done(bind, number)

    async with joined("tcp") as (client, server):
        await until_rails((client, server))
        monkeypatch.setattr(share_keys.KeyRequest, "done", hold)
        with server.alloc(8) as memory:
            sharing = asyncio.ensure_future(server.send_region(memory))
            asking = asyncio.ensure_future(client.request_region(8))
            while len(held) < 2:
                await yield_loop(1)
            await yield_loop(20)
            assert not client._sharing.remote_regions.by_id
            for go_on in held:
                go_on()
            await sharing
            for remote in (await client.recv_region(), await asking):
                assert list(remote._keys or ()) == [1]


async def test_pending_key_of_expired_lease_closes_when_a_rail_is_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The lease thread ends the lease while a bind is in flight, and before the busy loop has
    processed the end of the lease.
    """
    monkeypatch.setattr(share_keys, "GRACE", 1e6)
    async with sharing(MB) as (_, server, _, _):
        (share,) = server._sharing.shares.by_id.values()
        (_, late), (gone, _) = share._keys.items()
        with monkeypatch.context() as patch:
            patch.setattr(late, "_in_flight", {object()})
            share._expire()
        assert not late.closed
        share._remove_rail(gone)
        assert late.closed
        assert not server._sharing.shared


async def test_removing_a_rail_discards_its_keys_for_the_regions_of_the_peer() -> None:
    """A peer that keeps adding rails could otherwise exhaust the memory."""
    async with sharing(MB) as (client, server, _, remote):
        assert list(remote._keys or ()) == [second(client).number]
        second(client).rail_broke(CUT)
        await until_rails((client, server), ["lead", "down"])
        assert remote._keys == {}


async def test_key_created_after_lease_expiry_is_closed() -> None:
    """The lease thread cannot close this key, because it did not exist when the lease ended."""
    async with sharing(MB) as (_, server, _, _):
        (share,) = server._sharing.shares.by_id.values()
        share._expire()
        share._keys.pop(second(server)).close()
        share._add_rail(second(server))
        assert all(key.closed for key in share._keys.values())


async def test_key_message_is_dropped_when_its_rail_is_removed() -> None:
    """The message would otherwise wait forever for credits that the peer does not give."""
    async with sharing(MB) as (_, server, _, _):
        (share,) = server._sharing.shares.by_id.values()
        server._sharing.notify = (told := mock.Mock())  # type: ignore[method-assign]
        share._announce_key(second(server))
        share._remove_rail(second(server))
        told.return_value.assert_called_once_with()
        del server._sharing.notify


async def test_revoke_closes_remaining_keys_after_a_device_error() -> None:
    async with sharing(MB) as (_, server, _, _):
        (share,) = server._sharing.shares.by_id.values()
        first, other = share._keys.values()
        refusal = VerbsError(errno.EBUSY, "ibv_dealloc_mw")
        with mock.patch.object(first, "close", side_effect=refusal), pytest.raises(VerbsError):
            share.revoke()
        assert other.closed
        share._ended = False
        share.revoke()


async def test_hand_over_waits_for_earlier_writes_during_failover() -> None:
    """Control messages keep their place behind writes, whichever rails carry the writes."""
    async with joined("tcp", config=Config()) as conns:
        await until_rails(conns)
        client, server = conns
        region = await client.request_region(16 * MB)
        data = pattern(16 * MB)
        writing = asyncio.ensure_future(client.write(data, region))
        await yield_loop(1)
        giving = asyncio.ensure_future(client.hand_over(region))
        await yield_loop(1)
        assert not writing.done()
        client._queue.rail_broke(CUT)
        buffer = await server.recv_buffer()
        assert buffer.view == data
        buffer.release()
        await asyncio.gather(writing, giving)


@pytest.mark.parametrize("batched", [False, True])
async def test_cancelled_write_finishes_before_the_next_write(batched: bool) -> None:
    async with sharing(8 * MB) as (client, _, there, remote):

        async def many() -> None:
            async with client.batch() as batch:
                for number in range(4):
                    batch.write(bytes([number + 1]) * (8 * MB), remote)
                    batch.write(b"short", remote[:5])

        working = asyncio.ensure_future(
            many() if batched else client.write(bytes(range(1, 9)) * MB, remote)
        )
        await yield_loop(1)
        working.cancel()
        await client.write(bytes(8 * MB), remote)
        assert there.view == bytes(8 * MB)
        await asyncio.wait([working])
        assert working.cancelled()


@pytest.mark.parametrize("end", ["close", "abort", "peer aborts"])
@pytest.mark.parametrize("turns", [None, 0, 1, 3])
@by_tcp
@one_loop
async def test_striped_operations_finish_when_the_connection_ends(
    end: str, turns: int | None
) -> None:
    """`turns` is the number of loop iterations between the failure of the lead and the end of the
    connection. The fixtures look for leaks.
    """
    async with joined("tcp") as (client, server):
        await until_rails((client, server))
        with server.register(bytearray(16 * MB)) as memory:
            await server.send_region(memory, access=Rights.READ | Rights.WRITE)
            remote = await client.recv_region()
            working = [
                asyncio.ensure_future(client.read(remote[8 * MB :], bytearray(8 * MB))),
                asyncio.ensure_future(client.write(bytes(8 * MB), remote[: 8 * MB])),
                asyncio.ensure_future(client.write(b"behind it", remote[:9])),
            ]
            await yield_loop(2)
            if turns is not None:
                client._queue.rail_broke(CUT)
                await yield_loop(turns)
            if end == "close":
                await client.close()
            else:
                (client if end == "abort" else server).abort()
            for result in await asyncio.gather(*working, return_exceptions=True):
                if end == "close":
                    assert result is None
                elif end == "abort":
                    assert isinstance(result, ConnectionClosedError)
                else:
                    assert result is None or isinstance(result, BROKEN)
