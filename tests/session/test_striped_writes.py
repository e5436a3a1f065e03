"""Tests of striped writes to overlapping bytes, while any of the rails may break.

Messages and reads go between the writes. Each write writes its own number, so no byte may be less
than the last write before a message has left it. Memory that is only read never changes.
"""

from __future__ import annotations

import asyncio
import os
import random
from functools import partial

import numpy as np
import pytest

from aiordma import Connection, ConnectionBrokenError, OutcomeUnknownError, Rights
from tests.session.pair import PairFactory, new_loop, provider
from tests.session.provider import Break, How, When
from tests.transport.connection_factory import SMALL, pattern, yield_loop

SIZE = 5 << 20
LENGTHS = (1, 5000, 600_001, 1 << 20, 3 << 20)
SEEDS = 24
LEAD_SEEDS = tuple(map(int, os.environ.get("SESSION_SEEDS", "0:48").split(":")))


async def writes(
    client: Connection, server: Connection, chance: random.Random, breaking: tuple[int, ...] = ()
) -> None:
    """Run random operations. The rails in `breaking` may fail once the region has been shared."""
    memory, expected = bytearray(2 * SIZE), np.zeros(SIZE, np.uint8)
    memory[SIZE:] = same = pattern(SIZE)
    found = np.frombuffer(memory, np.uint8)[:SIZE]
    with server.register(memory) as region:
        await server.send_region(region, access=Rights.READ | Rights.WRITE)
        remote = await client.recv_region()
        provider().breaks += [Break.drawn(chance, rail) for rail in breaking]
        tasks: list[asyncio.Future[None]] = []
        at_message: list[np.ndarray] = []

        async def write_batch(parts: list[tuple[int, bytes]], read: int) -> None:
            into = bytearray(read)
            async with client.batch() as batch:
                for start, data in parts:
                    batch.write(data, remote[start : start + len(data)])
                if read:
                    batch.read(remote[SIZE : SIZE + read], into)
            assert into == same[:read]

        async def read(length: int) -> None:
            into = bytearray(length)
            await client.read(remote[SIZE : SIZE + length], into)
            assert into == same[:length]

        def drawn(number: int) -> tuple[int, bytes]:
            length = chance.choice(LENGTHS)
            start = chance.randrange(SIZE - length)
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
                length = chance.choice((0, *LENGTHS))
                tasks.append(asyncio.ensure_future(write_batch(parts, length)))
            else:
                start, data = drawn(number)
                write = client.write(data, remote[start : start + len(data)])
                tasks.append(asyncio.ensure_future(write))
                if chance.random() < 0.2:
                    tasks.append(asyncio.ensure_future(read(chance.choice(LENGTHS))))
            await yield_loop(1)  # start the task
            if number % 12 == 1:
                at_message.append(expected.copy())
                tasks.append(asyncio.ensure_future(client.send_nowait(b"m")))
            await yield_loop(chance.choice((0, 0, 1, 20)))
        await asyncio.gather(receiving, *tasks)
        assert (found == expected).all()
        again = bytearray(SIZE)
        await client.read(remote[:SIZE], again)
        assert again == memory[:SIZE]


@pytest.mark.parametrize("seed", range(SEEDS))
def test_striped_writes_keep_their_order(seed: int) -> None:
    async def run() -> None:
        factory = PairFactory("", "", "tcp", 1.0, rails=2, breaking=(1,) if seed % 2 else ())
        async with factory.pair(SMALL) as ends:
            await writes(*ends, random.Random(seed))

    with asyncio.Runner(loop_factory=partial(new_loop, seed)) as runner:
        runner.run(run())


@pytest.mark.parametrize("seed", range(*LEAD_SEEDS))
def test_striped_writes_keep_their_order_across_failover(seed: int) -> None:
    """Every write completes, however much of it the old lead has done. Two of three rails break."""

    async def run() -> None:
        rails = 3 if seed % 3 == 2 else 2
        async with PairFactory("", "", "tcp", 1.0, rails=rails).pair(SMALL) as ends:
            up = ["lead", *["up"] * (rails - 1)]
            while any([rail.state for rail in conn.rails] != up for conn in ends):
                await yield_loop(1)
            await writes(*ends, random.Random(seed), tuple(range(rails - 1)))

    with asyncio.Runner(loop_factory=partial(new_loop, seed)) as runner:
        runner.run(run())


@pytest.mark.parametrize("seed", range(4))
def test_acknowledged_write_in_a_batch_is_not_repeated_on_failover(seed: int) -> None:
    """The lead breaks without acknowledging the batch, but the next message reaches the peer.

    The peer then changes the bytes, which a repeated write would overwrite.
    """

    async def run() -> None:
        async with PairFactory("", "", "tcp", 1.0, rails=2).pair(SMALL) as (client, server):
            while any(conn.rails[1:][0].state != "up" for conn in (client, server)):
                await yield_loop(1)
            with server.register(bytearray(b"before there")) as memory:
                await server.send_region(memory, access=Rights.READ | Rights.WRITE)
                remote, found = await client.recv_region(), bytearray(5)
                provider().breaks.append(Break(0, 0, How.CUT, When.IN, 2))

                async def write_and_read() -> None:
                    async with client.batch() as batch:
                        batch.write(b"behind", remote[:6])
                        batch.read(remote[7:], found)

                working = asyncio.ensure_future(write_and_read())
                await yield_loop(1)
                sending = client.send_nowait(b"m")
                with await server.recv():
                    assert bytes(memory.view) == b"behind there"
                    memory.view[:6] = b"newest"
                await asyncio.gather(working, sending)
                assert client.rails[0].state == "down"
                assert bytes(memory.view) == b"newest there"
                assert found == b"there"

    with asyncio.Runner(loop_factory=partial(new_loop, seed)) as runner:
        runner.run(run())


def test_unexecuted_write_delivers_no_immediate_data() -> None:
    """The next lead has no key for the memory and cannot write, so the connection ends."""

    async def run() -> None:
        factory = PairFactory("", "", "tcp", 1.0, rails=2)
        async with factory.pair(SMALL) as (client, server):
            with server.register(bytearray(8)) as memory:
                await server.send_region(memory, access=Rights.WRITE)
                remote = await client.recv_region()
                receiving = asyncio.ensure_future(server.recv())
                await factory.rest(client, server)
                assert remote._keys
                remote._keys.clear()
                provider().breaks.append(Break(0, 0, How.CUT, When.BEFORE, 0))
                with pytest.raises(OutcomeUnknownError):
                    await client.write(b"not here", remote[:], imm=7)
                with pytest.raises(ConnectionBrokenError):
                    await receiving
                assert bytes(memory.view) == bytes(8)
                with pytest.raises(ConnectionBrokenError, match="was not executed"):
                    await client.recv()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(run())


def test_write_with_immediate_fails_when_the_immediate_data_is_lost() -> None:
    """All rails break after the bytes were acknowledged, but before the immediate data arrives."""

    async def run() -> None:
        factory = PairFactory("", "", "tcp", 1.0, rails=2)
        async with factory.pair(SMALL) as (client, server):
            with server.register(bytearray(8)) as memory:
                await server.send_region(memory, access=Rights.WRITE)
                remote = await client.recv_region()
                receiving = asyncio.ensure_future(server.recv())
                await factory.rest(client, server)
                breaks = [Break(rail, 1, How.CUT, When.BEHIND, 0, of_all=True) for rail in (1, 0)]
                provider().breaks += breaks
                with pytest.raises(ConnectionBrokenError, match="message of a write"):
                    await client.write(b"in place", remote[:], imm=7)
                assert bytes(memory.view) == b"in place"
                with pytest.raises(ConnectionBrokenError):
                    await receiving

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(run())
