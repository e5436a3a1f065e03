"""What the two sides demand of each other before they talk: a key, TLS on the TCP bootstrap."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass

from .._core import protocol
from .._core.handshake import Hello
from ..errors import AuthenticationError, ProtocolError


@dataclass(frozen=True, slots=True)
class Security:
    """`auth` is the pre-shared key, `tls` the context of the TCP bootstrap; None: without."""

    auth: bytes | None = None
    tls: ssl.SSLContext | None = None
    hostname: str | None = None
    """The name in the certificate that the connecting side expects."""

    def __post_init__(self) -> None:
        if self.auth is not None:
            from .._core.authentication import check_key  # noqa: PLC0415 - it loads OpenSSL

            check_key(self.auth)
        if self.tls is not None and not isinstance(self.tls, ssl.SSLContext):
            raise TypeError(f"ssl is an ssl.SSLContext, not {type(self.tls).__name__}")

    def agree(self, peer: Hello) -> None:
        """AuthenticationError when only one of the two sides was given a key."""
        if peer.authenticates and self.auth is None:
            raise AuthenticationError("the peer asks for a key: give auth=")
        if self.auth is not None and not peer.authenticates:
            raise AuthenticationError("the peer was given no key: auth= must be the same on both")


NO_SECURITY = Security()


class KeyProof:
    """One side's part of the proof that both have the key, which ends the handshake.

    Until then the peer may send nothing else.  `send` takes a control message; `done` ends when
    the peer has proved it.
    """

    def __init__(
        self,
        key: bytes,
        hellos: tuple[Hello, Hello],
        qp_nums: tuple[int, int],
        send: Callable[[protocol.Message], None],
        *,
        client: bool,
    ) -> None:
        """`hellos` and `qp_nums` are those of this side and of the peer."""
        from .._core import authentication  # noqa: PLC0415 - it loads OpenSSL

        self._core = authentication
        self._key = key
        here, there = (0, 1) if client else (1, 0)
        self._transcript = authentication.transcript(
            hellos[here], hellos[there], qp_nums[here], qp_nums[there]
        )
        self._send = send
        self._client = client
        self._nonce = os.urandom(authentication.NONCE_SIZE)
        self._peer_nonce: bytes | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def begin(self) -> None:
        if self._client:
            self._send(protocol.AuthHello(0, self._nonce))

    def _proof(self, role: str) -> bytes:
        assert self._peer_nonce is not None
        nonces = self._nonce, self._peer_nonce
        client, server = nonces if self._client else reversed(nonces)
        return self._core.proof(self._key, role, client, server, self._transcript)

    def _check(self, role: str, given: bytes) -> None:
        if not self._core.proves(self._proof(role), given):
            raise AuthenticationError("the peer has not the key that auth= has here")

    def control(self, message: protocol.Message) -> None:
        """Takes a message of the peer; AuthenticationError or ProtocolError if it is wrong."""
        match message:
            case protocol.AuthHello() if not self._client and self._peer_nonce is None:
                self._peer_nonce = message.nonce
                self._send(protocol.AuthAnswer(0, self._nonce, self._proof("server")))
            case protocol.AuthAnswer() if self._client and not self.done.done():
                self._peer_nonce = message.nonce
                self._check("server", message.proof)
                self._send(protocol.AuthProof(0, self._proof("client")))
                if not self.done.done():  # to send may have ended the connection
                    self.done.set_result(None)
            case protocol.AuthProof() if (
                not self._client and self._peer_nonce is not None and not self.done.done()
            ):
                self._check("client", message.proof)
                self.done.set_result(None)
            case _:
                raise ProtocolError(f"the peer sent a {type(message).__name__}, unexpected here")
