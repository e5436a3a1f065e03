"""The security requirements of a connection, and their check in the handshake: a key, encryption,
TLS on the TCP bootstrap, messages or a stream."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .._core import protocol
from .._core.handshake import Hello
from ..config import Encrypt
from ..errors import AuthenticationError, ProtocolError, host_port

KINDS = {
    False: "messages (connect, listen, start_server)",
    True: "byte streams (open_connection, create_connection, start_stream_server, create_server)",
}

NOT_THE_SAME_KEY = "the peer says that it has not the same key"

if TYPE_CHECKING:
    from .._core.admission import TicketOffice
    from ..cm.address import Address
    from .encryption import KeyExchange


@dataclass(frozen=True, slots=True)
class Security:
    """`auth` is the pre-shared key, `tls` the context of the TCP bootstrap; None: without.

    `encrypt`: True, or "messages", which allows operations on memory in clear.
    """

    auth: bytes | None = None
    tls: ssl.SSLContext | None = None
    hostname: str | None = None
    """The name in the certificate that the connecting side expects."""
    encrypt: Encrypt = False
    stream: bool = False
    """Whether both sides are byte streams (aiordma.streams)."""
    inspects: bool = False
    """Whether the application of this side, a listener, inspects requests (inspection.py)."""

    def __post_init__(self) -> None:
        if self.auth is not None:
            from .._core.authentication import check_key  # noqa: PLC0415 - it loads OpenSSL

            check_key(self.auth)
        self._check_encrypt()
        if self.tls is not None and not isinstance(self.tls, ssl.SSLContext):
            raise TypeError(f"ssl is an ssl.SSLContext, not {type(self.tls).__name__}")

    def _check_encrypt(self) -> None:
        if self.encrypt not in (False, True, "messages"):
            raise ValueError(f'encrypt is True, False or "messages", not {self.encrypt!r}')
        if not self.encrypt:
            return
        if self.auth is None:
            raise ValueError("encrypt= needs auth=, a key that both sides have")
        try:
            from . import encryption  # noqa: F401, PLC0415 - it needs a package
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"encrypt= needs the package {error.name}: pip install 'aiordma[encrypt]'",
                name=error.name,
            ) from error

    @property
    def memory_in_clear(self) -> bool:
        """Whether a connection that encrypts allows operations on memory."""
        return self.encrypt == "messages"

    def agree(self, peer: Hello, address: Address | None = None) -> None:
        """AuthenticationError when only one of the two sides was given a key, or encrypts.

        ProtocolError when one sends messages and the other a byte stream.  `address` is the peer's,
        for the error.
        """
        if peer.stream != self.stream:
            raise ProtocolError(
                f"{host_port(address) if address else 'the peer'} has {KINDS[peer.stream]}, this "
                f"side {KINDS[self.stream]}: use the same kind on both"
            )
        if peer.authenticates and self.auth is None:
            raise AuthenticationError("the peer asks for a key: give auth=")
        if self.auth is not None and not peer.authenticates:
            raise AuthenticationError("the peer was given no key: auth= must be the same on both")
        here, there = self._encrypts, (peer.encrypts, peer.memory_in_clear)
        if here != there:
            raise AuthenticationError(
                f"the peer {_ENCRYPTS[there]}, and this side {_ENCRYPTS[here]}: "
                f"give the same encrypt= on both"
            )

    @property
    def _encrypts(self) -> tuple[bool, bool]:
        return bool(self.encrypt), self.memory_in_clear


_ENCRYPTS = {
    (False, False): "does not encrypt",
    (False, True): "does not encrypt",
    (True, False): "encrypts (encrypt=True)",
    (True, True): 'encrypts messages alone (encrypt="messages")',
}


NO_SECURITY = Security()


def new_ticket(key: bytes, challenge: bytes, offer: bytes) -> bytes:
    """A client's ticket for its offer; ProtocolError for what is no challenge."""
    from .._core import admission  # noqa: PLC0415 - it loads OpenSSL

    asked = admission.Challenge.unpack(challenge)
    return admission.ticket(key, asked, offer, os.urandom(admission.SALT_SIZE))


def new_ticket_office(key: bytes) -> TicketOffice:
    """A listener's, or one for a single socket."""
    from .._core import admission  # noqa: PLC0415 - it loads OpenSSL

    return admission.TicketOffice(key, os.urandom)


class KeyProof:
    """One side's part of the proof that both have the key, which ends the handshake.

    Until then the peer may send nothing else.  `send` takes a control message; `done` ends when
    the peer has proved it.  With an `exchange`, the nonces are its public keys.  A client may
    `begin` before it knows the connection; what the peer answers is taken after `bind`.
    """

    def __init__(
        self,
        key: bytes,
        send: Callable[[protocol.Message], None],
        *,
        client: bool,
        exchange: KeyExchange | None = None,
    ) -> None:
        from .._core import authentication  # noqa: PLC0415 - it loads OpenSSL

        self._core = authentication
        self._key = key
        self._transcript = b""
        self._send = send
        self._client = client
        self._exchange = exchange
        self._nonce = os.urandom(authentication.NONCE_SIZE) if exchange is None else exchange.public
        self._peer_nonce: bytes | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def bind(self, hellos: tuple[Hello, Hello], qp_nums: tuple[int, int]) -> None:
        """To the connection: `hellos` and `qp_nums` are those of this side and of the peer."""
        here, there = (0, 1) if self._client else (1, 0)
        self._transcript = self._core.transcript(
            hellos[here], hellos[there], qp_nums[here], qp_nums[there]
        )

    def begin(self) -> None:
        if self._client:
            self._send(protocol.AuthHello(0, self._nonce))

    def _proof(self, role: str) -> bytes:
        assert self._peer_nonce is not None
        nonces = self._nonce, self._peer_nonce
        client, server = nonces if self._client else reversed(nonces)
        return self._core.proof(self._key, role, client, server, self._transcript)

    def _take_nonce(self, nonce: bytes) -> None:
        self._peer_nonce = nonce
        if self._exchange is not None:
            self._exchange.agree(self._key, nonce, self._transcript, client=self._client)

    def _check(self, role: str, given: bytes) -> None:
        if not self._core.proves(self._proof(role), given):
            raise AuthenticationError("the peer does not have the key given as auth=")

    def control(self, message: protocol.Message) -> None:
        """Takes a message of the peer; AuthenticationError or ProtocolError if it is wrong."""
        match message:
            case protocol.AuthHello() if not self._client and self._peer_nonce is None:
                self._take_nonce(message.nonce)
                self._send(protocol.AuthAnswer(0, self._nonce, self._proof("server")))
            case protocol.AuthAnswer() if self._client and not self.done.done():
                self._take_nonce(message.nonce)
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
