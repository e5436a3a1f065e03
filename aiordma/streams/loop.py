"""An event loop that connects over RDMA, for software that connects through its event loop.

    with asyncio.Runner(loop_factory=aiordma.streams.EventLoop) as runner: runner.run(main())

Connections and servers opened by host and port use RDMA. Sockets that the program has connected
itself, Unix sockets, datagrams and pipes work as usual.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from contextvars import ContextVar
from typing import IO, Any
from weakref import WeakKeyDictionary, finalize

from .._options import (
    CLIENT,
    STREAM_SERVER,
    ClientOptions,
    Devices,
    Options,
    StreamServerOptions,
    Via,
)
from .._transport.arguments import check_host
from ..config import DEFAULT, Config
from ..errors import ConnectionManagerError, ProtocolError
from ..transport import Address, Connection, check_security, connect_with, numeric
from . import client, server
from .tls import TLSLimits
from .transport import StreamTransport

# The options of asyncio's `create_connection` and `create_server`. All are accepted, but some have
# no effect over RDMA. For example, `happy_eyeballs_delay` is ignored because addresses are tried
# sequentially, and `keep_alive` is ignored because `Config.keep_alive` replaces it.
OPTIONS = {"ssl", "sock", "family", "flags", "ssl_handshake_timeout", "ssl_shutdown_timeout"}
CONNECT_OPTIONS = OPTIONS | {"local_addr", "server_hostname", "all_errors"}
CONNECT_OPTIONS |= {"proto", "happy_eyeballs_delay", "interleave"}
ADDRESS_OPTIONS = ("family", "flags", "all_errors")
SERVER_OPTIONS = OPTIONS | {"backlog", "start_serving", "reuse_address", "reuse_port", "keep_alive"}

# True while asyncio's own `create_connection` is running, so that `sock_connect` uses TCP.
_in_asyncio_connect: ContextVar[bool] = ContextVar("aiordma.streams.of_asyncio", default=False)

# RDMA connections opened by `sock_connect` and not yet used by `create_connection`. A finalizer
# holds each connection and aborts it if the socket is garbage-collected.
_unclaimed_connections: WeakKeyDictionary[socket.socket, finalize[..., socket.socket]] = (
    WeakKeyDictionary()
)


PART = 256 << 10
"""The number of bytes to read at a time from a file that cannot be memory-mapped."""


def check_options(function: str, given: dict[str, Any], known: set[str]) -> None:
    """Raise TypeError for options that the named asyncio function does not accept."""
    for name in given:
        if name not in known:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")


def abort(loop: asyncio.AbstractEventLoop, connection: Connection) -> None:
    """Abort a connection whose socket has been garbage-collected. Can be called from any thread."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(connection.abort)


class OverRDMA:
    """A mixin that makes an event loop connect over RDMA: `class Loop(OverRDMA, uvloop.Loop): ...`.

    The attributes `device`, `via` and `config` have the same meaning as the options of
    `aiordma.connect` and `aiordma.listen`. Set them on the class or on the loop. Override `applies`
    to use RDMA only for certain addresses.
    """

    device: Devices = None
    via: Via = "cm"
    config: Config = DEFAULT

    @property
    def _options(self) -> Options:
        return {"device": self.device, "via": self.via, "config": self.config}

    def applies(self, host: str | None, port: int) -> bool:
        """Return whether to use RDMA when connecting to, or listening on, an address."""
        return True

    async def create_connection(
        self,
        protocol_factory: Callable[[], asyncio.BaseProtocol],
        host: str | None = None,
        port: int | str | None = None,
        **options: Any,
    ) -> Any:
        """Connect over RDMA. Takes the same arguments as `AbstractEventLoop.create_connection`.

        If `applies` returns False for the address, the connection does not use RDMA.
        """
        ssl, sock = options.get("ssl"), options.get("sock")
        server_hostname = options.get("server_hostname")
        limits = TLSLimits.of(options)
        # `sock_connect` may already have opened an RDMA connection on behalf of the socket.
        aborter = None if sock is None else _unclaimed_connections.pop(sock, None)
        if sock is not None and aborter is not None and host is None and port is None:
            client.check_factory(protocol_factory)
            detached = aborter.detach()
            assert detached is not None
            _, connection = detached[2]  # the arguments of `abort`
            sock.close()
            try:
                tls = client.ClientTLS(ssl, server_hostname, None, limits)
            except BaseException:
                connection.abort()
                raise
            return await client.attach(connection, protocol_factory, tls)
        number = client.port_number(port)
        by_name = sock is None and (host is not None or port is not None)
        if not by_name or not self.applies(host, number):
            # asyncio calls `sock_connect`, which must not use RDMA now.
            token = _in_asyncio_connect.set(True)
            try:
                return await super().create_connection(  # type: ignore[misc]
                    protocol_factory, host, port, **options
                )
            finally:
                _in_asyncio_connect.reset(token)
        client.check_factory(protocol_factory)
        check_options("create_connection", options, CONNECT_OPTIONS)
        tls = client.ClientTLS(ssl, server_hostname, host, limits)
        address_options = {name: options[name] for name in ADDRESS_OPTIONS if name in options}
        source = options.get("local_addr")
        connection = await self._connect(host or "localhost", number, source, **address_options)
        return await client.attach(connection, protocol_factory, tls)

    async def _connect(
        self, host: str, port: int, source: Address | None, **address_options: Any
    ) -> Connection:
        options: ClientOptions = {**CLIENT, **self._options, "source": source}
        security = check_security(options, None, host, stream=True)
        return await connect_with(options, security, host, port, **address_options)

    async def sock_connect(self, sock: socket.socket, address: Any) -> None:
        """Connect to an address over RDMA on behalf of a socket.

        This method is for clients that choose among addresses themselves, such as aiohttp. The
        socket itself stays unconnected. If you pass the socket to `create_connection` as `sock`,
        you get a stream over the RDMA connection. If nothing at the address accepts RDMA
        connections, the socket is connected over TCP instead.
        """
        stream = (
            sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM
        )
        if not stream or _in_asyncio_connect.get() or not self.applies(*address[:2]):
            return await super().sock_connect(sock, address)  # type: ignore[misc, no-any-return]
        check_host(address[0])  # with TCP, the host would end at the first null character
        bound, _ = sock.getsockname()[:2]
        source = (bound, 0) if bound not in ("", "0.0.0.0", "::") else None
        try:
            connection = await self._connect(*numeric(address), source)
        except (ConnectionManagerError, ProtocolError) as error:
            try:
                await super().sock_connect(sock, address)  # type: ignore[misc]
            except OSError:
                raise error from None
        else:
            aborter = finalize(sock, abort, asyncio.get_running_loop(), connection)
            aborter.atexit = False
            _unclaimed_connections[sock] = aborter

    async def create_server(
        self,
        protocol_factory: Callable[[], asyncio.BaseProtocol],
        host: Any = None,
        port: int | str | None = None,
        **options: Any,
    ) -> Any:
        """Listen over RDMA. Takes the same arguments as `AbstractEventLoop.create_server`.

        If `applies` returns False for the address, the server does not use RDMA.
        """
        limits = TLSLimits.of(options)
        number = client.port_number(port)
        hosts = server.hosts_of(host)
        uses_rdma = {self.applies(each or None, number) for each in hosts}
        by_name = options.get("sock") is None and (host is not None or port is not None)
        if not by_name or uses_rdma == {False}:
            return await super().create_server(  # type: ignore[misc]
                protocol_factory, host, port, **options
            )
        check_options("create_server", options, SERVER_OPTIONS)
        if False in uses_rdma:
            raise ValueError(
                f"cannot start a single server on {host!r}: applies() selects RDMA for only some "
                "of these hosts; start a separate server for the others"
            )
        served: StreamServerOptions = {
            **STREAM_SERVER,
            **self._options,
            "backlog": options.get("backlog", 128),
            "ssl": options.get("ssl"),
            "start_serving": options.get("start_serving", True),
        }
        family, flags = options.get("family", 0), options.get("flags", socket.AI_PASSIVE)
        try:
            return await server.serve(
                served, protocol_factory, hosts, number, limits=limits, family=family, flags=flags
            )
        except OSError as error:
            if options.get("reuse_port") and error.errno == errno.EADDRINUSE:
                error.add_note(
                    "reuse_port is not supported over RDMA: a port can have only one listener"
                )
            raise

    async def sendfile(
        self,
        transport: asyncio.WriteTransport,
        file: IO[bytes],
        offset: int = 0,
        count: int | None = None,
        *,
        fallback: bool = True,
    ) -> int:
        """Send a file, like `AbstractEventLoop.sendfile`.

        Over RDMA, regular files are sent by `aiordma.streams.sendfile`. Other files, such as a
        BytesIO or a pipe, are read and copied in chunks.

        Raises:
            asyncio.SendfileNotAvailableError: If the file is not a regular file and `fallback` is
                False.
        """
        if not isinstance(transport, StreamTransport):
            sent: int = await super().sendfile(  # type: ignore[misc]
                transport, file, offset, count, fallback=fallback
            )
            return sent
        if transport.is_closing():
            raise RuntimeError(f"cannot send a file: {transport!r} is closing")
        if client.is_regular(file):
            return await client.sendfile(transport, file, offset, count)
        if not fallback:
            raise asyncio.SendfileNotAvailableError(f"{file!r} is not a regular file")
        return await copy_file(transport, file, offset, count)


async def copy_file(
    transport: StreamTransport, file: IO[bytes], offset: int, count: int | None
) -> int:
    """Read a file in a thread, send its data, and return the number of bytes sent."""
    client.check_part(file, offset, count)
    if offset or (hasattr(file, "seekable") and file.seekable()):
        file.seek(offset)  # even if 0, because the current position may differ
    sent = 0
    while count is None or sent < count:
        size = PART if count is None else min(PART, count - sent)
        data = await asyncio.to_thread(file.read, size)
        if not data:
            break
        await transport.write_from(memoryview(data))
        sent += len(data)
    return sent


class EventLoop(OverRDMA, asyncio.SelectorEventLoop):
    """asyncio's selector event loop, with support for RDMA connections."""
