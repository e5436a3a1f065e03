"""An `asyncio.Transport` over a connection: a byte stream for protocols written for TCP.

The stream is sent as messages over the connection. Each non-empty message carries the next part of
the stream. An empty message means that the sender has finished sending (`write_eof`). If the
connection is closed without an empty message, both directions end.

Design rationale:

- Sending a message costs about the same whether it contains ten bytes or ten thousand. Writes made
  while a few messages are in flight are therefore joined into one message.
- `write` never waits, so data is buffered until the peer has space for it. Data not yet passed to
  the connection counts towards the transport's watermarks. `WINDOW` limits the amount of data
  passed to the connection but not yet sent.
- After `pause_reading`, no data may be delivered. The connection then holds on to the messages and
  does not return their credits, which slows the peer down.
- A message's memory goes back to the pool after use, so `data_received` gets a copy. For a
  BufferedProtocol, data is copied straight from the message into the protocol's buffer.
- When a program closes or aborts a TCP socket, or exits without closing it, the kernel still
  delivers the data written to it. Here, the connection does this, for up to `Config.close_timeout`.
  To make this possible, the event loop's shutdown code takes over a stream's connection when the
  stream ends.
"""

from __future__ import annotations

import asyncio
import logging
from asyncio.sslproto import SSLProtocol
from asyncio.streams import FlowControlMixin
from asyncio.transports import _FlowControlMixin
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from .._core.arguments import refusal
from .._event_loop import shutdown
from .._event_loop.affinity import LoopAffinity
from .._event_loop.futures import settle
from .._event_loop.shutdown import EXITS, background
from ..errors import TLS_HINT, ConnectionClosedError, ProtocolError, host_port
from ..transport import Connection, Message, MessageClaim
from ..verbs import bytes_of
from ..verbs._memory.buffers import require_data
from .sockets import socket_name, transport_socket

logger: logging.Logger = logging.getLogger("aiordma.streams")

# The maximum size of a stream's messages in bytes, unless the peer accepts less. Larger messages
# cost less per byte, and smaller messages let the reader start earlier.
MAX_MESSAGE_SIZE = 256 << 10
# The number of bytes in flight at which the stream stops passing data to the connection.
WINDOW = 1 << 20
# The number of messages in flight at which further writes are joined into one message.
EAGER_WRITES = 4
# Exceptions raised by operations after the connection has ended. ProtocolError is not a subclass of
# ConnectionError.
ENDED = (ConnectionError, ProtocolError)

# The content type of a TLS client's first record (RFC 8446, section 5.1).
TLS_HANDSHAKE = 0x16

NO_TLS = f"the server of this stream uses TLS, but its client does not: {TLS_HINT}"
NOT_READ = "{} closed the stream before it had read all data"
NOT_SENT = "the connection to {} ended before all data was sent"


def take_buffered(protocol: object) -> bytes:
    """Remove and return the unread data in a `StreamReader`, for `start_tls`.

    This data is the beginning of the TLS handshake. Without this function, asyncio would leave the
    data in the reader, and TLS would wait for the data forever.
    """
    reader = getattr(protocol, "_stream_reader", None)
    if not isinstance(reader, asyncio.StreamReader):
        return b""
    buffer: bytearray = vars(reader)["_buffer"]
    unread = bytes(buffer)
    buffer.clear()
    return unread


def make_drain_fail(protocol: object) -> None:
    """Make `StreamWriter.drain` raise ConnectionResetError after `close`, as it does over TCP.

    `drain` fails once `connection_lost` has been called. Over TCP, `connection_lost` is called as
    soon as all data has been passed to the kernel. Over RDMA, `connection_lost` is not called until
    the peer has received all data. Without this function, `drain` would succeed until then.
    """
    if isinstance(protocol, FlowControlMixin):
        vars(protocol)["_connection_lost"] = True


def reset_error(connection: Connection, text: str) -> ConnectionResetError:
    address = connection.peer_address
    peer = f"the peer {host_port(address)}" if address else "the peer"
    return ConnectionResetError(text.format(peer))


class _Outbox:
    """Written data that the connection has not yet sent."""

    def __init__(self, connection: Connection, messages: MessageClaim) -> None:
        self._connection = connection
        self._messages = messages
        self._max_message_size = max(1, min(MAX_MESSAGE_SIZE, connection.max_message))
        self._chunks: deque[memoryview] = deque()  # not yet passed to the connection
        self.size = 0  # total size of `_chunks` in bytes
        self.messages_in_flight = 0
        self._bytes_in_flight = 0
        self.undelivered = False  # whether written data was lost
        self.send_error: BaseException | None = None  # the error that ended sending
        self.eof_written = False
        self.eof_pending = False  # whether the end of the stream must still be sent
        self._idle: asyncio.Future[None] | None = None  # done when all data has been sent

    def append(self, data: bytes | memoryview) -> None:
        self._chunks.append(memoryview(data))
        self.size += len(data)

    @property
    def has_unsent(self) -> bool:
        """Whether some written data could not be sent, or has not yet reached the connection."""
        return bool(self.undelivered or self.size)

    def _has_sendable_message(self) -> bool:
        """Return whether data fits into the window or, without data, the end is to be sent."""
        return self._bytes_in_flight < WINDOW if self.size else self.eof_pending

    def _take_message(self) -> memoryview:
        """Remove and return the data of the next message, joining small chunks."""
        most = self._max_message_size
        first = self._chunks.popleft() if self._chunks else memoryview(b"")
        if len(first) < most and self._chunks:
            joined = bytearray(first)
            while self._chunks and len(joined) + len(self._chunks[0]) <= most:
                joined += self._chunks.popleft()
            first = memoryview(joined)
        elif len(first) > most:
            self._chunks.appendleft(first[most:])
            first = first[:most]
        self.size -= len(first)
        return first

    def flush(self, on_sent: Callable[[], object]) -> None:
        """Pass as much queued data to the connection as the window allows.

        `on_sent` is called each time a message has been sent or has failed.
        """
        while self.send_error is None and self._has_sendable_message():
            if not self.size:
                self.eof_pending = False  # an empty message, which follows, ends the stream
            piece = self._take_message()
            try:
                future = self._messages.send_nowait(piece)
            except Exception as error:
                self._record_send_failure(len(piece), error)
            else:
                self.messages_in_flight += 1
                self._bytes_in_flight += len(piece)
                future.add_done_callback(partial(self._sent, len(piece), on_sent))

    def _sent(self, size: int, on_sent: Callable[[], object], future: asyncio.Future[None]) -> None:
        """Update the amount in flight after a message has been sent or has failed."""
        self.messages_in_flight -= 1
        self._bytes_in_flight -= size
        error = None if future.cancelled() else future.exception()
        if error is not None:
            self._record_send_failure(size, error)
        on_sent()
        if self.undelivered or not self.messages_in_flight:
            self._wake_waiters()

    def _record_send_failure(self, size: int, error: BaseException) -> None:
        self.undelivered |= size > 0
        self.send_error = self.send_error or error

    async def wait(self) -> None:
        """Wait until nothing is in flight, and raise an error if not everything was sent."""
        if self.undelivered:
            raise reset_error(self._connection, NOT_SENT)
        if self.size or self.messages_in_flight:
            self._idle = self._idle or asyncio.get_running_loop().create_future()
            await asyncio.shield(self._idle)

    def _wake_waiters(self) -> None:
        """Wake the tasks waiting in `wait()` after all data has been sent or sending has failed."""
        idle, self._idle = self._idle, None
        if idle is not None:
            settle(
                idle, None, reset_error(self._connection, NOT_SENT) if self.undelivered else None
            )

    def drop(self) -> None:
        """Discard the queued data. Nothing more will be sent."""
        self._chunks.clear()
        self.size = 0
        self.undelivered = True
        self._wake_waiters()


class _Inbox:
    """Received data that has not yet been passed to the protocol."""

    def __init__(self, connection: Connection) -> None:
        self.messages = connection.claim_messages("a stream")
        self.message: Message | None = None  # current message
        self.delivered_bytes = 0  # bytes of `message` already delivered
        self.before_tls = b""  # TLS data received before start_tls
        self.is_buffered = False
        self._queue_lengths = connection._messages.figures

    @property
    def has_unread(self) -> bool:
        """Whether received data has not been delivered yet."""
        return self.message is not None or bool(self._queue_lengths().get("arrived"))

    def drop(self) -> None:
        if self.message is not None:
            self.message.release()
            self.message = None

    def deliver(self, protocol: Any, data: memoryview) -> int:
        """Pass data to the protocol, and return the number of bytes accepted."""
        count = len(data)
        if self.is_buffered:
            buffer = bytes_of(protocol.get_buffer(count), target=True)
            count = min(len(buffer), count)
            if not count:
                raise RuntimeError(f"{protocol!r}.get_buffer() returned an empty buffer")
            buffer[:count] = data[:count]
            buffer.release()
            protocol.buffer_updated(count)
        else:
            protocol.data_received(bytes(data))
        return count


class StreamTransport(_FlowControlMixin):
    """An `asyncio.Transport` that runs over a connection.

    `create_connection` and `create_server` create these transports. All features that asyncio
    documents for transports are supported: a write buffer with watermarks, flow control in both
    directions, half-closing, `abort`, and buffered protocols. `get_extra_info` accepts these names:

    - `peername` and `sockname`: The peer's address and the local address.
    - `socket`: An `asyncio.trsock.TransportSocket` that is not backed by a real socket.
    - `connection`: The underlying `Connection`.
    """

    # `loop.start_tls` rejects transports without this attribute.
    _start_tls_compatible = True

    # Declare the flow-control members inherited from asyncio for the type checker.
    _loop: asyncio.AbstractEventLoop
    _protocol_paused: bool  # whether asyncio has told the protocol to stop writing
    _maybe_pause_protocol: Callable[[], None]
    _maybe_resume_protocol: Callable[[], None]

    def __init__(
        self,
        connection: Connection,
        protocol: asyncio.BaseProtocol,
        on_lost: Callable[[StreamTransport], None] | None = None,
        *,
        awaits_tls: bool = False,
    ) -> None:
        if not hasattr(protocol, "connection_made"):
            raise TypeError(
                refusal("the result of protocol_factory", "an asyncio protocol", protocol)
            )
        self._socket, socket = transport_socket(
            connection.local_address, connection.peer_address, self._is_readable
        )
        super().__init__(
            {
                "peername": socket_name(connection.peer_address),
                "sockname": socket_name(connection.local_address),
                "socket": socket,
                "connection": connection,
            },
            loop=asyncio.get_running_loop(),
        )
        self._affinity = LoopAffinity()
        self._connection = connection
        self._inbox = _Inbox(connection)
        self._loop_shutdown = shutdown.for_running_loop()
        self._loop_shutdown.take_over(self, connection)
        self._on_lost = on_lost
        self._awaits_tls = awaits_tls  # the client has not begun the TLS handshake yet
        self._outbox = _Outbox(connection, self._inbox.messages)
        self._eof_received = False
        self._reading_paused = False
        self._closing = False
        self._lost = False  # whether `connection_lost` has been scheduled
        self._close_task: asyncio.Task[None] | None = None
        # The task that detects the connection's end while the transport is closing.
        self._connection_watcher: asyncio.Task[None] | None = None
        self._protocol: Any = None  # duck-typed, possibly without asyncio's base classes
        self.set_protocol(protocol)
        self._loop.call_soon(self._call, "in connection_made()", protocol.connection_made, self)
        self._reader: asyncio.Task[None] | None = None
        self._loop.call_soon(self._start_reading)

    def __repr__(self) -> str:
        state = "closed" if self._lost else "closing" if self._closing else "open"
        return f"<StreamTransport over {self._connection!r}, {state}>"

    # ---- protocol ------------------------------------------------------------------------

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Switch to a new protocol, which receives all further data and events.

        As in uvloop, a protocol that has a `get_buffer` method but is not an `asyncio.Protocol` is
        treated as a BufferedProtocol.
        """
        if isinstance(protocol, SSLProtocol):
            self._inbox.before_tls += take_buffered(self._protocol)
        self._protocol = protocol
        self._inbox.is_buffered = isinstance(protocol, asyncio.BufferedProtocol) or (
            hasattr(protocol, "get_buffer") and not isinstance(protocol, asyncio.Protocol)
        )

    def get_protocol(self) -> asyncio.BaseProtocol:
        protocol: asyncio.BaseProtocol = self._protocol
        return protocol

    # ---- reading -------------------------------------------------------------------------

    def _start_reading(self) -> None:
        """Start the reading task, after delivering the data that arrived before `start_tls`."""
        inbox = self._inbox
        while inbox.before_tls and self.is_reading():
            inbox.before_tls = inbox.before_tls[self._deliver(memoryview(inbox.before_tls)) :]
        if self._reader is None and not self._closing:
            self._reader = background(self._loop, self._read())

    async def _read(self) -> None:
        """Deliver received messages to the protocol until reading is paused or the stream ends."""
        inbox = self._inbox
        try:
            while True:
                message = inbox.message
                if message is None:
                    message = inbox.message = await anext(inbox.messages)
                    inbox.delivered_bytes = 0
                if not self.is_reading():
                    self._reader = None  # `resume_reading` starts another task
                    return
                if not len(message):
                    self._take_eof()
                elif self._eof_received:
                    raise reset_error(self._connection, "{} sent data after the end of its stream")
                elif self._awaits_tls and message.data[0] != TLS_HANDSHAKE:
                    raise ProtocolError(NO_TLS)
                else:
                    self._awaits_tls = False
                    inbox.delivered_bytes += self._deliver(message.data[inbox.delivered_bytes :])
                if inbox.delivered_bytes == len(message):
                    inbox.drop()
        except StopAsyncIteration:
            # When the peer closes the connection cleanly, all sends have completed, but their
            # callbacks may not have run yet. Let the callbacks run first.
            await asyncio.sleep(0)
            error = reset_error(self._connection, NOT_READ) if self._outbox.has_unsent else None
            self._take_eof()
            self._force_close(error)
        except Exception as error:
            self._force_close(error)
        finally:
            if self._closing:
                inbox.drop()

    def _deliver(self, data: memoryview) -> int:
        """Pass data to the protocol, and return the number of bytes accepted."""
        delivered_bytes = self._call(
            "while receiving data", self._inbox.deliver, self._protocol, data
        )
        return delivered_bytes or 0

    def _call(self, when: str, callback: Callable[..., Any], *args: object) -> Any:
        """Call the protocol. If it fails, report the error, end the stream, and return None."""
        try:
            return callback(*args)
        except EXITS:
            self._force_close(None)
            raise
        except BaseException as error:
            self._report_and_close(error, f"the protocol failed {when}")
            return None

    def _take_eof(self) -> None:
        """Report the end of the received data. Close the transport unless the protocol objects."""
        if self._eof_received or self._closing:
            return
        self._eof_received = True
        if not self._call("in eof_received()", self._protocol.eof_received):
            self.close()

    def is_reading(self) -> bool:
        """Return whether the transport is delivering received data to the protocol.

        Returns False while reading is paused and after the transport has started closing.
        """
        return not self._reading_paused and not self._closing

    def pause_reading(self) -> None:
        """Stop delivering data until `resume_reading` is called.

        Flow control slows the peer down while reading is paused.
        """
        self._affinity.check(self)
        if self.is_reading():
            self._reading_paused = True
            if self._protocol_paused:
                # The protocol waits for its data to be sent, and may resume reading only then.
                # Flush now, because `_flush` ends the stream if sending has failed. The reading
                # task would have reported the failure, but it does not run while paused.
                self._flush()

    def resume_reading(self) -> None:
        """Resume delivering data after `pause_reading`."""
        self._affinity.check(self)
        if self._reading_paused:
            self._reading_paused = False
            self._start_reading()

    # ---- writing -------------------------------------------------------------------------

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Copy data and queue it for sending, without waiting."""
        self._affinity.check(self)
        if not isinstance(data, bytes | bytearray | memoryview):
            raise TypeError(refusal("data", "bytes, bytearray or memoryview", data))
        if self._outbox.eof_written:
            raise RuntimeError(f"cannot write to {self!r} after write_eof()")
        # Convert the data before checking its length. A multidimensional view can be empty although
        # its length is not 0.
        data = bytes(require_data(data))
        if not data:
            return
        if self._lost or self._closing:
            logger.warning("ignored data written to %r after close()", self)
            return
        self._outbox.append(data)
        if self._outbox.messages_in_flight < EAGER_WRITES:
            self._flush()
        self._maybe_pause_protocol()

    async def write_from(self, data: memoryview) -> None:
        """Send data without copying it, after all previously written data.

        The call returns once everything has been sent. Do not modify the data before then.

        Raises:
            ConnectionError: If the connection ends before everything has been sent.
        """
        self._affinity.check(self)
        if self._outbox.eof_written or self._closing:
            raise reset_error(self._connection, "the stream to {} is closed for writing")
        if len(data):
            self._outbox.append(data)
            self._flush()
        await self._outbox.wait()

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        """Join the buffers and queue the result for sending, without waiting."""
        self.write(b"".join(map(require_data, list_of_data)))

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        """Close the write end once all written data has been sent. Data can still be received."""
        self._affinity.check(self)
        if not self._outbox.eof_written and not self._closing:
            self._outbox.eof_written = self._outbox.eof_pending = True
            self._flush()

    def _flush(self) -> None:
        """Send as much data as possible, or end the stream if sending has failed.

        If the connection has ended and reading is not paused, let the reading task end the stream.
        """
        self._outbox.flush(self._sent)
        error = self._outbox.send_error
        if error is None or self._lost:
            return
        if not isinstance(error, ENDED):
            self._report_and_close(error, "cannot send the written data")
        elif self._reading_paused:
            closed = isinstance(error, ConnectionClosedError)
            self._force_close(reset_error(self._connection, NOT_READ) if closed else error)
        # If reading is not paused, the reading task delivers earlier messages and then reports the
        # error. Until then, written data stays in the outbox. The protocol is told to pause writing
        # when the outbox reaches the high-water mark.

    def _sent(self) -> None:
        """Send more data after a message has been sent, or finish closing if none is left."""
        if self._lost:
            return
        self._flush()
        if self._outbox.send_error is not None:
            return
        self._maybe_resume_protocol()
        if self._closing:
            self._finish_if_flushed()

    def get_write_buffer_size(self) -> int:
        """Return the number of bytes written but not yet passed to the connection."""
        return self._outbox.size

    # ---- the end -------------------------------------------------------------------------

    def is_closing(self) -> bool:
        """Return whether the transport is closing or closed."""
        return self._closing

    def close(self) -> None:
        """Stop reading, send all written data, close, and then call `connection_lost(None)`."""
        if self._closing or self._affinity.is_after_fork:
            return
        self._affinity.check(self)
        self._closing = True
        self._loop_shutdown.mark_closing(self)
        self._stop_reading()
        # The reading task has stopped, so another task must detect the end of the connection.
        self._connection_watcher = background(self._loop, self._connection.wait_closed())
        self._connection_watcher.add_done_callback(self._on_connection_end)
        self._finish_if_flushed()

    def _on_connection_end(self, _: asyncio.Task[None]) -> None:
        """End the stream with an error unless `_finish_if_flushed` is closing the connection."""
        if self._close_task is None:
            text = "{} ended the connection before it had read all data"
            self._force_close(reset_error(self._connection, text))

    def _stop_reading(self) -> None:
        reader = self._reader
        # If the reading task itself is closing the transport, it still uses the current message. It
        # then drops the message and ends on its own.
        if reader is None or reader is not asyncio.current_task(self._loop):
            self._inbox.drop()
            if reader is not None:
                reader.cancel()

    def _finish_if_flushed(self) -> None:
        """While closing, close the connection once all written data has been sent."""
        if self._outbox.has_unsent:
            return
        self._loop.call_soon(make_drain_fail, self._protocol)
        if not self._outbox.messages_in_flight and self._close_task is None:
            self._close_task = background(self._loop, self._connection.close())
            self._close_task.add_done_callback(lambda _: self._force_close(None))

    def abort(self) -> None:
        """Close the transport immediately, without waiting for written data to be sent.

        If all written data has been passed to the connection and all received data has been read,
        the written data is still delivered, and the peer sees the end of the stream. Otherwise, the
        remaining data is lost, and the peer sees a broken connection, as with a socket.
        """
        if not self._affinity.is_after_fork:
            self._affinity.check(self)
            self._force_close(None)

    def _report_and_close(self, error: BaseException, message: str) -> None:
        """Pass an error to the loop's exception handler, and close the transport with it."""
        self._loop.call_exception_handler(
            {"message": message, "exception": error, "transport": self, "protocol": self._protocol}
        )
        self._force_close(error)

    def _force_close(self, error: BaseException | None) -> None:
        """Close the transport now, and pass `error` to the protocol's `connection_lost`."""
        if self._lost:
            return
        if self._awaits_tls and error is not None and not self._connection._is_ending:
            # Report the error to the client.
            self._connection.abort(ProtocolError(NO_TLS))
        # After `close`, received data is no longer wanted.
        can_close_cleanly = (
            error is None
            and not self._outbox.has_unsent
            and (self._closing or not self._inbox.has_unread)
        )
        self._lost = self._closing = True
        self._socket.close()
        self._outbox.drop()
        self._stop_reading()
        if self._connection_watcher is not None:
            self._connection_watcher.cancel()
        if can_close_cleanly and not self._connection.closed:
            self._loop_shutdown.mark_closing(self._connection)
            self._close_task = self._close_task or background(self._loop, self._connection.close())
        else:
            self._connection.abort()
        self._loop_shutdown.remove(self)
        self._loop.call_soon(self._protocol.connection_lost, error)
        if self._on_lost is not None:
            self._loop.call_soon(self._on_lost, self)

    def _is_readable(self) -> bool:
        """Return whether the stream has unread data or has ended."""
        return self._inbox.has_unread or self._eof_received or self._connection._is_ending

    async def _end_with_loop(self) -> None:
        """Close the transport before its loop is closed, waiting a limited time for the peer."""
        self.close()
        closed = background(self._loop, self._connection.wait_closed())
        await asyncio.wait((closed,), timeout=self._connection._endpoint.config.close_timeout)
        self._force_close(None)
        await closed

    def _end_without_loop(self) -> None:
        self._connection._end_without_loop()
