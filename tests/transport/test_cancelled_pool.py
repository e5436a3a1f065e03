"""Random cancellations of everything that uses the pool: nothing of it stays leased.

An idle connection holds its posted receives, the larger ones that it is about to post in their
place, and its spare blocks for control frames.  That is not always the same number: receives are
posted again for several messages at a time, and change their size.
"""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from aiordma import Config, Connection, RemoteRegion

from .connection_factory import (
    SMALL,
    ConnectionFactory,
    at_rest,
    check_alive,
    pool_statistics,
    shared,
    yield_loop,
)
from .marks import on_pair

pytestmark = on_pair

SIZES = (1, 10, 900, 3000, 20_000, 100_000)
LARGEST = max(SIZES)
CONFIGS = {
    "small": SMALL,
    "growing": replace(SMALL, max_eager_size=4096, fetch_ahead=16 << 10),
    "usual": Config(),
}


def held(conn: Connection) -> int:
    """Blocks of an idle connection."""
    figures = conn._messages.figures()
    return sum(figures[name] for name in ("receives", "larger_blocks", "spare_blocks"))


async def check_pool(*pair: Connection) -> None:
    await at_rest(*pair)
    while any(conn._messages.figures()["arrived"] for conn in pair):
        for conn in pair:
            while conn._messages.figures()["arrived"]:
                (await conn.recv()).release()
        await at_rest(*pair)  # credits
    gc.collect()
    assert pool_statistics(pair[0]).leases == sum(map(held, pair))


async def take_until(conn: Connection, last: int) -> None:
    while True:
        with await conn.recv() as message:
            if message.imm == last:
                return


async def some_operation(
    chance: random.Random, conn: Connection, user: Connection, remote: RemoteRegion
) -> None:
    """One operation of a random kind; `conn` is any side, `user` the one that may use `remote`."""
    size = chance.choice(SIZES)
    operations: tuple[Callable[[], Awaitable[object]], ...] = (
        lambda: conn.send(bytes(size)),
        lambda: conn.send([bytes(size), bytes(size)]),
        conn.recv,
        lambda: conn.recv_into(bytearray(2 * LARGEST)),
        lambda: conn.recv_with(bytearray),
        lambda: conn.lease(size),
        lambda: user.read(remote[:size], bytearray(size)),
        lambda: user.write(bytes(size), remote[:size]),
        lambda: user.write(bytes(size), remote[:size], imm=0),
        lambda: user.fetch_and_add(remote[:8], 1),
    )
    result = await chance.choice(operations)()
    if hasattr(result, "release"):
        result.release()


async def finish(
    factory: ConnectionFactory,
    tasks: list[asyncio.Task[None]],
    pair: tuple[Connection, Connection],
    number: int,
) -> None:
    """All but the receivers end by themselves; these are cancelled, and what is left is taken."""
    taking = [asyncio.create_task(take_until(conn, number)) for conn in pair]
    sending = [asyncio.create_task(conn.send(b"", imm=number)) for conn in pair]
    async with factory.within(10):
        while not all(task.done() for task in taking):
            # A receiver that was there before may take the last message, or wait behind it.
            if all(task.done() for task in sending):
                sending = [asyncio.create_task(conn.send(b"", imm=number)) for conn in pair]
            await yield_loop(1)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *sending, return_exceptions=True)


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("seed", range(3))
async def test_random_cancellations(factory: ConnectionFactory, kind: str, seed: int) -> None:
    chance = random.Random(f"{kind} {seed}")
    async with factory.pair(CONFIGS[kind]) as pair:
        client, server = pair
        await check_pool(*pair)
        async with shared(server, client, LARGEST) as (_, remote):
            for number in range(1, 40 if factory.slow == 1 else 5):
                tasks = [
                    asyncio.create_task(some_operation(chance, chance.choice(pair), client, remote))
                    for _ in range(chance.randrange(1, 8))
                ]
                await yield_loop(chance.randrange(12))
                for task in tasks:
                    if chance.random() < 0.7:
                        task.cancel()
                await yield_loop(chance.randrange(12))
                await finish(factory, tasks, pair, number)
        await check_pool(*pair)
        await check_alive(*pair)
        await check_pool(*pair)
