"""The handshake of a connection, without I/O.

A `Handshake` is one side of a handshake. It follows the list of steps in STEPS: messages to send,
messages to receive, and actions. Its owner carries the messages and performs the actions. Up to
START, this is the method of connecting (connect_tcp.py, ...) with a ConnectAttempt
(connect_attempt.py). After that, it is the connection (lifecycle.py), which carries the remaining
messages on its queue pair.

A handshake has no branches. A message other than the next one in the list is a protocol error, and
every error ends the handshake, except that the user can pass another offer to an out-of-band
connection. The handshake has no time limit of its own: the time limits of `connect` and of the
listener cover it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from .._core import protocol
from .._core.handshake_layout import CHALLENGE_SIZE, ENDPOINT_SIZE, TICKET_SIZE, Endpoint, Hello
from ..errors import AuthenticationError, InternalError, ProtocolError, host_port
from .auth import NOT_THE_SAME_KEY, Security, new_ticket, new_ticket_validator

if TYPE_CHECKING:
    from .._core.admission import TicketValidator
    from ..cm.address import Address
    from .encryption import KeyExchange

Method = Literal["tcp", "cm", "in-band", "oob"]


class Message(Enum):
    """A message of a handshake. The values are descriptions."""

    OFFER = "the client's endpoint and hello; over CM, only its hello"
    CHALLENGE = "a nonce, and the server's hello"
    TICKET = "an HMAC of the nonce and the offer"
    REPLY = "the server's endpoint and hello; over CM, only its hello"
    AUTH_HELLO = "the client's nonce or public key"
    AUTH_ANSWER = "the server's nonce or public key, and its proof of the key"
    AUTH_PROOF = "the client's proof of the key"
    READY = "the sender's queue pair is connected"
    CONNECT_DATA = "the data that the user passed to `connect`"
    CONNECT_ACCEPTED = "`on_request` has accepted the connection"


class Action(Enum):
    """An action that a side performs between two messages. The values are descriptions."""

    CREATE = "create the queue pair"
    COMPARE = "check that the hellos are compatible"
    CONNECT = "connect the queue pair; without remote access if the peer must still prove the key"
    START = "let the connection carry the remaining messages on the queue pair"
    GRANT = "enable remote access"
    INSPECT = "client: get the user's data; server: call `on_request`"
    END = "nothing, because the handshake is complete"


class Direction(Enum):
    """The direction of a step's message. The values are the notation in STEPS."""

    SEND = ">"
    RECEIVE = "<"
    NONE = ""


class Step(NamedTuple):
    """A step of one side: a message to send or receive, or an action, whose direction is NONE."""

    direction: Direction
    kind: Message | Action

    def __str__(self) -> str:
        return self.direction.value + self.kind.name


def _parse(text: str) -> tuple[Step, ...]:
    """Convert a list of steps from the notation in STEPS."""
    steps: list[Step] = []
    for word in text.split():
        name = word.lstrip("<>")
        direction = Direction(word.removesuffix(name))
        names = Action if direction is Direction.NONE else Message
        steps.append(Step(direction, names[name]))
    return tuple(steps)


END = Step(Direction.NONE, Action.END)
"""The step after the last one."""


class Sides(NamedTuple):
    """The steps of both sides of a handshake."""

    client: tuple[Step, ...]
    server: tuple[Step, ...]


def _sides(client: str, server: str) -> Sides:
    return Sides(_parse(client), _parse(server))


_CLIENT_PROOF_STEPS = " >AUTH_HELLO <AUTH_ANSWER >AUTH_PROOF GRANT"
_SERVER_PROOF_STEPS = " <AUTH_HELLO >AUTH_ANSWER <AUTH_PROOF GRANT"

STEPS: Mapping[tuple[Method, bool], Sides] = MappingProxyType(
    {
        ("tcp", False): _sides(
            "CREATE >OFFER <REPLY COMPARE CONNECT >READY START",
            "<OFFER CREATE CONNECT >REPLY COMPARE <READY START",
        ),
        ("tcp", True): _sides(
            "CREATE >OFFER <CHALLENGE COMPARE >TICKET >AUTH_HELLO"
            " <REPLY <AUTH_ANSWER >AUTH_PROOF CONNECT >READY <READY START",
            "<OFFER >CHALLENGE COMPARE <TICKET CREATE >REPLY"
            " <AUTH_HELLO >AUTH_ANSWER <AUTH_PROOF <READY CONNECT >READY START",
        ),
        ("cm", False): _sides(
            "CREATE >OFFER CONNECT <REPLY COMPARE START",
            "<OFFER CREATE >REPLY CONNECT COMPARE START",
        ),
        ("cm", True): _sides(
            "CREATE >OFFER CONNECT <REPLY COMPARE START" + _CLIENT_PROOF_STEPS,
            "<OFFER CREATE >REPLY CONNECT COMPARE START" + _SERVER_PROOF_STEPS,
        ),
        ("in-band", False): _sides(
            "CREATE >OFFER <REPLY COMPARE CONNECT START >READY",
            "<OFFER CREATE CONNECT >REPLY COMPARE START <READY",
        ),
        ("in-band", True): _sides(
            "CREATE >OFFER <REPLY COMPARE CONNECT START" + _CLIENT_PROOF_STEPS,
            "<OFFER CREATE CONNECT >REPLY COMPARE START" + _SERVER_PROOF_STEPS,
        ),
        ("oob", False): _sides(
            "CREATE >OFFER <OFFER COMPARE CONNECT START",
            "CREATE >OFFER <OFFER COMPARE CONNECT START",
        ),
        ("oob", True): _sides(
            "CREATE >OFFER <OFFER COMPARE CONNECT START" + _CLIENT_PROOF_STEPS,
            "CREATE >OFFER <OFFER COMPARE CONNECT START" + _SERVER_PROOF_STEPS,
        ),
    }
)
"""The steps of both sides, by method of connecting and by whether the sides have a key.

">" marks a message to send, and "<" a message to receive. These rules hold for all methods:

- Each side compares the hellos as soon as the peer has both of them, so that both sides report the
  reason if they are not compatible.
- With a key, a server creates nothing for a client that has not sent a ticket. With the connection
  manager, the ticket is part of the request (connect_cm.py). In-band, the request arrives over a
  connection whose peer has proved the key.
- No peer may access memory before it has proved the key. The connection manager connects the queue
  pair with remote access, so CONNECT withdraws the access before the reply is read.

With TCP, neither side connects its queue pair before the proof. Otherwise a peer without the key
could make the embedded device connect to any address. The client sends AUTH_HELLO together with the
ticket, which saves a round trip.
"""

INSPECTION = _sides(
    "INSPECT >CONNECT_DATA <CONNECT_ACCEPTED", "<CONNECT_DATA INSPECT >CONNECT_ACCEPTED"
)
"""The steps that follow if the server's hello announces an inspection (inspection.py)."""

PROOF = frozenset({Message.AUTH_HELLO, Message.AUTH_ANSWER, Message.AUTH_PROOF})
"""The messages that prove the key. They are control messages on every carrier."""

CONTROLS: Mapping[type[protocol.Message], Message] = MappingProxyType(
    {
        protocol.AuthHello: Message.AUTH_HELLO,
        protocol.AuthAnswer: Message.AUTH_ANSWER,
        protocol.AuthProof: Message.AUTH_PROOF,
        protocol.ReadyToUse: Message.READY,
        protocol.ConnectData: Message.CONNECT_DATA,
        protocol.ConnectAccepted: Message.CONNECT_ACCEPTED,
    }
)
"""The messages that are control messages. READY is one only on a queue pair."""


INTERFACES = {
    False: "messages (connect, listen, start_server)",
    True: "byte streams (open_connection, create_connection, start_stream_server, create_server)",
}
"""The interfaces for messages (False) and for byte streams (True), by `Security.stream`."""


class _Encryption(NamedTuple):
    """The encryption of one side, as its hello announces it."""

    encrypts: bool
    memory_in_clear: bool


_ENCRYPTION_TEXTS = {
    _Encryption(encrypts=False, memory_in_clear=False): "does not encrypt",
    _Encryption(encrypts=False, memory_in_clear=True): "does not encrypt",
    _Encryption(encrypts=True, memory_in_clear=False): "encrypts (encrypt=True)",
    _Encryption(encrypts=True, memory_in_clear=True): 'encrypts only messages (encrypt="messages")',
}


def check_compatible(security: Security, peer: Hello, address: Address | None = None) -> None:
    """Check that both sides have the same requirements.

    Args:
        security: The requirements of this side.
        peer: The peer's hello.
        address: The peer's address, for error messages.

    Raises:
        AuthenticationError: If only one side has a key, or `encrypt` differs.
        ProtocolError: If one side uses messages and the other side uses a byte stream.
    """
    if peer.stream != security.stream:
        name = host_port(address) if address else "the peer"
        raise ProtocolError(
            f"{name} uses {INTERFACES[peer.stream]}, but "
            f"this side uses {INTERFACES[security.stream]}: use the same interface on both sides"
        )
    if peer.authenticates and security.auth is None:
        raise AuthenticationError("the peer requires a key: pass the same auth= on both sides")
    if security.auth is not None and not peer.authenticates:
        raise AuthenticationError("the peer has no key: pass the same auth= on both sides")
    here = _Encryption(bool(security.encrypt), security.memory_in_clear)
    there = _Encryption(peer.encrypts, peer.memory_in_clear)
    if here != there:
        raise AuthenticationError(
            f"the peer {_ENCRYPTION_TEXTS[there]}, but this side {_ENCRYPTION_TEXTS[here]}: "
            f"pass the same encrypt= on both sides"
        )


class Handshake:
    """One side of a handshake.

    The owner performs the steps in their order. For a message, it calls `send` or `receive`. For
    COMPARE, it calls `compare`. After another action, it calls `created` or `done`.
    """

    def __init__(
        self,
        method: Method,
        security: Security,
        *,
        client: bool,
        hello: Hello | None = None,
        address: Address | None = None,
        random: Callable[[int], bytes] = os.urandom,
    ) -> None:
        """Start a handshake.

        Args:
            method: The method of connecting.
            security: The requirements of this side.
            client: Whether this is the connecting side.
            hello: The hello that a server sends with a challenge, before it has an endpoint.
            address: The peer's address, for error messages.
            random: Returns n random bytes.
        """
        self.client: bool = client
        """Whether this is the connecting side."""
        self.exchange: KeyExchange | None = None
        """The key exchange of a connection that encrypts. Set it before the key is proved."""
        self.peer_qp_num: int | None = None
        """The number of the peer's queue pair. If it is None, the peer's endpoint contains it."""
        self.request_data: bytes = b""
        """The data for CONNECT_DATA. On the server, it is valid once INSPECT is the next step."""
        self.peer_authenticated: bool = security.auth is None
        """Whether the peer may access memory: it has proved the key, or no key is required."""
        self.heard_from_peer: bool = False
        """Whether any message of the peer has arrived, valid or not."""
        self._security = security
        self._address = address
        self._random = random
        self._method: Method = method
        self._position = 0
        self._hello = hello
        self._peer: Hello | None = None
        self._offer = b""  # this side's offer or reply
        self._qp_num = 0
        self._peer_offer = b""
        self._tickets: TicketValidator | None = None
        self._remote: Endpoint | None = None
        self._nonce = b""
        self._peer_nonce = b""
        self._transcript = b""
        self._choose_steps()
        if security.auth is not None:
            from .._core import authentication  # noqa: PLC0415 - it loads OpenSSL

            self._authentication = authentication

    def _choose_steps(self) -> None:
        """Choose this side's steps, again when the peer's hello or this side's role is known."""
        sides = STEPS[self._method, self._security.auth is not None]
        steps = sides.client if self.client else sides.server
        if self.is_inspected:
            steps += INSPECTION.client if self.client else INSPECTION.server
        self._steps = (*steps, END)

    @property
    def next_step(self) -> Step:
        """The step that the owner must perform next, or END after the last one."""
        return self._steps[self._position]

    def set_role(self, *, client: bool) -> None:
        """Set the role of a side whose role depends on the peer's offer."""
        self.client = client
        self._choose_steps()

    @property
    def is_inspected(self) -> bool:
        """Whether the server's application inspects the connection."""
        if not self.client:
            return self._security.inspects
        return self._peer is not None and self._peer.inspects

    @property
    def proves_key(self) -> bool:
        """Whether the next step belongs to the proof of the key."""
        return self.next_step.kind in PROOF

    @property
    def hello(self) -> Hello:
        """The hello of this side, which must have been created."""
        assert self._hello is not None
        return self._hello

    @property
    def peer(self) -> Hello:
        """The hello of the peer, which must have arrived."""
        assert self._peer is not None
        return self._peer

    @property
    def remote(self) -> Endpoint:
        """The endpoint of the peer. Raises ProtocolError if it is invalid."""
        if self._remote is None:
            self._remote = Endpoint.unpack(self._peer_offer[:ENDPOINT_SIZE])
        return self._remote

    # ---- steps -----------------------------------------------------------------------------------

    def created(self, hello: Hello, offer: bytes, qp_num: int) -> None:
        """Continue after this side's queue pair has been created.

        Args:
            hello: The hello of this side.
            offer: The offer or reply of this side, packed.
            qp_num: The number of this side's queue pair.
        """
        self.done(Action.CREATE)
        self._hello, self._offer, self._qp_num = hello, offer, qp_num

    def compare(self) -> None:
        """Compare the hellos, as soon as each side has both of them.

        Raises:
            AuthenticationError: If only one side has a key, or `encrypt` differs.
            ProtocolError: If one side uses messages and the other side uses a byte stream.
        """
        check_compatible(self._security, self.peer, self._address)
        self.done(Action.COMPARE)

    def done(self, action: Action) -> None:
        """Continue after an action. Raises InternalError if it was not the next step."""
        if self.next_step.kind is not action:
            raise InternalError(f"{action.name} is not the next step of a {self._method} handshake")
        self._position += 1

    def send(self) -> bytes | protocol.Message:
        """Return the message that the owner must send now: packed, or a control message.

        Raises:
            InternalError: If the next step is not a message to send.
            ProtocolError: If the peer's challenge is invalid.
        """
        step = self.next_step
        if step.direction is not Direction.SEND:
            raise InternalError(f"a {self._method} handshake has nothing to send")
        self._position += 1
        return _SEND[step.kind](self)

    def send_bytes(self) -> bytes:
        """Return the message to send now, which is not a control message."""
        message = self.send()
        assert isinstance(message, bytes)
        return message

    def receive(self, kind: Message, message: bytes | protocol.Message) -> None:
        """Process a message from the peer.

        Raises:
            AuthenticationError: If the peer does not have the key.
            ProtocolError: If the message is invalid or not the expected one.
        """
        self.heard_from_peer = True
        direction, expected = self.next_step
        if kind is not expected or direction is not Direction.RECEIVE:
            raise ProtocolError(f"the peer sent an unexpected {_message_name(kind, message)}")
        _RECEIVE[kind](self, message)
        self._position += 1

    def receive_again(self, kind: Message) -> None:
        """Go back to the step that receives `kind`, because its contents could not be used."""
        self._position = self._steps.index(Step(Direction.RECEIVE, kind))

    def receive_control(self, message: protocol.Message) -> None:
        """Process a control message from the peer. Raises the same exceptions as `receive`."""
        if isinstance(message, protocol.Goodbye):
            raise AuthenticationError(NOT_THE_SAME_KEY)
        kind = CONTROLS.get(type(message))
        if kind is None:
            raise ProtocolError(f"the peer sent an unexpected {type(message).__name__}")
        self.receive(kind, message)

    # ---- endpoints and hellos --------------------------------------------------------------------

    def _send_hello(self) -> bytes:
        """Return this side's offer or reply, which contains its hello."""
        return self._offer

    def _receive_hello(self, message: bytes) -> None:
        """Store a challenge, offer or reply, and its hello, which replaces an earlier one."""
        self._peer_offer, self._remote = message, None
        self._peer = Hello.unpack(message if self._method == "cm" else message[ENDPOINT_SIZE:])
        self._choose_steps()

    def _receive_offer(self, offer: bytes) -> None:
        self._receive_hello(offer)
        if self._method != "cm":
            self.remote  # noqa: B018 - reject an invalid endpoint before creating anything

    def _send_ready(self) -> bytes | protocol.Message:
        return b"" if self._method == "tcp" else protocol.ReadyToUse(0)

    def _receive_ready(self, _: bytes | protocol.Message) -> None:
        """Do nothing, because the message has no contents."""

    # ---- the ticket (admission.py) ---------------------------------------------------------------

    def _send_challenge(self) -> bytes:
        assert self._security.auth is not None
        self._tickets = new_ticket_validator(self._security.auth, self._random)
        return self._tickets.challenge.pack() + self.hello.pack()

    def _send_ticket(self) -> bytes:
        assert self._security.auth is not None
        challenge = self._peer_offer[:CHALLENGE_SIZE]
        return new_ticket(self._security.auth, challenge, self._offer, self._random)

    def _receive_ticket(self, ticket: bytes) -> None:
        assert self._tickets is not None
        if len(ticket) != TICKET_SIZE or not self._tickets.validate(ticket, self._peer_offer):
            raise ProtocolError("the peer's ticket does not match this listener's challenge")

    # ---- the proof of the key (authentication.py) ------------------------------------------------

    def _own_nonce(self) -> bytes:
        """Return this side's nonce, or its public key on a connection that encrypts.

        The proofs cover both nonces, so public keys that serve as nonces are authenticated too.
        """
        if not self._nonce:
            size, exchange = self._authentication.NONCE_SIZE, self.exchange
            self._nonce = self._random(size) if exchange is None else exchange.public
        return self._nonce

    def _get_transcript(self) -> bytes:
        """Return the hash that binds the proofs to this connection."""
        if self._transcript:
            return self._transcript
        peer_qp_num = self.remote.qp_num if self.peer_qp_num is None else self.peer_qp_num
        hellos, qp_nums = (self.hello, self.peer), (self._qp_num, peer_qp_num)
        client, server = (0, 1) if self.client else (1, 0)
        self._transcript = self._authentication.transcript(
            hellos[client], hellos[server], qp_nums[client], qp_nums[server]
        )
        return self._transcript

    def _proof(self, role: str) -> bytes:
        """Return the proof that the side with this role, "client" or "server", has the key."""
        assert self._security.auth is not None
        nonces = self._own_nonce(), self._peer_nonce
        client, server = nonces if self.client else reversed(nonces)
        return self._authentication.proof(
            self._security.auth, role, client, server, self._get_transcript()
        )

    def _receive_nonce(self, nonce: bytes) -> None:
        """Store the peer's nonce. On a connection that encrypts, derive the keys from it."""
        self._peer_nonce = nonce
        if self.exchange is not None:  # the nonce is the peer's public key
            assert self._security.auth is not None
            key, transcript = self._security.auth, self._get_transcript()
            self.exchange.agree(key, nonce, transcript, client=self.client)

    def _check_proof(self, role: str, proof: bytes) -> None:
        if not self._authentication.is_valid_proof(self._proof(role), proof):
            raise AuthenticationError("the peer does not have the key given as auth=")
        self.peer_authenticated = True

    def _send_auth_hello(self) -> protocol.Message:
        return protocol.AuthHello(0, self._own_nonce())

    def _receive_auth_hello(self, message: protocol.AuthHello) -> None:
        self._receive_nonce(message.nonce)

    def _send_auth_answer(self) -> protocol.Message:
        return protocol.AuthAnswer(0, self._own_nonce(), self._proof("server"))

    def _receive_auth_answer(self, message: protocol.AuthAnswer) -> None:
        self._receive_nonce(message.nonce)
        self._check_proof("server", message.proof)

    def _send_auth_proof(self) -> protocol.Message:
        return protocol.AuthProof(0, self._proof("client"))

    def _receive_auth_proof(self, message: protocol.AuthProof) -> None:
        self._check_proof("client", message.proof)

    # ---- the inspection (inspection.py) ----------------------------------------------------------

    def _send_connect_data(self) -> protocol.Message:
        return protocol.ConnectData(0, self.request_data)

    def _receive_connect_data(self, message: protocol.ConnectData) -> None:
        self.request_data = message.data

    def _send_connect_accepted(self) -> protocol.Message:
        return protocol.ConnectAccepted(0)

    def _receive_connect_accepted(self, _: protocol.ConnectAccepted) -> None:
        """Do nothing, because the message has no contents."""


_SEND: Mapping[Message | Action, Callable[[Handshake], bytes | protocol.Message]] = (
    MappingProxyType(
        {
            Message.OFFER: Handshake._send_hello,
            Message.CHALLENGE: Handshake._send_challenge,
            Message.TICKET: Handshake._send_ticket,
            Message.REPLY: Handshake._send_hello,
            Message.AUTH_HELLO: Handshake._send_auth_hello,
            Message.AUTH_ANSWER: Handshake._send_auth_answer,
            Message.AUTH_PROOF: Handshake._send_auth_proof,
            Message.READY: Handshake._send_ready,
            Message.CONNECT_DATA: Handshake._send_connect_data,
            Message.CONNECT_ACCEPTED: Handshake._send_connect_accepted,
        }
    )
)
"""The method that returns each message to send."""

_RECEIVE: Mapping[Message, Callable[[Handshake, Any], None]] = MappingProxyType(
    {
        Message.OFFER: Handshake._receive_offer,
        # The client reads the challenge only after comparing the hellos, because a server without a
        # key sends its endpoint instead.
        Message.CHALLENGE: Handshake._receive_hello,
        Message.TICKET: Handshake._receive_ticket,
        Message.REPLY: Handshake._receive_hello,
        Message.AUTH_HELLO: Handshake._receive_auth_hello,
        Message.AUTH_ANSWER: Handshake._receive_auth_answer,
        Message.AUTH_PROOF: Handshake._receive_auth_proof,
        Message.READY: Handshake._receive_ready,
        Message.CONNECT_DATA: Handshake._receive_connect_data,
        Message.CONNECT_ACCEPTED: Handshake._receive_connect_accepted,
    }
)
"""The method that processes each message from the peer."""


def _message_name(kind: Message, message: bytes | protocol.Message) -> str:
    return kind.name if isinstance(message, bytes) else type(message).__name__
