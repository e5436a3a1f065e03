"""Long messages over two rails of a connection."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from aiordma import Connection, ConnectionBrokenError
from tests.transport.connection_factory import KEY, pattern, yield_loop
from tests.transport.marks import by_tcp, one_loop

from .joining import WAYS, joined, until_rails

MB = 1 << 20


async def carried(sender: Connection, receiver: Connection, data: Any, into: Any = None) -> None:
    """Sends a message until both rails have read a part of one: it may be over before the second
    one has its keys."""
    expected = b"".join(data) if isinstance(data, list) else bytes(getattr(data, "view", data))
    for _ in range(20):
        sending = asyncio.ensure_future(sender.send_nowait(data))
        if into is None:
            with await receiver.recv() as message:
                assert message == expected
        else:
            await receiver.recv_into(into)
            assert (into if isinstance(into, bytearray) else into.view) == expected
        await sending
        if all(rail.bytes_received for rail in receiver.rails):
            break
    else:
        pytest.fail(f"one rail has read everything: {receiver.rails}")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "security", [{}, {"auth": KEY}, {"auth": KEY, "encrypt": True}], ids=["open", "key", "sealed"]
)
async def test_both_rails_carry_long_messages(way: str, security: dict[str, Any]) -> None:
    async with joined(way, **security) as conns:
        await until_rails(conns)
        data = pattern(4 * MB)
        for sender, receiver in (conns, conns[::-1]):
            await carried(sender, receiver, [data[:100], data[100:]])
            received = receiver.statistics().bytes_received
            assert sum(rail.bytes_received for rail in receiver.rails) == received
            await carried(sender, receiver, data, bytearray(len(data)))


@by_tcp
@one_loop
async def test_registered_memory_is_registered_with_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no key to all memory, as on a card."""
    monkeypatch.setattr("aiordma.mr_pool.reg_local_dma", lambda _: None)
    async with joined("tcp") as (client, server):
        await until_rails((client, server))
        data = pattern(4 * MB)
        with client.register(bytearray(data)) as source, server.register(bytearray(4 * MB)) as sink:
            await carried(client, server, source, sink)
        await carried(client, server, data)
        await carried(client, server, data, bytearray(4 * MB))


@pytest.mark.parametrize("seed", range(2))
@by_tcp
@one_loop
async def test_a_rail_breaks_in_the_middle(seed: int) -> None:
    """Its chunks are read again; messages keep their order, and none is lost."""
    chance = random.Random(seed)
    async with joined("tcp") as conns:
        await until_rails(conns)
        messages = [pattern(chance.choice([10, MB, 3 * MB + 1, 8 * MB])) for _ in range(12)]
        sending = [conns[0].send_nowait(data) for data in messages]
        after = chance.randrange(12)
        for number, data in enumerate(messages):
            receiving = asyncio.create_task(conns[1].recv())
            if number == after:
                await yield_loop(chance.randrange(20))
                rails = chance.choice(conns)._rails
                assert rails is not None
                _, rail = rails.rails
                assert rail.queue is not None
                rail.queue.rail_broke(ConnectionBrokenError("its cable"))
            with await receiving as message:
                assert message == data
        await asyncio.gather(*sending)
        await until_rails(conns, ["lead", "down"])
