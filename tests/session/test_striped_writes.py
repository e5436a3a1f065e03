"""Writes to overlapping bytes, by two rails of which either may break, with messages between them.

Each writes its own number, so no byte may be less than what the last write before a message has put
there.
"""

from __future__ import annotations

import asyncio
import random
from functools import partial

import numpy as np
import pytest

from aiordma import Connection, Rights
from tests.session.pair import PairFactory, new_loop, provider
from tests.session.provider import Break
from tests.transport.connection_factory import SMALL, yield_loop

SIZE = 5 << 20
SHORT = (1, 100, 5000, 200_000)
LENGTHS = (1, 5000, 600_001, 1 << 20, 3 << 20)
SEEDS = 24


async def writes(
    client: Connection,
    server: Connection,
    chance: random.Random,
    lengths: tuple[int, ...] = LENGTHS,
    breaking: tuple[int, ...] = (),
) -> None:
    """Rails of those numbers break when both know the region."""
    memory, expected = bytearray(SIZE), np.zeros(SIZE, np.uint8)
    found = np.frombuffer(memory, np.uint8)
    with server.register(memory) as region:
        await server.send_region(region, access=Rights.READ | Rights.WRITE)
        remote = await client.recv_region()
        while breaking and not remote._keys:
            await yield_loop(1)
        provider().breaks += [Break.drawn(chance, rail) for rail in breaking]
        tasks: list[asyncio.Future[None]] = []
        at_message: list[np.ndarray] = []

        async def write_batch(parts: list[tuple[int, bytes]]) -> None:
            async with client.batch() as batch:
                for start, data in parts:
                    batch.write(data, remote[start : start + len(data)])

        def drawn(number: int) -> tuple[int, bytes]:
            length = chance.choice(lengths)
            start = chance.randrange(min(SIZE, 2 * max(lengths)) - length)
            expected[start : start + length] = number
            return start, bytes([number]) * length

        async def receive() -> None:
            for _ in range(20):
                (await server.recv()).release()
                assert (found >= at_message.pop(0)).all(), "a message came before a write"

        receiving = asyncio.create_task(receive())
        for number in range(1, 241, 3):
            if chance.random() < 0.3:
                parts = [drawn(number + more) for more in range(3)]
                tasks.append(asyncio.ensure_future(write_batch(parts)))
            else:
                start, data = drawn(number)
                write = client.write(data, remote[start : start + len(data)])
                tasks.append(asyncio.ensure_future(write))
            await yield_loop(1)  # it has begun
            if number % 12 == 1:
                at_message.append(expected.copy())
                tasks.append(asyncio.ensure_future(client.send_nowait(b"m")))
            await yield_loop(chance.choice((0, 0, 1, 20)))
        await asyncio.gather(receiving, *tasks)
        assert (found == expected).all()
        again = bytearray(SIZE)
        await client.read(remote, again)
        assert again == memory


@pytest.mark.parametrize("seed", range(SEEDS))
def test_they_keep_their_order(seed: int) -> None:
    async def run() -> None:
        factory = PairFactory("", "", "tcp", 1.0, rails=2, breaking=(1,) if seed % 2 else ())
        async with factory.pair(SMALL) as ends:
            await writes(*ends, random.Random(seed))

    with asyncio.Runner(loop_factory=partial(new_loop, seed)) as runner:
        runner.run(run())


@pytest.mark.parametrize("seed", range(4 * SEEDS))
def test_they_keep_their_order_by_the_next_lead(seed: int) -> None:
    """Those that one rail carries are all done, whatever the old lead had of them."""

    async def run() -> None:
        async with PairFactory("", "", "tcp", 1.0, rails=2).pair(SMALL) as ends:
            while any(len(conn.rails) < 2 or conn.rails[1].state != "up" for conn in ends):
                await yield_loop(1)
            await writes(*ends, random.Random(seed), SHORT, (0,))

    with asyncio.Runner(loop_factory=partial(new_loop, seed)) as runner:
        runner.run(run())
