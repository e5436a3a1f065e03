"""The open socket of a TCP bootstrap, with or without TLS, until it is closed.

TCPLink is an asyncio protocol rather than a stream, because it needs no stream buffers and no
waiting task. The bootstrap reads a few short messages (connect_tcp.py). After that, the peer only
closes the socket, or sends the numbers of ended connections if several share the socket
(connection_group.py).
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import cast

from .._core import protocol
from .._core.refusal import (
    REFUSAL_SIZE,
    REJECTED_BY_APPLICATION,
    is_missing_key_refusal,
    unpack_refusal,
)
from .._native import fork
from ..cm.address import Address
from ..errors import (
    TLS_HINT,
    UNANNOUNCED,
    AuthenticationError,
    HandshakeBrokenError,
    ProtocolError,
    RejectedError,
    cause_text,
    host_port,
)
from .auth import NOT_THE_SAME_KEY

VIA_HINT = 'is an aiordma listener running there, with via="tcp" and not "cm"?'

REFUSED = b"refused\x01"

# The first two bytes of a TLS handshake and a TLS alert: the record type and the major version.
TLS_RECORDS = (b"\x16\x03", b"\x15\x03")

# The header of a bootstrap control message. It contains the magic and the message length.
_CONTROL = struct.Struct("<4sI")
CONTROL = b"ctrl"

# The message that reports the end of a connection while other connections still use the socket. It
# contains the magic and the connection number.
_ENDED = struct.Struct("<4sI")
ENDED = b"over"

# The maximum number of unsent bytes. If more accumulate, the socket is aborted.
MAX_UNSENT = 1 << 16

# During the bootstrap, reading stops if more than this many received bytes have not been processed.
# A complete bootstrap is shorter than this limit.
MAX_READ_AHEAD = 4096


def address_of(name: tuple[str, int] | tuple[str, int, int, int] | None) -> Address | None:
    """Return a socket name as (host, port), or None if the socket was reset.

    IPv4-mapped IPv6 addresses are converted to IPv4.
    """
    if not name:
        return None
    host = name[0]
    return host.removeprefix("::ffff:") if "." in host else host, name[1]


class TCPLink(asyncio.Protocol):
    """An asyncio protocol that owns the socket of a bootstrap connection."""

    local_address: Address | None = None
    peer_address: Address | None = None

    def __init__(self, connected: socket.socket) -> None:
        """Take ownership of a connected socket. asyncio must then create a transport for it."""
        self._loop = asyncio.get_running_loop()
        self._socket = connected
        self._transport: asyncio.Transport | None = None
        self._registered_inode = 0
        self._received = bytearray()
        self._is_lost = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._on_end: Callable[[str], None] | None = None
        self._on_member_ended: Callable[[int], None] | None = None

    # ---- asyncio.Protocol ----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._registered_inode = fork.register_socket(transport.get_extra_info("socket").fileno())
        self.local_address = address_of(transport.get_extra_info("sockname"))
        self.peer_address = address_of(transport.get_extra_info("peername"))

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self._on_end is not None:
            self._process_ended_numbers()
        elif len(self._received) > MAX_READ_AHEAD:
            assert self._transport is not None
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        self._error = exc
        if self._on_end is not None:
            self._process_ended_numbers()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    @property
    def _peer(self) -> str:
        return host_port(self.peer_address) if self.peer_address is not None else "the peer"

    # ---- the bootstrap -------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        """Send data that fits into the socket's send buffer.

        Raises:
            HandshakeBrokenError: If the connection is closed or broken.
        """
        if self._error is not None:
            raise self._handshake_error(self._error) from self._error
        assert self._transport is not None
        if self._is_lost:  # uvloop would raise a RuntimeError
            raise HandshakeBrokenError(f"{self._peer} closed the bootstrap connection")
        self._transport.write(data)

    async def read(self, size: int, magic: bytes) -> bytes:
        """Read a message of `size` bytes, and return it without `magic`, with which it begins.

        If it begins differently, an error is raised immediately. If it is a refusal, it is raised.
        """
        start = await self._read(len(magic))
        if start == magic:
            return await self._read(size - len(magic))
        if start == REFUSED:
            raise refusal(await self._read(REFUSAL_SIZE))
        raise self._bootstrap_error(start)

    def send_control(self, message: protocol.Message) -> None:
        """Send a control message in the bootstrap, unless the socket is closed.

        A closed socket is not an error here, because the data already received may contain the
        reason for closing it.
        """
        data = protocol.encode(message)
        if self._error is None and not self._is_lost:
            self.write(_CONTROL.pack(CONTROL, len(data)) + data)

    async def read_control(self) -> protocol.Message:
        """Read the next control message. If the peer sent a refusal instead, raise it."""
        start = await self._read(_CONTROL.size)
        if start == REFUSED:
            raise refusal(await self._read(REFUSAL_SIZE))
        magic, size = _CONTROL.unpack(start)
        if magic != CONTROL or size > protocol.MAX_LENGTH:
            raise self._bootstrap_error(start)
        return protocol.decode(await self._read(size))

    def _bootstrap_error(self, start: bytes) -> ProtocolError:
        if start.startswith(TLS_RECORDS):
            return ProtocolError(
                f"{self._peer} uses TLS for the bootstrap, but this side does not: {TLS_HINT}"
            )
        what = "a web server responded; " if start.startswith(b"HTTP/") else ""
        return ProtocolError(
            f"{self._peer} does not use the aiordma bootstrap: {what}it sent {start!r}; {VIA_HINT}"
        )

    async def _read(self, size: int) -> bytes:
        received = self._received
        while len(received) < size:
            if self._error is not None:
                raise self._handshake_error(self._error) from self._error
            if self._is_lost:
                raise HandshakeBrokenError(
                    f"{self._peer} closed the bootstrap connection after {len(received)} bytes; "
                    f"{VIA_HINT}"
                )
            self._waiter = self._loop.create_future()
            await self._waiter
        data = bytes(received[:size])
        del received[:size]
        return data

    def _handshake_error(self, error: Exception) -> HandshakeBrokenError:
        return HandshakeBrokenError(
            f"the bootstrap connection with {self._peer} broke: {cause_text(error)}; {VIA_HINT}"
        )

    # ---- after the bootstrap -------------------------------------------------------------

    def established(
        self, on_end: Callable[[str], None], on_member_ended: Callable[[int], None] | None = None
    ) -> None:
        """Finish the bootstrap and start calling the given callbacks.

        `on_end` is called once, with the reason, when the socket is closed or the peer sends
        unexpected data. `on_member_ended` is called with the number of each connection that the
        peer reports as ended. If `on_member_ended` is None, the peer must not send such reports.
        """
        self._on_end = on_end
        self._on_member_ended = on_member_ended
        if self._received or self._is_lost:
            self._loop.call_soon(self._process_ended_numbers)

    def send_ended(self, numbers: list[int]) -> None:
        """Send the numbers of ended connections. Abort the socket if the peer does not read."""
        if self._transport is None or self._transport.is_closing() or self._loop.is_closed():
            return
        self._transport.write(b"".join(_ENDED.pack(ENDED, number) for number in numbers))
        if self._transport.get_write_buffer_size() > MAX_UNSENT:
            self._transport.abort()

    def _process_ended_numbers(self) -> None:
        """Process the connection numbers that have arrived. Treat other data as an error."""
        while self._on_member_ended is not None and len(self._received) >= _ENDED.size:
            magic, number = _ENDED.unpack_from(self._received)
            if magic != ENDED:
                break
            del self._received[: _ENDED.size]
            self._on_member_ended(number)
        if self._on_member_ended is not None and ENDED.startswith(bytes(self._received[:4])):
            if not self._is_lost:
                return  # the rest has not arrived yet
            self._received.clear()  # an incomplete report is not unexpected data
        self._end()

    def _end(self) -> None:
        on_end, self._on_end = self._on_end, None
        self._on_member_ended = None
        if on_end is None:
            return  # closed in the meantime
        reason = "the peer sent data after the bootstrap" if self._received else UNANNOUNCED
        error = f": {self._error}" if self._error is not None else ""
        on_end(f"{reason} (the socket of the TCP bootstrap{error})")

    def close(self) -> None:
        self._on_end = self._on_member_ended = None

    def release(self) -> None:
        fork.unregister_socket(self._registered_inode)
        transport, self._transport = self._transport, None
        if self._loop.is_closed():
            self._socket.close()  # the transport cannot close it without the loop
        elif transport is not None:
            transport.close()


def refusal(data: bytes) -> RejectedError | ProtocolError | AuthenticationError:
    """Convert a refusal message from a listener to an exception."""
    why = unpack_refusal(data)
    if why is None:
        return ProtocolError(f"invalid refusal from the peer: {data[:8]!r}")
    if is_missing_key_refusal(data):
        return AuthenticationError(NOT_THE_SAME_KEY)
    why = why or "the connection was rejected"
    return RejectedError(why, reason=REJECTED_BY_APPLICATION, private_data=data, event="")
