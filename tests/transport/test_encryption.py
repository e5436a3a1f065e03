"""Test encrypted connections: the bytes on the wire, and the effects of tampering with them.

Most tests use a hand-made peer that seals with tests/model/sealing.py. It connects by the
connection manager, where the key is proved in frames.
"""

from __future__ import annotations

import asyncio
import copy
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from aiordma import (
    AuthenticationError,
    Connection,
    RegionToken,
    Rights,
    connect,
    listen,
    prepare_connection,
    reconnect,
    start_server,
    streams,
    verbs,
)
from aiordma._core import protocol
from aiordma._core.authentication import proof, transcript
from aiordma._core.frames import TAG_SIZE, FrameKind
from aiordma._core.handshake_layout import Hello
from aiordma._transport.encryption import TrafficKeys, new_sealing
from aiordma.config import Encrypt
from aiordma.errors import IntegrityError, ProtocolError, UnencryptedError
from tests.model.sealing import ModelExchange, SealedDirection, open_payload, seal_payload

from .connection_factory import (
    KEY,
    SMALL,
    ConnectionFactory,
    check_alive,
    echo,
    ends,
    exchange,
    hello,
    pattern,
    yield_loop,
)
from .marks import by_cm, by_tcp, one_loop
from .raw_peer import (
    WRITE_WITH_IMM,
    Piece,
    RawPeer,
    acknowledgement,
    control,
    frame,
    read_request,
    rendezvous,
)
from .test_connect_inband import share_a_group

pytestmark = pytest.mark.any_device

REMOTE_READ = verbs.AccessFlags.REMOTE_READ
LETTER = b"the quick brown fox jumps over the lazy dog"
LONG = LETTER * 100  # offered, because it does not fit a receive
SEAL = 48  # key and tag after a request


@pytest.fixture
def factory(factory: ConnectionFactory) -> ConnectionFactory:
    return replace(factory, auth=KEY, encrypt=True)


class SealedPeer:
    """A hand-written client that has the key and seals the frames it sends."""

    def __init__(self, raw: RawPeer, sending: SealedDirection, receiving: SealedDirection) -> None:
        self.raw = raw
        self.sending, self.receiving = sending, receiving
        raw.opened = receiving.open

    def send(self, *frames: bytes) -> None:
        self.raw.send(*map(self.sending.seal, frames))

    async def next(self, *kinds: FrameKind) -> tuple[FrameKind, bytes]:
        """Return the next frame of one of these kinds, skipping earlier frames."""
        while True:
            kind, content = await self.raw.frames.get()
            if kind in kinds:
                return kind, content


async def prove(raw: RawPeer, said: bytes) -> SealedPeer | None:
    """Perform the client's part of the key proof. Return None if the hello disables encryption."""
    ours, hello = ModelExchange(), Hello.unpack(said)
    raw.send(control(protocol.AuthHello(0, ours.public)))
    answer = await raw.control()
    assert isinstance(answer, protocol.AuthAnswer)
    connection = transcript(hello, raw.theirs, raw.qp.qp_num, raw.qp.query().dest_qp_num)
    assert answer.proof == proof(KEY, "server", ours.public, answer.nonce, connection)
    shown = control(
        protocol.AuthProof(0, proof(KEY, "client", ours.public, answer.nonce, connection))
    )
    if not hello.encrypts:
        raw.send(shown)
        return None
    peer = SealedPeer(raw, *ours.agree(KEY, answer.nonce, connection))
    peer.send(shown)
    return peer


@asynccontextmanager
async def victim(factory: ConnectionFactory) -> AsyncIterator[tuple[Connection, SealedPeer]]:
    """Yield an encrypted connection and its hand-written peer."""
    said = replace(hello(SMALL), authenticates=True, encrypts=True).pack()
    async with (
        await factory.listen() as listener,
        RawPeer.connect(factory, listener.port, hello_data=said, key=KEY) as raw,
    ):
        peer = await prove(raw, said)
        assert peer is not None
        conn = await listener.accept()
        try:
            yield conn, peer
        finally:  # the peer returns no credits for a goodbye
            conn.abort()
            await conn.wait_closed()


# ---- what is on the wire -------------------------------------------------------------------------


@by_cm
async def test_only_the_first_frame_is_sent_unencrypted(factory: ConnectionFactory) -> None:
    """The peer is honest.

    It exchanges single and bundled messages, a long message, and control messages.
    """
    async with victim(factory) as (conn, peer):
        peer.send(frame(FrameKind.DATA, LETTER))
        with await conn.recv() as message:
            assert message == LETTER
        sends = [conn.send_nowait(LETTER) for _ in range(3)]  # the first one is sent alone
        kinds, contents = set(), b""
        while contents.count(LETTER) < 3:
            kind, content = await peer.next(FrameKind.DATA, FrameKind.BUNDLE)
            kinds.add(kind)
            contents += content
        assert kinds == {FrameKind.DATA, FrameKind.BUNDLE}
        await asyncio.gather(*sends)

        sending = asyncio.create_task(conn.send([LONG[:1000], LONG[1000:]]))
        _, content = await peer.next(FrameKind.RNDV_RTS)
        request, seal = content[:-SEAL], content[-SEAL:]
        request_id, [piece] = read_request(request)
        offered = await peer.raw.read(piece)
        assert len(offered) == len(LONG)
        assert LETTER not in offered
        assert open_payload(offered, seal) == LONG
        peer.send(acknowledgement(request_id))
        await sending

        peer.send(control(protocol.Ping(7)))
        _, content = await peer.next(FrameKind.CONTROL)
        assert protocol.decode(content) == protocol.Pong(7)
        first, *others = peer.raw.received
        assert first[0] == FrameKind.CONTROL  # the AuthAnswer
        assert others
        assert not any(LETTER[:8] in data or b"\xcd\xa1\x7d" in data for data in others)
        assert len(set(others)) == len(others)


@by_cm
@one_loop
async def test_long_message_from_an_encrypting_peer_is_decrypted(
    factory: ConnectionFactory,
) -> None:
    async with victim(factory) as (conn, peer):
        offered, seal = seal_payload(LONG, bytes(range(32)))
        with peer.raw.qp.pd.reg_mr(bytearray(offered), REMOTE_READ) as memory:
            piece = Piece(memory.addr, len(LONG), memory.rkey)
            peer.send(rendezvous(1, piece) + seal)
            with await conn.recv() as message:
                assert message == LONG
            assert (await peer.next(FrameKind.RNDV_ACK))[1][:4] == b"\1\0\0\0"
            into = bytearray(len(LONG))
            peer.send(rendezvous(2, piece) + seal)
            assert (await conn.recv_into(into)).length == len(LONG)
            assert into == LONG


# ---- changes on the way --------------------------------------------------------------------------


async def broken(conn: Connection, peer: SealedPeer) -> str:
    """Return the text of the IntegrityError that ended the connection on both sides."""
    error = await ends(conn.recv(), IntegrityError)
    for again in (conn.recv(), conn.send(b"x"), conn.recv_into(bytearray(4))):
        assert str(await ends(again, IntegrityError)) == str(error)
    _, content = await peer.next(FrameKind.CONTROL)
    said = protocol.decode(content)
    assert isinstance(said, protocol.Goodbye)
    assert said.code == protocol.GoodbyeCode.PROTOCOL_ERROR
    assert said.text == str(error)
    await conn.wait_closed()
    return str(error)


def test_flipping_any_bit_of_a_frame_raises_integrity_error() -> None:
    """The frame has a header, a text and a tag, and each of their bits is flipped in turn."""
    plain = frame(FrameKind.DATA, LETTER)

    def opened(at: int | None) -> bytes:
        sealing = new_sealing(memory_in_clear=False)
        sealing.start(TrafficKeys(bytes(32)), TrafficKeys(bytes(32)))
        assert sealing.sealed(b"first") == b"first" == sealing.opened(b"first")
        data = bytearray(sealing.sealed(plain))
        if at is not None:
            data[at // 8] ^= 1 << at % 8
        return sealing.opened(bytes(data))

    assert opened(None) == plain
    for at in range(8 * (len(plain) + TAG_SIZE)):
        with pytest.raises(IntegrityError):
            opened(at)


TEXT = frame(FrameKind.DATA, LETTER)
FORGED_FRAMES: dict[str, Callable[[SealedPeer], list[bytes]]] = {
    "replayed": lambda peer: 2 * [peer.sending.seal(TEXT)],
    "swapped": lambda peer: [peer.sending.seal(TEXT) for _ in range(2)][::-1],
    "left out": lambda peer: [peer.sending.seal(TEXT) for _ in range(2)][1:],
    "sent back": lambda peer: [copy.copy(peer.receiving).seal(TEXT)],
    "in clear": lambda _: [TEXT],
    "cut off": lambda peer: [peer.sending.seal(TEXT)[:-1]],
    "nearly nothing": lambda _: [b"\1"],
    "with more": lambda peer: [peer.sending.seal(TEXT) + b"\0"],
    "changed": lambda peer: [peer.sending.seal(TEXT)[:-1] + b"x"],
}


@by_cm
@one_loop
@pytest.mark.parametrize("forgery", FORGED_FRAMES)
async def test_forged_frame_ends_the_encrypted_connection(
    factory: ConnectionFactory, forgery: str
) -> None:
    async with factory.witness(), victim(factory) as (conn, peer):
        peer.raw.send(*FORGED_FRAMES[forgery](peer))
        if forgery == "replayed":
            with await conn.recv() as message:  # the first of the two copies
                assert message == LETTER
        await broken(conn, peer)


@by_cm
@one_loop
@pytest.mark.parametrize("into", [False, True], ids=["recv", "recv_into"])
@pytest.mark.parametrize("change", ["the memory", "the key", "the tag"])
async def test_tampered_long_message_is_not_delivered(
    factory: ConnectionFactory, change: str, into: bool
) -> None:
    async with factory.witness(), victim(factory) as (conn, peer):
        offered, seal = map(bytearray, seal_payload(LONG, bytes(range(32))))
        (offered if change == "the memory" else seal)[{"the tag": -1}.get(change, 5)] ^= 4
        with peer.raw.qp.pd.reg_mr(offered, REMOTE_READ) as memory:
            peer.send(rendezvous(1, Piece(memory.addr, len(LONG), memory.rkey)) + seal)
            if into:
                target = bytearray(b"x" * len(LONG))
                await ends(conn.recv_into(target), IntegrityError)
                assert target == bytes(len(LONG))
            assert "long message" in await broken(conn, peer)


@by_cm
@one_loop
async def test_unsealed_long_message_raises_protocol_error(factory: ConnectionFactory) -> None:
    async with victim(factory) as (conn, peer):
        peer.send(rendezvous(1, Piece(4096, 1 << 20, 1)))
        await ends(conn.recv(), ProtocolError)


# ---- keys ----------------------------------------------------------------------------------------


def rekey_after(conn: Connection, *, sent: int, received: int, by_bytes: bool) -> None:
    sealing = conn._messages.outbox.sealing
    assert sealing
    for direction, bound in ((sealing.sending, sent), (sealing.receiving, received)):
        if by_bytes:
            direction.max_bytes = 1000 * bound
        else:
            direction.max_frames = bound


@pytest.mark.parametrize("by_bytes", [False, True], ids=["frames", "bytes"])
async def test_traffic_keys_are_renewed_after_the_frame_or_byte_limit(
    factory: ConnectionFactory, by_bytes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sides must switch to the next key of a direction at the same frame."""
    async with factory.pair() as (client, server):
        rekey_after(client, sent=5, received=3, by_bytes=by_bytes)
        rekey_after(server, sent=3, received=5, by_bytes=by_bytes)
        made = 0
        next_cipher = TrafficKeys.next_cipher

        def counted(keys: TrafficKeys) -> object:
            nonlocal made
            made += 1
            return next_cipher(keys)

        monkeypatch.setattr(TrafficKeys, "next_cipher", counted)
        for n in range(20):
            for size in (0, 500, 900, 5000):
                await exchange(client, server, pattern(size, n))
                await exchange(server, client, pattern(size, n))
        assert made >= 20


@by_cm
@one_loop
async def test_both_sides_renew_keys_at_the_same_frame(factory: ConnectionFactory) -> None:
    async with victim(factory) as (conn, peer):
        sealing = conn._messages.outbox.sealing
        assert sealing
        sealing.receiving.max_frames = peer.sending.max_frames = 2
        for n in range(10):
            back, peer.raw.owed = peer.raw.owed, 0
            peer.send(frame(FrameKind.DATA, pattern(50, n), control=back))
            with await conn.recv() as message:
                assert message == pattern(50, n)
            await peer.next(FrameKind.CREDIT) if n % 2 else None


@one_loop
@by_tcp
async def test_each_connection_generates_its_own_key_pair(factory: ConnectionFactory) -> None:
    """This includes connections opened in-band over another one."""
    async with await factory.listen() as listener:
        pairs = [await factory.both(listener) for _ in range(3)]
        assert share_a_group(*(client for client, _ in pairs))
        publics = set()
        for client, server in pairs:
            await check_alive(client, server)
            for conn in (client, server):
                assert conn._handshake.exchange is not None
                publics.add(conn._handshake.exchange.public)
        assert len(publics) == 6
        for client, server in pairs:
            await asyncio.gather(client.close(), server.close())


# ---- operations on memory ------------------------------------------------------------------------


@one_loop
async def test_memory_operations_raise_unencrypted_error_when_encrypted(
    factory: ConnectionFactory,
) -> None:
    async with factory.pair() as (client, server):
        with client.alloc(64) as buffer:
            for refused in (
                client.send_region(buffer),
                client.recv_region(),
                client.request_region(64),
                client.recv_buffer(),
            ):
                error = await ends(refused, UnencryptedError)
                assert 'encrypt="messages"' in str(error)
            with pytest.raises(UnencryptedError):
                client.share(buffer)
            with pytest.raises(UnencryptedError):
                client.open_region(RegionToken(1, 4096, 64, 7, Rights.READ, 0))
        await check_alive(client, server)


@by_cm
@one_loop
@pytest.mark.parametrize(
    "message",
    [protocol.RegionRequest(1, 4096, Rights.READ, 0), protocol.RegionRelease(0, 1)],
    ids=lambda message: type(message).__name__,
)
async def test_memory_request_from_the_peer_ends_an_encrypted_connection(
    factory: ConnectionFactory, message: protocol.Message
) -> None:
    async with victim(factory) as (conn, peer):
        peer.send(control(message))
        error = await ends(conn.recv(), ProtocolError)
        assert "does not allow memory operations" in str(error)


@by_cm
@one_loop
async def test_write_with_immediate_ends_the_encrypted_connection(
    factory: ConnectionFactory,
) -> None:
    async with victim(factory) as (conn, peer):
        peer.raw.qp.post_send_one(0, WRITE_WITH_IMM, 0, 0, 0, 0, 0, 0, 5)
        error = await ends(conn.recv(), ProtocolError)
        assert "wrote to memory" in str(error)


# ---- both sides have to ask for it ---------------------------------------------------------------


@pytest.mark.parametrize("theirs", [False, True, "messages"])
@pytest.mark.parametrize("ours", [False, True, "messages"])
async def test_connect_fails_when_encryption_settings_differ(
    factory: ConnectionFactory, ours: Encrypt, theirs: Encrypt, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    there, here = (replace(factory, encrypt=encrypt) for encrypt in (theirs, ours))
    async with await there.listen(replace(SMALL, handshake_timeout=1000)) as listener:
        if ours != theirs:
            error = await ends(here.connect(listener.port), AuthenticationError)
            assert "pass the same encrypt= on both" in str(error)
            while "pass the same encrypt= on both" not in caplog.text:
                await yield_loop(1)
        client, server = await there.both(listener)
        async with client, server:
            await check_alive(client, server)
            if theirs == "messages":
                with server.alloc(64) as buffer:
                    buffer.view[:] = pattern(64)
                    await server.send_region(buffer)
                    into = bytearray(64)
                    await client.read(await client.recv_region(), into)
                    assert into == pattern(64)


@one_loop
async def test_encrypt_requires_an_auth_key(factory: ConnectionFactory) -> None:
    error = await ends(connect("127.0.0.1", 1, encrypt=True), ValueError)
    assert "auth=" in str(error)
    error = await ends(listen(auth=KEY, encrypt="no"), ValueError)  # type: ignore[arg-type]
    assert "'no'" in str(error)


@one_loop
async def test_encrypt_suggests_the_pip_extra_when_cryptography_is_missing(
    factory: ConnectionFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package is imported only when it is needed."""
    for name in ("aiordma._transport.encryption", "cryptography", "cryptography.exceptions"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delattr("aiordma._transport.encryption")
    monkeypatch.setitem(sys.modules, "cryptography", None)
    error = await ends(connect("127.0.0.1", 1, auth=KEY, encrypt=True), ModuleNotFoundError)
    assert "aiordma[encrypt]" in str(error)
    async with await replace(factory, encrypt=False).listen():
        pass


# ---- each way to one -----------------------------------------------------------------------------


@one_loop
@by_tcp
async def test_prepared_connections_are_encrypted(factory: ConnectionFactory) -> None:
    where: dict[str, Any] = {"device": factory.device, "auth": KEY, "encrypt": True}
    first, second = [
        await prepare_connection(address=factory.host, config=SMALL, **where) for _ in range(2)
    ]
    async with first, second:
        first.accept(second.endpoint)
        second.accept(first.endpoint)
        one, other = await asyncio.gather(first.start(), second.start())
    async with one, other:
        assert one._messages.outbox.sealing
        await check_alive(one, other)


@one_loop
async def test_streams_and_reconnect_use_encryption_when_enabled(
    factory: ConnectionFactory,
) -> None:
    async def echo_stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.read())
        writer.close()

    where, there = factory.where, factory.there
    async with await streams.start_stream_server(echo_stream, factory.host, **there) as server:
        reader, writer = await streams.open_connection(factory.host, server.address[1], **where)
        assert writer.get_extra_info("connection")._messages.outbox.sealing
        writer.write(LONG)
        writer.write_eof()
        assert await reader.read() == LONG
        writer.close()
        await writer.wait_closed()

    async with await start_server(echo, factory.host, **there) as messages:
        rounds = 0
        async for conn in reconnect(factory.host, messages.port, **where):
            assert conn._messages.outbox.sealing
            await conn.send(LONG)
            with await conn.recv() as message:
                assert message == LONG
            rounds += 1
            if rounds == 2:
                break
        assert rounds == 2
        await conn.close()


@one_loop
async def test_sealed_messages_larger_than_the_pool_do_not_deadlock(
    factory: ConnectionFactory,
) -> None:
    """Sealed copies are made outside the pool, so the two sides cannot wait for each other's
    memory.
    """
    config = replace(SMALL, pool_limit=8 << 20)
    async with factory.pair(config) as (client, server):
        data = pattern(6 << 20)
        into = bytearray(len(data))
        receiving = asyncio.create_task(server.recv_into(into))
        await client.send(data)
        await receiving
        assert into == data
        with client.alloc(2 << 20):
            sends = [asyncio.create_task(client.send(pattern(1 << 20, n))) for n in range(8)]
            for n in range(8):
                with await server.recv() as message:
                    assert message == pattern(1 << 20, n)
            await asyncio.gather(*sends)
