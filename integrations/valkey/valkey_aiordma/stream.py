"""An asyncio transport for Valkey over RDMA, which implements the client side of the protocol.

Each side lends the other a buffer, using the command RegisterXferMemory. To send data, a side
writes the data into the borrowed buffer, and passes the length as immediate data. Once a buffer is
full and its owner has read the data, the owner lends the buffer again. Commands are 32-byte
messages in big-endian byte order. The section "Protocol" of https://valkey.io/topics/RDMA describes
the protocol.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import struct
from enum import IntEnum
from typing import Any, Final

from aiordma import AsyncConnectionId, ReceiveRing
from aiordma.errors import AddressError, ConnectionManagerError, ProtocolError
from aiordma.verbs import AccessFlags, QPCapabilities, WCOpcode, WorkCompletion, bytes_of

RECEIVE_BUFFER_SIZE: Final = 1 << 20  # of the buffer lent to the server; the server's default
MAX_WRITE_SIZE: Final = 256 << 10  # maximum number of bytes per write
RECEIVES: Final = 128  # each of the server's writes and commands consumes one
HIGH_WATER: Final = 64 << 10  # number of pending bytes, as for asyncio's sockets
KEEPALIVE: Final = 3.0  # seconds between commands, as on the server

COMMAND: Final = struct.Struct(">HH28x")
FEATURE: Final = struct.Struct(">HH20xQ")
MEMORY: Final = struct.Struct(">H14xQII")


class Opcode(IntEnum):
    """The type of a command, stored in the command's first field."""

    GET_SERVER_FEATURE = 0
    SET_CLIENT_FEATURE = 1
    KEEPALIVE = 2
    REGISTER_XFER_MEMORY = 3


class ValkeyTransport(asyncio.Transport):
    """A byte stream to a Valkey server, created by :func:`open_connection`.

    Written data stays in ``_pending`` until there is space in the server's buffer. Received data is
    passed to the protocol immediately. While the protocol has paused reading, received data stays
    in the lent buffer, between ``_delivered`` and ``_arrived``. The server's commands are processed
    even while reading is paused, because they can make more space available for pending data.
    """

    def __init__(
        self, id: AsyncConnectionId, protocol: asyncio.BaseProtocol, keepalive: bool
    ) -> None:
        super().__init__({"peername": id.id.peer_address, "connection": id})
        self._loop = asyncio.get_running_loop()
        self._protocol: Any = protocol
        self._id = id
        self._queue = id.create_qp(QPCapabilities(64, RECEIVES, max_inline_data=32))
        self._receives: ReceiveRing = self._queue.receives(RECEIVES, COMMAND.size)
        rights = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE
        self._receive_buffer = id.pd.reg_mr(RECEIVE_BUFFER_SIZE, rights)
        self._memory = self._receive_buffer.buf
        self._delivered = self._arrived = 0  # offsets in the lent buffer
        self._send_buffer = id.pd.reg_mr(MAX_WRITE_SIZE)
        self._commands = id.pd.reg_mr(COMMAND.size)
        self._address = self._rkey = self._remote_space = 0  # unused part of the server's buffer
        self._pending = bytearray()
        self._writing = self._paused = self._closing = self._disconnected = False
        self._reading = True
        self._keepalive = keepalive
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Connect and lend the server a buffer. The server lends its own buffer later."""
        await self._id.connect()
        self._command(FEATURE.pack(Opcode.GET_SERVER_FEATURE, 0, 0))
        self._lend_buffer()
        self._protocol.connection_made(self)
        if self._disconnected:  # a command failed
            return
        self._tasks = [self._loop.create_task(self._receive())]
        if self._keepalive:
            self._tasks.append(self._loop.create_task(self._keep_alive()))

    # ---- commands ------------------------------------------------------------------------

    def _command(self, command: bytes) -> None:
        if self._disconnected:
            return
        self._commands.buf[:] = command  # an inline send copies it immediately
        try:
            self._queue.send_nowait([self._commands.sge()], inline=True)
        except Exception as error:
            self._disconnect(error)

    def _lend_buffer(self) -> None:
        self._delivered = self._arrived = 0
        lent = self._receive_buffer
        self._command(MEMORY.pack(Opcode.REGISTER_XFER_MEMORY, lent.addr, lent.length, lent.rkey))

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(KEEPALIVE)
            self._command(COMMAND.pack(Opcode.KEEPALIVE, 0))

    # ---- receiving -----------------------------------------------------------------------

    async def _receive(self) -> None:
        try:
            async for completion, command in self._receives:
                if completion.opcode is WCOpcode.RECV_RDMA_WITH_IMM:
                    self._on_bytes(completion.imm_data or 0)
                else:
                    self._on_command(command)
        except Exception as error:  # otherwise, the client would wait forever
            self._disconnect(error)

    def _on_bytes(self, count: int) -> None:
        start = self._arrived
        if not 0 < count <= RECEIVE_BUFFER_SIZE - start:
            raise ProtocolError(
                f"the server wrote {count} bytes at offset {start} of a buffer of "
                f"{RECEIVE_BUFFER_SIZE} bytes"
            )
        self._arrived += count
        if self._reading:
            self._deliver()

    def _deliver(self) -> None:
        """Pass received data to the protocol. If the whole buffer has been read, lend it again."""
        if data := self._read_received():
            self._protocol.data_received(data)
        if self._delivered == RECEIVE_BUFFER_SIZE:
            self._lend_buffer()

    def _read_received(self) -> bytes:
        start, self._delivered = self._delivered, self._arrived
        return b"" if self._closing else bytes(self._memory[start : self._arrived])

    def _on_command(self, command: memoryview) -> None:
        if len(command) != COMMAND.size:
            raise ProtocolError(
                f"the server sent a command of {len(command)} bytes instead of {COMMAND.size}"
            )
        opcode, _ = COMMAND.unpack(command)
        if opcode == Opcode.REGISTER_XFER_MEMORY:
            _, self._address, self._remote_space, self._rkey = MEMORY.unpack(command)
            self._flush()
        elif opcode == Opcode.GET_SERVER_FEATURE:
            *_, features = FEATURE.unpack(command)
            if features:
                raise ProtocolError(
                    f"the server announced features {features:#x} that were not requested"
                )
        elif opcode != Opcode.KEEPALIVE:
            raise ProtocolError(f"received unknown command {opcode} from the server")

    def pause_reading(self) -> None:
        """Stop passing data to the protocol. Received data stays in the lent buffer."""
        if not self._closing:
            self._reading = False

    def resume_reading(self) -> None:
        """Resume passing data to the protocol in the next event loop iteration.

        A stream reader calls this method before it starts waiting for data. Data passed to the
        protocol during the call would not wake the reader.
        """
        self._reading = True
        if self._delivered < self._arrived:
            self._loop.call_soon(self._resume_delivery)

    def _resume_delivery(self) -> None:
        if self._reading:
            try:
                self._deliver()
            except Exception as error:
                self._disconnect(error)

    # ---- writing -------------------------------------------------------------------------

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Copy the data and send it as soon as there is space in the server's buffer."""
        if self._disconnected or self._closing:
            return
        self._pending += data if isinstance(data, bytes | bytearray) else bytes_of(data)
        self._flush()
        if len(self._pending) > HIGH_WATER and not self._paused:
            self._paused = True
            self._protocol.pause_writing()

    def _flush(self) -> None:
        """Start sending pending data if no write is in flight.

        Data added during a write is combined into one write once the current write has completed.
        """
        count = min(len(self._pending), self._remote_space, MAX_WRITE_SIZE)
        if self._writing or not count:
            return
        self._send_buffer.buf[:count] = self._pending[:count]
        piece = self._send_buffer.sge(0, count)
        try:
            written = self._queue.write_nowait([piece], self._address, self._rkey, imm=count)
        except Exception as error:
            self._disconnect(error)
            return
        del self._pending[:count]
        self._writing = True
        self._address, self._remote_space = self._address + count, self._remote_space - count
        written.add_done_callback(self._on_written)

    def _on_written(self, written: asyncio.Future[WorkCompletion]) -> None:
        self._writing = False
        if self._disconnected or written.exception() is not None:
            return  # the receives fail as well
        self._flush()
        if self._paused and len(self._pending) <= HIGH_WATER:
            self._paused = False
            self._protocol.resume_writing()
        if self._closing and not self._pending and not self._writing:
            self._disconnect(None)

    def get_write_buffer_size(self) -> int:
        """Return the number of bytes waiting for space in the server's buffer."""
        return len(self._pending)

    # ---- closing -------------------------------------------------------------------------

    def is_closing(self) -> bool:
        """Return whether the transport is closed, or will be closed once all data has been sent."""
        return self._closing or self._disconnected

    def close(self) -> None:
        """Close the transport once all data has been sent.

        Data received in the meantime is dropped.
        """
        self._closing = self._reading = True
        self._deliver()
        if not self._pending and not self._writing:
            self._disconnect(None)

    def abort(self) -> None:
        """Close the transport immediately, dropping all unread and unsent data."""
        self._closing = True
        self._disconnect(None)

    def _disconnect(self, error: Exception | None) -> None:
        if self._disconnected:
            return
        self._disconnected = True
        for task in self._tasks:  # even the current task, if it detected the error
            task.cancel()
        self._id.close()
        reset: OSError | None = None
        # Report a disconnect as the normal end of the stream, and other errors as a reset.
        if error is not None and not isinstance(error.__cause__, ConnectionManagerError):
            reset = ConnectionResetError(errno.ECONNRESET, str(error.__cause__ or error))
            reset.__cause__ = error
        self._loop.call_soon(self._end, reset)

    def _end(self, reset: OSError | None) -> None:
        """Deliver the remaining data, even if reading is paused, and report the lost connection."""
        try:
            if data := self._read_received():
                self._protocol.data_received(data)
        finally:
            self._protocol.connection_lost(reset)


async def _connect(
    device: str | None, address: tuple[str, int], protocol: asyncio.BaseProtocol, keepalive: bool
) -> ValkeyTransport:
    id = AsyncConnectionId(device)
    try:
        await id.resolve_addr(address)
        await id.resolve_route()
        transport = ValkeyTransport(id, protocol, keepalive)
        await transport.start()
    except BaseException:
        id.close()
        raise
    return transport


def _drop(connecting: asyncio.Task[ValkeyTransport]) -> None:
    if not connecting.cancelled() and connecting.exception() is None:
        connecting.result().abort()


async def open_connection(
    host: str,
    port: int,
    *,
    device: str | None = None,
    keepalive: bool = False,
    limit: int = 1 << 16,
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to a Valkey server's RDMA port, and return a stream reader and a stream writer.

    This function is like ``asyncio.open_connection``, which connects to a TCP port. If the host has
    several addresses, they are tried one after another. If all attempts fail, the last attempt's
    OSError is raised.

    Cancelling the call takes effect immediately. However, the connection stays open until the
    server has responded, because a Valkey 9.1 server would crash otherwise.
    """
    if "\0" in host:  # the resolver would ignore the rest of the name
        raise AddressError(f"host {host!r} contains a null character")
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit, loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    failure: OSError | None = None
    for *_, (ip, number, *_) in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        address = str(ip), int(number)
        connecting = loop.create_task(_connect(device, address, protocol, keepalive))
        try:
            transport = await asyncio.shield(connecting)
        except OSError as error:
            failure = error
        except asyncio.CancelledError:
            connecting.add_done_callback(_drop)
            raise
        else:
            return reader, asyncio.StreamWriter(transport, protocol, reader, loop)
    assert failure is not None
    raise failure
