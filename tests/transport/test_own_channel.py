"""Test endpoints and tokens that programs exchange over their own channel."""

from __future__ import annotations

import asyncio
import math
import random
import sys
from contextlib import suppress
from dataclasses import replace
from unittest import mock

import pytest

from aiordma import (
    AuthenticationError,
    BufferStateError,
    Connection,
    ConnectionBrokenError,
    LeaseEndedError,
    ProtocolError,
    RegionToken,
    RemoteRangeError,
    RemoteRegion,
    Rights,
    prepare_connection,
)
from aiordma._core.region import NUMBER_BITS
from aiordma._transport.remote_memory import MAX_ENDED, RemoteRegions
from aiordma.errors import RemoteAccessError
from aiordma.mr_pool import REMOTE_RIGHTS
from aiordma.transport import PendingConnection
from aiordma.verbs import AccessFlags

from .connection_factory import (
    ALL,
    SMALL,
    ConnectionFactory,
    barrier,
    check_alive,
    ends,
    pattern,
    yield_loop,
)
from .marks import by_tcp, one_loop

pytestmark = [by_tcp, pytest.mark.any_device]  # other ways of connecting make no difference


async def half(factory: ConnectionFactory, auth: bytes | None = None) -> PendingConnection:
    return await prepare_connection(
        device=factory.device, address=factory.host, config=SMALL, auth=auth
    )


async def joined(
    factory: ConnectionFactory, *, auth: tuple[bytes | None, bytes | None] = (None, None)
) -> tuple[Connection, Connection]:
    first, second = await half(factory, auth[0]), await half(factory, auth[1])
    async with first, second:
        first.accept(second.endpoint)
        second.accept(first.endpoint)
        one, other = await asyncio.gather(first.start(), second.start())
    return one, other


async def test_peer_cannot_access_memory_before_its_proof(factory: ConnectionFactory) -> None:
    key = b"a key of sixteen bytes or more"
    first, second = await half(factory, key), await half(factory, key)
    async with first, second:
        for one, other in ((first, second), (second, first)):
            one.accept(other.endpoint)
            qp = one._attempt.endpoint.qp
            assert qp is not None
            assert qp.query().qp_access_flags == AccessFlags.NONE
        opened = await asyncio.gather(first.start(), second.start())
        for connection in opened:
            assert connection.queue_pair.query().qp_access_flags == REMOTE_RIGHTS
        await asyncio.gather(*(connection.close() for connection in opened))


async def test_closed_prepared_connection_drops_its_private_key(factory: ConnectionFactory) -> None:
    pending = await prepare_connection(
        device=factory.device,
        address=factory.host,
        config=SMALL,
        auth=b"a key of sixteen bytes or more",
        encrypt=True,
    )
    handshake = pending._attempt.handshake
    assert handshake.exchange is not None
    await pending.close()
    assert handshake.exchange is None


async def test_prepared_connections_fail_when_auth_keys_differ(factory: ConnectionFactory) -> None:
    key = b"a key of sixteen bytes or more"
    one, other = await joined(factory, auth=(key, key))
    async with one, other:
        await check_alive(one, other)
    await ends(joined(factory, auth=(key, b"another key of many bytes")), AuthenticationError)
    first, second = await half(factory, key), await half(factory)
    async with first, second:
        with pytest.raises(AuthenticationError):
            first.accept(second.endpoint)


@one_loop
async def test_prepared_connection_rejects_calls_out_of_order(factory: ConnectionFactory) -> None:
    first, second = await half(factory), await half(factory)
    async with first, second:
        assert "new" in repr(first)
        await ends(first.start(), BufferStateError)
        first.accept(bytearray(second.endpoint))
        assert "accepted" in repr(first)
        with pytest.raises(BufferStateError):
            first.accept(second.endpoint)
        second.accept(memoryview(first.endpoint))
        one, other = await first.start(), await second.start()
        await ends(first.start(), BufferStateError)
        assert "started" in repr(first)
    async with one, other:  # not affected by the end of the halves
        await check_alive(one, other)


@one_loop
async def test_closed_prepared_connection_rejects_accept(factory: ConnectionFactory) -> None:
    """The fixtures check that nothing is left of it."""
    first, second = await half(factory), await half(factory)
    async with second:
        await first.close()
        await first.close()
        assert len(first.endpoint) == len(second.endpoint) == 72
        with pytest.raises(BufferStateError, match="is closed"):
            first.accept(second.endpoint)


@one_loop
async def test_prepared_connection_closed_after_accept_cannot_start(
    factory: ConnectionFactory,
) -> None:
    first, second = await half(factory), await half(factory)
    async with second:
        first.accept(second.endpoint)
        await first.close()
        assert "closed" in repr(first)
        with pytest.raises(BufferStateError, match="is closed"):
            await first.start()


@one_loop
async def test_accept_rejects_malformed_endpoints(factory: ConnectionFactory) -> None:
    first, second = await half(factory), await half(factory)
    async with first, second:
        good = second.endpoint
        for wrong in (b"", good[:-1], good + b"x", b"x" + good[1:], good[:5] + b"\xff" + good[6:]):
            with pytest.raises(ProtocolError):
                first.accept(wrong)
        with pytest.raises(ProtocolError, match="own"):
            first.accept(first.endpoint)
        first.accept(good)


# The program run by the peer process, which exits without closing its connection.
OTHER_HALF = """
import asyncio, os, sys, aiordma

async def main():
    pending = await aiordma.prepare_connection(device=sys.argv[1], address=sys.argv[2])
    print(pending.endpoint.hex(), flush=True)
    pending.accept(bytes.fromhex(sys.stdin.readline()))
    conn = await pending.start()
    await conn.recv()
    os._exit(0)

asyncio.run(main())
"""


@one_loop
async def test_prepared_connection_breaks_when_the_peer_process_exits(
    factory: ConnectionFactory,
) -> None:
    """The queue pair must report it, because there is neither a socket nor a keep-alive."""
    config = replace(SMALL, keep_alive=None)
    other = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", OTHER_HALF, factory.device, factory.host),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert other.stdin is not None
    assert other.stdout is not None
    async with await prepare_connection(
        device=factory.device, address=factory.host, config=config
    ) as pending:
        other.stdin.write(pending.endpoint.hex().encode() + b"\n")
        pending.accept(bytes.fromhex((await other.stdout.readline()).decode()))
        conn = await pending.start()
    async with conn:
        await conn.send(b"the last word")
        await ends(conn.recv(), ConnectionBrokenError)
    assert await other.wait() == 0


# ---- tokens --------------------------------------------------------------------------------------


async def test_open_region_accepts_a_token_sent_out_of_band(factory: ConnectionFactory) -> None:
    async with factory.pair() as (client, server):
        with server.alloc(4096) as buffer:
            buffer.view[:] = pattern(4096)
            rights = Rights.READ | Rights.WRITE
            with server.share(buffer[100:200], access=rights) as share:
                await share.ready()
                token = share.token.pack()
                remote = client.open_region(token)
                assert len(remote) == 100
                assert remote.rights == rights
                target = bytearray(100)
                await client.read(remote, target)
                assert target == pattern(4096)[100:200]
                await client.write(b"here", remote[:4])
                assert bytes(buffer.view[100:104]) == b"here"
                await ends(client.fetch_and_add(remote[:8], 1), RemoteRangeError)
                assert client.open_region(share.token).token == share.token
            assert share.revoked
            await ends(client.read(remote, target), RemoteAccessError)


@one_loop
async def test_open_region_rejects_tokens_from_other_connections(
    factory: ConnectionFactory,
) -> None:
    """The error says whose token it is, and nothing is posted."""
    async with factory.pair() as (client, server), factory.pair() as others:
        with server.alloc(8) as buffer, server.share(buffer, access=ALL) as share:
            for conn, why in (
                (server, "belongs to this side"),
                *((other, "belongs to another connection") for other in others),
            ):
                with pytest.raises(ValueError, match=f"{share.region_id:#x} {why}"):
                    conn.open_region(share.token.pack())
            assert await client.fetch_and_add(client.open_region(share.token), 1) >= 0
        await check_alive(client, server)
        await check_alive(*others)


@pytest.mark.parametrize(
    "how", ["revoked", "released", "lent and released", "handed over", "dropped", "dropped late"]
)
@one_loop
async def test_open_region_raises_lease_ended_error_for_expired_tokens(
    factory: ConnectionFactory, how: str
) -> None:
    """The user's side knows the end of a region, whatever caused it and whether or not the token
    was opened.
    """
    async with factory.pair() as (client, server):
        region: RemoteRegion | None
        with server.alloc(8) as buffer:
            if how in ("revoked", "released"):
                share = server.share(buffer)
                token, region = share.token, None
                if how == "released":
                    await client.open_region(token).release()
                share.revoke()
                await barrier(server)
            else:
                region = await client.request_region(8)
                token = region.token
            if region is not None and how == "lent and released":
                await region.release()
            elif region is not None and how == "handed over":
                await client.hand_over(region)
            elif region is not None and how == "dropped late":
                region._deadline = -math.inf
            del region
            await yield_loop(2)
            with pytest.raises(LeaseEndedError, match=f"{token.region_id:#x} has ended"):
                client.open_region(token)
        await check_alive(client, server)


def test_expired_region_ids_are_remembered_up_to_a_limit() -> None:
    """The limit bounds the memory per peer. The latest ids are kept, whatever their order."""
    regions = RemoteRegions(mock.Mock())
    regions.begin(1, 2)
    first, chance = 2 << NUMBER_BITS, random.Random(7)

    def over(region_id: int) -> bool:
        with suppress(LeaseEndedError):
            regions.check(RegionToken(region_id, 0, 8, 1, Rights.READ))
            return False
        return True

    ended = set[int]()
    for _ in range(300):
        ended.add(each := first + chance.randrange(200))
        regions.end(each)
        assert {it for it in range(first, first + 201) if over(it)} == ended
    for each in range(first + 1000, first + 1000 + 2 * MAX_ENDED, 2):
        regions.end(each)
    regions.end(1 << NUMBER_BITS)  # not an id of the peer
    assert len(regions._ended_runs) == MAX_ENDED
    assert over(each)


@one_loop
async def test_open_region_rejects_malformed_tokens(factory: ConnectionFactory) -> None:
    async with factory.pair() as (client, server):
        with server.alloc(64) as buffer, server.share(buffer) as share:
            good = share.token.pack()
            for wrong in (b"", good[:-1], good + b"x", b"x" + good[1:]):
                with pytest.raises(ProtocolError):
                    client.open_region(wrong)
        await check_alive(client, server)
