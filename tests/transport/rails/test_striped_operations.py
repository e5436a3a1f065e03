"""Long reads and writes over two rails of a connection, and what comes behind them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import NamedTuple

import pytest

from aiordma import Config, Connection, ConnectionBrokenError, LeaseEndedError, RemoteRegion, Rights
from aiordma._core.protocol import RegionKey
from aiordma._datapath.rail import SendQueue
from aiordma._transport import share_keys
from aiordma._transport.rails import Rail, Rails
from aiordma.mr_pool import LocalMemory
from tests.transport.connection_factory import check_alive, ends, pattern, shared, yield_loop
from tests.transport.marks import by_tcp, one_loop

from .joining import WAYS, joined, until_rails

MB = 1 << 20
CUT = ConnectionBrokenError("its cable")


class Ends(NamedTuple):
    """A connection with two rails, of which the server shares memory."""

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
    """Requests of the second rail that are done."""
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


async def test_short_ones_and_foreign_tokens_stay_on_the_lead() -> None:
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


async def test_memory_is_registered_with_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no key to all memory, as on a card."""
    monkeypatch.setattr("aiordma.mr_pool.reg_local_dma", lambda _: None)
    async with sharing(4 * MB) as (client, _, there, remote):
        data = pattern(4 * MB)
        before = posted(client)
        await client.write(data, remote)
        assert there.view == data
        with client.register(bytearray(4 * MB)) as memory:
            await client.read(remote, memory)
            assert memory.view == data
        assert posted(client) > before + 1


async def test_a_message_comes_after_the_write_before_it() -> None:
    async with sharing(16 * MB) as (client, server, there, remote):
        for seed in range(5):
            data = pattern(16 * MB, seed)
            writing = asyncio.ensure_future(client.write(data, remote))
            await yield_loop(1)
            sending = client.send_nowait(b"it is there")
            with await server.recv():
                assert there.view == data
            await asyncio.gather(writing, sending)


async def test_writes_keep_their_order() -> None:
    """Short ones before and behind a long one, to its bytes."""
    async with sharing(8 * MB) as (client, _, there, remote):
        for seed in range(5):
            chance = random.Random(seed)
            expected = bytearray(8 * MB)
            writing = [asyncio.ensure_future(client.write(bytes(8 * MB), remote))]
            for _ in range(20):
                size = chance.choice([10, 1000, MB, 3 * MB + 7])
                start = chance.randrange(8 * MB - size)
                data = pattern(size, chance.randrange(100))
                expected[start : start + size] = data
                writing.append(asyncio.ensure_future(client.write(data, remote[start:][:size])))
            await asyncio.gather(*writing)
            assert there.view == expected


@pytest.mark.parametrize("seed", range(10))
@by_tcp
@one_loop
async def test_a_rail_breaks_in_the_middle(seed: int) -> None:
    chance = random.Random(seed)
    size = 8 * MB
    async with sharing(size) as it:
        data, found = pattern(size, seed), bytearray(size)
        if reads := chance.random() < 0.5:
            it.there.view[:] = data
            working = asyncio.ensure_future(it.client.read(it.remote, found))
        else:
            working = asyncio.ensure_future(it.client.write(data, it.remote))
        await yield_loop(chance.randrange(1, 6))
        second(chance.choice(it[:2])).rail_broke(CUT)
        await working
        assert bytes(found if reads else it.there.view) == data
        await until_rails(it[:2], ["lead", "down"])
        while 1 in (it.remote._keys or {}):
            await yield_loop(1)
        await it.client.write(bytes(size), it.remote)
        assert it.there.view == bytes(size)


@pytest.mark.parametrize("seed", range(20))
@by_tcp
@one_loop
async def test_the_lead_breaks_in_the_middle(seed: int) -> None:
    chance = random.Random(seed)
    size = 8 * MB
    async with sharing(size) as it:
        it.there.view[:] = before = pattern(size, 100)
        data, found = pattern(size // 2, seed), bytearray(size // 2)
        working = [
            asyncio.ensure_future(it.client.read(it.remote[size // 2 :], found)),
            asyncio.ensure_future(it.client.write(data, it.remote[: size // 2])),
            asyncio.ensure_future(it.client.write(b"behind it", it.remote[:9])),
        ]
        await yield_loop(1)
        sending = it.client.send_nowait(b"comes last")
        await yield_loop(chance.randrange(8))
        for conn in chance.choice((it[:1], it[1:2], it[:2])):
            conn._queue.rail_broke(CUT)
        with await it.server.recv() as message:
            assert message == b"comes last"
            assert it.there.view == b"behind it" + data[9:] + before[size // 2 :]
        await asyncio.gather(sending, *working)
        assert found == before[size // 2 :]
        await until_rails(it[:2], ["down", "lead"])
        await it.client.write(bytes(size), it.remote)
        assert it.there.view == bytes(size)


@pytest.mark.parametrize("end", ["abort", "peer aborts"])
@pytest.mark.parametrize("turns", [0, 1, 3])
@by_tcp
@one_loop
async def test_the_end_while_there_is_no_lead(end: str, turns: int) -> None:
    """Every operation ends; the fixtures look for what is left over."""
    async with sharing(8 * MB) as it:
        working = [
            asyncio.ensure_future(it.client.read(it.remote[4 * MB :], bytearray(4 * MB))),
            asyncio.ensure_future(it.client.write(bytes(4 * MB), it.remote[: 4 * MB])),
            asyncio.ensure_future(it.client.write(b"behind it", it.remote[:9])),
        ]
        await yield_loop(2)
        it.client._queue.rail_broke(CUT)
        await yield_loop(turns)
        (it.client if end == "abort" else it.server).abort()
        await asyncio.gather(*working, return_exceptions=True)


async def test_nothing_is_written_again_before_the_peer_has_stopped_the_rail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with sharing(8 * MB) as (client, server, there, remote):
        told: list[tuple[Rails, Rail]] = []
        down = Rails._told_down
        other = await client.request_region(100)
        monkeypatch.setattr(Rails, "_told_down", lambda *args: told.append(args))
        data = pattern(8 * MB)
        writing = asyncio.ensure_future(client.write(data, remote))
        while not second(client).outstanding:
            await yield_loop(1)
        releasing = asyncio.ensure_future(
            other.release()
        )  # which waits, but not what tells of the end
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


async def test_a_cancelled_write_ends_before_what_is_behind_it() -> None:
    async with sharing(16 * MB) as (client, _, there, remote):
        writing = asyncio.ensure_future(client.write(bytes(range(1, 17)) * MB, remote))
        await yield_loop(1)
        writing.cancel()
        await client.write(bytes(16 * MB), remote)
        assert there.view == bytes(16 * MB)
        await asyncio.wait([writing])
        assert writing.cancelled()


async def test_a_lease_ends_in_the_middle() -> None:
    async with sharing(16 * MB) as (client, _, _, remote):
        writing = asyncio.ensure_future(client.write(bytes(16 * MB), remote))
        behind = asyncio.ensure_future(client.send_nowait(b"goes on"))
        await yield_loop(1)
        remote._take_back()
        await ends(writing, LeaseEndedError)
        await behind


@pytest.mark.parametrize("end", ["close", "abort", "peer aborts"])
@pytest.mark.parametrize("reads", [True, False], ids=["read", "write"])
@by_tcp
@one_loop
async def test_the_end_in_the_middle(end: str, reads: bool) -> None:
    """The fixtures look for what is left over."""
    async with joined("tcp") as (client, server):
        await until_rails((client, server))
        with server.register(bytearray(16 * MB)) as memory:
            await server.send_region(memory, access=Rights.READ | Rights.WRITE)
            remote = await client.recv_region()
            working = asyncio.ensure_future(
                client.read(remote, bytearray(16 * MB))
                if reads
                else client.write(bytes(16 * MB), remote)
            )
            await yield_loop(2)
            if end == "close":
                await client.close()
            else:
                (client if end == "abort" else server).abort()
            await asyncio.gather(working, return_exceptions=True)
            assert working.done()


async def test_a_batch_keeps_its_order() -> None:
    """Long operations go by both rails, short ones between them by the lead."""
    size = 12 * MB
    async with sharing(size) as (client, _, there, remote):
        for seed in range(5):
            chance = random.Random(seed)
            expected = bytearray(size)
            there.view[:] = expected
            before = posted(client)
            async with client.batch() as batch:
                for length in [*chance.choices([1, 1000, MB, 9 * MB], k=12), MB]:
                    start = chance.randrange(size - length)
                    data = pattern(length, chance.randrange(100))
                    expected[start : start + length] = data
                    batch.write(data, remote[start:][:length])
            assert there.view == expected
            assert posted(client) > before
            found = [bytearray(9 * MB), bytearray(100), bytearray(2 * MB)]
            async with client.batch() as batch:
                for into in found:
                    batch.read(remote[1:][: len(into)], into)
            assert [bytes(it) for it in found] == [bytes(expected[1:][: len(it)]) for it in found]


async def test_a_cancelled_batch_ends_before_what_is_behind_it() -> None:
    async with sharing(8 * MB) as (client, _, there, remote):

        async def many() -> None:
            async with client.batch() as batch:
                for number in range(4):
                    batch.write(bytes([number + 1]) * (8 * MB), remote)
                    batch.write(b"short", remote[:5])

        working = asyncio.ensure_future(many())
        await yield_loop(1)
        working.cancel()
        await client.write(bytes(8 * MB), remote)
        assert there.view == bytes(8 * MB)
        await asyncio.wait([working])
        assert working.cancelled()


async def test_keys_that_are_not_needed() -> None:
    """Of a rail that is not up, and of regions that the connection has not brought."""
    async with sharing(MB) as (client, server, _, remote):
        with server.register(bytearray(MB)) as memory, server.share(memory) as share:
            foreign = client.open_region(share.token)
            number = remote.token.region_id
            for key in ((number, 9), (share.token.region_id, 1), (number + 1000, 1)):
                await server._sharing.tell(RegionKey(0, *key, 1))
            await server.send(b"behind them")
            (await client.recv()).release()
            assert list(remote._keys or ()) == [1]
            assert foreign._keys is None
            await check_alive(client, server)


@pytest.mark.parametrize("windows", [True, False])
async def test_memory_that_was_shared_before_there_was_the_rail(
    monkeypatch: pytest.MonkeyPatch, windows: bool
) -> None:
    """The peer gets keys behind RailReady: before that it does not know the rail."""
    if not windows:
        monkeypatch.setattr("aiordma.mr_pool.offers_windows", lambda *_: False)
    begin = Rails.begin
    monkeypatch.setattr(Rails, "begin", lambda _: None)
    async with joined("tcp") as conns, shared(*conns, MB) as (_, remote):
        assert conns[0]._rails is not None
        begin(conns[0]._rails)
        await until_rails(conns)
        await yield_loop(20)
        assert list(remote._keys or ()) == [1]


async def test_the_first_operation_has_the_keys_of_all_rails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Memory is granted when all of them work."""
    held: list[Callable[[], None]] = []
    done = share_keys.OfKey.done

    def hold(bind: share_keys.OfKey, number: int) -> None:
        if bind.key._queue.number:
            held.append(partial(done, bind, number))
        else:
            done(bind, number)

    async with joined("tcp") as (client, server):
        await until_rails((client, server))
        monkeypatch.setattr(share_keys.OfKey, "done", hold)
        with server.alloc(8) as memory:
            sharing = asyncio.ensure_future(server.send_region(memory))
            asking = asyncio.ensure_future(client.request_region(8))
            while len(held) < 2:
                await yield_loop(1)
            await yield_loop(20)
            assert not client._sharing.regions.used
            for go_on in held:
                go_on()
            await sharing
            for remote in (await client.recv_region(), await asking):
                assert list(remote._keys or ()) == [1]


async def test_a_rail_goes_as_a_lease_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key whose bind is under way does not outlive the lease for it: here before the loop, which
    computes, has heard of the end."""
    monkeypatch.setattr(share_keys, "GRACE", 1e6)
    async with sharing(MB) as (_, server, _, _):
        (share,) = server._sharing.regions.shares.values()
        (_, late), (gone, _) = share._keys.items()
        with monkeypatch.context() as patch:
            patch.setattr(late, "_under_way", {object()})
            share._expire()
        assert not late.closed
        share._remove_rail(gone)
        assert late.closed
        assert not server._sharing.shared


async def test_memory_goes_back_behind_a_long_write_that_moves() -> None:
    """Control messages keep their place behind writes, by whatever rail these are done."""
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
        async with asyncio.timeout(30):
            buffer = await server.recv_buffer()
            assert buffer.view == data
            buffer.release()
            await asyncio.gather(writing, giving)
