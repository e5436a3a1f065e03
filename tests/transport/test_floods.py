"""Test peers that ask for more than this side can answer, or answer more than they were asked.

Each single request is valid. Their number, or the credits that are withheld, would otherwise use
memory without limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from aiordma import ConnectionBrokenError, MessageTooLongError, ProtocolError, Rights
from aiordma._core import protocol
from aiordma._core.frames import FrameKind

from .connection_factory import SMALL, ConnectionFactory, ends, pattern
from .inside import figures
from .marks import by_tcp, on_device, on_pair
from .raw_peer import Piece, RawPeer, frame, rendezvous
from .test_hostile import REMOTE_READ, drain, ends_with, finish, victim

pytestmark = on_pair

FEW = 16
TOO_LARGE = SMALL.lend_quota + 1

REQUESTS: dict[str, Callable[[int], protocol.Message]] = {
    "pings": lambda _: protocol.Ping(1),
    "requests that are refused": lambda n: protocol.RegionRequest(n, TOO_LARGE, Rights.READ, 0),
    "requests with leases that end": lambda n: protocol.RegionRequest(n, 8, Rights.READ, 1),
    "the same request again": lambda _: protocol.RegionRequest(1, TOO_LARGE, Rights.READ, 0),
}


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the limit on unanswered messages before any connection is created."""
    monkeypatch.setattr(protocol, "MAX_UNANSWERED", FEW)


@pytest.mark.parametrize("request_kind", REQUESTS)
async def test_connection_ends_when_the_peer_withholds_response_credits(
    factory: ConnectionFactory, request_kind: str
) -> None:
    """The peer returns just the credits that bring it new ones, and none for the answers."""
    async with victim(factory) as (conn, peer):
        ask = REQUESTS[request_kind]
        ended = asyncio.create_task(conn.wait_closed())
        number = most = 0
        for round in range(4 * FEW):
            for back in (int(round > 1), 0):
                number += 1
                peer.send(frame(FrameKind.CONTROL, protocol.encode(ask(number)), control=back))
            # Wait for a frame, which gives the peer new credits. After the first few rounds, it is
            # no longer a response.
            await frame_or_end(peer, ended)
            most = max(most, figures(conn)["controls_waiting"])
            if conn.closed:
                break
        await ends_with(conn, ProtocolError, "does not return credits")
        assert 2 * FEW < most <= 4 * FEW


async def frame_or_end(peer: RawPeer, ended: asyncio.Task[None]) -> FrameKind | None:
    """Return the kind of the next frame, or None if the connection ends first."""
    frame = asyncio.create_task(peer.frames.get())
    await asyncio.wait([frame, ended], return_when=asyncio.FIRST_COMPLETED)
    if frame.done():
        return frame.result()[0]
    frame.cancel()
    return None


async def test_connection_ends_when_the_peer_withholds_acknowledgement_credits(
    factory: ConnectionFactory,
) -> None:
    """The peer sends offers, which the user receives as they arrive."""
    async with victim(factory) as (conn, peer):
        memory = peer.qp.pd.reg_mr(4096, REMOTE_READ)
        taking = asyncio.create_task(drain(conn))
        ended = asyncio.create_task(conn.wait_closed())
        offers = 0
        while not conn.closed and offers < 8 * FEW:
            while peer.credits:
                peer.credits -= 1
                offers += 1
                peer.send(rendezvous(offers, Piece(memory.addr, 4096, memory.rkey)))
            if await frame_or_end(peer, ended) is FrameKind.CREDIT:
                peer.send(frame(FrameKind.CREDIT, control=1))
            assert figures(conn)["controls_waiting"] <= 4 * FEW
        await ends(finish(taking), ProtocolError)
        await ends_with(conn, ProtocolError, "does not return credits")
        memory.close()


async def test_sender_stays_within_the_limit_on_unanswered_requests(
    factory: ConnectionFactory,
) -> None:
    """Many concurrent requests and large messages must wait for their turn on the sending side."""
    many = 6 * FEW
    config = replace(SMALL, max_regions=2 * many, data_receives=2 * many)
    async with factory.pair(config) as (client, server):
        data = pattern(2000)
        asking = [asyncio.create_task(client.request_region(8)) for _ in range(many)]
        sending = [asyncio.create_task(client.send(data)) for _ in range(many)]
        most_asked = most_offered = 0
        for _ in range(many):
            with await server.recv() as message:
                assert message == data
            most_asked = max(most_asked, len(client._sharing._requests))
            most_offered = max(most_offered, figures(client)["rendezvous"])
        await asyncio.gather(*asking, *sending)
        assert most_asked <= FEW
        assert most_offered <= FEW


# ---- answers that were not asked for -------------------------------------------------------------


# ---- ends ----------------------------------------------------------------------------------------


@on_device
@by_tcp
async def test_half_closed_bootstrap_socket_breaks_the_connection(
    factory: ConnectionFactory,
) -> None:
    """The peer's socket announces its end, even if its queue pair still works."""
    async with victim(factory) as (conn, peer):
        assert peer.socket is not None
        peer.socket.write_eof()
        await ends_with(conn, ConnectionBrokenError, "without a goodbye")


async def test_recv_raises_the_close_error_behind_an_unfetched_long_message(
    factory: ConnectionFactory,
) -> None:
    """Messages behind one that was never fetched can no longer be received, and no task may wait
    for them.
    """
    config = replace(SMALL, fetch_ahead=0)
    async with victim(factory, config) as (conn, peer):
        peer.send(
            frame(FrameKind.DATA, b"first"),
            rendezvous(1, Piece(0x1000, 5000, 1)),
            frame(FrameKind.DATA, b"behind it"),
        )
        small = bytearray(100)
        assert (await conn.recv_into(small)).length == 5
        await ends(conn.recv_into(small), MessageTooLongError)
        peer.send(frame(0x55))
        await conn.wait_closed()
        await ends(conn.recv_into(small), ProtocolError)
        await ends(conn.recv(), ProtocolError)
