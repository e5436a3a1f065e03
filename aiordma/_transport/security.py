"""What the two sides ask of each other before they talk: a key, TLS on the exchange."""

from __future__ import annotations

import ssl
from dataclasses import dataclass

from .._core.handshake import Hello
from ..errors import AuthenticationError


@dataclass(frozen=True, slots=True)
class Security:
    """`auth` is the pre-shared key, `tls` the context of the exchange over TCP; None: without."""

    auth: bytes | None = None
    tls: ssl.SSLContext | None = None
    hostname: str | None = None
    """Whose certificate the connecting side expects."""

    def __post_init__(self) -> None:
        if self.auth is not None:
            from .._core.authentication import check_key  # noqa: PLC0415 - only for who has a key

            check_key(self.auth)
        if self.tls is not None and not isinstance(self.tls, ssl.SSLContext):
            raise TypeError(f"ssl is an ssl.SSLContext, not {type(self.tls).__name__}")

    def agree(self, peer: Hello) -> None:
        """AuthenticationError when only one of the two sides was given a key."""
        if peer.authenticates and self.auth is None:
            raise AuthenticationError("the peer asks for a key: give auth=")
        if self.auth is not None and not peer.authenticates:
            raise AuthenticationError("the peer was given no key: auth= must be the same on both")


OPEN = Security()
