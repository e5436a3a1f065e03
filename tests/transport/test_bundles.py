"""Test when small messages share a frame, and that users cannot tell the difference."""

from __future__ import annotations

import asyncio

from aiordma import Connection
from aiordma._core import protocol
from aiordma._core.frames import HEADER_SIZE, MAX_BUNDLE, FrameKind
from tests.model.test_frames import packed_bundle, unpacked_bundle

from .connection_factory import ALONE, SMALL, ConnectionFactory, pattern
from .marks import on_pair
from .raw_peer import RawPeer, frame
from .test_hostile import victim

pytestmark = on_pair


async def frames(peer: RawPeer, count: int) -> list[tuple[FrameKind, bytes]]:
    return [await peer.frames.get() for _ in range(count)]


async def test_messages_sent_in_one_iteration_share_a_frame(factory: ConnectionFactory) -> None:
    """The first message is sent alone, because there is no other message yet to wait for."""
    async with victim(factory) as (conn, peer):
        contents = [pattern(n, n) for n in range(0, 50, 7)]
        sends = [conn.send_nowait(data, imm=7 if data else None) for data in contents]
        (kind, first), (other, rest) = await frames(peer, 2)
        assert (kind, first) == (FrameKind.DATA, contents[0])
        assert other is FrameKind.BUNDLE
        assert unpacked_bundle(rest) == [(data, 7) for data in contents[1:]]
        await asyncio.gather(*sends)


async def test_messages_awaited_one_by_one_are_sent_in_separate_frames(
    factory: ConnectionFactory,
) -> None:
    async with victim(factory) as (conn, peer):
        for n in range(SMALL.data_receives):
            await conn.send(pattern(n))
        expected = [(FrameKind.DATA, pattern(n)) for n in range(SMALL.data_receives)]
        assert await frames(peer, SMALL.data_receives) == expected


async def test_bundle_does_not_exceed_the_size_of_a_receive(factory: ConnectionFactory) -> None:
    """Messages that do not fit into a bundle are sent alone, and all messages stay in order."""
    async with victim(factory) as (conn, peer):
        sizes = [0, ALONE, ALONE, 40, SMALL.eager_size - HEADER_SIZE]
        sends = [conn.send_nowait(pattern(size)) for size in sizes]
        found = await frames(peer, 4)
        assert [kind for kind, _ in found] == [*[FrameKind.DATA] * 2, FrameKind.BUNDLE,
                                               FrameKind.DATA]  # fmt: skip
        assert unpacked_bundle(found[2][1]) == [(pattern(size), None) for size in (ALONE, 40)]
        assert len(found[2][1]) <= SMALL.eager_size - HEADER_SIZE
        await asyncio.gather(*sends)


async def test_messages_beyond_the_bundle_limit_are_received(factory: ConnectionFactory) -> None:
    async with factory.pair() as (client, server):
        sends = [client.send_nowait(b"") for _ in range(3 * MAX_BUNDLE)]
        for _ in sends:
            assert len(await server.recv()) == 0
        await asyncio.gather(*sends)


async def taken(conn: Connection, count: int) -> None:
    for _ in range(count):
        (await conn.recv()).release()


async def test_bundle_credit_is_returned_after_its_last_message(factory: ConnectionFactory) -> None:
    """A peer must not exceed the memory of its credits by sending many messages in one frame."""
    async with victim(factory) as (conn, peer):
        full = SMALL.data_receives
        bundle = frame(FrameKind.BUNDLE, packed_bundle((b"a", None), (b"b", None), (b"c", None)))
        peer.send(*[bundle] * full)
        peer.credits -= full
        await taken(conn, 3 * full - 1)
        await barrier_of(peer)
        early = peer.credits
        await taken(conn, 1)
        await peer.send_data(b"one more")
        assert bytes(await conn.recv()) == b"one more"
        assert early < full


async def barrier_of(peer: RawPeer) -> None:
    """Wait until the other side has processed everything sent so far."""
    peer.send_control(protocol.Ping(1))
    assert isinstance(await peer.control(), protocol.Pong)
