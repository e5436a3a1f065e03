"""Test that memory keys are useless to peers that they were not given to.

A key is valid for the queue pair of one connection, and no peer can access memory before it has
proved the key that `auth` requires.
"""

from __future__ import annotations

import asyncio
import mmap
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from aiordma import (
    Connection,
    ConnectionBrokenError,
    RemoteRegion,
    Rights,
    mr_pool,
    prepare_connection,
    verbs,
)
from aiordma._core.frames import FrameKind
from aiordma._core.handshake_layout import ENDPOINT_SIZE, Endpoint
from aiordma._core.region import RegionToken
from aiordma._transport import endpoint
from aiordma.errors import RemoteAccessError, WorkCompletionError
from aiordma.transport import Via

from .connection_factory import (
    ALL,
    KEY,
    NEVER,
    SMALL,
    ConnectionFactory,
    check_alive,
    exchange,
    forged,
    give,
    hello,
    pattern,
)
from .marks import by_tcp, one_loop
from .raw_peer import (
    CAPABILITIES,
    REMOTE,
    Piece,
    RawPeer,
    RawQueuePair,
    acknowledgement,
    frame,
    raw_pair,
    read_request,
    rendezvous,
)

pytestmark = pytest.mark.any_device

WROpcode = verbs.WROpcode

Attack = Callable[[Connection, RemoteRegion], Awaitable[object]]

ATTACKS: dict[str, Attack] = {
    "read": lambda conn, region: conn.read(region, bytearray(8)),
    "write": lambda conn, region: conn.write(b"attacked", region),
    "compare and swap": lambda conn, region: conn.compare_and_swap(region, 0, 1),
    "fetch and add": lambda conn, region: conn.fetch_and_add(region, 1),
}

OPCODES = [
    WROpcode.RDMA_READ,
    WROpcode.RDMA_WRITE,
    WROpcode.ATOMIC_CMP_AND_SWP,
    WROpcode.ATOMIC_FETCH_AND_ADD,
]

# A queue pair that lacks the access right may also report an invalid request (IBTA volume 1,
# clause 9.7.4.1.4).
REFUSED = {verbs.WCStatus.REM_ACCESS_ERR, verbs.WCStatus.REM_INV_REQ_ERR}

# With `via="tcp"`, the victim's queue pair is not connected before the proof, so retries run out.
NOT_PROVED = {"cm": REFUSED, "tcp": {verbs.WCStatus.RETRY_EXC_ERR}}

vias = pytest.mark.parametrize("via", ["cm", "tcp"])
auths = pytest.mark.parametrize("auth", [None, KEY], ids=["without auth", "auth"])


PATIENT = replace(SMALL, handshake_timeout=NEVER)


async def refused(attack: Awaitable[object]) -> None:
    """Check that the owner's device refuses `attack`, which ends the attacker's connection."""
    with pytest.raises((WorkCompletionError, ConnectionBrokenError)) as caught:
        await attack
    error = caught.value
    assert isinstance(
        error if isinstance(error, WorkCompletionError) else error.__cause__, RemoteAccessError
    )


def post(peer: RawPeer, opcode: WROpcode, token: RegionToken) -> None:
    """Post an 8-byte operation with plain verbs."""
    memory = peer._memory.sends
    local = verbs.ScatterGatherElement(memory.addr, 8, memory.lkey)
    peer.qp.post_send([
        verbs.SendWorkRequest(
            1 << 20, opcode, (local,), remote_addr=token.address, rkey=token.rkey, compare_add=0,
            swap=1,
        )
    ])  # fmt: skip


async def failure(peer: RawPeer) -> verbs.WCStatus:
    while not peer.failures:  # noqa: ASYNC110 - a raw peer has no event for them
        await asyncio.sleep(0.001)
    return peer.failures[0]


@vias
@auths
@pytest.mark.parametrize("attack", ATTACKS)
@one_loop
async def test_region_key_is_refused_on_another_connection(
    factory: ConnectionFactory, via: Via, auth: bytes | None, attack: str
) -> None:
    """The thief is another client of the same listener that has behaved well and has learned the
    token.
    """
    factory = replace(factory, via=via, auth=auth)
    async with await factory.listen(PATIENT) as listener:
        client, server = await factory.both(listener)
        thief, served = await factory.both(listener)
        async with client, server, thief, served:
            with server.alloc(8) as buffer:
                buffer.view[:] = pattern(8)
                share, remote = await give(server, client, buffer, ALL)
                stolen = forged(thief, share.token)
                await refused(ATTACKS[attack](thief, stolen))
                assert buffer.view == pattern(8)
                got = bytearray(8)
                await client.read(remote, got)
                assert got == pattern(8)
                share.revoke()
            await check_alive(client, server)


@vias
@pytest.mark.parametrize("opcode", OPCODES, ids=lambda opcode: opcode.name)
@pytest.mark.parametrize("scope", ["another connection's", "any queue pair's"])
@one_loop
async def test_unauthenticated_peer_cannot_use_a_token(
    factory: ConnectionFactory, via: Via, opcode: WROpcode, scope: str
) -> None:
    """A peer with a ticket posts with a token that it has learned, without proving the key.

    This must also fail if the token has the key of a region, which every queue pair of the domain
    would accept.
    """
    factory = replace(factory, via=via, auth=KEY)
    async with await factory.listen(PATIENT) as listener:
        client, server = await factory.both(listener)
        async with client, server:
            with server.alloc(8) as buffer:
                buffer.view[:] = pattern(8)
                share = server.share(buffer, access=ALL)
                token = share.token
                region = server._endpoint.driver.pd.reg_mr(
                    buffer.view, REMOTE | verbs.AccessFlags.LOCAL_WRITE
                )
                if scope == "any queue pair's":
                    token = replace(token, rkey=region.rkey)
                claims = replace(hello(), authenticates=True).pack()
                async with RawPeer.connect(
                    factory, listener.port, hello_data=claims, key=KEY
                ) as peer:
                    if peer.connect_unproved is not None:
                        peer.connect_unproved()
                    post(peer, opcode, token)
                    assert await failure(peer) in NOT_PROVED[via]
                assert buffer.view == pattern(8)
                region.close()
                share.revoke()
            await check_alive(client, server)


@one_loop
@by_tcp
@pytest.mark.parametrize("opcode", OPCODES, ids=lambda opcode: opcode.name)
async def test_unauthenticated_prepared_peer_cannot_use_a_key(
    factory: ConnectionFactory, opcode: WROpcode
) -> None:
    """With `prepare_connection` the queue pairs are connected before the proof, but without access
    rights.
    """
    pending = await prepare_connection(
        device=factory.device, address=factory.host, config=SMALL, auth=KEY
    )
    with verbs.open_device(factory.device) as context:
        made = RawQueuePair(context, lambda pd, cq: pd.create_qp(cq, cq, CAPABILITIES))
        made.qp.to_init(access=REMOTE)
        made.memory.post_receives(made.qp)
        local = made.qp.endpoint(context.find_gid(factory.host))
        async with pending:
            theirs = replace(hello(), authenticates=True)
            pending.accept(local.pack() + theirs.pack())
            made.qp.connect(local, Endpoint.unpack(pending.endpoint[:ENDPOINT_SIZE]), access=REMOTE)
            peer = RawPeer(made, theirs)
            memory = bytearray(pattern(8))
            region = pending._attempt.endpoint.driver.pd.reg_mr(
                memory, REMOTE | verbs.AccessFlags.LOCAL_WRITE
            )
            token = RegionToken(1, region.addr, 8, region.rkey, ALL)
            post(peer, opcode, token)
            assert await failure(peer) in REFUSED
            assert memory == pattern(8)
            region.close()
            peer.close()
        made.close()


@one_loop
async def test_read_only_memory_can_be_shared_for_reading(factory: ConnectionFactory) -> None:
    """Examples are `bytes`, and a mapping without write permission."""
    with tempfile.TemporaryFile() as file:
        file.write(pattern(4096))
        file.flush()
        mapped = mmap.mmap(file.fileno(), 4096, prot=mmap.PROT_READ)
        async with factory.pair() as (client, server):
            for memory in (pattern(4096), mapped):
                with server.register(memory) as region:
                    share, remote = await give(server, client, region, Rights.READ)
                    got = bytearray(4096)
                    await client.read(remote, got)
                    assert got == pattern(4096)
                    share.revoke()
                    with pytest.raises(ValueError, match="cannot register a read-only"):
                        server.share(region, access=Rights.WRITE)
                    with pytest.raises(ValueError, match="at least 1 byte long"):
                        server.share(region[:0])
            await check_alive(client, server)
        mapped.close()


@one_loop
@by_tcp
async def test_sharing_without_memory_windows_logs_one_warning(
    factory: ConnectionFactory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Shares work, but their keys are valid in the whole protection domain, so other connections
    can use them. The log warns of that once.
    """
    monkeypatch.setattr(mr_pool, "offers_windows", lambda *_: False)
    endpoint.log_missing_windows.cache_clear()
    config = replace(SMALL, pool_limit=64 << 20)  # forces a separate driver
    factory = replace(factory, auth=KEY)
    async with await factory.listen(config) as listener:
        client, server = await factory.both(listener, config)
        other, served = await factory.both(listener, config)
        async with client, server, other, served:
            with server.alloc(8) as buffer:
                buffer.view[:] = pattern(8)
                share, remote = await give(server, client, buffer, ALL)
                for conn, region in ((client, remote), (other, forged(other, share.token))):
                    got = bytearray(8)
                    await conn.read(region, got)
                    assert got == pattern(8)
                share.revoke()
            await check_alive(client, server)
    [record] = [record for record in caplog.records if "memory windows" in record.getMessage()]
    assert record.levelname == "WARNING"
    assert factory.device in record.getMessage()


# ---- messages that the peer reads ----------------------------------------------------------------

LONG = 5000
IS_WINDOW = 1


async def offer(
    conn: Connection, peer: RawPeer, data: object
) -> tuple[asyncio.Task[None], int, list[Piece]]:
    """Offer a message. Return the task of its `send`, the request id and the pieces."""
    sending = asyncio.create_task(sent(conn, data))
    kind, content = await peer.frames.get()
    while kind is not FrameKind.RNDV_RTS:
        kind, content = await peer.frames.get()
    return sending, *read_request(content)


async def sent(conn: Connection, data: Any) -> None:
    await conn.send(data)


def token_of(piece: Piece) -> RegionToken:
    return RegionToken(1, piece.address, piece.length, piece.rkey, Rights.READ)


@vias
@one_loop
async def test_long_message_key_is_refused_on_another_connection(
    factory: ConnectionFactory, via: Via
) -> None:
    """A second client learns the address and key of a message that was offered to the first one."""
    factory = replace(factory, via=via)
    async with raw_pair(factory) as (conn, peer):
        data = pattern(LONG)
        sending, request_id, [piece] = await offer(conn, peer, data)
        async with factory.pair() as (thief, _):
            stolen = forged(thief, token_of(piece))
            await refused(thief.read(stolen, bytearray(LONG)))
        assert piece.flags == IS_WINDOW
        peer.send(acknowledgement(request_id))
        await sending


def acknowledge(peer: RawPeer, request_id: int, key: int) -> None:
    """Send an acknowledgement that invalidates the window with this key."""
    peer.send_invalidating(acknowledgement(request_id), key)


def end_before(peer: RawPeer, request_id: int, pieces: list[Piece]) -> None:
    """Invalidate the window with a data frame, then send the acknowledgement."""
    peer.send_invalidating(frame(FrameKind.DATA, b"x"), pieces[0].rkey)
    peer.send(acknowledgement(request_id))


ENDS: dict[str, Callable[[RawPeer, int, list[Piece]], None]] = {
    "key ended with it": lambda peer, id, pieces: acknowledge(peer, id, pieces[0].rkey),
    "key not ended": lambda peer, id, _: peer.send(acknowledgement(id)),
    "key ended before": end_before,
    "another piece's key": lambda peer, id, pieces: acknowledge(peer, id, pieces[-1].rkey),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("pieces", [1, 3])
@one_loop
async def test_long_message_key_is_invalid_after_the_transfer(
    factory: ConnectionFactory, end: str, pieces: int
) -> None:
    """The keys must end however the reader reports that it is done. Windows must not pile up."""
    async with raw_pair(factory) as (conn, peer):
        parts = [pattern(LONG, seed) for seed in range(pieces)]
        before = verbs.live().get("MemoryWindow", 0)
        for _ in range(SMALL.data_receives):
            sending, request_id, offered = await offer(conn, peer, parts)
            assert len(offered) == pieces
            ENDS[end](peer, request_id, offered)
            await sending
            assert verbs.live().get("MemoryWindow", 0) - before <= 1
        post(peer, WROpcode.RDMA_READ, token_of(offered[-1]))
        assert await failure(peer) in REFUSED


@one_loop
async def test_connection_breaks_when_the_peer_mislabels_a_region_as_a_window(
    factory: ConnectionFactory,
) -> None:
    """The message arrives, but its acknowledgement cannot invalidate the key.

    That breaks only the liar's own connection.
    """
    async with factory.witness(), raw_pair(factory) as (conn, peer):
        memory = peer.qp.pd.reg_mr(bytearray(pattern(LONG)), verbs.AccessFlags.REMOTE_READ)
        peer.send(rendezvous(1, Piece(memory.addr, LONG, memory.rkey, IS_WINDOW)))
        with await conn.recv() as message:
            assert message == pattern(LONG)
        await conn.wait_closed()
        memory.close()


@one_loop
async def test_memory_window_is_reused_until_the_connection_closes(
    factory: ConnectionFactory,
) -> None:
    """Between two honest ends, one window serves one message after another."""
    async with factory.witness():
        before = verbs.live().get("MemoryWindow", 0)
        async with factory.pair() as (client, server):
            for n in range(300):  # the low bits of a key wrap around
                await exchange(client, server, pattern(LONG, n))
            assert verbs.live()["MemoryWindow"] == before + 1
        assert verbs.live().get("MemoryWindow", 0) == before
