"""Queue pairs that rest between two connections: what the next one has of the one before."""

from __future__ import annotations

import asyncio
import gc
import signal
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from aiordma import (
    Config,
    Connection,
    ConnectionBrokenError,
    ConnectionClosedError,
    Listener,
    ProtocolError,
    Rights,
    connect,
    listen,
    verbs,
)
from aiordma._core import protocol
from aiordma._core.frames import FrameKind
from aiordma._native import Frame
from aiordma._transport import family as families
from aiordma._transport import kin, rest
from aiordma._transport.by_tcp import TCPAcceptor
from aiordma._transport.family import Family, Member
from aiordma._transport.keep_alive import Probe
from aiordma._transport.messages import REST_FRAME
from aiordma._transport.receives import Receives
from aiordma._transport.work_queue import WorkQueue
from aiordma.errors import QuotaError, RejectedError, RemoteAccessError

from .marks import by_cm, by_tcp, one_loop
from .place import (
    NEVER,
    SMALL,
    Place,
    cancelled_after,
    check_alive,
    ends,
    exchange,
    give,
    leases,
    pattern,
    pool_statistics,
    turns,
)
from .raw_peer import RawPeer, control, frame
from .test_kin import ENDS, KEY, abandon, places_taken, until
from .test_other_processes import Child

pytestmark = [by_tcp, pytest.mark.any_device]

Pair = tuple[Connection, Connection]


@pytest.fixture(autouse=True)
def _long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is to end here has another reason than time."""
    monkeypatch.setattr(families, "RESTS", 1000)


def family(conn: Connection) -> Family:
    link = conn._link
    assert isinstance(link, Member)
    return link.family


def resting(conn: Connection) -> int:
    return family(conn).resting


@dataclass
class House:
    """A listener, a connection with it that stays, and others."""

    place: Place
    listener: Listener
    client: Connection
    server: Connection
    config: Config = SMALL

    async def both(self, config: Config | None = None) -> Pair:
        return await self.place.both(self.listener, config or self.config)

    async def settled(self, count: int) -> None:
        """Until so many pairs rest on both sides, and can be opened."""
        async with self.place.within(5):
            await until(lambda: len(family(self.client)._ready) == count)
            await until(lambda: resting(self.client) == resting(self.server) == count)

    async def rested(self) -> Pair:
        """One that was used and closed in order, and whose pair rests."""
        pair = await self.both()
        await check_alive(*pair)
        await pair[0].close()
        await self.settled(1)
        return pair


@asynccontextmanager
async def house(place: Place, config: Config = SMALL) -> AsyncIterator[House]:
    async with await place.listen(config) as listener:
        client, server = await place.both(listener, config)
        async with client, server:
            yield House(place, listener, client, server, config)
            await check_alive(client, server)


def rests(conn: Connection) -> bool:
    """Whether one of its family has ended, and another goes on with its pair."""
    return any(
        isinstance(one, rest.Rest) and one.connection is not None
        for one in family(conn)._resting.values()
    )


def queue_pairs(pair: Pair) -> tuple[verbs.QueuePair | None, ...]:
    return pair[0]._side.qp, pair[1]._side.qp


# ---- the next connection -------------------------------------------------------------------------


@pytest.mark.parametrize("side", [0, 1], ids=["client", "server"])
async def test_the_next_one_has_the_queue_pairs(place: Place, side: int) -> None:
    """Whoever closes, again and again; and begins with nothing else of the one before."""
    async with house(place) as at:
        pair = await at.both()
        first = queue_pairs(pair)
        for seed in range(5):
            assert pair[0].statistics().messages_sent == 0
            await check_alive(*pair, seed=seed)
            await pair[side].close()
            async with place.within(1):
                error = await ends(pair[1 - side].recv(), ConnectionClosedError)
                assert isinstance(error, ConnectionClosedError)
                assert error.by_peer
                await pair[1 - side].wait_closed()
            await at.settled(1)
            pair = await at.both()
            assert queue_pairs(pair) == first
            assert pair[0].peer_address == at.client.peer_address
        await pair[0].close()


async def test_closed_by_both_at_once(place: Place) -> None:
    async with house(place) as at:
        for _ in range(5):
            pair = await at.both()
            await asyncio.gather(*(conn.close() for conn in pair))
            other = await at.both()  # with whatever is there by now
            await check_alive(*other)
            await asyncio.gather(*(conn.close() for conn in other))
        async with place.within(5):
            await until(lambda: resting(at.client) == resting(at.server) > 0)


@one_loop
async def test_it_is_opened_before_its_own_word_has_arrived(place: Place) -> None:
    """Nothing orders the completion of a side's Rest and what comes after the other's."""
    async with house(place) as at:
        client, server = old = await at.both()
        slow = slow_rest(server)
        await asyncio.gather(client.close(), server.close())
        async with place.within(5):
            await until(lambda: len(family(at.client)._ready) == 1)
        connecting = asyncio.create_task(place.connect(at.listener.port))
        async with place.within(5):
            await until(lambda: bool(server._messages._early))
        slow()
        async with place.within(1):
            new = await connecting, await at.listener.accept()
            while new[1].closed:  # the one before, which nobody has accepted
                new = new[0], await at.listener.accept()
        assert queue_pairs(new) == queue_pairs(old)
        await check_alive(*new)
        await new[0].close()


def slow_rest(conn: Connection) -> Callable[[], None]:
    """As if its Rest were under way until that is called."""
    say, queue = conn._messages.say_rest, conn._queue

    def slowly() -> bool:
        said = say()
        queue.capacity += 1
        return said

    def over() -> None:
        queue.capacity -= 1
        queue.on_room()

    conn._messages.say_rest = slowly  # type: ignore[method-assign]
    return over


def deafen(conn: Connection) -> tuple[list[protocol.Message], Callable[[], None]]:
    """What its peer tells it meanwhile; it hears the first of that when the other is called."""
    heard: list[protocol.Message] = []
    hear, conn._messages._on_control = conn._messages._on_control, heard.append
    return heard, lambda: hear(heard[0])


class Late(Probe):
    """Something that was about to be posted when the connection ended."""

    __slots__ = ("error",)

    def __init__(self) -> None:
        super().__init__(lambda: None)
        self.error: BaseException | None = None

    def failed(self, error: BaseException) -> None:
        self.error = error


@one_loop
async def test_nothing_more_is_posted(place: Place) -> None:
    """By what was in the middle of something, while the pair is not another one's yet, or is."""
    async with house(place) as at:
        client, server = await at.both()
        slow = slow_rest(client)
        assert client._kin is not None
        client._queue.capacity += 1
        assert not client._kin.may_rest(client)  # something is under way
        client._queue.capacity -= 1
        await client.close()
        late = Late()
        client._queue.post(late)
        assert isinstance(late.error, ConnectionClosedError)
        slow()
        await at.settled(1)
        for conn in (client, server):
            late = Late()
            conn._queue.post(late)
            assert isinstance(late.error, ConnectionClosedError)


@one_loop
async def test_who_has_the_ended_one_has_an_end(place: Place) -> None:
    """Nothing that was the ended connection's reaches the next one."""
    async with house(place) as at:
        client, server = old = await at.both()
        batch = client.batch()
        with server.alloc(64) as buffer, client.alloc(64) as local:
            share, remote = await give(server, client, buffer)
            await batch.__aenter__()
            batch.write(local, remote)
            await client.close()
            with pytest.raises(ConnectionClosedError):
                batch.read(remote, bytearray(64))
            await at.settled(1)
            new = await at.both()
            with pytest.raises(ConnectionClosedError):
                await batch.__aexit__(None, None, None)
            assert queue_pairs(new) == queue_pairs(old)
            for conn in old:
                for call in (
                    conn.send(b"x"), conn.recv(), conn.write(local, remote), conn.recv_region(),
                    conn.fetch_and_add(remote, 1), conn.request_region(8), conn.lease(8),
                ):  # fmt: skip
                    await ends(call, ConnectionClosedError)
                with pytest.raises(ConnectionClosedError):
                    conn.send_nowait(b"x")
                await conn.close()
            assert share.revoked
            with pytest.raises(ValueError, match="belongs to another connection"):
                await new[0].write(local, remote)
        await check_alive(*new)
        await new[0].close()


@one_loop
async def test_a_key_ends_with_its_connection(place: Place) -> None:
    """The next one has the same queue pair, and yet cannot use what was shared with the first."""
    async with house(place) as at:
        client, server = old = await at.both()
        with server.alloc(64) as buffer:
            share, remote = await give(server, client, buffer)
            token = share.token
            await client.write(bytes(64), remote)
            await client.close()
            await at.settled(1)
            new = await at.both()
            assert queue_pairs(new) == queue_pairs(old)
            buffer.view[:] = b"\xff" * 64
            error = await ends(
                new[0].write(bytes(64), new[0].open_region(token)), ConnectionBrokenError,
                RemoteAccessError,
            )  # fmt: skip
            assert isinstance(error, RemoteAccessError | ConnectionBrokenError)
            assert bytes(buffer.view) == b"\xff" * 64
        await new[0].wait_closed()
        await new[1].wait_closed()


@one_loop
async def test_messages_that_nobody_took(place: Place) -> None:
    """They are still there, with their memory, while the next connection is at work."""
    async with house(place) as at:
        client, server = old = await at.both()
        sent = [pattern(size, 7) for size in (1, 100, 900)]
        for data in sent:
            await client.send(data)
        leased = await server.recv()
        await client.close()
        await at.settled(1)
        new = await at.both()
        assert queue_pairs(new) == queue_pairs(old)
        for seed in range(8):
            await check_alive(*new, seed=seed)
        assert [leased, await server.recv(), await server.recv()] == sent
        await ends(server.recv(), ConnectionClosedError)
        leased.release()
        await check_alive(*new)
        await new[1].close()


@one_loop
async def test_its_counts_and_limits_begin_anew(place: Place) -> None:
    """Credits, numbers of requests and regions, borrowed memory."""
    async with house(place) as at:
        for _ in range(4):
            client, server = await at.both()
            borrowed = [await client.request_region(SMALL.lend_quota // 4) for _ in range(4)]
            assert [region.token.region_id for region in borrowed] == [1, 2, 3, 4]
            for number in range(3 * SMALL.data_receives):
                await exchange(client, server, pattern(600, number))
            for number in range(SMALL.data_receives - 1):  # nobody takes them
                await client.send(pattern(600, number))
            await client.close()
            await server.wait_closed()
            await at.settled(1)


@one_loop
async def test_nothing_is_left_after_many(place: Place) -> None:
    async with house(place) as at:
        pair = await at.both()
        held = await leases(at.client, at.server)  # as many as before it rests
        await pair[0].close()
        await at.settled(1)
        objects = []
        for _ in range(20):
            await at.rested()
            gc.collect()
            async with place.within(2):  # the last frame of the pair may still be under way
                while await leases(at.client, at.server) != held:
                    await turns(1)
            objects.append(sum(isinstance(o, Connection) for o in gc.get_objects()))
        assert objects[5] == objects[-1]
        assert places_taken(at.listener) == 1


@one_loop
async def test_with_a_key(place: Place) -> None:
    """The pair was proved once; who has another key does not get it."""

    async def dial(key: bytes | None) -> Connection:
        return await connect(
            place.host, listener.port, device=place.device, via="tcp", config=SMALL, auth=key
        )

    async with (
        await listen(
            place.host, 0, device=place.device, via="tcp", config=SMALL, auth=KEY
        ) as listener,
        await dial(KEY) as first,
        await listener.accept() as server,
    ):
        pair = await dial(KEY), await listener.accept()
        await pair[0].close()
        await House(place, listener, first, server).settled(1)
        for wrong in (None, bytes(16)):
            await ends(dial(wrong), ConnectionRefusedError)
        again = await dial(KEY), await listener.accept()
        assert queue_pairs(again) == queue_pairs(pair)
        await check_alive(*again)
        await again[0].close()


# ---- what does not rest --------------------------------------------------------------------------


async def abort(pair: Pair) -> None:
    pair[0].abort()


async def offer_and_close(pair: Pair) -> None:
    """A long message that nobody reads: `close` waits in vain."""
    pair[0].send_nowait(bytes(100_000))
    await pair[0].close()


UNRESTED = {"aborted": abort, "a message that is not read": offer_and_close}


@pytest.mark.parametrize("how", UNRESTED)
@one_loop
async def test_an_end_that_is_not_in_order(place: Place, how: str) -> None:
    slowly = replace(SMALL, fetch_ahead=0, close_timeout=0.05)
    async with house(place, slowly) as at:
        pair = await at.both(slowly)
        await UNRESTED[how](pair)
        await asyncio.gather(*(conn.wait_closed() for conn in pair))
        async with place.within(5):
            await until(lambda: len(family(at.server)._members) == 1)
        assert resting(at.client) == resting(at.server) == 0


@one_loop
async def test_the_last_connection_takes_them_along(place: Place) -> None:
    before = verbs.live().get("QueuePair", 0)
    async with await place.listen() as listener:
        client, server = await place.both(listener)
        pairs = [await place.both(listener) for _ in range(3)]
        for pair in pairs:
            await pair[0].close()
        await House(place, listener, client, server).settled(3)
        assert verbs.live()["QueuePair"] == before + 8
        await client.close()
        await server.wait_closed()
        async with place.within(5):
            await until(lambda: verbs.live().get("QueuePair", 0) == before)


@pytest.mark.parametrize("side", [0, 1], ids=["client", "server"])
async def test_word_of_an_end_arrives_before_the_last(place: Place, side: int) -> None:
    """Who closes all of its connections in a row has closed each in order."""
    for _ in range(5):
        async with await place.listen() as listener:
            pairs = [await place.both(listener) for _ in range(4)]
            for pair in pairs:
                await pair[side].close()
            for pair in pairs:
                async with place.within(2):
                    error = await ends(pair[1 - side].recv(), ConnectionClosedError)
                assert isinstance(error, ConnectionClosedError)
                assert error.by_peer


@one_loop
async def test_the_last_one_waits_for_word_of_the_others(place: Place) -> None:
    async with await place.listen() as listener:
        client, server = await place.both(listener)
        other, its_server = await place.both(listener)
        heard, hear = deafen(its_server)
        slow = slow_rest(other)
        await other.close()
        closing = asyncio.create_task(client.close())
        async with place.within(5):
            await server.wait_closed()
            await until(lambda: bool(heard))
        await turns(20)
        assert not closing.done()
        slow()
        async with place.within(5):
            await closing
        hear()
        async with place.within(5):
            error = await ends(its_server.recv(), ConnectionClosedError)
        assert isinstance(error, ConnectionClosedError)


async def test_word_of_an_end_arrives_before_the_listener_goes(place: Place) -> None:
    for _ in range(5):
        async with await place.listen() as listener:
            client, server = await place.both(listener)
            other, its_server = await place.both(listener)
            await its_server.close()
            await listener.close()
            async with place.within(2):
                error = await ends(other.recv(), ConnectionClosedError)
            assert isinstance(error, ConnectionClosedError)
            assert error.by_peer
            await client.close()
            await server.wait_closed()


@one_loop
async def test_not_for_long(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "RESTS", 0.02)
    async with house(place) as at:
        pair = await at.both()
        await pair[0].close()
        async with place.within(5):
            await until(lambda: len(family(at.client)._members) == 1)
            await until(lambda: len(family(at.server)._members) == 1)
        again = await at.both()
        assert queue_pairs(again) != queue_pairs(pair)
        await check_alive(*again)
        await again[0].close()


@one_loop
async def test_not_more_than_so_many(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those of one socket, and of one listener."""
    monkeypatch.setattr(rest, "MOST_RESTING", 2)
    async with house(place) as at:
        pairs = [await at.both() for _ in range(4)]
        for pair in pairs:
            await pair[0].close()
            await pair[1].wait_closed()
        async with place.within(5):
            await until(lambda: resting(at.client) == resting(at.server) == 2)
            await until(lambda: len(family(at.client)._members) == 3)
        acceptor = at.listener._acceptor
        assert isinstance(acceptor, TCPAcceptor)
        acceptor._reception.most_resting = 1
        pairs = [await at.both() for _ in range(2)]
        for pair in pairs:
            await pair[0].close()
        async with place.within(5):
            await until(lambda: resting(at.client) == resting(at.server) == 1)


@one_loop
async def test_not_where_memory_is_short(place: Place) -> None:
    async with house(place, replace(SMALL, pool_limit=8 << 20)) as at:
        pair = await at.both()
        pool = at.client.pool_statistics()
        with at.client.alloc(pool.limit // 2 - pool.leased_bytes + 1):
            await pair[0].close()
            async with place.within(5):
                await until(lambda: len(family(at.client)._members) == 1)


@one_loop
async def test_not_where_receives_have_grown(place: Place) -> None:
    """Whoever connects next expects the sizes of the handshake."""
    growing = replace(SMALL, max_eager_size=8192)
    async with await place.listen(growing) as listener:
        client, server = await place.both(listener, growing)
        other, its_server = await place.both(listener, growing)
        async with client, server:
            for number in range(12):
                await exchange(other, its_server, pattern(5000, number))
            assert its_server._messages.grown
            await other.close()
            async with place.within(5):
                await until(lambda: len(family(client)._members) == 1)


@one_loop
async def test_only_for_the_same_configuration(place: Place) -> None:
    async with house(place) as at:
        pair = await at.rested()
        other = await at.both(replace(SMALL, max_message=1 << 16))
        assert queue_pairs(other) != queue_pairs(pair)
        assert resting(at.client) == 1
        same = await at.both(replace(SMALL, max_message=SMALL.max_message))
        assert queue_pairs(same) == queue_pairs(pair)
        for conn in (other[0], same[0]):
            await conn.close()


@one_loop
async def test_without_a_family(place: Place) -> None:
    """Each has a socket of its own, and its end is its queue pair's."""
    alone = replace(SMALL, in_band=False)
    async with house(place) as at:
        client, server = await at.both(alone)
        await client.close()
        await server.wait_closed()
        assert resting(at.client) == resting(at.server) == 0


@one_loop
async def test_one_closes_while_the_other_does(place: Place) -> None:
    """Who waits in its `close`, and hears of the other's, says its last word all the same."""
    slowly = replace(SMALL, fetch_ahead=0)
    async with house(place, slowly) as at:
        client, server = old = await at.both()
        client.send_nowait(bytes(100_000)).add_done_callback(lambda done: done.exception())
        closing = asyncio.create_task(client.close())
        await turns(10)
        assert not closing.done()
        await server.close()
        await closing
        await at.settled(1)
        async with place.within(1):
            new = await at.both()
        assert queue_pairs(new) == queue_pairs(old)
        await new[0].close()


@one_loop
async def test_a_goodbye_crosses_rest(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    async with house(place) as at:
        client, server = await at.both()
        with monkeypatch.context() as patched:
            patched.setattr(kin.Asking, "may_rest", lambda self, connection: False)
            closing = asyncio.create_task(client.close())
            await turns(1)
        await server.close()
        await closing
        async with place.within(5):
            await until(lambda: resting(at.client) == resting(at.server))
        async with place.within(1):
            new = await at.both()
            await check_alive(*new)
        await new[0].close()


@one_loop
async def test_writes_under_way_when_the_peer_closes(place: Place) -> None:
    """Their memory is no more shared, but what their caller hears is that the peer has closed."""
    async with house(place) as at:
        client, server = await at.both()
        with server.alloc(64) as buffer, client.alloc(64) as local:
            _, remote = await give(server, client, buffer)
            await server.close()
            writes = [client._queue.write(local, remote) for _ in range(3)]
            for write in writes:
                assert write is not None
                error = await ends(write, ConnectionClosedError)
                assert isinstance(error, ConnectionClosedError)
                assert error.by_peer


@one_loop
async def test_all_close_in_one_turn(place: Place) -> None:
    """Then none may rest, whichever they thought would stay."""
    async with await place.listen() as listener:
        pairs = [await place.both(listener) for _ in range(3)]
        known = [family(conn) for conn in pairs[0]]

        async def close_when_told(client: Connection) -> None:
            with await client.recv():
                pass
            await client.close()

        closing = [asyncio.create_task(close_when_told(pair[0])) for pair in pairs]
        await turns(5)
        for pair in pairs:
            pair[1].send_nowait(b"x")
        await asyncio.gather(*closing)
        for pair in pairs:
            await pair[1].wait_closed()
        async with place.within(5):
            await until(lambda: not any(one._members for one in known))


@one_loop
async def test_memory_runs_out_when_another_is_to_go_on(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pair goes, and nothing is left for the garbage collector."""
    async with house(place, replace(SMALL, pool_limit=8 << 20)) as at:
        client, server = await at.both()
        for _ in range(3):
            await client.send(b"a message that nobody takes")
        gc.collect()
        parts = [weakref.ref(part) for part in (server, server._messages, server._queue)]

        def fail(self: Receives, before: WorkQueue, arrived: int) -> None:
            self._queue.take_receives(before)
            raise QuotaError("no memory", amount=1, limit=0)

        monkeypatch.setattr(Receives, "post_all", fail)
        gc.disable()
        try:
            await client.close()
            await server.wait_closed()
            async with place.within(5):
                await until(lambda: resting(at.client) == resting(at.server) == 0)
            del server
            await turns(5)
            assert [part() for part in parts] == [None] * 3
        finally:
            gc.enable()


# ---- opening -------------------------------------------------------------------------------------


@one_loop
async def test_no_place(place: Place) -> None:
    """The reason is the usual one, and the pair is there when there is a place again."""
    async with house(place, replace(SMALL, max_connections=2)) as at:
        pair = await at.rested()
        alone = replace(at.config, in_band=False)
        third = await at.both(alone)
        for _ in range(2):
            error = await ends(place.connect(at.listener.port), RejectedError)
            assert "as many connections as it takes (2)" in str(error)
        await third[0].close()
        await third[1].wait_closed()
        again = await at.both()
        assert queue_pairs(again) == queue_pairs(pair)
        await again[0].close()
        await again[1].wait_closed()
        assert places_taken(at.listener) == 1


async def test_who_opens_is_cancelled(place: Place) -> None:
    """At whatever step: nothing is left of it on either side, and the others go on."""
    async with house(place) as at:
        accepting = asyncio.create_task(abandon(at.listener))
        for count in place.turns:
            other = await place.connect(at.listener.port)
            await other.close()
            async with place.within(5):
                await until(lambda: len(family(at.client)._ready) > 0)
            for made in await cancelled_after(count, lambda: place.connect(at.listener.port)):
                await made.close()
            async with place.within(5):
                await until(lambda: places_taken(at.listener) == 1)
                for conn in (at.client, at.server):
                    await until(lambda conn=conn: len(list(family(conn))) == 1)  # type: ignore[misc]
            await check_alive(at.client, at.server)
        accepting.cancel()


@one_loop
async def test_nobody_answers(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of the time is left for another way, and the pair is not tried again."""
    async with house(place) as at:
        pair = await at.both()
        await pair[0].close()
        await at.settled(1)
        with monkeypatch.context() as patched:
            patched.setattr(kin, "PATIENCE", 0.1 / NEVER)
            patched.setattr(rest.ListenersRest, "control", lambda self, message: None)
            async with place.within(5):
                other = await at.both()
        assert queue_pairs(other) != queue_pairs(pair)
        await check_alive(*other)
        async with place.within(5):
            await until(lambda: resting(at.client) == resting(at.server) == 0)
        await other[0].close()


@pytest.mark.parametrize("how", ENDS)
async def test_the_one_beside_it_ends_meanwhile(place: Place, how: str) -> None:
    """With the pair that is being opened, or without: whoever connects gets a connection."""
    for count in place.turns:
        async with await place.listen() as listener:
            client, server = await place.both(listener)
            at = House(place, listener, client, server)
            await at.rested()
            connecting = asyncio.create_task(place.connect(listener.port))
            await turns(count)
            ending = ENDS[how](client, server)
            if ending is not None:
                await ending
            async with place.within(5):
                other = await connecting
                while True:
                    its_server = await listener.accept()
                    if not its_server.closed:
                        break
                async with other, its_server:
                    await check_alive(other, its_server)
            await asyncio.gather(client.wait_closed(), server.wait_closed())
            async with place.within(5):
                await until(lambda listener=listener: places_taken(listener) == 0)  # type: ignore[misc]


@one_loop
async def test_the_listener_is_closed(place: Place) -> None:
    async with house(place) as at:
        await at.rested()
        port = at.listener.port
        await at.listener.close()
        await ends(place.connect(port), RejectedError)
        assert not at.client.closed
        async with place.within(5):
            await until(lambda: resting(at.client) == resting(at.server) == 0)


@one_loop
async def test_the_listener_is_closed_by_who_hears_of_an_end(place: Place) -> None:
    """What rests only after that is not opened."""
    async with house(place) as at:
        client, server = await at.both()
        port = at.listener.port

        async def close_listener() -> None:
            await ends(server.recv(), ConnectionClosedError)
            assert server._leaving
            await at.listener.close()

        closing = asyncio.create_task(close_listener())
        await turns(3)
        await client.close()
        await closing
        await ends(place.connect(port), RejectedError)
        async with place.within(5):
            await until(lambda: resting(at.client) == resting(at.server) == 0)


@one_loop
async def test_a_listener_does_not_wait_for_a_peer(place: Place) -> None:
    """Before it gives up handshakes; and not for long for word of its ends to arrive."""
    async with house(place, replace(SMALL, close_timeout=0.05)) as at:
        _, server = await at.both()
        slow_rest(server)  # its peer's device does not answer
        await server.close()
        _, writer = await asyncio.open_connection(place.host, at.listener.port)
        acceptor = at.listener._acceptor
        assert isinstance(acceptor, TCPAcceptor)
        handshakes = acceptor._reception._handshakes
        await until(lambda: len(handshakes) == 1)
        closing = asyncio.create_task(at.listener.close())
        await turns(3)
        assert not handshakes
        async with place.within(1):
            await closing
        writer.close()


@one_loop
async def test_the_listener_is_closed_meanwhile(place: Place) -> None:
    """At whatever step."""
    for count in place.turns:
        async with house(place) as at:
            await at.rested()
            connecting = asyncio.create_task(place.connect(at.listener.port))
            await turns(count)
            await at.listener.close()
            try:
                async with place.within(5), await connecting as other:
                    await ends(other.recv(), ConnectionClosedError, ConnectionBrokenError)
            except RejectedError:
                pass


@one_loop
async def test_the_peer_dies_meanwhile(place: Place) -> None:
    async with Child.connected(place, "stay") as child:
        assert child.conn.peer_address is not None
        port = child.conn.peer_address[1]
        other = await place.connect(port)
        await other.close()
        async with place.within(5):
            await until(lambda: len(family(child.conn)._ready) == 1)
        child.signal(signal.SIGKILL)
        async with place.within(2):
            await ends(child.conn.recv(), ConnectionBrokenError)
            await until(lambda: resting(child.conn) == 0)
        await ends(place.connect(port), RejectedError, ProtocolError)


@one_loop
async def test_a_goodbye_while_sends_are_under_way(place: Place) -> None:
    """The end comes with the last of their completions, not when patience does."""
    patient = replace(SMALL, close_timeout=1000)
    async with house(place) as at:
        client, server = await at.both(patient)
        server._queue.capacity += 1  # as if one more were under way
        await client.close()
        await turns(20)
        assert not server.closed
        server._queue.capacity -= 1
        server._queue.post_work(Probe(lambda: None))
        async with place.within(2):
            await server.wait_closed()


# ---- hostile peers -------------------------------------------------------------------------------

REST = bytes(REST_FRAME)


@asynccontextmanager
async def raw(place: Place, at: House) -> AsyncIterator[tuple[RawPeer, Connection]]:
    """Beside a connection of its own socket that is to go on, which a raw peer asks for."""
    async with RawPeer.connect(place, at.listener.port) as peer:
        yield peer, await at.listener.accept()


@one_loop
async def test_rest_for_one_that_is_alone(place: Place) -> None:
    """It is a goodbye, and nothing rests without a connection beside it."""
    async with house(place) as at, raw(place, at) as (peer, conn):
        peer.send(REST)
        async with place.within(2):
            error = await ends(conn.recv(), ConnectionClosedError)
            assert isinstance(error, ConnectionClosedError)
            assert error.by_peer
            await until(lambda: places_taken(at.listener) == 1)
        assert resting(at.server) == 0


@by_cm
async def test_rest_where_nobody_asked(place: Place) -> None:
    async with place.witness(), place.pair() as (client, server):
        client._messages.say_rest()
        async with place.within(2):
            await ends(server.recv(), ProtocolError)


@by_cm
async def test_rest_for_one_that_has_ended(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """It says nothing any more, and so nothing is wrong with it."""
    async with place.pair() as (client, server):
        client._messages.say_rest()
        server._fail(ConnectionBrokenError("it has failed"))
        server._messages._heard_rest(server._memory.pool.block(8))
        server._tear_down()
        await client.close()
    assert not [record for record in caplog.records if record.name == "aiordma.connection"]


def says(message: protocol.Message) -> Callable[[Connection], None]:
    return lambda conn: conn._messages.send_control(message)


def sends(data: bytes) -> Callable[[Connection], None]:
    """A frame that nobody else would send, from the pool of the connection."""

    def send(conn: Connection) -> None:
        block = conn._memory.pool.block(len(data))
        block.view[: len(data)] = data
        conn._queue.post_frame(Frame(block, len(data)))

    return send


LIES: dict[str, Callable[[Connection], None]] = {
    "a message": sends(frame(FrameKind.DATA, b"hello")),
    "opened": says(protocol.OPENED),
    "a refusal": says(protocol.Error(1, 3, "no")),
    "a request": says(protocol.RegionRequest(1, 8, Rights.READ, 0)),
    "a question": says(protocol.Ping(3)),
    "an ask": says(protocol.Ask(1, 9, bytes(40), bytes(32))),
    "rest, again": sends(REST),
    "no frame": sends(bytes(4)),
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("side", [0, 1], ids=["client", "server"])
@one_loop
async def test_lies_while_it_rests(place: Place, lie: str, side: int) -> None:
    """The pair goes, on both sides; nobody else notices, and the next connection has another."""
    async with house(place) as at:
        await at.rested()
        (liar,) = family((at.client, at.server)[side])._resting.values()
        assert isinstance(liar, rest.Rest)
        assert liar.connection is not None
        LIES[lie](liar.connection)
        async with place.within(5):
            await until(lambda: resting(at.client) == resting(at.server) == 0)
        other = await at.both()
        await check_alive(*other)
        await other[0].close()
        assert places_taken(at.listener) <= 2


@one_loop
async def test_one_that_has_just_failed_is_not_opened(place: Place) -> None:
    async with house(place) as at:
        pair = await at.rested()
        (one,) = family(at.client)._resting.values()
        assert isinstance(one, rest.Rest)
        assert one.connection is not None
        one.connection._end(ConnectionBrokenError("it has failed"))
        async with place.within(1):
            other = await at.both()
        assert queue_pairs(other) != queue_pairs(pair)
        await other[0].close()


@one_loop
async def test_the_asked_side_cannot_open(place: Place) -> None:
    async with house(place) as at:
        await at.rested()
        (server,) = family(at.server)._resting.values()
        assert isinstance(server, rest.Rest)
        assert server.connection is not None
        server.connection._messages.send_control(protocol.OPEN)
        async with place.within(5):
            await until(lambda: resting(at.client) == resting(at.server) == 0)


@one_loop
async def test_what_comes_before_the_last_word_is_of_the_one_before(place: Place) -> None:
    """Whatever it is: it is dropped, and counts for nothing."""
    async with house(place) as at:
        client, server = old = await at.both()
        heard, hear = deafen(client)
        await server.close()
        async with place.within(5):  # the server goes on, and the client has not ended yet
            await until(lambda: rests(at.server) and bool(heard))
        for _ in range(3):
            sends(frame(FrameKind.DATA, b"too late"))(client)
            sends(control(protocol.Ping(5)))(client)
        async with place.within(5):
            await until(lambda: not client._queue.outstanding)
        hear()
        await at.settled(1)
        new = await at.both()
        assert queue_pairs(new) == queue_pairs(old)
        await check_alive(*new)
        await new[0].close()


@one_loop
async def test_one_that_goes_on_after_the_other_has_ended(place: Place) -> None:
    """For no longer than it could have been under way."""
    async with house(place) as at:
        client, server = await at.both()
        heard, hear = deafen(client)
        await server.close()
        async with place.within(5):
            await until(lambda: rests(at.server) and bool(heard))
            for _ in range(SMALL.data_receives + SMALL.control_receives):
                sends(frame(FrameKind.DATA, b"on and on"))(client)
                await until(lambda: not client._queue.outstanding)
            await until(lambda: resting(at.server) == 0)
        hear()
        async with place.within(5):
            await until(lambda: resting(at.client) == 0)


@one_loop
async def test_a_flood_of_opening_and_closing_costs_nothing_more(place: Place) -> None:
    """By a client that closes before anybody has accepted it."""
    async with house(place) as at:
        for _ in range(30):
            other = await place.connect(at.listener.port)
            await other.close()
            await at.settled(1)
        assert places_taken(at.listener) == 1
        assert verbs.live()["QueuePair"] >= 4
        for _ in range(30):
            ended = await at.listener.accept()
            async with place.within(2):
                await ended.wait_closed()
        assert pool_statistics(at.client).leases > 0
