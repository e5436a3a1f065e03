"""Test that receives grow with the messages sent, and shrink again."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from aiordma import Connection
from aiordma._core import protocol
from aiordma._core.frames import HEADER_SIZE, FrameKind

from .connection_factory import (
    SMALL,
    ConnectionFactory,
    at_rest,
    barrier,
    exchange,
    pattern,
    pool_statistics,
    yield_loop,
)
from .inside import figures
from .marks import on_pair
from .raw_peer import RawPeer
from .test_hostile import victim

pytestmark = on_pair

GROWING = replace(SMALL, max_eager_size=16 << 10, pool_limit=64 << 20)
GROW_AFTER, SHRINK_AFTER = 4, 256  # messages: _datapath/receives.pyx
AT_ONCE = 16 << 10  # shortest message sent without waiting to share a frame: _datapath/outbox.pyx
MEDIUM = GROWING.max_eager_size - HEADER_SIZE  # the longest message that fits a grown receive


async def several(client: Connection, server: Connection, count: int, size: int) -> None:
    for n in range(count):
        await exchange(client, server, pattern(size, n))


async def leased(*conns: Connection) -> int:
    """Return the leased bytes of the shared pool once no frame is in flight."""
    await at_rest(*conns)
    return pool_statistics(conns[0]).leased_bytes


async def test_receive_buffers_grow_and_shrink_with_message_size(
    factory: ConnectionFactory,
) -> None:
    async with factory.pair(GROWING) as (client, server):
        before = await leased(client, server)
        await several(client, server, GROW_AFTER + 2 * 8, MEDIUM)
        await barrier(client)
        grown = await leased(client, server)
        assert figures(server)["receive_size"] == GROWING.max_eager_size
        assert grown >= before + 8 * (16 << 10) - 8 * (1 << 10)
        await several(client, server, SHRINK_AFTER + 3 * 8, 10)
        await barrier(client)
        assert await leased(client, server) < grown // 2
        assert figures(server)["receive_size"] == GROWING.eager_size
        await several(client, server, GROW_AFTER + 2 * 8, MEDIUM)
        await several(client, server, 3, MEDIUM + 1)


async def test_large_messages_sent_in_one_iteration_are_posted_together(
    factory: ConnectionFactory,
) -> None:
    """Large messages would not share a frame.

    Of shorter messages, only the first is posted immediately.
    """
    async with factory.pair(replace(GROWING, max_eager_size=64 << 10)) as (client, server):
        await several(client, server, GROW_AFTER + 2 * 8, AT_ONCE)
        for size, posted in ((AT_ONCE, 3), (AT_ONCE - 1, 1)):
            await at_rest(client, server)
            await yield_loop(2)  # makes these the first messages of their iteration
            sends = [client.send_nowait(pattern(size, n)) for n in range(3)]
            assert figures(client)["frames_in_flight"] == posted
            for n in range(3):
                with await server.recv() as message:
                    assert message == pattern(size, n)
            await asyncio.gather(*sends)


async def test_receives_grow_while_acknowledgements_consume_credits(
    factory: ConnectionFactory,
) -> None:
    """Each offer needs an answer, but the announcement of the larger receives must not wait behind
    the answers.
    """
    async with factory.pair(GROWING) as (client, server):
        before = await leased(client, server)

        async def send() -> None:
            under_way = [client.send_nowait(pattern(MEDIUM, n)) for n in range(16)]
            for n in range(16, 100):
                await under_way.pop(0)
                under_way.append(client.send_nowait(pattern(MEDIUM, n)))
            await asyncio.gather(*under_way)

        sending = asyncio.create_task(send())
        for n in range(100):
            with await server.recv() as message:
                assert message == pattern(MEDIUM, n)
        await sending
        await barrier(client)
        assert await leased(client, server) >= before + 8 * (15 << 10)


async def test_receives_do_not_grow_when_the_pool_has_no_room(factory: ConnectionFactory) -> None:
    config = replace(GROWING, pool_limit=4 << 20)
    async with factory.pair(config) as (client, server):
        with server.alloc(2 << 20):
            before = await leased(client, server)
            await several(client, server, 5 * GROW_AFTER, MEDIUM)
            await barrier(client)
            assert await leased(client, server) <= before + 4 * SMALL.eager_size


async def test_frames_do_not_exceed_the_local_eager_size(factory: ConnectionFactory) -> None:
    """A peer with huge receives must not make this side use equally large frames and memory."""
    async with victim(factory, replace(SMALL, close_timeout=0.05)) as (conn, peer):
        peer.send_control(protocol.ReceiveSize(0, 0, 1 << 20))
        peer.send_control(protocol.Ping(1))
        assert isinstance(await peer.control(), protocol.Pong)
        sending = conn.send_nowait(bytes(SMALL.eager_size))
        assert await next_message(peer) is FrameKind.RNDV_RTS
        sending.cancel()


async def next_message(peer: RawPeer) -> FrameKind:
    while True:
        kind, _ = await peer.frames.get()
        if kind in (FrameKind.DATA, FrameKind.RNDV_RTS, FrameKind.BUNDLE):
            return kind
