"""Tests of servers that violate the protocol. The connection ends with a helpful error."""

from __future__ import annotations

import asyncio
import ctypes
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import pytest
import valkey.asyncio
from valkey.exceptions import ConnectionError as ValkeyConnectionError
from valkey_aiordma import stream
from valkey_aiordma.stream import COMMAND, FEATURE, MEMORY, Opcode
from valkey_aiordma.valkey import RDMAConnection

from aiordma import AsyncConnectionId, AsyncQueuePair, ReceiveRing, verbs
from aiordma.errors import ProtocolError, RemoteInvalidRequestError, WorkRequestFlushedError

from .conftest import HOST

ROOM = verbs.QPCapabilities(max_send_wr=64, max_recv_wr=64)


@dataclass
class Peer:
    """The server's end of a connection, controlled by the test."""

    queue: AsyncQueuePair
    receives: ReceiveRing
    memory: verbs.MemoryRegion
    lent: tuple[int, int, int] = (0, 0, 0)

    async def begin(self) -> None:
        """Receive the client's first two commands, and check their contents."""
        _, command = await self.receives.get()
        assert FEATURE.unpack(command) == (Opcode.GET_SERVER_FEATURE, 0, 0)
        await self.take_lent()

    async def take_lent(self) -> None:
        _, command = await self.receives.get()
        opcode, *lent = MEMORY.unpack(command)
        assert opcode == Opcode.REGISTER_XFER_MEMORY
        self.lent = (lent[0], lent[1], lent[2])

    async def command(self, command: bytes) -> None:
        self.memory.buf[: len(command)] = command
        await self.queue.send([self.memory.sge(0, len(command))])

    async def lend(self, length: int) -> None:
        memory = self.memory
        await self.command(
            MEMORY.pack(Opcode.REGISTER_XFER_MEMORY, memory.addr, length, memory.rkey)
        )

    async def write(self, data: bytes, said: int | None = None) -> None:
        self.memory.buf[: len(data)] = data
        address, _, rkey = self.lent
        count = len(data) if said is None else said
        await self.queue.write([self.memory.sge(0, len(data))], address, rkey, imm=count)

    async def is_heard(self, writer: asyncio.StreamWriter) -> None:
        """Wait until the client has processed everything sent so far.

        This method lends the client one byte. The client processes messages in order, so it has
        processed all earlier ones when it writes to this byte.
        """
        await self.lend(1)
        writer.write(b"x")
        completion, _ = await self.receives.get()
        assert (completion.imm_data, completion.opcode) == (1, verbs.WCOpcode.RECV_RDMA_WITH_IMM)

    async def fill(self, writer: asyncio.StreamWriter) -> bytes:
        """Fill the buffer that the client has lent, and return the data."""
        pieces = [bytes([i]) * (1 << 16) for i in range(stream.RECEIVE_BUFFER_SIZE >> 16)]
        address, length, rkey = self.lent
        for i, piece in enumerate(pieces):
            self.lent = address + (i << 16), length, rkey
            await self.write(piece)
        await self.is_heard(writer)  # checks that the client has not lent the buffer again
        return b"".join(pieces)


Opening: TypeAlias = asyncio.Task[tuple[asyncio.StreamReader, asyncio.StreamWriter]]


@asynccontextmanager
async def requested() -> AsyncIterator[tuple[AsyncConnectionId, Opening]]:
    """Yield a pending connection request, and the client task that waits for its acceptance."""
    async with AsyncConnectionId() as listener:
        listener.id.bind_addr((HOST, 0))
        listener.listen()
        address = listener.id.local_address
        assert address is not None
        opening = asyncio.create_task(stream.open_connection(*address, keepalive=True))
        async with await listener.get_request() as request:
            yield request, opening


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter, Peer]]:
    async with requested() as (request, opening):
        queue = request.create_qp(ROOM)
        rights = verbs.AccessFlags.LOCAL_WRITE | verbs.AccessFlags.REMOTE_WRITE
        peer = Peer(queue, queue.receives(32, 64), request.pd.reg_mr(1 << 16, rights))
        await request.accept()
        reader, writer = await opening
        await peer.begin()
        try:
            yield reader, writer, peer
        finally:
            writer.transport.abort()


async def test_conforming_server_exchanges_data() -> None:
    async with connected() as (reader, writer, peer):
        await peer.command(FEATURE.pack(Opcode.GET_SERVER_FEATURE, 0, 0))
        await peer.command(COMMAND.pack(Opcode.KEEPALIVE, 0))
        with pytest.raises(TypeError, match="addresses in this process"):
            writer.write(memoryview((ctypes.py_object * 2)()))
        writer.write(b"before there is room")
        await peer.lend(5)
        completion, _ = await peer.receives.get()
        assert (completion.imm_data, bytes(peer.memory.buf[:5])) == (5, b"befor")
        await peer.lend(1 << 16)
        completion, _ = await peer.receives.get()
        assert bytes(peer.memory.buf[: completion.imm_data]) == b"e there is room"
        await peer.write(b"+OK\r\n")
        assert await reader.readline() == b"+OK\r\n"


@pytest.mark.parametrize(
    ("misbehave", "text"),
    [
        (
            lambda peer: peer.write(b"+OK\r\n", said=stream.RECEIVE_BUFFER_SIZE + 1),
            "of a buffer of 1048576 bytes",
        ),
        (lambda peer: peer.write(b"+OK\r\n", said=0xFFFFFFFF), "wrote 4294967295 bytes"),
        (lambda peer: peer.write(b"", said=0), "wrote 0 bytes"),
        (lambda peer: peer.command(b"\0\3"), "a command of 2 bytes"),
        (lambda peer: peer.command(bytes(31)), "a command of 31 bytes"),
        (lambda peer: peer.command(COMMAND.pack(77, 0)), "unknown command 77"),
        (lambda peer: peer.command(COMMAND.pack(Opcode.SET_CLIENT_FEATURE, 0)), "unknown command"),
        (lambda peer: peer.command(FEATURE.pack(Opcode.GET_SERVER_FEATURE, 0, 5)), "features 0x5"),
    ],
)
async def test_protocol_violation_resets_the_connection(
    misbehave: Callable[[Peer], Awaitable[None]], text: str
) -> None:
    async with connected() as (reader, writer, peer):
        await misbehave(peer)
        with pytest.raises(ConnectionResetError, match=text) as caught:
            await reader.readline()
        assert isinstance(caught.value.__cause__, ProtocolError)
        with pytest.raises(ConnectionResetError):
            await writer.drain()


@pytest.mark.parametrize("error", [OSError(5, "of the device"), ValueError("of a field")])
@pytest.mark.parametrize("where", ["_on_bytes", "_on_command"])
async def test_unexpected_exception_resets_the_connection(
    where: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(transport: stream.ValkeyTransport, _: object) -> None:
        raise error

    async with connected() as (reader, writer, peer):
        monkeypatch.setattr(stream.ValkeyTransport, where, fail)
        with suppress(WorkRequestFlushedError):  # the client disconnects after the first message
            await peer.lend(1 << 16)
            await peer.write(b"+OK\r\n")
        with pytest.raises(ConnectionResetError) as caught:
            await reader.readline()
        assert caught.value.__cause__ is error
        assert writer.is_closing()


@pytest.mark.parametrize("paused", [False, True])
async def test_exception_in_data_received_resets_the_connection(paused: bool) -> None:
    """The stream reader raises an error if it receives data after EOF."""
    async with connected() as (reader, writer, peer):
        reader.feed_eof()
        if paused:
            writer.transport.pause_reading()  # type: ignore[attr-defined]
        await peer.write(b"+OK\r\n")
        if paused:
            await peer.is_heard(writer)
            writer.transport.resume_reading()  # type: ignore[attr-defined]
        with pytest.raises(ConnectionResetError):
            await writer.wait_closed()


def refuse(*_: object, **__: object) -> None:
    raise ValueError("of a field")


@pytest.mark.parametrize("verb", ["send_nowait", "write_nowait"])
async def test_connection_is_reset_when_posting_fails(
    verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connected() as (reader, writer, peer):
        await peer.lend(1 << 16)
        monkeypatch.setattr(AsyncQueuePair, verb, refuse)
        writer.write(b"PING\r\n")
        writer.transport._lend_buffer()
        with pytest.raises(ConnectionResetError, match="of a field"):
            await reader.readline()


async def test_oversized_command_resets_the_connection() -> None:
    """The device rejects the command, because the receive buffer has only 32 bytes."""
    async with connected() as (reader, _, peer):
        with pytest.raises(RemoteInvalidRequestError):
            await peer.command(bytes(64))
        with pytest.raises(ConnectionResetError):
            await reader.readline()


async def test_invalid_remote_key_resets_the_connection() -> None:
    async with connected() as (reader, writer, peer):
        await peer.command(MEMORY.pack(Opcode.REGISTER_XFER_MEMORY, 4096, 4096, 0xDEAD))
        writer.write(b"PING\r\n")
        with pytest.raises(ConnectionResetError, match="IBV_WC_REM_ACCESS_ERR"):
            await reader.readline()


async def test_drain_waits_when_the_server_lends_no_buffer() -> None:
    """The transport keeps written data. A client that waits for space needs its own timeout."""
    async with connected() as (_, writer, peer):
        await peer.lend(0)
        writer.write(bytes(2 * stream.HIGH_WATER))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await writer.drain()
        assert writer.transport.get_write_buffer_size() == 2 * stream.HIGH_WATER


@pytest.mark.parametrize("end", ["room", "disconnect"])
async def test_close_completes_while_reading_is_paused(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client still needs the server's commands, and must still notice a disconnect."""
    monkeypatch.setattr(stream, "KEEPALIVE", 1e6)  # no keep-alive commands between the writes
    async with connected() as (reader, writer, peer):
        await peer.lend(5)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(b"hello, world")
        assert (await peer.receives.get())[0].imm_data == 5
        writer.close()
        await peer.write(b"never read")
        if end == "room":
            await peer.lend(1 << 16)
            assert (await peer.receives.get())[0].imm_data == 7
            await writer.wait_closed()
            assert await reader.read() == b""
        else:
            peer.queue.close()
            await asyncio.gather(writer.wait_closed(), return_exceptions=True)


async def test_data_received_while_paused_is_delivered_after_resuming(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The client lends the buffer again only after the protocol has received all data in it."""
    monkeypatch.setattr(stream, "KEEPALIVE", 1e6)  # no keep-alive commands from the client
    async with connected() as (reader, writer, peer):
        transport: Any = writer.transport
        transport.pause_reading()
        sent = await peer.fill(writer)
        assert not reader._buffer  # type: ignore[attr-defined]
        transport.resume_reading()
        transport.pause_reading()
        await peer.is_heard(writer)
        assert not reader._buffer  # type: ignore[attr-defined]
        transport.resume_reading()
        assert await reader.readexactly(len(sent)) == sent
        await peer.take_lent()
        await peer.write(b"and on")
        assert await reader.readexactly(6) == b"and on"


@pytest.mark.parametrize("end", ["disconnect", "violation"])
async def test_paused_data_is_delivered_before_connection_lost(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The protocol receives the remaining data before it learns of the lost connection."""
    monkeypatch.setattr(stream, "KEEPALIVE", 1e6)
    async with connected() as (reader, writer, peer):
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        sent = await peer.fill(writer)
        if end == "violation":
            await peer.write(b"", said=4)  # exceeds the lent buffer
            with pytest.raises(ConnectionResetError, match="wrote 4 bytes at offset 1048576 of"):
                await writer.wait_closed()
        else:
            peer.queue.close()
            await asyncio.gather(writer.wait_closed(), return_exceptions=True)
        assert reader._buffer == sent  # type: ignore[attr-defined]


@pytest.mark.parametrize("paused", [False, True])
async def test_client_receives_data_after_a_flood_of_keep_alives(paused: bool) -> None:
    async with connected() as (reader, writer, peer):
        transport: Any = writer.transport
        if paused:
            transport.pause_reading()
        for _ in range(1000):
            await peer.command(COMMAND.pack(Opcode.KEEPALIVE, 0))
        await peer.write(b"+OK\r\n")
        transport.resume_reading()
        assert await reader.readline() == b"+OK\r\n"


async def test_keep_alive_commands_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "KEEPALIVE", 0.001)
    async with connected() as (_, _, peer):
        for _ in range(3):
            _, command = await peer.receives.get()
            assert COMMAND.unpack(command) == (Opcode.KEEPALIVE, 0)


async def test_failed_keep_alive_resets_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keep-alive task detects the failure, and ends together with the connection."""
    monkeypatch.setattr(stream, "KEEPALIVE", 0.001)
    async with connected() as (reader, writer, _):
        monkeypatch.setattr(AsyncQueuePair, "send_nowait", refuse)
        with pytest.raises(ConnectionResetError, match="of a field"):
            await reader.readline()
        receiving, sending = writer.transport._tasks
        await asyncio.wait([receiving, sending])
        assert sending.cancelled()


async def test_connection_is_reset_when_startup_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection fails before it has started its tasks."""
    monkeypatch.setattr(AsyncQueuePair, "send_nowait", refuse)
    async with requested() as (request, opening):
        request.create_qp(ROOM)
        await request.accept()
        reader, writer = await opening
        with pytest.raises(ConnectionResetError, match="of a field"):
            await reader.readline()
        assert not writer.transport._tasks


async def test_stream_ends_after_the_received_data_when_the_peer_disconnects() -> None:
    async with connected() as (reader, writer, peer):
        await peer.write(b"last words")
        peer.queue.close()
        assert await reader.read() == b"last words"
        await writer.wait_closed()


async def test_cancelled_open_disconnects_only_after_the_server_accepts() -> None:
    """A Valkey 9.1 server would crash if it accepted a request that the client had withdrawn."""
    async with AsyncConnectionId() as listener:
        listener.id.bind_addr((HOST, 0))
        listener.listen()
        address = listener.id.local_address
        assert address is not None
        opening = asyncio.create_task(stream.open_connection(*address))
        async with await listener.get_request() as request:
            opening.cancel()
            with pytest.raises(asyncio.CancelledError):
                await opening
            gc.collect()
            request.create_qp(ROOM)
            await request.accept()
            assert (await request.wait_disconnected()).event == "RDMA_CM_EVENT_DISCONNECTED"


async def test_rejection_raises_connection_error() -> None:
    async with AsyncConnectionId() as listener:
        listener.id.bind_addr((HOST, 0))
        listener.listen()
        address = listener.id.local_address
        assert address is not None
        client: Any = valkey.asyncio.Valkey.from_pool(
            valkey.asyncio.ConnectionPool(
                connection_class=RDMAConnection, host=address[0], port=address[1]
            )
        )
        pinging = asyncio.create_task(client.ping())
        (await listener.get_request()).reject()
        with pytest.raises(ValkeyConnectionError, match="rejected the connection"):
            await pinging
        await client.aclose()
