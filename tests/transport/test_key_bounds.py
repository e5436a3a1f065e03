"""Test that a memory key gives the peer no access to the memory beside what it was given.

On rdma_rxe, a window reaches as far as its region, so these tests run on each kind of device.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from aiordma import ConnectionBrokenError
from aiordma.verbs import WROpcode

from .connection_factory import ALL, ConnectionFactory, forged, give, pattern
from .marks import one_loop
from .raw_peer import raw_pair
from .test_keys_of_others import ATTACKS, LONG, REFUSED, failure, offer, post, refused, token_of


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("shift", [-64, 64])
@pytest.mark.parametrize("kind", ["region", "buffer"])
@one_loop
async def test_share_gives_no_access_to_the_memory_beside_it(
    factory: ConnectionFactory, kind: str, shift: int, attack: str
) -> None:
    async with factory.pair() as (client, server):
        with server.register(bytearray(192)) if kind == "region" else server.alloc(192) as memory:
            memory.view[:] = pattern(192)
            share, remote = await give(server, client, memory[64:128], ALL)
            got = bytearray(64)
            await client.read(remote, got)
            assert got == pattern(192)[64:128]
            token = replace(share.token, address=share.token.address + shift, length=8)
            await refused(ATTACKS[attack](client, forged(client, token)))
            assert memory.view == pattern(192)
            await server.wait_closed()


@pytest.mark.parametrize("shift", [-LONG, LONG])
@one_loop
async def test_long_message_gives_no_access_to_the_memory_beside_it(
    factory: ConnectionFactory, shift: int
) -> None:
    async with raw_pair(factory) as (conn, peer):
        with conn.alloc(3 * LONG) as buffer:
            buffer.view[:] = pattern(3 * LONG)
            sending, _, [piece] = await offer(conn, peer, buffer[LONG : 2 * LONG])
            token = token_of(piece)
            post(peer, WROpcode.RDMA_READ, replace(token, address=token.address + shift))
            assert await failure(peer) in REFUSED
            with pytest.raises(ConnectionBrokenError):
                await sending
