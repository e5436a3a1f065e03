"""`create_connection` and `open_connection` over RDMA, and sending files."""

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

from .._core.arguments import instance, integer, refusal
from .._options import STREAM, TLS, StreamOptions, complete, shows
from ..errors import AddressError, host_port
from ..transport import Connection, check_security, connect_with
from .tls import NO_LIMITS, TLSLimits, between, context_of, hinted
from .transport import StreamTransport

P = TypeVar("P", bound=asyncio.BaseProtocol)

# The limit of the reader's buffer, as in asyncio.open_connection.
LIMIT = 64 << 10


class ClientTLS:
    """TLS of a client: what `ssl`, `server_hostname` and the time limits ask for, checked."""

    def __init__(
        self, ssl: TLS, server_hostname: str | None, host: str | None, limits: TLSLimits = NO_LIMITS
    ) -> None:
        if server_hostname is not None:
            wanted = "a str, the name in the server's certificate"
            instance("server_hostname", server_hostname, str, wanted)
        if server_hostname is not None and not ssl:
            raise ValueError(
                f"server_hostname {server_hostname!r} is the name in a certificate: it needs ssl=, "
                "a context or True"
            )
        name = host if server_hostname is None else server_hostname
        if ssl and name is None:
            raise ValueError("ssl= without a host needs server_hostname=")
        self.context: SSLContext | None = context_of(ssl, client=True)
        self.name: str = name or ""
        self.limits = limits


@shows(StreamOptions, STREAM)
async def create_connection(
    protocol_factory: Callable[[], P], host: str, port: int | str, **options: Unpack[StreamOptions]
) -> tuple[asyncio.Transport, P]:
    """Connect and attach a protocol: `loop.create_connection` over RDMA.

    Returns when `connection_made` has been called.  Raises what `aiordma.connect` raises.  `port`
    may be text, a number or the name of a service.  `ssl`, a context or True for the default one,
    puts TLS over the stream: every byte is encrypted, and the server must have a certificate for
    `server_hostname` (None: `host`), else ssl.SSLError; ValueError for `server_hostname` without
    `ssl`.
    The transport is a `StreamTransport`, or with TLS asyncio's SSL transport on top of one.
    """
    check_factory(protocol_factory)
    given = complete("create_connection", options, STREAM)
    tls = ClientTLS(given["ssl"], given["server_hostname"], host)
    security = check_security(given, None, host, stream=True)
    connection = await connect_with(given, security, host, port_number(port))
    return await attach(connection, protocol_factory, tls)


def check_factory(factory: object) -> None:
    if not callable(factory):
        wanted = "a function that returns a protocol, as a class of asyncio.Protocol"
        raise TypeError(refusal("protocol_factory", wanted, factory))


def port_number(port: int | str | bytes | None) -> int:
    """A port as `getaddrinfo` takes it: a number, also as text, a service's name, None or ""."""
    if port is None or isinstance(port, int):
        return port or 0
    if not isinstance(port, str | bytes):
        return port  # the resolver refuses it, or takes it for a number
    text = port if isinstance(port, str) else port.decode(errors="replace")
    if not text or (text.isascii() and text.isdecimal()):
        return int(text or 0)
    try:
        return socket.getservbyname(text, "tcp")
    except (OSError, ValueError):
        raise AddressError(f"port {port!r} is neither a number nor a known service") from None


async def attach(
    connection: Connection, protocol_factory: Callable[[], P], tls: ClientTLS
) -> tuple[asyncio.Transport, P]:
    """A transport for a client's new connection, and its protocol, which has been told of it."""
    handshake, shutdown = tls.limits
    if handshake is None:
        handshake = connection._endpoint.config.handshake_timeout
    ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    try:
        protocol = protocol_factory()
        below: Any = protocol
        if tls.context is not None:
            limits = TLSLimits(handshake, shutdown)
            below = between(protocol, tls.context, ready, limits, server_hostname=tls.name)
        transport = StreamTransport(connection, below)
    except BaseException:
        connection.abort()
        raise
    try:
        await (asyncio.sleep(0) if tls.context is None else ready)  # connection_made runs first
    except OSError as error:
        transport.abort()
        peer = connection.peer_address
        raise hinted(error, host_port(peer) if peer else "the peer") from error.__cause__
    except BaseException:
        transport.abort()
        raise
    return transport if tls.context is None else below._get_app_transport(), protocol


@shows(StreamOptions, STREAM)
async def open_connection(
    host: str, port: int | str, *, limit: int = LIMIT, **options: Unpack[StreamOptions]
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect: `asyncio.open_connection` over RDMA.

    `limit` is the limit of the reader's buffer, in bytes.  The other arguments are those of
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
    """Send a part of a regular file from the page cache, without a copy; return its length.

    `count` None means all from `offset` on.  Bytes that were written before are sent first; the
    call returns when nothing is in flight any more.  As with `loop.sendfile`, the file's position
    is then behind the sent part.  The file must not be truncated meanwhile.  Raises
    ConnectionError, and ValueError for a transport with TLS, which has to copy, and for another
    kind of file.
    """
    if not isinstance(transport, StreamTransport):
        raise ValueError(
            f"{type(transport).__name__} is not a StreamTransport: with TLS, use write()"
        )
    check_part(offset, count)
    if not is_regular(file):
        raise ValueError(f"{file!r} is no regular file: read it, and use write()")
    size = os.fstat(file.fileno()).st_size
    end = size if count is None else min(size, offset + count)
    if end <= offset:
        return 0
    # Private: the kernel does not register a shared mapping without write access (ib_umem_get).
    mapped = mmap.mmap(file.fileno(), end, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
    await transport.write_from(memoryview(mapped)[offset:])
    file.seek(end)
    return end - offset


def check_part(offset: int, count: int | None) -> None:
    """TypeError or ValueError for what is no part of a file."""
    integer("offset", offset)
    if count is not None:
        integer("count", count, 1)


def is_regular(file: IO[bytes]) -> bool:
    try:
        return stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    except (AttributeError, io.UnsupportedOperation):
        return False
