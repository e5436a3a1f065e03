"""TLS over streams: asyncio's own, between a stream's transport and the user's protocol.

What `ssl=` means here is what it means to asyncio: everything that travels is encrypted, and the
server has shown its certificate before the protocol hears of the connection. The bytes of TLS are
the messages of the connection, so keys and tokens of that are none of a stream's secrets.
"""

from __future__ import annotations

import asyncio
import ssl
from asyncio import sslproto
from collections.abc import Callable
from typing import Any, NamedTuple

from .._options import TLS
from ..transport import Connection
from .transport import StreamTransport


class TLSLimits(NamedTuple):
    """Seconds that parts of TLS may take, None as asyncio's: its arguments."""

    ssl_handshake_timeout: float | None
    ssl_shutdown_timeout: float | None

    @classmethod
    def of(cls, options: dict[str, Any]) -> TLSLimits:
        """Those of a call; ValueError for a time limit without `ssl`, as in asyncio."""
        limits = cls(*map(options.get, cls._fields))
        for name, value in limits._asdict().items():
            if value is not None and not options.get("ssl"):
                raise ValueError(f"{name} is a time limit of TLS: it needs ssl=")
        return limits


NO_LIMITS = TLSLimits(None, None)


def client_context(tls: TLS) -> ssl.SSLContext | None:
    """The client's context; True means the certificates that this machine trusts, as in asyncio."""
    if tls is True:
        return ssl.create_default_context()
    return checked(tls)


def server_context(tls: TLS) -> ssl.SSLContext | None:
    if tls is True:
        raise TypeError(
            "ssl=True is for clients: a server needs an ssl.SSLContext with its certificate"
        )
    return checked(tls)


def checked(tls: TLS) -> ssl.SSLContext | None:
    if tls is None or tls is False:
        return None
    if not isinstance(tls, ssl.SSLContext):
        raise TypeError(f"ssl must be an ssl.SSLContext or None, not {type(tls).__name__}")
    return tls


def between(
    protocol: asyncio.BaseProtocol,
    context: ssl.SSLContext,
    ready: asyncio.Future[None] | None,
    limits: TLSLimits,
    **who: Any,
) -> Any:
    """asyncio's TLS protocol, between the stream's transport and the user's protocol."""
    protocol_of_tls: Any = sslproto.SSLProtocol
    return protocol_of_tls(
        asyncio.get_running_loop(), protocol, context, ready, **limits._asdict(), **who
    )


async def connected(
    connection: Connection,
    protocol: asyncio.BaseProtocol,
    context: ssl.SSLContext,
    server_hostname: str,
    limits: TLSLimits,
) -> asyncio.Transport:
    """The client's transport after the TLS handshake; raises what asyncio raises."""
    ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    try:
        below = between(protocol, context, ready, limits, server_hostname=server_hostname)
        transport = StreamTransport(connection, below)
    except BaseException:
        connection.abort()
        raise
    try:
        await ready
    except BaseException:
        transport.abort()
        raise
    made: asyncio.Transport = below._get_app_transport()
    return made


def accepted(
    connection: Connection,
    protocol: asyncio.BaseProtocol,
    context: ssl.SSLContext,
    on_lost: Callable[[StreamTransport], None],
    limits: TLSLimits,
) -> StreamTransport:
    """The server's transport; `connection_made` is called after the TLS handshake."""
    below = between(protocol, context, None, limits, server_side=True)
    return StreamTransport(connection, below, on_lost)
