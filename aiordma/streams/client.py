"""Clients: `create_connection`, `open_connection` and `sendfile` over RDMA."""

from __future__ import annotations

import asyncio
import io
import mmap
import os
import socket
import stat
from collections.abc import Callable
from ssl import SSLContext
from typing import IO, Any, TypeVar, Unpack

from .._core.arguments import host_name, integer, refusal, signature_error
from .._options import STREAM, TLS, StreamOptions, complete, shows
from ..errors import AddressError, host_port
from ..transport import Connection, check_security, connect_with
from .tls import NO_LIMITS, TLSLimits, add_tls_hint, context_of, wrap_in_tls
from .transport import StreamTransport

P = TypeVar("P", bound=asyncio.BaseProtocol)

# The default size limit of the reader's buffer in bytes, as in asyncio.open_connection.
LIMIT = 64 << 10


class ClientTLS:
    """A client's validated TLS options: `ssl`, `server_hostname` and the time limits."""

    def __init__(
        self, ssl: TLS, server_hostname: str | None, host: str | None, limits: TLSLimits = NO_LIMITS
    ) -> None:
        if server_hostname is not None:
            wanted = "a str, the name in the server's certificate"
            host_name("server_hostname", server_hostname, wanted)
        if server_hostname is not None and not ssl:
            raise ValueError(
                f"server_hostname {server_hostname!r} requires TLS; pass ssl=True or an "
                "ssl.SSLContext as well"
            )
        name = host if server_hostname is None else server_hostname
        if ssl and name is None:
            raise ValueError("ssl= without a host requires server_hostname=")
        self.context: SSLContext | None = context_of(ssl, client=True)
        self.name: str = name or ""
        self.limits = limits


@shows(StreamOptions, STREAM)
async def create_connection(
    protocol_factory: Callable[[], P], host: str, port: int | str, **options: Unpack[StreamOptions]
) -> tuple[asyncio.Transport, P]:
    """Connect to a host and attach a protocol, like `loop.create_connection`.

    The function returns once the protocol's `connection_made` has been called. The transport is a
    `StreamTransport` or, with TLS, asyncio's SSL transport on top of a `StreamTransport`.

    `port` may be a number, a string of digits, or a service name. If `ssl` is an SSL context, or
    True for the default context, the whole stream is encrypted with TLS. The server must then have
    a certificate for `server_hostname`, which defaults to `host`. This function can also raise any
    exception that `aiordma.connect` raises.

    Raises:
        ssl.SSLError: If the server does not have a valid certificate for `server_hostname`.
        ValueError: If `server_hostname` is given without `ssl`.
    """
    check_factory(protocol_factory)
    given = complete("create_connection", options, STREAM)
    tls = ClientTLS(given["ssl"], given["server_hostname"], host)
    security = check_security(given, None, host, stream=True)
    connection = await connect_with(given, security, host, port_number(port))
    return await attach(connection, protocol_factory, tls)


def check_factory(factory: object) -> None:
    if not callable(factory):
        wanted = "a function that returns a protocol, such as a subclass of asyncio.Protocol"
        raise TypeError(refusal("protocol_factory", wanted, factory))
    if why := signature_error(factory, ()):
        raise TypeError(f"protocol_factory {factory!r} must not require arguments: {why}")


def port_number(port: int | str | bytes | None) -> int:
    """Convert a port to a number. Accepts the same values as `getaddrinfo`."""
    if port is None or isinstance(port, int):
        return port or 0
    if not isinstance(port, str | bytes):
        return port  # the resolver checks values of other types
    text = port if isinstance(port, str) else port.decode(errors="replace")
    if not text or (text.isascii() and text.isdecimal()):
        return int(text or 0)
    try:
        return socket.getservbyname(text, "tcp")
    except (OSError, ValueError):
        raise AddressError(f"invalid port {port!r}: expected a number or a service name") from None


async def attach(
    connection: Connection, protocol_factory: Callable[[], P], tls: ClientTLS
) -> tuple[asyncio.Transport, P]:
    """Create a client's transport and protocol, and call `connection_made`."""
    handshake, shutdown = tls.limits
    if handshake is None:
        handshake = connection._endpoint.config.handshake_timeout
    ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    try:
        protocol = protocol_factory()
        transport_protocol: Any = protocol
        if tls.context is not None:
            limits = TLSLimits(handshake, shutdown)
            transport_protocol = wrap_in_tls(
                protocol, tls.context, ready, limits, server_hostname=tls.name
            )
        transport = StreamTransport(connection, transport_protocol)
    except BaseException:
        connection.abort()
        raise
    try:
        await (asyncio.sleep(0) if tls.context is None else ready)  # let connection_made run
    except OSError as error:
        transport.abort()
        peer = connection.peer_address
        raise add_tls_hint(error, host_port(peer) if peer else "the peer") from error.__cause__
    except BaseException:
        transport.abort()
        raise
    return transport if tls.context is None else transport_protocol._get_app_transport(), protocol


@shows(StreamOptions, STREAM)
async def open_connection(
    host: str, port: int | str, *, limit: int = LIMIT, **options: Unpack[StreamOptions]
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to a host and return a reader and a writer, like `asyncio.open_connection`.

    `limit` is the reader's buffer size limit in bytes. The other arguments are the same as for
    `create_connection`.
    """
    given = complete("open_connection", options, STREAM)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=integer("limit", limit, 1), loop=loop)
    transport, protocol = await create_connection(
        lambda: asyncio.StreamReaderProtocol(reader, loop=loop), host, port, **given
    )
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


async def sendfile(
    transport: asyncio.WriteTransport, file: IO[bytes], offset: int = 0, count: int | None = None
) -> int:
    """Send part of a regular file without copying it, and return the number of bytes sent.

    The part starts at `offset` and is `count` bytes long. By default, the part extends to the end
    of the file. All previously written data is sent first. The call returns once everything has
    been sent. On return, the file position is just past the last byte sent, as with
    `loop.sendfile`. Do not truncate the file before the call returns.

    Raises:
        ConnectionError: If the connection ends before everything has been sent.
        TypeError: If `transport` is not a `StreamTransport`.
        ValueError: If the file is not a regular file or was opened in text mode, or if the
            transport uses TLS, which cannot send without copying.
    """
    if not isinstance(transport, StreamTransport):
        if isinstance(transport, asyncio.Transport) and transport.get_extra_info("ssl_object"):
            raise ValueError("sendfile is not supported on TLS streams; use write() instead")
        hint = "pass writer.transport" if isinstance(transport, asyncio.StreamWriter) else ""
        raise TypeError(refusal("transport", "a StreamTransport", transport, hint))
    check_part(file, offset, count)
    if not is_regular(file):
        raise ValueError(f"{file!r} is not a regular file; read it and use write() instead")
    size = os.fstat(file.fileno()).st_size
    end = size if count is None else min(size, offset + count)
    if end <= offset:
        return 0
    # Use a private mapping, because the kernel cannot register a read-only shared mapping
    # (ib_umem_get).
    mapped = mmap.mmap(file.fileno(), end, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
    await transport.write_from(memoryview(mapped)[offset:])
    file.seek(end)
    return end - offset


def check_part(file: IO[bytes], offset: int, count: int | None) -> None:
    """Raise TypeError or ValueError if the arguments do not describe part of a binary file."""
    if hasattr(file, "encoding"):
        raise ValueError(f"file must be opened in binary mode: {file!r}")
    integer("offset", offset)
    if count is not None:
        integer("count", count, 1)


def is_regular(file: IO[bytes]) -> bool:
    try:
        return stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    except (AttributeError, io.UnsupportedOperation):
        return False
