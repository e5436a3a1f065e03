"""Random messages both ways, with receivers that give up: every byte arrives, once, in order."""

from __future__ import annotations

import asyncio
import random

import pytest

from aiordma import Config, Connection, Message

from .connection_factory import ConnectionFactory

MESSAGES = 300
SIZES = (0, 1, 7, 64, 500, 4096, 8184, 8185, 30_000, 131_064, 200_000)


def content(seed: int, number: int, size: int) -> bytes:
    """The bytes of a message tell which one it is."""
    return random.Random(seed << 20 | number).randbytes(size)


def sizes(seed: int) -> list[int]:
    chance = random.Random(seed)
    return [
        chance.choice(SIZES) if chance.random() < 0.7 else chance.randrange(10_000)
        for _ in range(MESSAGES)
    ]


async def send_all(conn: Connection, seed: int) -> None:
    """One at a time, several at once, as tasks and as futures; all in the order of the calls."""
    chance = random.Random(seed + 1)
    under_way: list[asyncio.Future[None]] = []
    for number, size in enumerate(sizes(seed)):
        data: bytes | bytearray | memoryview = content(seed, number, size)
        data = chance.choice((bytes, bytearray, memoryview))(data)
        imm = number if number % 3 == 0 else None
        if chance.random() < 0.3:
            await conn.send(data, imm=imm)
        else:
            under_way.append(conn.send_nowait(data, imm=imm))
        if len(under_way) > 12 or chance.random() < 0.05:
            await asyncio.gather(*under_way)
            under_way.clear()
    await asyncio.gather(*under_way)


async def given_up(conn: Connection, chance: random.Random) -> Message | None:
    """A receiver that may be cancelled before it has something; None if it was."""
    task = asyncio.ensure_future(conn.recv())
    for _ in range(chance.randrange(4)):
        await asyncio.sleep(0)
    task.cancel()
    try:
        return await task
    except asyncio.CancelledError:
        return None


async def receive_all(conn: Connection, seed: int) -> None:
    chance = random.Random(seed + 2)
    kept = []
    for number, size in enumerate(sizes(seed)):
        expected = content(seed, number, size)
        imm = number if number % 3 == 0 else None
        message = None
        while message is None and chance.random() < 0.3:
            message = await given_up(conn, chance)
        if message is None and chance.random() < 0.2:
            memory = bytearray(size + 3)
            received = await conn.recv_into(memory)
            assert (received.length, received.imm) == (size, imm)
            assert memory[:size] == expected
            continue
        if message is None:
            message = await conn.recv()
        assert message.imm == imm
        assert bytes(message) == expected
        kept.append(message)
        while kept and chance.random() < 0.6:
            kept.pop(chance.randrange(len(kept))).release()
    for message in kept:
        message.release()


@pytest.mark.parametrize("seed", range(4))
async def test_every_byte_in_order(factory: ConnectionFactory, seed: int) -> None:
    config = Config(data_receives=6, send_queue=16, max_eager_size=(8 << 10) << seed)
    async with factory.pair(config) as (client, server):
        await asyncio.gather(
            send_all(client, seed),
            receive_all(server, seed),
            send_all(server, seed + 100),
            receive_all(client, seed + 100),
        )
        for conn in (client, server):
            counts = conn.statistics()
            assert counts.messages_sent == counts.messages_received == MESSAGES
