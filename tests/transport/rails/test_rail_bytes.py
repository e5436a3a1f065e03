"""Test that both sides count the bytes of one-sided operations on each rail."""

from __future__ import annotations

import pytest

from aiordma import Connection, ConnectionBrokenError
from tests.transport.connection_factory import pattern, shared
from tests.transport.marks import by_tcp, one_loop

from .joining import further, joined, until_rails

SIZE = 20 << 20
CUT = ConnectionBrokenError("its cable")


def carried(client: Connection, server: Connection) -> tuple[int, int]:
    """Return the bytes read and written on all rails, on which both sides must agree."""
    by_device = {rail.device: rail for rail in server.rails}
    for rail in client.rails:
        other = by_device[rail.device]
        assert (rail.bytes_read, rail.bytes_written) == (
            other.peer_bytes_read,
            other.peer_bytes_written,
        )
    counts = client.statistics()
    assert counts.bytes_read == sum(rail.bytes_read for rail in client.rails)
    assert counts.bytes_written == sum(rail.bytes_written for rail in client.rails)
    counts_there = server.statistics()
    assert (counts_there.peer_bytes_read, counts_there.peer_bytes_written) == (
        counts.bytes_read,
        counts.bytes_written,
    )
    return counts.bytes_read, counts.bytes_written


@one_loop
@by_tcp
@pytest.mark.parametrize("broken", ["lead", "further"])
async def test_rails_count_the_one_sided_bytes_that_they_carry(broken: str) -> None:
    async with joined("tcp") as conns:
        client, server = conns
        await until_rails(conns)
        async with shared(server, client, SIZE) as (_, remote):
            await client.write(pattern(SIZE), remote)
            await client.read(remote, bytearray(SIZE))
            assert carried(client, server) == (SIZE, SIZE)
            assert all(rail.bytes_read and rail.bytes_written for rail in client.rails)
            queue = client._queue if broken == "lead" else further(client).queue
            assert queue is not None
            queue.rail_broke(CUT)
            await client.read(remote[:1000], bytearray(1000))
            await client.write(bytes(2000), remote[:2000])
            # Closed rails keep their byte counts.
            assert carried(client, server) == (SIZE + 1000, SIZE + 2000)
