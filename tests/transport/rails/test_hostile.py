"""Test that a peer's lies about rails end the connection or have no effect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest

from aiordma import Buffer, Connection, ConnectionBrokenError, ProtocolError, listen
from aiordma._core import protocol
from aiordma._core.fields import MAX_RAILS
from aiordma._core.frames import FrameKind
from aiordma._core.operations import OperationKind
from aiordma._core.protocol import ErrorCode, RailAnswer, RailCause, RailDown, RailOffer, RailReady
from aiordma._datapath.work_queue import WorkRequest
from aiordma._transport.rails import Rail, Rails
from aiordma.errors import QuotaError
from aiordma.verbs import WROpcode
from tests.transport.connection_factory import (
    ALONE,
    KEY,
    SMALL,
    ConnectionFactory,
    check_alive,
    ends,
    hello,
    yield_loop,
)
from tests.transport.inside import figures
from tests.transport.marks import by_tcp, one_loop
from tests.transport.raw_peer import Piece, RawPeer, endpoint_at, frame, rendezvous

from .joining import HOST, TWO, further, joined, until_rails

FOREIGN = "198.51.100.1"  # assigned to no host (RFC 5737)
ENDPOINT = endpoint_at(HOST)


@asynccontextmanager
async def victim(
    factory: ConnectionFactory, *, rails: bool = True, **options: Any
) -> AsyncIterator[tuple[Connection, RawPeer]]:
    """Yield a two-device connection and its raw peer. The connection's rail clock is frozen."""
    options = {"config": SMALL, "device": TWO, "via": factory.via, **options}
    async with await listen(factory.host, **options) as listener:
        data = replace(hello(), rails=rails).pack()
        raw = RawPeer.connect(factory, listener.port, hello_data=data)
        async with raw as peer, await listener.accept() as conn:
            if conn._rails is not None:
                now = conn._rails.clock()
                conn._rails.clock = lambda: now
            try:
                yield conn, peer
            finally:
                conn.abort()  # the peer returns no credit for a goodbye


async def asked(peer: RawPeer, message: protocol.Message) -> protocol.Message:
    peer.send_control(message)
    return await peer.control()


INVALID_MESSAGES: dict[str, tuple[protocol.Message, str]] = {
    "a number is left out": (RailOffer(1, 2, ENDPOINT), "rail 2, but rail 1 is next"),
    "the lead is offered": (RailOffer(1, 0, ENDPOINT), "rail 0, but rail 1 is next"),
    "no endpoint": (RailOffer(1, 1, bytes(40)), "not an aiordma endpoint"),
    "an answer without an offer": (RailAnswer(1, 1, ENDPOINT), "RailAnswer"),
    "an unknown one is ready": (RailReady(0, 1), "rail 1, which this connection does not have"),
    "an unknown one is down": (RailDown(0, 1), "rail 1, which this connection does not have"),
    "the lead is ready": (RailReady(0, 0), "READY from the peer for rail 0, which is UP"),
    "the lead is down": (RailDown(0, 0), "stopped the lead rail"),
}


@pytest.mark.parametrize("case", INVALID_MESSAGES)
async def test_invalid_rail_message_ends_the_connection(
    factory: ConnectionFactory, case: str
) -> None:
    message, text = INVALID_MESSAGES[case]
    async with victim(factory) as (conn, peer):
        peer.send_control(message)
        assert text in str(await ends(conn.recv(), ProtocolError))


@pytest.mark.parametrize(
    "message",
    [RailOffer(1, 1, ENDPOINT), RailAnswer(1, 1, ENDPOINT), RailReady(0, 1), RailDown(0, 1)],
    ids=lambda message: type(message).__name__,
)
@pytest.mark.parametrize("options", [{"rails": False}, {"device": "embedded0"}], ids=str)
async def test_rail_messages_end_the_connection_when_rails_are_off(
    factory: ConnectionFactory, message: protocol.Message, options: dict[str, Any]
) -> None:
    """Rails are off if the peer has not announced them, or if this side has only one device."""
    async with victim(factory, **options) as (conn, peer):
        assert not peer.theirs.rails
        peer.send_control(message)
        assert type(message).__name__ in str(await ends(conn.recv(), ProtocolError))


@pytest.mark.parametrize("answer", [[], [RailDown(0, 1)]], ids=["ready", "down"])
async def test_repeated_rail_message_ends_the_connection(
    factory: ConnectionFactory, answer: list[protocol.Message]
) -> None:
    message = RailDown(0, 1) if answer else RailReady(0, 1)
    async with victim(factory) as (conn, peer):
        assert isinstance(await asked(peer, RailOffer(1, 1, ENDPOINT)), RailAnswer)
        peer.send_control(message)
        for expected in answer:
            assert await peer.control() == expected
        peer.send_control(message)
        assert "for rail 1, which is" in str(await ends(conn.recv(), ProtocolError))


async def test_late_rail_ready_for_a_broken_rail_is_ignored(factory: ConnectionFactory) -> None:
    """An honest peer may send RailReady before it learns that the rail has ended."""
    async with victim(factory) as (conn, peer):
        assert isinstance(await asked(peer, RailOffer(1, 1, ENDPOINT)), RailAnswer)
        assert conn._rails is not None
        _, rail = conn._rails.rails
        assert rail.queue is not None
        rail.queue.rail_broke(ConnectionBrokenError("its cable"))
        assert await peer.control() == RailDown(RailCause.SILENCE, 1)
        peer.send_control(RailReady(0, 1))
        peer.send_control(RailDown(0, 1))
        assert isinstance(await asked(peer, RailOffer(2, 2, ENDPOINT)), RailAnswer)
        assert [rail.state for rail in conn.rails] == ["lead", "connecting"]


async def test_rail_offer_before_accept_is_rejected(factory: ConnectionFactory) -> None:
    options: dict[str, Any] = {"device": TWO, "via": factory.via, "on_request": lambda _: None}
    data = replace(hello(), rails=True).pack()
    async with (
        await listen(factory.host, config=SMALL, **options) as listener,
        RawPeer.connect(factory, listener.port, hello_data=data) as peer,
    ):
        goodbye = await asked(peer, RailOffer(1, 1, ENDPOINT))
        assert isinstance(goodbye, protocol.Goodbye)
        assert "before its connection was accepted" in goodbye.text


@pytest.mark.parametrize("most", [1, MAX_RAILS - 1])
async def test_rail_offers_beyond_max_rails_are_refused(
    factory: ConnectionFactory, most: int
) -> None:
    """`max_rails` includes the lead. By default it is the number of devices."""
    config = SMALL if most == 1 else replace(SMALL, max_rails=most + 1)
    async with victim(factory, config=config) as (conn, peer):
        for number in range(1, most + 1):
            answer = await asked(peer, RailOffer(number, number, ENDPOINT))
            assert isinstance(answer, RailAnswer)
        assert [rail.device for rail in conn.rails] == ["embedded0", "embedded1"] + (
            ["embedded0"] * (most - 1)
        )
        refusal = await asked(peer, RailOffer(most + 1, most + 1, ENDPOINT))
        assert isinstance(refusal, protocol.Error)
        assert refusal.code == ErrorCode.QUOTA
        assert "max_rails" in refusal.text
        with pytest.raises(ProtocolError):  # no rail has this number
            conn._owner.control(RailDown(0, most + 1))


async def test_rail_offers_are_limited_per_second(factory: ConnectionFactory) -> None:
    """Of the rails that have ended, only the latest is kept, for its error."""
    async with victim(factory) as (conn, peer):
        for number in range(1, MAX_RAILS + 1):
            answer = await asked(peer, RailOffer(number, number, ENDPOINT))
            assert isinstance(answer, RailAnswer)
            assert await asked(peer, RailDown(0, number)) == RailDown(0, number)
        assert [rail.state for rail in conn.rails] == ["lead", "down"]
        number += 1
        refusal = await asked(peer, RailOffer(number, number, ENDPOINT))
        assert isinstance(refusal, protocol.Error)
        assert refusal.code == ErrorCode.BUSY
        assert conn._rails is not None
        later = conn._rails.clock() + 1.001  # one second, plus rounding
        conn._rails.clock = lambda: later
        number += 1
        answer = await asked(peer, RailOffer(number, number, ENDPOINT))
        assert isinstance(answer, RailAnswer)


async def test_rail_offer_is_refused_while_closing(factory: ConnectionFactory) -> None:
    async with victim(factory) as (conn, peer):
        # Send one message more than the peer has receives, so that `close` has to wait.
        sends = [conn.send_nowait(bytes(ALONE)) for _ in range(SMALL.data_receives + 1)]
        closing = asyncio.create_task(conn.close())
        await yield_loop(3)
        refusal = await asked(peer, RailOffer(1, 1, ENDPOINT))
        assert isinstance(refusal, protocol.Error)
        assert refusal.code == ErrorCode.CANCELLED
        conn.abort()
        await asyncio.gather(*sends, closing, return_exceptions=True)


@pytest.mark.parametrize("allowed", [False, True])
async def test_rail_to_another_host_requires_allow_other_addresses(
    factory: ConnectionFactory, allowed: bool
) -> None:
    config = replace(SMALL, allow_other_addresses=allowed)
    async with victim(factory, config=config) as (conn, peer):
        answer = await asked(peer, RailOffer(1, 1, endpoint_at(FOREIGN)))
        if allowed:
            assert isinstance(answer, RailAnswer)
        else:
            assert isinstance(answer, protocol.Error)
            assert FOREIGN in answer.text
            assert "allow_other_addresses" in answer.text
        assert not conn.closed


async def test_connection_breaks_when_message_key_never_arrives(factory: ConnectionFactory) -> None:
    """The time limit is needed because the message holds pool memory that other users wait for."""
    async with victim(factory, config=replace(SMALL, pool_limit=16 << 20)) as (conn, peer):
        pool = conn._memory.pool
        pool._stalled_reads.timeout = 0.01
        receiving = asyncio.create_task(conn.recv())
        peer.send(rendezvous(1, Piece(0x1000, 100_000, 0x1234, 99 << 8)))
        while not figures(conn)["read_ahead"]:
            await yield_loop(1)
        with ExitStack() as held:
            with suppress(QuotaError):
                while True:
                    held.enter_context(pool.alloc(1 << 20))
            waiting = asyncio.create_task(conn.lease(1 << 20))
            error = await ends(receiving, ConnectionBrokenError)
            assert "completed too few READs" in str(error)
            waiting.cancel()


class Sent(WorkRequest):
    """A frame posted to a rail without going through the session."""

    def __init__(self, memory: Buffer, data: bytes) -> None:
        memory.view[: len(data)] = data
        send = int(WROpcode.SEND)
        super().__init__(OperationKind.SEND, send, memory.address, len(data), memory.lkey)

    def done(self, byte_len: int) -> None:
        """Ignore the completion."""

    def failed(self, error: BaseException) -> None:
        """Ignore the error."""

    def release(self) -> None:
        """Keep the memory, which the test owns."""


@contextmanager
def resume(rail: Rail, number: int, frames: int = 0) -> Iterator[None]:
    """Post a Resume on `rail`, and keep its memory until the block ends."""
    assert rail.queue is not None
    assert rail.endpoint is not None
    data = frame(FrameKind.CONTROL, protocol.encode(protocol.Resume(number, rail.number, frames)))
    with rail.endpoint.driver.pool.alloc(64) as memory:
        rail.queue.post_checked(Sent(memory, data))
        yield


@one_loop
async def test_second_resume_on_the_same_rail_ends_the_connection(
    factory: ConnectionFactory,
) -> None:
    """Each Resume would use up a receive of the next lead, until none was left."""
    async with joined(factory.via) as conns, AsyncExitStack() as stack:
        await until_rails(conns)
        victim, peer = conns
        peer._messages.failover.fail_over = lambda lead: None
        rail = further(peer)
        victim._queue.rail_broke(ConnectionBrokenError("its cable"))
        while victim._queue.number != rail.number:
            await yield_loop(1)
        for _ in range(2):
            assert not victim.closed
            stack.enter_context(resume(rail, 0))
        assert "a frame on rail 1" in str(await ends(victim.recv(), ProtocolError))
        peer.abort()


@by_tcp
@one_loop
async def test_connection_breaks_when_key_never_arrives_after_failover() -> None:
    """The time limit is needed because the message holds pool memory that another connection waits
    for.
    """
    config = replace(SMALL, pool_limit=16 << 20)
    async with joined("tcp", config=config) as (peer, conn), joined("tcp", config=config) as others:
        await until_rails((peer, conn))
        pool = conn._memory.pool
        assert others[1]._memory.pool is pool
        pool._stalled_reads.timeout = 0.01
        peer._messages.failover.fail_over = lambda lead: None
        sending = asyncio.ensure_future(peer.send(bytes(60_000)))
        while not figures(conn)["read_ahead"]:
            await yield_loop(1)
        conn._queue.rail_broke(ConnectionBrokenError("its cable"))
        while not conn._queue.number:
            await yield_loop(1)
        frames = conn._messages.outbox.journal.sent
        with resume(further(peer), 1, frames), ExitStack() as held:
            with suppress(QuotaError):
                while True:
                    held.enter_context(pool.alloc(1 << 20))
            waiting = asyncio.create_task(others[1].lease(1 << 20))
            error = await ends(conn.recv(), ConnectionBrokenError)
            assert "completed too few READs" in str(error)
            waiting.cancel()
            peer.abort()
            await asyncio.gather(sending, return_exceptions=True)


@one_loop
@by_tcp
async def test_authenticated_peer_may_offer_a_rail_to_another_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with joined("tcp", auth=KEY, config=replace(SMALL, max_rails=3)) as conns:
        await until_rails(conns)
        monkeypatch.setattr(Rails, "_send", lambda *_: None)
        conns[1]._owner.control(RailOffer(99, 2, endpoint_at(FOREIGN)))
        while len(conns[1].rails) < 3:
            await yield_loop(1)
        assert conns[1].rails[2].state == "connecting"


async def test_invalid_rail_messages_from_listener_raise_protocol_error(
    factory: ConnectionFactory,
) -> None:
    """None of these messages is valid when sent to the side that offers the rails."""
    async with joined(factory.via) as conns:
        await until_rails(conns)
        assert conns[0]._rails is not None
        _, rail = conns[0]._rails.rails
        for message in (
            RailOffer(1, 2, ENDPOINT),
            RailReady(0, 1),
            RailAnswer(rail.offer_id, 2, ENDPOINT),
            RailAnswer(rail.offer_id + 1, 1, ENDPOINT),
            RailAnswer(rail.offer_id, 1, bytes(40)),
            RailAnswer(rail.offer_id, 1, ENDPOINT),  # a second time
            RailDown(0, 2),
            protocol.Error(rail.offer_id, ErrorCode.INTERNAL, "it was answered"),
        ):
            with pytest.raises(ProtocolError):
                conns[0]._owner.control(message)
        await check_alive(*conns)
