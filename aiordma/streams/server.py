"""Servers: `loop.create_server` and `asyncio.start_server` over RDMA."""

from __future__ import annotations

import asyncio
from asyncio.trsock import TransportSocket
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from ssl import SSLContext
from typing import Unpack

from .._core.arguments import integer, truth
from .._core.async_only import AsyncContext
from .._event_loop import shutdown
from .._event_loop.affinity import LoopAffinity
from .._event_loop.shutdown import EXITS, background
from .._options import STREAM_SERVER, StreamServerOptions, complete, shows
from ..errors import ConnectionClosedError, DeviceEventError
from ..transport import Address, Connection, Listener, check_security, check_signature, listen_with
from .client import LIMIT, check_factory, port_number
from .sockets import transport_socket
from .tls import NO_LIMITS, TLSLimits, context_of, wrap_in_tls
from .transport import StreamTransport

Hosts = str | Iterable[str | None] | None


class StreamServer(AsyncContext, asyncio.AbstractServer):
    """A server, created by `create_server`, that attaches a protocol to each connection.

    Use it like an `asyncio.Server`, for example in an `async with` statement. `close` makes the
    server stop listening but leaves accepted connections open.
    """

    def __init__(
        self,
        listener: Listener,
        protocol_factory: Callable[[], asyncio.BaseProtocol],
        context: SSLContext | None,
        limits: TLSLimits,
    ) -> None:
        self._context = context
        self._limits = limits
        self._affinity = LoopAffinity()
        self._loop = self._affinity.loop
        self._loop_shutdown = shutdown.for_running_loop()
        # Like asyncio's servers, keep serving even if the program drops its reference.
        self._loop_shutdown.add(self, keep=True)
        self._listener = listener
        self._factory = protocol_factory
        self._transports: set[StreamTransport] = set()
        self._all_disconnected = asyncio.Event()
        self._all_disconnected.set()
        self._closing: asyncio.Task[None] | None = None
        self._close_started = asyncio.Event()
        self._accepting: asyncio.Task[None] | None = None
        self._serving_forever: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        return f"<StreamServer with {len(self._transports)} connections of {self._listener!r}>"

    @property
    def address(self) -> Address:
        """The server's address as (host, port). Port 0 is replaced by the assigned port."""
        return self._listener.address

    @property
    def sockets(self) -> tuple[TransportSocket, ...]:
        """Socket-like objects that report the server's addresses. Empty after `close`."""
        addresses = () if self._closing else self._listener.addresses
        return tuple(transport_socket(address)[1] for address in addresses)

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """Return the event loop the server is running on."""
        return self._loop

    def is_serving(self) -> bool:
        """Return whether the server is accepting connections."""
        return self._accepting is not None and self._closing is None

    async def start_serving(self) -> None:
        """Start accepting connections. Does nothing if the server is already accepting them.

        Raises:
            RuntimeError: If the server is closed.
        """
        self._affinity.check(self)
        if self._closing is not None:
            raise RuntimeError(f"{self!r} is closed; create another server")
        if self._accepting is None:
            self._accepting = background(self._loop, self._accept())

    async def serve_forever(self) -> None:
        """Accept connections until the server is closed. Cancelling this call closes the server.

        Raises:
            DeviceEventError: If the device has failed. The server is then unusable, so start a new
                server.
            RuntimeError: If the server is closed, or if this method is already running.
        """
        if self._serving_forever is not None:
            raise RuntimeError(f"serve_forever() is already running for {self!r}")
        await self.start_serving()
        assert self._accepting is not None
        self._serving_forever = asyncio.shield(self._accepting)
        try:
            await self._serving_forever
        except (asyncio.CancelledError, DeviceEventError):
            self.close()
            await self.wait_closed()
            raise
        finally:
            self._serving_forever = None

    async def _accept(self) -> None:
        """Accept connections until the listener is closed."""
        # Do not use `async for`. When the event loop shuts down, asyncio would close the generator
        # while it is running.
        with suppress(ConnectionClosedError):
            while True:
                self._start_transport(await self._listener.accept())

    def _start_transport(self, connection: Connection) -> None:
        """Attach a protocol to an accepted connection. If its factory fails, end the connection."""
        try:
            transport = self._attach(connection)
        except EXITS:
            connection.abort()
            raise
        except BaseException as error:
            connection.abort()
            self._loop.call_exception_handler(
                {"message": "the protocol factory of a stream server failed", "exception": error}
            )
        else:
            self._transports.add(transport)
            self._all_disconnected.clear()

    def _attach(self, connection: Connection) -> StreamTransport:
        """Create a connection's protocol and transport, with TLS between them if it is enabled."""
        protocol = self._factory()
        if self._context is None:
            return StreamTransport(connection, protocol, self._on_connection_lost)
        # asyncio calls the protocol's `connection_made` after the TLS handshake.
        tls = wrap_in_tls(protocol, self._context, None, self._limits, server_side=True)
        return StreamTransport(connection, tls, self._on_connection_lost, awaits_tls=True)

    def _on_connection_lost(self, transport: StreamTransport) -> None:
        self._transports.discard(transport)
        if not self._transports:
            self._all_disconnected.set()

    def close(self) -> None:
        """Stop listening. Connections already accepted stay open.

        Connections still waiting to be accepted are closed.
        """
        if self._closing is None and not self._affinity.is_after_fork:
            self._affinity.check(self)
            self._loop_shutdown.remove(self)
            self._closing = background(self._loop, self._listener.close())
            self._close_started.set()

    def close_clients(self) -> None:
        """Close each accepted connection once its written data has been sent."""
        for transport in list(self._transports):
            transport.close()

    def abort_clients(self) -> None:
        """Close every accepted connection immediately, without waiting for data to be sent."""
        for transport in list(self._transports):
            transport.abort()

    async def wait_closed(self) -> None:
        """Wait until the server is closed and all of its connections have ended.

        `asyncio.Server.wait_closed` has worked like this since Python 3.12.
        """
        if self._closing is None and self._affinity.is_after_fork:
            return
        self._affinity.check(self)
        await self._close_started.wait()
        assert self._closing is not None
        await asyncio.shield(self._closing)
        if self._accepting is not None:
            await asyncio.wait([self._accepting])  # serve_forever raises the task's exception
        await self._all_disconnected.wait()

    async def _end_with_loop(self) -> None:
        self.close()  # each connection is closed separately
        assert self._closing is not None
        await self._closing

    def _end_without_loop(self) -> None:
        """Do nothing, because the listener and the connections are closed separately."""


@shows(StreamServerOptions, STREAM_SERVER)
async def create_server(
    protocol_factory: Callable[[], asyncio.BaseProtocol],
    host: Hosts = None,
    port: int | str | None = 0,
    **options: Unpack[StreamServerOptions],
) -> StreamServer:
    """Listen for connections and attach a protocol to each of them, like `loop.create_server`.

    If `host` is None or "", the server listens on all addresses. If `host` is a sequence of hosts,
    the server uses the same port on all of them. To encrypt the streams with TLS, pass an SSL
    context with a certificate as `ssl`. The remaining options have the same meaning as in
    `aiordma.listen` or `loop.create_server`. This function can raise any exception that
    `aiordma.listen` raises.
    """
    given = complete("create_server", options, STREAM_SERVER)
    return await serve(given, protocol_factory, host, port)


async def serve(
    options: StreamServerOptions,
    protocol_factory: Callable[[], asyncio.BaseProtocol],
    host: Hosts,
    port: int | str | None,
    *,
    limits: TLSLimits = NO_LIMITS,
    family: int = 0,
    flags: int = 0,
) -> StreamServer:
    """Start a server for `create_server` or `OverRDMA.create_server`.

    Only `OverRDMA.create_server` passes `limits`, `family` and `flags`.
    """
    check_factory(protocol_factory)
    start = truth("start_serving", options["start_serving"])
    context = context_of(options["ssl"], client=False)
    listener = await listen_with(
        options,
        check_security(options, None, None, stream=True),
        [each or "" for each in hosts_of(host)],
        port_number(port),
        family=family,
        flags=flags,
    )
    if limits.ssl_handshake_timeout is None:
        limits = limits._replace(ssl_handshake_timeout=options["config"].handshake_timeout)
    server = StreamServer(listener, protocol_factory, context, limits)
    if start:
        await server.start_serving()
    return server


def hosts_of(host: Hosts) -> list[str | None]:
    """Return the hosts to listen on, as a list."""
    is_single = isinstance(host, str | bytes) or not isinstance(host, Iterable)
    return [host] if is_single else list(host)  # type: ignore[list-item, arg-type]


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None] | None]


@shows(StreamServerOptions, STREAM_SERVER)
async def start_stream_server(
    client_connected_cb: Handler,
    host: Hosts = None,
    port: int | str | None = 0,
    *,
    limit: int = LIMIT,
    **options: Unpack[StreamServerOptions],
) -> StreamServer:
    """Start a server that calls a handler with a reader and a writer, like `asyncio.start_server`.

    `limit` is the reader's buffer size limit in bytes. The other arguments are the same as for
    `create_server`.
    """
    given = complete("start_stream_server", options, STREAM_SERVER)
    loop = asyncio.get_running_loop()
    check_signature(client_connected_cb, 2, "a reader and a writer")
    limit = integer("limit", limit, 1)

    def factory() -> asyncio.StreamReaderProtocol:
        reader = asyncio.StreamReader(limit=limit, loop=loop)
        return asyncio.StreamReaderProtocol(reader, client_connected_cb, loop=loop)

    return await create_server(factory, host, port, **given)
