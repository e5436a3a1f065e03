"""The `distributed` backend for addresses that begin with `rdma://`."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import dask
from dask.utils import parse_timedelta
from distributed.comm.addressing import parse_host_port, unparse_host_port
from distributed.comm.core import (
    BaseListener,
    Comm,
    CommClosedError,
    Connector,
    FatalCommClosedError,
)
from distributed.comm.registry import Backend
from distributed.comm.utils import ensure_concrete_host, from_frames, to_frames
from distributed.system import MEMORY_LIMIT
from distributed.utils import ensure_ip, get_ip

import aiordma
from aiordma import errors

from .framing import Bytes, FramingError, pack, unpack
from .memory import frame_memory
from .settings import connection_arguments, kept_memory

__all__ = ["RDMA", "RDMABackend", "RDMAConnector", "RDMAListener"]

logger = logging.getLogger("distributed.comm.rdma")

# The maximum number of bytes in flight when `write` starts sending a message. The message itself
# can be longer, because Dask expects `write` to return before the peer reads.
WRITE_BUFFER = 4 << 20

# The lowest rate at which `close` expects the peer to read, in bytes per second. `close` cannot see
# progress within a frame, because frames are not split. The value is an estimate, about one
# hundredth of the bandwidth of a 1 Gb/s network.
MIN_BYTES_PER_SECOND = 1 << 20

# Dask should not retry after these errors. The peer's security settings or software cause those in
# REFUSED, and this machine's setup causes those in MISSING.
REFUSED = (errors.AuthenticationError, errors.ProtocolError, ssl.SSLError)
MISSING = (errors.DeviceNotFoundError, errors.LibraryNotFoundError)


@contextmanager
def _settings_logged(address: str) -> Iterator[None]:
    """Log configuration errors, because Dask itself may report only that a process failed."""
    try:
        yield
    except (TypeError, ValueError, RuntimeError, *MISSING) as error:
        logger.error("%s: %s", address, error)
        raise


class RDMA(Comm):
    """A Dask comm that uses an aiordma connection.

    `write` can return before the message has been sent. As with Dask's TCP comm, do not modify the
    message's memory, even after `write` has returned. The connection keeps the memory alive until
    the peer has received the message.
    """

    # Disable frame splitting, because each part would be received into separate memory.
    max_shard_size: ClassVar[int] = 1 << 62

    def __init__(
        self, conn: aiordma.Connection, local_addr: str, peer_addr: str, deserialize: bool = True
    ) -> None:
        super().__init__(deserialize=deserialize)
        self._conn: aiordma.Connection | None = conn
        self._loop = asyncio.get_running_loop()
        self._memory = frame_memory(self._loop, kept_memory())
        self._local_addr = local_addr
        self._peer_addr = peer_addr
        self._in_flight = 0
        self._room_available: asyncio.Future[None] | None = None

    @property
    def local_address(self) -> str:
        return self._local_addr

    @property
    def peer_address(self) -> str:
        return self._peer_addr

    def _open(self) -> aiordma.Connection:
        if self._conn is None:
            raise CommClosedError(f"in {self}: the comm is closed")
        return self._conn

    def _lost(self, error: BaseException) -> CommClosedError:
        """Abort the comm after a connection error, and return the exception to raise for Dask."""
        lost = CommClosedError(f"in {self}: {type(error).__name__}: {error}")
        self.abort()
        return lost

    # ---- messages ------------------------------------------------------------------------

    async def read(self, deserializers: Any = None) -> Any:
        conn = self._open()
        try:
            frames = await self._read_frames(conn)
        except (aiordma.RDMAError, OSError, FramingError) as error:
            raise self._lost(error) from error
        except BaseException:
            # The peer may have sent further connection messages for this Dask message. The next
            # `read` would mistake them for a new Dask message.
            self.abort()
            raise
        try:
            return await from_frames(
                frames,
                deserialize=self.deserialize,
                deserializers=deserializers,
                allow_offload=self.allow_offload,
            )
        except EOFError as error:
            raise self._lost(error) from error

    async def _read_frames(self, conn: aiordma.Connection) -> list[memoryview]:
        first = await conn.recv_with(self._memory.lend_rounded)
        unpacked = unpack(first.memory, MEMORY_LIMIT)
        frames = unpacked.frames
        for index, length in unpacked.missing:
            received = await conn.recv_with(self._memory.lend)
            if received.length != length:
                raise FramingError(
                    f"the peer sent {received.length} bytes instead of a frame of {length} bytes"
                )
            frames[index] = received.memory
        return frames  # type: ignore[return-value]

    async def write(
        self, msg: Any, serializers: Any = None, on_error: str | None = "message"
    ) -> int:
        self._open()
        frames = await to_frames(
            msg,
            allow_offload=self.allow_offload,
            serializers=serializers,
            on_error=on_error,
            context={
                "sender": self.local_info,
                "recipient": self.remote_info,
                **self.handshake_options,
            },
            frame_split_size=self.max_shard_size,
        )
        await self._wait_for_in_flight(WRITE_BUFFER)
        conn = self._open()
        try:
            messages, total = pack(frames)
            for message in messages:
                self._send(conn, message)
        except (aiordma.RDMAError, OSError) as error:
            raise self._lost(error) from error
        except BaseException:  # the peer may have received part of the message
            self.abort()
            raise
        return total

    def _send(self, conn: aiordma.Connection, message: list[Bytes]) -> None:
        length = sum(memoryview(part).nbytes for part in message)
        sending = conn.send_nowait(message)
        self._in_flight += length

        def sent(future: asyncio.Future[None]) -> None:
            self._in_flight -= length
            error = None if future.cancelled() else future.exception()
            room = self._room_available
            if room is not None and not room.done():
                room.set_result(None)
            if error is not None and self._conn is not None:
                logger.debug("%s: %s", self, error)
                self.abort()

        sending.add_done_callback(sent)

    async def _wait_for_in_flight(self, limit: int) -> None:
        """Wait until at most `limit` bytes are in flight."""
        while self._in_flight > limit:
            if self._room_available is None or self._room_available.done():
                self._room_available = self._loop.create_future()
            await asyncio.shield(self._room_available)

    # ---- the end -------------------------------------------------------------------------

    async def close(self) -> None:
        conn, self._conn = self._conn, None
        if conn is None:
            return
        silence = parse_timedelta(dask.config.get("distributed.comm.timeouts.tcp"), "seconds")
        limit = 0.0
        try:
            while self._in_flight:
                limit = silence + self._in_flight / MIN_BYTES_PER_SECOND
                async with asyncio.timeout(limit):
                    await self._wait_for_in_flight(self._in_flight - 1)
        except TimeoutError:
            logger.warning(
                "%s: aborted: the peer received no message for %.0f s while %d bytes were waiting",
                self,
                limit,
                self._in_flight,
            )
            conn.abort()
        except BaseException:  # cancelled
            conn.abort()
            raise
        await conn.close()

    def abort(self) -> None:
        conn, self._conn = self._conn, None
        if conn is None:
            return
        try:
            conn.abort()
        except errors.WrongLoopError:  # called by a destructor in another thread
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(conn.abort)

    def closed(self) -> bool:
        return self._conn is None or self._conn.closed


def _address(prefix: str, address: tuple[str, int] | None) -> str:
    """Format an address, or raise CommClosedError if the connection has already ended."""
    if address is None:
        raise CommClosedError("the connection was closed before it was fully established")
    return prefix + unparse_host_port(*address)


class RDMAConnector(Connector):
    """A Dask connector that opens connections to an `RDMAListener`."""

    prefix: ClassVar[str] = "rdma://"
    comm_class: ClassVar[type[RDMA]] = RDMA

    async def connect(self, address: str, deserialize: bool = True, **connection_args: Any) -> RDMA:
        host, port = parse_host_port(address)
        try:
            with _settings_logged(self.prefix + address):
                arguments = connection_arguments(self.prefix + address, connection_args)
                conn = await aiordma.connect(host, port, **arguments)
        except errors.HandshakeBrokenError:
            raise  # Dask tries again after any OSError
        except MISSING as error:
            raise FatalCommClosedError(f"{self.prefix}{address}: {error}") from error
        except REFUSED as error:
            raise FatalCommClosedError(
                f"{self.prefix}{address}: {error}. Check your security settings, and make sure "
                "that the peer uses dask-aiordma."
            ) from error
        except OSError:
            raise
        except aiordma.RDMAError as error:
            raise CommClosedError(f"{self.prefix}{address}: {error}") from error
        return self.comm_class(
            conn, _address(self.prefix, conn.local_address), self.prefix + address, deserialize
        )


class RDMAListener(BaseListener):
    """A Dask listener that accepts connections and passes each one to Dask as a comm."""

    prefix: ClassVar[str] = "rdma://"
    comm_class: ClassVar[type[RDMA]] = RDMA

    def __init__(
        self,
        address: str,
        comm_handler: Callable[[RDMA], Awaitable[None]],
        deserialize: bool = True,
        allow_offload: bool = True,
        default_host: str | None = None,
        default_port: int = 0,
        **connection_args: Any,
    ) -> None:
        super().__init__()
        self._given = self.prefix + address
        self.ip, self.port = parse_host_port(address, default_port)
        self.default_host = default_host
        self.comm_handler = comm_handler
        self.deserialize = deserialize
        self.allow_offload = allow_offload
        with _settings_logged(self._given):
            self.arguments = connection_arguments(self._given, connection_args)
        self._listener: aiordma.Listener | None = None
        self._bound: tuple[str, int] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        backlog = int(dask.config.get("distributed.comm.socket-backlog"))
        with _settings_logged(self._given):
            self._listener = await aiordma.listen(
                self.ip, self.port, backlog=backlog, **self.arguments
            )
        self._run(self._accept(self._listener))
        self.get_host_port()

    def stop(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.stop()
            self._run(listener.close())

    def _run(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s%s: %s", self.prefix, self._bound, error, exc_info=error)

    async def _accept(self, listener: aiordma.Listener) -> None:
        async for conn in listener:
            self._run(self._handle(conn))

    async def _handle(self, conn: aiordma.Connection) -> None:
        if self._listener is None:
            conn.abort()
            return
        try:
            peer = _address(self.prefix, conn.peer_address)
            comm = self.comm_class(
                conn, _address(self.prefix, conn.local_address), peer, self.deserialize
            )
            comm.allow_offload = self.allow_offload
            await self.on_connection(comm)
        except CommClosedError as error:
            logger.info("a connection was closed before its handshake completed: %s", error)
            return
        await self.comm_handler(comm)

    def get_host_port(self) -> tuple[str, int]:
        """Return the listener's host and port, preferring an IPv4 address."""
        if self._listener is None:
            raise ValueError("the listener is not running; call start() first")
        if self._bound is None:
            addresses = self._listener.addresses
            self._bound = next((it for it in addresses if ":" not in it[0]), addresses[0])
            if not self.ip:  # listens on all addresses; IPv4 is easiest for clients to reach
                self._bound = "0.0.0.0", self._bound[1]
        return self._bound

    @property
    def listen_address(self) -> str:
        return self.prefix + unparse_host_port(*self.get_host_port())

    @property
    def contact_address(self) -> str:
        host, port = self.get_host_port()
        return self.prefix + unparse_host_port(
            ensure_concrete_host(host, default_host=self.default_host), port
        )


class RDMABackend(Backend):
    """The Dask backend for `rdma://` addresses.

    `distributed` finds this class through an entry point.
    """

    connector_class: ClassVar[type[RDMAConnector]] = RDMAConnector
    listener_class: ClassVar[type[RDMAListener]] = RDMAListener

    def get_connector(self) -> RDMAConnector:
        return self.connector_class()

    def get_listener(
        self,
        loc: str,
        handle_comm: Callable[[RDMA], Awaitable[None]],
        deserialize: bool,
        **connection_args: Any,
    ) -> RDMAListener:
        return self.listener_class(loc, handle_comm, deserialize, **connection_args)

    def get_address_host(self, loc: str) -> str:
        return parse_host_port(loc)[0]

    def get_address_host_port(self, loc: str) -> tuple[str, int]:
        return parse_host_port(loc)

    def resolve_address(self, loc: str) -> str:
        host, port = parse_host_port(loc)
        return unparse_host_port(ensure_ip(host), port)

    def get_local_address_for(self, loc: str) -> str:
        host, _ = parse_host_port(loc)
        return unparse_host_port(get_ip(ensure_ip(host)))
