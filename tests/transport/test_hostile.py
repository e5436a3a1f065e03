"""Test peers that use verbs correctly but violate the protocol.

Each violation soon ends its own connection with a specific exception, and affects nothing else.
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
    RemoteRegion,
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
    check_alive,
    ends,
    hello,
    limits_pass,
    pattern,
    pool_statistics,
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
    """Yield a connection and its hostile peer, and check that other connections are unaffected.

    The connection's memory must return to the pool, however the connection ends.
    """
    async with factory.witness() as witness:
        before = pool_statistics(witness.client).leases
        async with raw_pair(factory, config) as (conn, peer):
            yield conn, peer
        with suppress(ConnectionBrokenError, ConnectionClosedError, ProtocolError):
            await drain(conn)
        if factory.via == "cm":  # "tcp" opens the device again and has a separate pool
            # `before` may include a frame that the witness had in flight, so the count can be lower
            # now.
            assert pool_statistics(witness.client).leases <= before
        async with factory.pair() as (client, server):
            await check_alive(client, server)


async def drain(conn: Connection) -> None:
    while True:
        (await conn.recv()).release()


async def ends_with(conn: Connection, kind: type[Exception], match: str = "") -> BaseException:
    """Check that the connection ends with this error for every call, and return the error."""
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

# Undecodable control messages and hellos are tested in tests/core.
VIOLATIONS: dict[str, Callable[[], list[bytes]]] = {
    "empty frame": lambda: [b""],
    "part of a header": lambda: [frame(DATA)[:7]],
    "unknown kind": lambda: [frame(0x55, b"x")],
    "empty bundle": lambda: [frame(BUNDLE, b"")],
    "bundle beyond its end": lambda: [frame(BUNDLE, b"\xff\xff\xff\x7f" + bytes(12))],
    "credits with immediate data": lambda: [frame(CREDIT | IMMEDIATE, control=1)],
    "unexpected immediate data": lambda: [frame(DATA)[:4] + b"\1\0\0\0"],
    "data credits that were not used": lambda: [frame(DATA, b"x", data=1)],
    "control credits that were not used": lambda: [frame(CREDIT, control=1)],
    "credits of nothing": lambda: [frame(CREDIT)],
    "more messages than credits": lambda: [frame(DATA, b"x")] * (SMALL.data_receives + 1),
    "more control messages than credits": lambda: [control(protocol.Ping(1))] * 200,
    "empty control message": lambda: [frame(CONTROL)],
    "control message too long": lambda: [frame(CONTROL, pattern(600))],
    "read what was not offered": lambda: [acknowledgement(7)],
    "acknowledgement of nothing": lambda: [frame(RNDV_ACK)],
    "acknowledgement and more": lambda: [acknowledgement(7) + b"\0"],
    "a write told of without rails": lambda: [frame(WRITTEN, bytes(4))],
    "keys of a rail that there is not": lambda: [frame(RNDV_KEYS, pack_keys(1, 1, 0, [(1, 0)]))],
    "acknowledgement with immediate data": lambda: [frame(RNDV_ACK | IMMEDIATE, bytes(8))],
    "answer without a question": lambda: [control(protocol.Pong(3))],
    "refusal without a request": lambda: [control(protocol.Error(3, 1, "no"))],
    "grant without a request": lambda: [control(protocol.RegionGrant(3, token()))],
    "request in a control frame": lambda: [frame(CONTROL, offered(NORMAL_LENGTH)[8:])],
    "control message in a request": lambda: [frame(RNDV_RTS, GOODBYE)],
    "empty request": lambda: [frame(RNDV_RTS)],
    "request of no pieces": lambda: [rendezvous(1)],
    "request of fewer pieces than it has": lambda: [rendezvous(1, PIECE, PIECE, count=1)],
    "request of more pieces than it has": lambda: [rendezvous(1, PIECE, count=2)],
    "request of more pieces than there can be": lambda: [rendezvous(1, PIECE, count=0xFFFFFFFF)],
    "request whose pieces overflow its size": lambda: [
        # At 24 bytes each, the size of these pieces wraps around to 24 modulo 2^32.
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
    "message beyond the end of the address space": lambda: [
        offered(NORMAL_LENGTH, address=(1 << 64) - NORMAL_LENGTH + 1)
    ],
    "the same for the second piece": lambda: [
        rendezvous(1, PIECE, PIECE._replace(address=(1 << 64) - 1))
    ],
    "more requests than credits": lambda: [offered(UNREAD)] * (SMALL.data_receives + 1),
}


@pytest.mark.parametrize("violation", VIOLATIONS)
async def test_protocol_violation_ends_the_connection(
    factory: ConnectionFactory, violation: str
) -> None:
    async with victim(factory) as (conn, peer):
        peer.send(*VIOLATIONS[violation]())
        await ends_with(conn, ProtocolError)


@on_device  # this device sends frames posted before the queue pair's end
async def test_peer_is_notified_of_its_protocol_violation(factory: ConnectionFactory) -> None:
    async with victim(factory) as (conn, peer):
        peer.send(frame(0x55))
        await ends_with(conn, ProtocolError)
        message = await peer.control()
        assert isinstance(message, protocol.Goodbye)
        assert message.code == protocol.GoodbyeCode.PROTOCOL_ERROR
        assert "0x55" in message.text


async def test_messages_before_a_protocol_violation_can_be_received(
    factory: ConnectionFactory,
) -> None:
    async with victim(factory) as (conn, peer):
        peer.send(frame(DATA, b"first"), frame(DATA, b"second"), frame(0x55))
        await conn.wait_closed()
        assert bytes(await conn.recv()) == b"first"
        assert bytes(await conn.recv()) == b"second"
        await ends_with(conn, ProtocolError)


async def test_regions_beyond_max_regions_end_the_connection(factory: ConnectionFactory) -> None:
    config = Config(max_regions=2, control_receives=16)
    async with victim(factory, config) as (conn, peer):
        peer.send(*(control(protocol.RegionGrant(0, token(n))) for n in range(3)))
        await asyncio.sleep(0)
        await conn.wait_closed()
        assert (await conn.recv_region()).token.region_id == 0
        assert (await conn.recv_region()).token.region_id == 1
        await ends_with(conn, ProtocolError, "regions")


@pytest.mark.parametrize("seed", range(10))
async def test_random_frames_raise_only_documented_errors(
    factory: ConnectionFactory, seed: int
) -> None:
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
        # A random frame can be a valid goodbye, which raises ConnectionClosedError.
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


@pytest.mark.parametrize("violation", ["a key of nothing", "too long", "the key of one piece"])
async def test_offer_with_invalid_keys_fails_with_remote_access_error(
    factory: ConnectionFactory, violation: str
) -> None:
    """The read fails at the peer's device, and no part of the message is received."""
    async with victim(factory, Config()) as (conn, peer):
        memory = peer.qp.pd.reg_mr(4096, REMOTE_READ)
        there = Piece(memory.addr, 4096, memory.rkey)
        guessed = there._replace(rkey=memory.rkey ^ 1)
        pieces = {
            "a key of nothing": [guessed],
            "too long": [there._replace(length=4097)],
            "the key of one piece": [there, there, guessed, there],
        }
        peer.send(rendezvous(1, *pieces[violation]))
        error = await ends_with(conn, ConnectionBrokenError)
        assert isinstance(error.__cause__, RemoteAccessError)
        memory.close()


async def test_each_duplicate_offer_is_read_and_acknowledged(factory: ConnectionFactory) -> None:
    """An offer may repeat pieces of the same message and the number of another message."""
    async with victim(factory) as (conn, peer):
        memory = peer.qp.pd.reg_mr(bytearray(pattern(4096)), REMOTE_READ)
        first, second = Piece(memory.addr, 3000, memory.rkey), Piece(memory.addr, 1, memory.rkey)
        messages = SMALL.data_receives
        peer.send(*[rendezvous(7, first, second, first)] * messages)
        for _ in range(messages):
            with await conn.recv() as message:
                assert message == pattern(4096)[:3000] + pattern(4096)[:1] + pattern(4096)[:3000]
        while messages:
            kind, content = await peer.frames.get()
            peer.give_back()
            if kind is FrameKind.RNDV_ACK:
                assert content == acknowledgement(7)[8:]
                messages -= 1
        memory.close()


async def test_read_with_an_invalid_key_raises_remote_access_error(
    factory: ConnectionFactory,
) -> None:
    async with victim(factory) as (conn, peer):
        peer.send(control(protocol.RegionGrant(0, token())))
        remote = await conn.recv_region()
        await ends(conn.read(remote, bytearray(8)), RemoteAccessError)
        error = await ends_with(conn, ConnectionBrokenError)
        assert isinstance(error.__cause__, RemoteAccessError)


def grant(length: int, access: Rights) -> Callable[[int], protocol.Message]:
    return lambda number: protocol.RegionGrant(number, RegionToken(7, 0x1000, length, 1, access))


INVALID_RESPONSES: dict[str, tuple[bool, Callable[[int], protocol.Message]]] = {
    "a lease": (False, lambda number: protocol.RegionLease(number, 7, 1000)),
    "fewer bytes": (False, grant(99, Rights.READ)),
    "more bytes": (False, grant(1 << 40, Rights.READ)),
    "other rights": (False, grant(100, Rights.WRITE)),
    "a grant": (True, grant(100, Rights.READ)),
    "another region": (True, lambda number: protocol.RegionLease(number, 8, 1000)),
}


@pytest.mark.parametrize(("renews", "answer"), INVALID_RESPONSES.values(), ids=INVALID_RESPONSES)
async def test_invalid_response_to_a_region_request_ends_the_connection(
    factory: ConnectionFactory, renews: bool, answer: Callable[[int], protocol.Message]
) -> None:
    """With `renews`, it is the answer to a request to renew the region's lease."""
    async with victim(factory) as (conn, peer):
        asking: asyncio.Task[object] = asyncio.create_task(
            conn.request_region(100, access=Rights.READ)
        )
        request = await peer.control()
        if renews:
            peer.send(control(grant(100, Rights.READ)(request.request_id)))
            region = await asking
            assert isinstance(region, RemoteRegion)
            asking = asyncio.create_task(region.renew(1))
            request = await peer.control()
        peer.send(control(answer(request.request_id)))
        await ends(asking, ProtocolError)
        await ends_with(conn, ProtocolError)


# ---- not lies, but not nice ----------------------------------------------------------------------


async def test_region_requests_beyond_the_quota_are_refused(factory: ConnectionFactory) -> None:
    async with victim(factory) as (conn, peer):
        before = pool_statistics(conn).registered_bytes
        requests = {
            1: protocol.RegionRequest(1, (1 << 64) - 1, Rights.READ, 0),
            2: protocol.RegionRequest(2, 0, Rights.READ, 0),
        }
        for number, request in requests.items():
            peer.send(control(request))
            answer = await peer.control()
            assert isinstance(answer, protocol.Error)
            assert answer.request_id == number
            peer.send(frame(CREDIT, control=1))
        assert pool_statistics(conn).registered_bytes == before
        assert not conn.closed
        assert conn._sharing.shared == 0


async def test_returning_an_unknown_region_is_ignored(factory: ConnectionFactory) -> None:
    """The region may have been revoked while the peer's message was in flight."""
    async with victim(factory, SLOW_PEER) as (conn, peer):
        with conn.alloc(8) as buffer:
            share = await conn.send_region(buffer)
            grant = await peer.control()
            assert isinstance(grant, protocol.RegionGrant)
            peer.send(
                control(protocol.RegionReturn(0, 12345)),
                control(protocol.RegionRelease(0, 12345)),
                control(protocol.RegionReturn(0, share.region_id)),  # not a borrowed region
                frame(DATA, b"still here"),
            )
            assert bytes(await conn.recv()) == b"still here"
            assert not share.revoked
            peer.send(control(protocol.RegionRelease(0, share.region_id)), frame(DATA, b"now"))
            assert bytes(await conn.recv()) == b"now"
            assert share.revoked


async def test_send_and_close_time_out_when_the_peer_never_reads(
    factory: ConnectionFactory,
) -> None:
    """`send` waits until the caller's timeout, and `close` until its own."""
    async with victim(factory, SLOW_PEER) as (conn, _):
        data = pattern(ALONE)
        sends = [asyncio.create_task(conn.send(data)) for _ in range(SMALL.data_receives + 1)]
        large = asyncio.create_task(conn.send(bytes(5000)))
        await asyncio.gather(*sends[:-1])
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await asyncio.shield(sends[-1])
        await conn.close()
        for task in (sends[-1], large):
            await ends(finish(task), ConnectionClosedError)


async def finish(task: asyncio.Task[None]) -> None:
    await task


async def test_frames_after_the_goodbye_are_ignored(factory: ConnectionFactory) -> None:
    async with victim(factory) as (conn, peer):
        peer.send(
            frame(DATA, b"last"),
            control(protocol.Goodbye(0, protocol.GoodbyeCode.NORMAL, "")),
            frame(DATA, b"too late"),
            frame(0x55),
        )
        assert bytes(await conn.recv()) == b"last"
        error = await ends_with(conn, ConnectionClosedError)
        assert isinstance(error, ConnectionClosedError)
        assert error.by_peer


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
async def test_invalid_hello_in_a_request_is_rejected(
    factory: ConnectionFactory, kind: str
) -> None:
    async with factory.witness(), await factory.listen() as listener:
        async with raw_request(factory, listener.port, BAD_HELLOS[kind]) as (_, event):
            assert event.type is cm.EventType.REJECTED
            assert event.private_data.startswith(b"AIOX")
        await factory.works(listener)


@pytest.mark.parametrize("kind", BAD_HELLOS)
@on_device
@by_cm
async def test_invalid_hello_in_a_response_raises_protocol_error(
    factory: ConnectionFactory, kind: str
) -> None:
    async with factory.witness():
        with closing(RawListener(factory)) as listener:
            connecting = asyncio.create_task(factory.connect(listener.port))
            raw = RawId((await listener.request()).id)
            raw.id.accept(parameters(BAD_HELLOS[kind]))
            await ends(connecting, ProtocolError)
            raw.close()


@on_device
@by_cm
async def test_rejection_by_a_listener_raises_rejected_error(factory: ConnectionFactory) -> None:
    with closing(RawListener(factory)) as listener:
        connecting = asyncio.create_task(factory.connect(listener.port))
        request = await listener.request()
        request.id.reject(b"go away")
        request.id.close()
        error = await ends(connecting, RejectedError)
        assert error.private_data.rstrip(b"\0") == b"go away"


@on_device
@one_loop
@by_cm
async def test_silent_listener_raises_unreachable_error(factory: ConnectionFactory) -> None:
    async with factory.witness():
        with closing(RawListener(factory)) as listener:
            connecting = asyncio.create_task(factory.connect(listener.port))
            request = await listener.request()
            limits_pass()
            await ends(connecting, UnreachableError)
            request.id.close()


# ---- whole conversations that are nearly right ---------------------------------------------------


async def test_recv_cost_does_not_grow_with_unfetched_messages(factory: ConnectionFactory) -> None:
    """Receiving a message must not search the thousands behind it for one to fetch."""
    config = replace(SMALL, data_receives=32, eager_size=2048, max_eager_size=2048)

    async def cost(*behind: bytes) -> float:
        """Return the CPU time of receiving 31 bundles that precede the frames in `behind`."""
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
