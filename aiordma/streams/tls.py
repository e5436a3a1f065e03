"""TLS for streams. asyncio's TLS protocol sits between the transport and the user's protocol.

`ssl=` has the same meaning as in asyncio. The whole stream is encrypted, and the protocol's
`connection_made` is not called until the server's certificate has been verified. TLS records are
sent as messages over the connection, so an attacker who learns the connection's own keys and tokens
still cannot read the stream's data.
"""

from __future__ import annotations

import asyncio
import ssl
from asyncio import sslproto
from typing import Any, NamedTuple

from .._core.arguments import seconds
from .._options import TLS
from .._transport.arguments import check_context
from ..errors import TLS_HINT, cause_text


class TLSLimits(NamedTuple):
    """TLS time limits in seconds, named as in asyncio. None means asyncio's default."""

    ssl_handshake_timeout: float | None
    ssl_shutdown_timeout: float | None

    @classmethod
    def of(cls, options: dict[str, Any]) -> TLSLimits:
        """Return the TLS time limits in `options`.

        Raises:
            ValueError: If a time limit is invalid, or was given without `ssl`.
        """
        limits = cls(*map(options.get, cls._fields))
        for name, value in limits._asdict().items():
            if value is None:
                continue
            if not options.get("ssl"):
                raise ValueError(f"{name} requires TLS; pass ssl= as well")
            if not seconds(name, value, allow_infinity=True):
                raise ValueError(f"{name} must be a positive number of seconds, not {value}")
        return limits


NO_LIMITS = TLSLimits(None, None)


def context_of(tls: TLS, *, client: bool) -> ssl.SSLContext | None:
    """Return the SSL context for the `ssl` option. True means the client's default context."""
    if tls is None or tls is False:
        return None
    if tls is True:
        if client:
            return ssl.create_default_context()
        raise TypeError(
            "ssl=True is not supported by servers; pass an ssl.SSLContext with a certificate"
        )
    if not isinstance(tls, ssl.SSLContext):
        raise TypeError(f"ssl must be an ssl.SSLContext or None, not {type(tls).__name__}")
    check_context(tls, client=client)
    return tls


def add_tls_hint(error: OSError, peer: str) -> OSError:
    """Return `error` with a hint to pass `ssl` on both sides or on neither.

    `error` was raised by a client's TLS handshake with `peer`. Certificate verification errors are
    returned unchanged.
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        return error
    text = f"the TLS handshake with {peer} failed: {cause_text(error)}; {TLS_HINT}"
    if isinstance(error, ssl.SSLError):
        error.strerror = text  # a new error would have neither `reason` nor `library`
        return error
    return type(error)(text)


def wrap_in_tls(
    protocol: asyncio.BaseProtocol,
    context: ssl.SSLContext,
    ready: asyncio.Future[None] | None,
    limits: TLSLimits,
    **options: Any,
) -> Any:
    """Create an asyncio `SSLProtocol` to sit between a stream's transport and `protocol`."""
    protocol_of_tls: Any = sslproto.SSLProtocol
    return protocol_of_tls(
        asyncio.get_running_loop(), protocol, context, ready, **limits._asdict(), **options
    )
