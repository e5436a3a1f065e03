"""A close while the peer sends: what a `send` has confirmed can be received."""

from __future__ import annotations

import asyncio
import itertools
import random
from dataclasses import replace

import pytest

from aiordma import Connection, ConnectionBrokenError, ConnectionClosedError

from .connection_factory import SMALL, ConnectionFactory, ends, pattern, yield_loop
from .marks import on_pair

pytestmark = on_pair

ROUNDS = 15


async def send_all(conn: Connection, sizes: list[int], confirmed: list[int]) -> None:
    """Until an end; notes the numbers of the messages whose `send` has returned."""

    async def one(number: int, size: int) -> None:
        await conn.send(number.to_bytes(4, "little") + pattern(size, number))
        confirmed.append(number)

    try:
        async with asyncio.TaskGroup() as group:
            for number, size in enumerate(sizes):
                group.create_task(one(number, size))
                if number % 3 == 0:
                    await yield_loop(1)
    except* (ConnectionClosedError, ConnectionBrokenError):
        pass


async def receive_all(conn: Connection, arrived: list[int]) -> None:
    """Until the end."""
    while True:
        try:
            with await conn.recv() as message:
                number = int.from_bytes(message.data[:4], "little")
                assert message.data[4:] == pattern(len(message) - 4, number)
                arrived.append(number)
        except (ConnectionClosedError, ConnectionBrokenError):
            return


@pytest.mark.parametrize("closes", ["one", "both"])
@pytest.mark.parametrize("reads", ["all the time", "after the close"])
@pytest.mark.parametrize("largest", [100, 3000], ids=["short", "mixed"])
async def test_close_while_the_peer_sends(
    factory: ConnectionFactory, closes: str, reads: str, largest: int
) -> None:
    chance = random.Random(f"{closes} {reads} {largest}")
    lost = []
    for number in range(ROUNDS if factory.slow == 1 else 5):
        async with factory.pair() as pair:
            confirmed: list[list[int]] = [[], []]
            arrived: list[list[int]] = [[], []]
            # A close waits until the peer has read the long ones, which it does ahead.
            count = 40 if reads == "all the time" else SMALL.data_receives
            sizes = [[chance.randrange(largest) for _ in range(count)] for _ in pair]
            tasks = [
                asyncio.create_task(send_all(*each))
                for each in zip(pair, sizes, confirmed, strict=True)
            ]
            if reads == "all the time":
                tasks += [
                    asyncio.create_task(receive_all(*each))
                    for each in zip(pair, arrived, strict=True)
                ]
            await yield_loop(chance.randrange(30))
            async with factory.within(20):
                await asyncio.gather(*(end.close() for end in pair[: 2 if closes == "both" else 1]))
                await asyncio.gather(*tasks)
                await asyncio.gather(*(end.wait_closed() for end in pair))
                await asyncio.gather(
                    *(receive_all(*each) for each in zip(pair, arrived, strict=True))
                )
            for side in range(2):
                assert arrived[1 - side] == sorted(arrived[1 - side])
                # What is behind a long message that was not read is lost with it (below).
                sure = itertools.takewhile(confirmed[side].__contains__, itertools.count())
                missing = set(sure) - set(arrived[1 - side])
                if missing:
                    lost.append((number, "sent by", side, sorted(missing)))
    assert not lost, lost


async def test_behind_a_long_message_that_was_not_read(factory: ConnectionFactory) -> None:
    """Messages are received in order, so what is behind it is lost with it."""
    config = replace(SMALL, fetch_ahead=0)
    async with factory.pair(SMALL, server=config) as (client, server):
        await client.send(b"before")
        long = client.send_nowait(pattern(5000))
        await client.send(b"behind")
        await server.close()
        assert isinstance(await ends(long, ConnectionClosedError), ConnectionClosedError)
        with await server.recv() as message:
            assert message == b"before"
        with pytest.raises(ConnectionClosedError):
            await server.recv()
