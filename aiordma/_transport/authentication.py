"""The last part of the handshake, where a key is given: both sides show that they have it.

Until then the peer may send nothing else: no message, no request (`Connection`, `Messages.gated`).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from .._core import authentication, protocol
from ..errors import AuthenticationError, ProtocolError


class Authentication:
    """One side's part.  `send` takes a control message; `done` ends when the peer has proved it."""

    def __init__(
        self,
        key: bytes,
        transcript: bytes,
        send: Callable[[protocol.Message], None],
        *,
        client: bool,
    ) -> None:
        self._key = key
        self._transcript = transcript
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
        return authentication.proof(self._key, role, client, server, self._transcript)

    def _check(self, role: str, given: bytes) -> None:
        if not authentication.proves(self._proof(role), given):
            raise AuthenticationError("the peer has not the key that auth= has here")

    def control(self, message: protocol.Message) -> None:
        """What the peer says; AuthenticationError or ProtocolError ends the connection."""
        match message:
            case protocol.AuthHello() if not self._client and self._peer_nonce is None:
                self._peer_nonce = message.nonce
                self._send(protocol.AuthAnswer(0, self._nonce, self._proof("server")))
            case protocol.AuthAnswer() if self._client and not self.done.done():
                self._peer_nonce = message.nonce
                self._check("server", message.proof)
                self._send(protocol.AuthProof(0, self._proof("client")))
                self.done.set_result(None)
            case protocol.AuthProof() if (
                not self._client and self._peer_nonce is not None and not self.done.done()
            ):
                self._check("client", message.proof)
                self.done.set_result(None)
            case _:
                raise ProtocolError(f"the peer sent a {type(message).__name__}, unexpected here")
