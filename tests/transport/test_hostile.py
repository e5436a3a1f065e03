"""Peers that speak verbs well and the protocol badly.

Each lie ends the connection that it was told on with a named exception, soon, and nothing else.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import replace

import pytest

from aiordma import (
    Config,
    Connection,
    ConnectionBrokenError,
    ConnectionClosedError,
    ProtocolError,
    RDMAError,
    Rights,
    cm,
    verbs,
)
from aiordma._core import protocol
from aiordma._core.frames import FrameKind
from aiordma._core.region import RegionToken
from aiordma.errors import RejectedError, RemoteAccessError, UnreachableError
from tests.model.frames import pack_keys

from .connection_factory import (
    ALONE,
    SMALL,
    ConnectionFactory,
    cancelled_after,
    check_alive,
    ends,
    hello,
    limits_pass,
    pattern,
    pool_statistics,
    take_all,
    yield_loop,
)
from .inside import figures
from .marks import by_cm, on_device, on_pair, one_loop
from .raw_peer import (
    Piece,
    RawId,
    RawListener,
    RawPeer,
    acknowledgement,
    control,
    frame,
    parameters,
    raw_pair,
    raw_request,
    read_request,
    rendezvous,
)

pytestmark = on_pair

DATA, CONTROL, CREDIT, RNDV_RTS, BUNDLE, RNDV_ACK, RNDV_KEYS, WRITTEN = map(int, FrameKind)
IMMEDIATE = 0x80
SLOW_PEER = replace(SMALL, close_timeout=0.2)
REMOTE_READ = verbs.AccessFlags.REMOTE_READ


@asynccontextmanager
async def victim(
    factory: ConnectionFactory, config: Config = SMALL
) -> AsyncIterator[tuple[Connection, RawPeer]]:
    """A connection of the transport with a peer that lies, beside one that must not notice.

    However it ends, the memory that it had goes back to the pool.
    """
    async with factory.witness() as witness:
        before = pool_statistics(witness.client).leases
        async with raw_pair(factory, config) as (conn, peer):
            yield conn, peer
        with suppress(ConnectionBrokenError, ConnectionClosedError, ProtocolError):
            await drain(conn)
        if factory.via == "cm":  # "tcp" opens the device for itself, and so has a pool of its own
            # Fewer where a frame of the witness was still under way.
            assert pool_statistics(witness.client).leases <= before
        async with factory.pair() as (client, server):
            await check_alive(client, server)


async def drain(conn: Connection) -> None:
    while True:
        (await conn.recv()).release()


async def ends_with(
    factory: ConnectionFactory, conn: Connection, kind: type[Exception], match: str = ""
) -> BaseException:
    """Every waiter gets it, and the connection is over, within a second."""
    async with factory.within(1):
        await conn.wait_closed()
        error = await ends(drain(conn), kind)
    assert match in str(error)
    for attempt in (conn.recv, conn.recv_region, lambda: conn.send(b"x")):
        assert isinstance(await ends(attempt(), kind), kind)
    return error


# ---- frames --------------------------------------------------------------------------------------


def offered(length: int, address: int = 0x1000, rkey: int = 1) -> bytes:
    return rendezvous(1, Piece(address, length, rkey))


def token(region_id: int = 1) -> RegionToken:
    return RegionToken(region_id, 0x1000, 8, 1, Rights.READ)


NORMAL_LENGTH = 100
UNREAD = SMALL.fetch_ahead + 1  # bytes of a message that waits for its receiver
PIECE = Piece(0x1000, NORMAL_LENGTH, 1)
GOODBYE = protocol.encode(protocol.Goodbye(0, 0, ""))

# Control messages that cannot be decoded, and hellos, are in tests/core.
LIES: dict[str, Callable[[], list[bytes]]] = {
    "empty frame": lambda: [b""],
    "part of a header": lambda: [frame(DATA)[:5]],
    "kind 0": lambda: [frame(0, b"x")],
    "unknown kind": lambda: [frame(0x55, b"x")],
    "empty bundle": lambda: [frame(BUNDLE, b"")],
    "bundle beyond its end": lambda: [frame(BUNDLE, b"\xff\xff\xff\x7f" + bytes(12))],
    "credits with immediate data": lambda: [frame(CREDIT | IMMEDIATE, control=1)],
    "stray immediate data": lambda: [frame(DATA)[:4] + b"\1\0\0\0"],
    "data credits that were not used": lambda: [frame(DATA, b"x", data=1)],
    "control credits that were not used": lambda: [frame(CREDIT, control=1)],
    "all credits at once": lambda: [frame(CREDIT, control=255, data=65535)],
    "credits of nothing": lambda: [frame(CREDIT)],
    "more messages than credits": lambda: [frame(DATA, b"x")] * (SMALL.data_receives + 1),
    "many more messages than credits": lambda: [frame(DATA, b"x")] * 200,
    "more control messages than credits": lambda: [control(protocol.Ping(1))] * 200,
    "empty control message": lambda: [frame(CONTROL)],
    "control message of random bytes": lambda: [frame(CONTROL, pattern(300))],
    "control message too long": lambda: [frame(CONTROL, pattern(600))],
    "read what was not offered": lambda: [acknowledgement(7)],
    "acknowledgement of nothing": lambda: [frame(RNDV_ACK)],
    "acknowledgement cut short": lambda: [acknowledgement(7)[:-1]],
    "acknowledgement and more": lambda: [acknowledgement(7) + b"\0"],
    "a write told of without rails": lambda: [frame(WRITTEN, bytes(4))],
    "keys of a rail that there is not": lambda: [frame(RNDV_KEYS, pack_keys(1, 1, 0, [(1, 0)]))],
    "acknowledgement with immediate data": lambda: [frame(RNDV_ACK | IMMEDIATE, bytes(8))],
    "many more acknowledgements than credits": lambda: [acknowledgement(7)] * 200,
    "answer without a question": lambda: [control(protocol.Pong(3))],
    "refusal without a request": lambda: [control(protocol.Error(3, 1, "no"))],
    "grant without a request": lambda: [control(protocol.RegionGrant(3, token()))],
    "request in a control frame": lambda: [frame(CONTROL, offered(NORMAL_LENGTH)[8:])],
    "control message in a request": lambda: [frame(RNDV_RTS, GOODBYE)],
    "empty request": lambda: [frame(RNDV_RTS)],
    "half a request": lambda: [frame(RNDV_RTS, bytes(7))],
    "request of garbage": lambda: [frame(RNDV_RTS, pattern(50))],
    "request of no pieces": lambda: [rendezvous(1)],
    "request of fewer pieces than it has": lambda: [rendezvous(1, PIECE, PIECE, count=1)],
    "request of more pieces than it has": lambda: [rendezvous(1, PIECE, count=2)],
    "request of more pieces than there can be": lambda: [rendezvous(1, PIECE, count=0xFFFFFFFF)],
    "request whose pieces overflow its size": lambda: [
        # 24 bytes each: so many of them have 24 bytes modulo 2^32.
        rendezvous(1, PIECE, count=(1 << 29) + 1)
    ],
    "request cut short": lambda: [offered(NORMAL_LENGTH)[:-1]],
    "request and more": lambda: [offered(NORMAL_LENGTH) + b"\0"],
    "stray bytes in a request": lambda: [rendezvous(1, PIECE._replace(flags=2))],
    "message of nothing": lambda: [offered(0)],
    "piece of nothing": lambda: [rendezvous(1, PIECE, PIECE._replace(length=0))],
    "message too long": lambda: [offered(SMALL.max_message + 1)],
    "pieces too long together": lambda: [
        rendezvous(1, PIECE, PIECE._replace(length=SMALL.max_message - NORMAL_LENGTH + 1))
    ],
    "pieces that are short again modulo 2^64": lambda: [
        rendezvous(1, PIECE, PIECE._replace(length=(1 << 64) - NORMAL_LENGTH + 1))
    ],
    "message of all memory": lambda: [offered((1 << 64) - 1, address=0)],
    "message beyond the end of the address space": lambda: [
        offered(NORMAL_LENGTH, address=(1 << 64) - NORMAL_LENGTH + 1)
    ],
    "the same for the second piece": lambda: [
        rendezvous(1, PIECE, PIECE._replace(address=(1 << 64) - 1))
    ],
    "more requests than credits": lambda: [offered(UNREAD)] * (SMALL.data_receives + 1),
    "many more requests than credits": lambda: [offered(UNREAD)] * 200,
}


@pytest.mark.parametrize("lie", LIES)
async def test_lie(factory: ConnectionFactory, lie: str) -> None:
    async with victim(factory) as (conn, peer):
        peer.send(*LIES[lie]())
        await ends_with(factory, conn, ProtocolError)


async def test_lie_while_much_is_under_way(factory: ConnectionFactory) -> None:
    """Every kind of waiter gets the same answer, at once."""
    async with victim(factory) as (conn, peer):
        peer.send(control(protocol.RegionGrant(0, token())))
        remote = await conn.recv_region()
        waiting = [
            asyncio.create_task(call)
            for call in (
                conn.recv(),
                conn.recv(),
                conn.recv_region(),
                conn.request_region(100),
                *(conn.send(bytes(size)) for size in (10, 5000, 10, 100_000)),
                *(conn.send(b"x") for _ in range(30)),
            )
        ]
        await yield_loop(3)
        peer.send(frame(0x55))
        async with factory.within(1):
            results = await asyncio.gather(*waiting, return_exceptions=True)
            await conn.wait_closed()
        # The peer has receives: what fits its credits is delivered, and nothing else.
        failed = [result for result in results if result is not None]
        assert len(failed) >= len(waiting) - SMALL.data_receives
        assert all(isinstance(result, ProtocolError) for result in failed)
        with pytest.raises(ProtocolError):
            await conn.read(remote, bytearray(8))


@on_device  # which sends what was posted before its end
async def test_the_peer_is_told(factory: ConnectionFactory) -> None:
    async with victim(factory) as (conn, peer):
        peer.send(frame(0x55))
        await ends_with(factory, conn, ProtocolError)
        message = await peer.control(factory.slow)
        assert isinstance(message, protocol.Goodbye)
        assert message.code == protocol.GoodbyeCode.PROTOCOL_ERROR
        assert "0x55" in message.text


async def test_what_arrived_before_the_lie_can_be_received(factory: ConnectionFactory) -> None:
    async with victim(factory) as (conn, peer):
        peer.send(frame(DATA, b"first"), frame(DATA, b"second"), frame(0x55))
        async with factory.within(1):
            await conn.wait_closed()
        assert bytes(await conn.recv()) == b"first"
        assert bytes(await conn.recv()) == b"second"
        await ends_with(factory, conn, ProtocolError)


async def test_too_many_regions(factory: ConnectionFactory) -> None:
    config = Config(max_regions=2, control_receives=16)
    async with victim(factory, config) as (conn, peer):
        peer.send(*(control(protocol.RegionGrant(0, token(n))) for n in range(3)))
        await asyncio.sleep(0)
        async with factory.within(1):
            await conn.wait_closed()
        assert (await conn.recv_region()).token.region_id == 0
        assert (await conn.recv_region()).token.region_id == 1
        await ends_with(factory, conn, ProtocolError, "regions")


@pytest.mark.parametrize("seed", range(10))
async def test_random_frames(factory: ConnectionFactory, seed: int) -> None:
    """Whatever it is, it is received, or the connection ends by ProtocolError or brokenness."""
    generator = random.Random(seed)
    async with victim(factory) as (conn, peer):
        for _ in range(generator.randrange(1, 5)):
            kind = generator.choice(
                [DATA, CONTROL, CREDIT, RNDV_RTS, RNDV_ACK, DATA | IMMEDIATE, RNDV_RTS | IMMEDIATE]
            )
            content = generator.randbytes(generator.choice([0, 1, 8, 60, 500]))
            if generator.random() < 0.7 and (some := VALID.get(kind & ~IMMEDIATE)):
                valid = bytearray(generator.choice(some))
                valid[generator.randrange(len(valid))] = generator.randrange(256)
                content = bytes(valid)
            peer.send(frame(kind, content))
        peer.send(frame(0x55))
        async with factory.within(1):
            # Closed is what a goodbye does, which it may be by chance.
            await ends(drain(conn), ProtocolError, ConnectionBrokenError, ConnectionClosedError)
            await conn.wait_closed()


LIES_ABOUT_FIELDS = [
    protocol.encode(message)
    for message in (
        protocol.RegionGrant(0, token()),
        protocol.RegionRequest(1, 100, Rights.READ, 1000),
        protocol.RegionReturn(0, 1),
        protocol.RegionRelease(0, 1),
        protocol.RegionEnd(0, 1),
        protocol.RegionRenew(1, 1, 1000),
        protocol.RegionLease(0, 1, 1000),
        protocol.Ping(1),
        protocol.Goodbye(0, 0, "bye"),
        protocol.Error(1, 1, "no"),
    )
]

VALID = {
    CONTROL: LIES_ABOUT_FIELDS,
    RNDV_RTS: [offered(NORMAL_LENGTH)[8:], rendezvous(2, PIECE, PIECE)[8:]],
    RNDV_ACK: [acknowledgement(1)[8:]],
}


# ---- the truth about memory that is not there ----------------------------------------------------


@pytest.mark.parametrize("length", [1, 100, 50_000, 10 << 20])
async def test_offer_with_a_key_of_nothing(factory: ConnectionFactory, length: int) -> None:
    """The read fails at the peer's device; the memory it was meant for goes back."""
    async with victim(factory, Config()) as (conn, peer):
        peer.send(offered(length))
        error = await ends_with(factory, conn, ConnectionBrokenError)
        assert isinstance(error.__cause__, RemoteAccessError)


async def test_offer_of_more_than_there_is(factory: ConnectionFactory) -> None:
    async with victim(factory) as (conn, peer):
        memory = peer.qp.pd.reg_mr(4096, REMOTE_READ)
        peer.send(offered(4097, memory.addr, memory.rkey))
        error = await ends_with(factory, conn, ConnectionBrokenError)
        assert isinstance(error.__cause__, RemoteAccessError)
        memory.close()


async def test_a_message_of_pieces_of_which_one_is_not_there(factory: ConnectionFactory) -> None:
    """No part of it is received."""
    async with victim(factory) as (conn, peer):
        memory = peer.qp.pd.reg_mr(4096, REMOTE_READ)
        there = Piece(memory.addr, 2000, memory.rkey)
        peer.send(rendezvous(1, there, there, there._replace(rkey=memory.rkey ^ 1), there))
        error = await ends_with(factory, conn, ConnectionBrokenError)
        assert isinstance(error.__cause__, RemoteAccessError)
        memory.close()


async def test_the_same_memory_and_request_again_and_again(factory: ConnectionFactory) -> None:
    """The pieces need not differ, nor the numbers: each message is read and acknowledged once."""
    async with victim(factory) as (conn, peer):
        memory = peer.qp.pd.reg_mr(bytearray(pattern(4096)), REMOTE_READ)
        first, second = Piece(memory.addr, 3000, memory.rkey), Piece(memory.addr, 1, memory.rkey)
        messages = SMALL.data_receives
        peer.send(*[rendezvous(7, first, second, first)] * messages)
        for _ in range(messages):
            with await conn.recv() as message:
                assert message == pattern(4096)[:3000] + pattern(4096)[:1] + pattern(4096)[:3000]
        async with factory.within(1):
            while messages:
                kind, content = await peer.frames.get()
                peer.give_back()
                if kind is FrameKind.RNDV_ACK:
                    assert content == acknowledgement(7)[8:]
                    messages -= 1
        memory.close()


async def test_region_of_nothing(factory: ConnectionFactory) -> None:
    async with victim(factory) as (conn, peer):
        peer.send(control(protocol.RegionGrant(0, token())))
        remote = await conn.recv_region()
        await ends(conn.read(remote, bytearray(8)), RemoteAccessError)
        error = await ends_with(factory, conn, ConnectionBrokenError)
        assert isinstance(error.__cause__, RemoteAccessError)


def grant(length: int, access: Rights) -> Callable[[int], protocol.Message]:
    return lambda number: protocol.RegionGrant(number, RegionToken(7, 0x1000, length, 1, access))


@pytest.mark.parametrize(
    "answer",
    [
        lambda number: protocol.RegionLease(number, 7, 1000),
        grant(99, Rights.READ),
        grant(1 << 40, Rights.READ),
        grant(100, Rights.WRITE),
    ],
    ids=["a lease", "fewer bytes", "more bytes", "other rights"],
)
async def test_wrong_answer_to_a_request_for_memory(
    factory: ConnectionFactory, answer: Callable[[int], protocol.Message]
) -> None:
    async with victim(factory) as (conn, peer):
        requesting = asyncio.create_task(conn.request_region(100, access=Rights.READ))
        request = await peer.control(factory.slow)
        assert isinstance(request, protocol.RegionRequest)
        peer.send(control(answer(request.request_id)))
        await ends(requesting, ProtocolError)
        await ends_with(factory, conn, ProtocolError)


@pytest.mark.parametrize(
    "answer",
    [grant(100, Rights.READ), lambda number: protocol.RegionLease(number, 8, 1000)],
    ids=["a grant", "another region"],
)
async def test_wrong_answer_to_a_renewal(
    factory: ConnectionFactory, answer: Callable[[int], protocol.Message]
) -> None:
    async with victim(factory) as (conn, peer):
        requesting = asyncio.create_task(conn.request_region(100, access=Rights.READ))
        request = await peer.control(factory.slow)
        assert isinstance(request, protocol.RegionRequest)
        peer.send(control(grant(100, Rights.READ)(request.request_id)))
        region = await requesting
        renewing = asyncio.create_task(region.renew(1))
        request = await peer.control(factory.slow)
        assert isinstance(request, protocol.RegionRenew)
        peer.send(control(answer(request.request_id)))
        await ends(renewing, ProtocolError)
        await ends_with(factory, conn, ProtocolError)


# ---- not lies, but not nice ----------------------------------------------------------------------


async def test_requests_beyond_the_quota_are_refused(factory: ConnectionFactory) -> None:
    async with victim(factory) as (conn, peer):
        before = pool_statistics(conn).registered_bytes
        requests = {
            1: protocol.RegionRequest(1, (1 << 64) - 1, Rights.READ, 0),
            2: protocol.RegionRequest(2, SMALL.lend_quota + 1, Rights.READ, 0),
            3: protocol.RegionRequest(3, 0, Rights.READ, 0),
        }
        for number, request in requests.items():
            peer.send(control(request))
            answer = await peer.control(factory.slow)
            assert isinstance(answer, protocol.Error)
            assert answer.request_id == number
            peer.send(frame(CREDIT, control=1))
        assert pool_statistics(conn).registered_bytes == before
        assert not conn.closed
        assert conn._sharing.shared == 0


async def test_regions_that_are_not_known(factory: ConnectionFactory) -> None:
    """Given back although it was never given: it may have been taken back in the meantime."""
    async with victim(factory, SLOW_PEER) as (conn, peer):
        with conn.alloc(8) as buffer:
            share = await conn.send_region(buffer)
            grant = await peer.control(factory.slow)
            assert isinstance(grant, protocol.RegionGrant)
            peer.send(
                control(protocol.RegionReturn(0, 12345)),
                control(protocol.RegionRelease(0, 12345)),
                control(protocol.RegionReturn(0, share.region_id)),  # not a loan
                frame(DATA, b"still here"),
            )
            assert bytes(await conn.recv()) == b"still here"
            assert not share.revoked
            peer.send(control(protocol.RegionRelease(0, share.region_id)), frame(DATA, b"now"))
            assert bytes(await conn.recv()) == b"now"
            assert share.revoked


@pytest.mark.parametrize("status", [protocol.ErrorCode.BUSY, 0xFFFFFFFF])
async def test_peer_does_not_take_the_message(factory: ConnectionFactory, status: int) -> None:
    async with victim(factory) as (conn, peer):
        sending = asyncio.create_task(conn.send(bytes(5000)))
        async with factory.within(1):
            kind, content = await peer.frames.get()
        assert kind is FrameKind.RNDV_RTS
        request_id, _ = read_request(content)
        peer.send(acknowledgement(request_id, status))
        with pytest.raises(RDMAError, match=rf"could not take the message \(code {int(status)}\)"):
            async with factory.within(1):
                await sending
        assert not conn.closed


async def test_peer_that_never_reads(factory: ConnectionFactory) -> None:
    """`send` waits for the caller's timeout, `close` for its own."""
    async with victim(factory, SLOW_PEER) as (conn, _):
        data = pattern(ALONE)
        sends = [asyncio.create_task(conn.send(data)) for _ in range(SMALL.data_receives + 1)]
        large = asyncio.create_task(conn.send(bytes(5000)))
        await asyncio.gather(*sends[:-1])
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await asyncio.shield(sends[-1])
        async with factory.within(1):
            await conn.close()
            for task in (sends[-1], large):
                await ends(finish(task), ConnectionClosedError)


async def finish(task: asyncio.Task[None]) -> None:
    await task


async def test_pool_held_by_the_user(factory: ConnectionFactory) -> None:
    """A side that holds all of it waits to send, but receives and answers its peer."""
    async with raw_pair(factory, replace(SMALL, pool_limit=4 << 20)) as (conn, peer):
        held = take_all(conn)
        for n in range(30):
            await peer.send_data(b"%d" % n, factory.slow)
            assert bytes(await conn.recv()) == b"%d" % n
        for n in range(1, 10):
            peer.send_control(protocol.Ping(n))
            assert await peer.control(factory.slow) == protocol.Pong(n)
        held += take_all(conn)  # of what has become free meanwhile
        sending = asyncio.create_task(conn.send(b"x"))
        peer.send_control(protocol.Ping(99))
        assert await peer.control(factory.slow) == protocol.Pong(99)
        assert conn.pool_statistics().waiting
        assert not sending.done()
        for buffer in held:
            buffer.release()
        await sending


async def test_messages_held_by_the_user(factory: ConnectionFactory) -> None:
    """Nothing is left to receive into; it goes on when the messages are released."""
    async with raw_pair(factory, replace(SMALL, pool_limit=4 << 20)) as (conn, peer):
        held = take_all(conn)
        kept = []
        for n in range(SMALL.data_receives):
            await peer.send_data(b"%d" % n, factory.slow)
            kept.append(await conn.recv())
        for message in kept:
            message.release()
        receiving = asyncio.create_task(conn.recv())
        await peer.send_data(b"next", factory.slow)
        assert bytes(await receiving) == b"next"
        for buffer in held:
            buffer.release()


async def test_peer_gives_up(factory: ConnectionFactory) -> None:
    async with victim(factory) as (conn, peer):
        peer.send(control(protocol.Goodbye(0, protocol.GoodbyeCode.TIMEOUT, "no patience")))
        await ends_with(factory, conn, ConnectionBrokenError, "no patience")


async def test_nothing_counts_after_the_goodbye(factory: ConnectionFactory) -> None:
    async with victim(factory) as (conn, peer):
        peer.send(
            frame(DATA, b"last"),
            control(protocol.Goodbye(0, protocol.GoodbyeCode.NORMAL, "")),
            frame(DATA, b"too late"),
            frame(0x55),
        )
        assert bytes(await conn.recv()) == b"last"
        error = await ends_with(factory, conn, ConnectionClosedError)
        assert isinstance(error, ConnectionClosedError)
        assert error.by_peer


async def test_ping_is_answered(factory: ConnectionFactory) -> None:
    async with victim(factory) as (_, peer):
        peer.send(control(protocol.Ping(77)))
        assert await peer.control(factory.slow) == protocol.Pong(77)


async def test_queue_pair_of_the_peer_dies(factory: ConnectionFactory) -> None:
    """Not the link but the queue pair: the next work request that needs it tells."""
    async with victim(factory) as (conn, peer):
        peer.qp.to_error()
        async with factory.within(3):
            sending = asyncio.create_task(conn.send(b"x"))
            await ends(conn.recv(), ConnectionBrokenError)
            await asyncio.wait([sending])
            assert isinstance(sending.exception(), ConnectionBrokenError | None)
            await conn.wait_closed()


# ---- wrong handshakes: the connection manager ----------------------------------------------------

GOOD = hello().pack()
BAD_HELLOS = {
    "nothing": b"",
    "random bytes": pattern(56),
    "bytes after it": GOOD + b"x",
    "no data receives": GOOD[:12] + bytes(2) + GOOD[14:],
}


@pytest.mark.parametrize("kind", BAD_HELLOS)
@on_device
@by_cm
async def test_wrong_hello_in_a_request(factory: ConnectionFactory, kind: str) -> None:
    async with factory.witness(), await factory.listen() as listener:
        async with (
            factory.within(1),
            raw_request(factory, listener.port, BAD_HELLOS[kind]) as (_, event),
        ):
            assert event.type is cm.EventType.REJECTED
            assert event.private_data.startswith(b"AIOX")
        await factory.works(listener)


@pytest.mark.parametrize("kind", BAD_HELLOS)
@on_device
@by_cm
async def test_wrong_hello_in_an_answer(factory: ConnectionFactory, kind: str) -> None:
    async with factory.witness():
        with closing(RawListener(factory)) as listener:
            connecting = asyncio.create_task(factory.connect(listener.port))
            raw = RawId((await listener.request()).id)
            raw.id.accept(parameters(BAD_HELLOS[kind]))
            async with factory.within(1):
                await ends(connecting, ProtocolError)
            raw.close()


@on_device
@by_cm
async def test_listener_that_refuses(factory: ConnectionFactory) -> None:
    with closing(RawListener(factory)) as listener:
        connecting = asyncio.create_task(factory.connect(listener.port))
        request = await listener.request()
        request.id.reject(b"go away")
        request.id.close()
        async with factory.within(1):
            error = await ends(connecting, RejectedError)
        assert error.private_data.rstrip(b"\0") == b"go away"


@on_device
@one_loop
@by_cm
async def test_listener_that_never_answers(factory: ConnectionFactory) -> None:
    async with factory.witness():
        with closing(RawListener(factory)) as listener:
            connecting = asyncio.create_task(factory.connect(listener.port))
            request = await listener.request()
            limits_pass()
            async with factory.within(1):
                await ends(connecting, UnreachableError)
            request.id.close()


@on_device
@by_cm
async def test_request_that_is_withdrawn(factory: ConnectionFactory) -> None:
    """The peer is gone between its request and the answer to it."""
    async with factory.witness(), await factory.listen() as listener:
        for count in (0, 1, 2, 5, 10, 20):
            requesting = asyncio.create_task(give_up_soon(factory, listener.port, count))
            await requesting
        await factory.works(listener)


async def give_up_soon(factory: ConnectionFactory, port: int, count: int) -> None:
    async def request() -> None:
        async with raw_request(factory, port, GOOD):
            pass

    await cancelled_after(count, request)


# ---- whole conversations that are nearly right ---------------------------------------------------


class NearlyRight:
    """Sends frames that an honest peer could send, and now and then one that it could not.

    It keeps to the credits, offers messages that are there, reads none of what it is offered,
    acknowledges what it was told of, and what it was not.
    """

    def __init__(self, peer: RawPeer, memory: verbs.MemoryRegion, seed: int) -> None:
        self._peer = peer
        self._memory = memory
        self._random = random.Random(seed)
        self._offers = 0
        self._offered: list[int] = []
        self._owed_data = 0

    def _look(self) -> None:
        while not self._peer.frames.empty():
            kind, content = self._peer.frames.get_nowait()
            self._owed_data += kind in (DATA, BUNDLE, RNDV_RTS)
            if kind is FrameKind.RNDV_RTS:
                self._offered.append(read_request(content)[0])

    def _lies(self) -> bool:
        return self._random.random() < 0.003

    def _pieces(self) -> list[Piece]:
        count = self._random.choice([1, 1, 1, 2, 7, 41])
        return [
            Piece(
                self._memory.addr + self._random.randrange(1000),
                self._random.choice([1, 2, 3, 1000, 20_000]),
                self._memory.rkey,
            )
            for _ in range(count)
        ]

    def _bundle(self) -> bytes:
        parts = b""
        for _ in range(self._random.choice([1, 2, 5, 60])):
            size = self._random.choice([0, 0, 1, 7, 8])
            parts += size.to_bytes(4, "little") + bytes(4) + b"x" * size + bytes(-size % 8)
        return parts

    def send(self) -> None:
        self._look()
        choice = self._random.choice
        kind = choice([DATA, DATA, BUNDLE, RNDV_RTS, RNDV_RTS, RNDV_ACK, CONTROL, CREDIT])
        if kind in (DATA, BUNDLE, RNDV_RTS):
            if not self._peer.credits:
                return
            self._peer.credits -= 1
        if kind == DATA:
            content = bytes(choice([0, 1, 100, 1000]))
        elif kind == BUNDLE:
            content = self._bundle()
        elif kind == RNDV_RTS:
            self._offers += 1
            number = choice([self._offers, 1])
            content = rendezvous(number, *self._pieces())[8:]
        elif kind == RNDV_ACK:
            if not self._offered and not self._lies():
                return
            number = self._offered.pop(0) if self._offered else 1
            content = acknowledgement(number, choice([0, 0, 5]))[8:]
        elif kind == CONTROL:
            content = choice(
                [
                    protocol.encode(protocol.Ping(1)),
                    protocol.encode(protocol.Pong(1) if self._lies() else protocol.Ping(2)),
                    protocol.encode(protocol.RegionRelease(0, 1)),
                    protocol.encode(protocol.RegionEnd(0, 1)),
                    protocol.encode(protocol.RegionRenew(1, 1, 1000)),
                    protocol.encode(protocol.RegionLease(int(self._lies()), 1, 1000)),
                    protocol.encode(protocol.RegionRequest(1, 4096, Rights.READ, 1000)),
                ]
            )
        else:
            content = b""
        back, data = self._peer.owed, self._owed_data
        if kind == CREDIT and not back and not data:
            return
        self._peer.owed = self._owed_data = 0
        self._peer.send(frame(kind, content, control=back, data=data))


async def use(conn: Connection, seed: int) -> None:
    """All kinds of receivers, some of which give up, and senders; the pool's memory goes back."""
    generator = random.Random(-seed)
    memory = conn.register(bytearray(1 << 20))

    def allocate(length: int) -> bytearray:
        if generator.random() < 0.2:
            raise LookupError("no room")
        return bytearray(length)

    async def one() -> None:
        call: Callable[[], object] = generator.choice(
            [
                conn.recv,
                lambda: conn.recv_into(bytearray(1 << 20)),
                lambda: conn.recv_into(bytearray(10)),
                lambda: conn.recv_into(memory),
                lambda: conn.recv_with(allocate),
                lambda: conn.send(bytes(generator.choice([0, 10, 900, 5000, 200_000]))),
                lambda: conn.send([bytes(5000), b"", bytes(10), bytes(9000)]),
            ]
        )
        with suppress(LookupError, RDMAError, TimeoutError):
            async with asyncio.timeout(generator.choice([0, 0.001, 0.01, 1])):
                await call()  # type: ignore[misc]

    async def go_on() -> None:
        while not conn.closed:
            await one()
            await asyncio.sleep(0)

    try:
        await asyncio.gather(*(go_on() for _ in range(4)))
    finally:
        memory.close()


@pytest.mark.parametrize("seed", range(12))
async def test_nearly_right_conversation(factory: ConnectionFactory, seed: int) -> None:
    """Nothing crashes or hangs, and memory stays within the limits, whatever the peer says."""
    config = replace(SMALL, pool_limit=32 << 20, data_receives=16, control_receives=16)
    async with victim(factory, config) as (conn, peer):
        memory = peer.qp.pd.reg_mr(1 << 20, REMOTE_READ)
        attacker = NearlyRight(peer, memory, seed)
        using = asyncio.create_task(use(conn, seed))
        async with factory.within(5):
            for _ in range(400):
                attacker.send()
                await asyncio.sleep(0)
                if conn.closed:
                    break
                counts = figures(conn)
                assert counts["unread"] <= counts["arrived"] <= 128 * config.data_receives
                assert counts["read_ahead"] <= config.fetch_ahead + 41 * 20_000
                assert conn._queue.outstanding <= 128 * config.data_receives
                assert pool_statistics(conn).registered_bytes <= config.pool_limit
            peer.send(frame(0x55))
            await conn.wait_closed()
            await using
        memory.close()


async def test_what_is_not_read_ahead_costs_no_search(factory: ConnectionFactory) -> None:
    """A message that waits behind thousands of others is not looked for with each of them."""
    config = replace(SMALL, data_receives=32, eager_size=2048, max_eager_size=2048)

    async def cost(*behind: bytes) -> float:
        """CPU time of receiving all that stands before it."""
        async with victim(factory, config) as (conn, peer):
            peer.send(*[frame(BUNDLE, bytes(8 * 128))] * 31, *behind)
            while figures(conn)["arrived"] < 31 * 128 + len(behind):
                await yield_loop(1)
            begin = time.thread_time()
            for _ in range(31 * 128):
                (await conn.recv()).release()
            return time.thread_time() - begin

    alone = min([await cost() for _ in range(3)])
    assert min([await cost(offered(config.fetch_ahead + 1)) for _ in range(3)]) < 10 * alone
