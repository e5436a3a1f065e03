"""Test long messages striped over two rails of a connection."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aiordma import Connection
from tests.transport.connection_factory import KEY, pattern

from .joining import WAYS, joined, until_rails

MB = 1 << 20


async def carried(sender: Connection, receiver: Connection, data: Any, into: Any = None) -> None:
    """Send the data repeatedly until both rails have carried some of it.

    The first messages may use only one rail, because the second one lacks its keys.
    """
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
