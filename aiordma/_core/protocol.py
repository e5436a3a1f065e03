"""Control messages between the two ends of a connection, in msgpack.

Each is an array ``[magic, version, type, request id, body]``, the body an array of the fields of
its class below, in order. It travels in a CONTROL frame (:mod:`aiordma._core.frames`); it is
never longer than MAX_LENGTH, so it fits every receive that a peer may post.

A request has a request id of its sender's choice (not 0); what answers it carries the same id,
and every request is answered: with what was asked for, or with an Error. Id 0 is for messages that
answer nothing and want no answer. At most MAX_UNANSWERED requests of one side, as many of its
offers, and as many of its connect requests, are unanswered at a time: answers wait for credits, and
a peer that withholds those could else make this side keep answers without end.

Decoding is strict: wrong types, numbers out of range, unknown versions and types, missing,
additional and trailing bytes are all a ProtocolError.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias, get_args, get_type_hints

import msgpack  # type: ignore[import-untyped]  # it has no types; _pack and _unpack do

from aiordma._core.fields import (
    U16,
    U32,
    U64,
    Access,
    Bytes32,
    Bytes40,
    Codec,
    Data,
    Keys,
    Text,
    Token,
)
from aiordma._core.frames import HEADER_SIZE, TAG_SIZE
from aiordma.errors import MessageTooLongError, ProtocolError

MAGIC = 0xA17D
VERSION = 1
MAX_LENGTH = 512
"""Bytes of the longest control message."""
MAX_UNANSWERED = 256
"""Requests, offers and connect requests, of each, that one side may have unanswered."""
MIN_RECEIVE = HEADER_SIZE + MAX_LENGTH + TAG_SIZE
"""Bytes that every receive must have: any of them may be hit by the longest control message."""


class ErrorCode(IntEnum):
    """Why a request was refused. Numbers that are not here may come from a later release."""

    OK = 0
    INTERNAL = 1
    UNSUPPORTED = 2
    QUOTA = 3
    UNKNOWN_REGION = 4
    ACCESS = 5
    TOO_LONG = 6
    BUSY = 7
    CANCELLED = 8


class GoodbyeCode(IntEnum):
    """Why a side ends the connection. Numbers that are not here may come from a later release."""

    NORMAL = 0
    SHUTDOWN = 1
    PROTOCOL_ERROR = 2
    TIMEOUT = 3
    INTERNAL = 4
    NOT_AUTHENTICATED = 5
    REJECTED = 6
    FAILED = 7


class RailCause(IntEnum):
    """Why a side has stopped a rail. Numbers that are not here may come from a later release."""

    UNKNOWN = 0
    UNANSWERED = 1
    NOT_READY = 2
    QUEUE_PAIR = 3
    PORT = 4
    DEVICE = 5
    SILENCE = 6
    OTHER = 7


RAIL_CAUSES: Mapping[int, str] = MappingProxyType(
    {
        RailCause.UNANSWERED: "its requests were not acknowledged (RETRY_EXC_ERR)",
        RailCause.NOT_READY: "this side had no receive posted for too long (RNR_RETRY_EXC_ERR)",
        RailCause.QUEUE_PAIR: "its queue pair failed",
        RailCause.PORT: "the port of its device went down (PORT_ERR)",
        RailCause.DEVICE: "its device failed (DEVICE_FATAL)",
        RailCause.SILENCE: "it did not hear this side in time, or its link was closed",
        RailCause.OTHER: "its device could not carry the connection",
    }
)
"""The text of each cause, for the other side. No text of a peer is repeated."""


def rail_cause_text(number: int) -> str:
    """Return the peer's cause as a text, which is empty if the peer gave none."""
    if number == RailCause.UNKNOWN:
        return ""
    return RAIL_CAUSES.get(number, f"cause {number}, which this release does not know")


class RegionGrant(NamedTuple):
    """A region of the sender is the receiver's to use, within the rights and lease of ``token``.

    Answers a RegionRequest (its request id), or is handed over unasked (0).  ``keys`` has the
    numbers of the rails that can use it, but for rail 0, whose rkey the token has, with an rkey
    for each.
    """

    request_id: U32
    token: Token
    keys: Keys = ()


class RegionReturn(NamedTuple):
    """A region that its owner lent goes back to the owner, for its contents.

    The sender is done with it and promises not to use its token any more.
    """

    request_id: U32
    region_id: U64


class RegionRequest(NamedTuple):
    """Lend me ``length`` bytes with these rights, for ``lease_ms`` (0: until I release them).

    Answered by RegionGrant, or by Error (over the quota, for instance).
    """

    request_id: U32
    length: U64
    access: Access
    lease_ms: U32


class RegionRelease(NamedTuple):
    """The sender needs the owner's region no longer; its contents do not matter."""

    request_id: U32
    region_id: U64


class RegionEnd(NamedTuple):
    """A region of the sender is the receiver's to use no longer: taken back, or its lease is over.

    The receiver ignores it for a region that it has given up.
    """

    request_id: U32
    region_id: U64


class RegionRenew(NamedTuple):
    """Let me use what you lent me for ``lease_ms`` from now on (0: until I release it).

    Answered by RegionLease, or by Error.
    """

    request_id: U32
    region_id: U64
    lease_ms: U32


class RegionLease(NamedTuple):
    """The lease of a region of the sender is ``lease_ms`` from now on (0: without an end).

    Answers a RegionRenew (its request id), or is told unasked (0).
    """

    request_id: U32
    region_id: U64
    lease_ms: U32


class Ping(NamedTuple):
    """Are you there? Answered by Pong."""

    request_id: U32


class Pong(NamedTuple):
    """Answers Ping."""

    request_id: U32


class Goodbye(NamedTuple):
    """The sender will send nothing after this; ``code`` is a GoodbyeCode."""

    request_id: U32
    code: U16
    text: Text


class Error(NamedTuple):
    """The request of this id is refused; ``code`` is an ErrorCode."""

    request_id: U32
    code: U16
    text: Text


class AuthHello(NamedTuple):
    """The connecting side begins: prove with this nonce that you have the key.

    Where both encrypt the nonces, this one and the answer's, are X25519 public keys.
    """

    request_id: U32
    nonce: Bytes32


class AuthAnswer(NamedTuple):
    """Answers AuthHello: the proof, and a nonce for the other side's."""

    request_id: U32
    nonce: Bytes32
    proof: Bytes32


class AuthProof(NamedTuple):
    """Answers AuthAnswer: the connecting side's proof."""

    request_id: U32
    proof: Bytes32


class ReceiveSize(NamedTuple):
    """The sender's receives from number ``first`` on (counted from 0) have ``size`` bytes."""

    request_id: U32
    first: U64
    size: U32


class ConnectRequest(NamedTuple):
    """A further connection is to be opened over this one: the sender's Endpoint and Hello.

    ``number`` identifies it on the socket that the two sides share. Answered by ConnectReply, or
    by Error: QUOTA when the listener has too many connections, else when to use a socket instead.
    """

    request_id: U32
    number: U32
    endpoint: Bytes40
    hello: Bytes32


class ConnectReply(NamedTuple):
    """Answers ConnectRequest: the listener's Endpoint and Hello; its queue pair is connected."""

    request_id: U32
    endpoint: Bytes40
    hello: Bytes32


class ReadyToUse(NamedTuple):
    """First message on a connection that was opened in-band: the queue pair is connected."""

    request_id: U32


class ConnectData(NamedTuple):
    """First message to a listener whose hello says that its application inspects requests.

    ``data`` is of the connecting side's user. Answered by ConnectAccepted, or by Goodbye with the
    reason (REJECTED).
    """

    request_id: U32
    data: Data


class ConnectAccepted(NamedTuple):
    """Answers ConnectData: the listener's application takes the connection."""

    request_id: U32


class RailOffer(NamedTuple):
    """The connecting side has a queue pair on another device: rail ``rail``, with its Endpoint.

    Rails are numbered from 1 in the order of their offers; the queue pair of the handshake is 0.
    Answered by RailAnswer, or by Error.
    """

    request_id: U32
    rail: U32
    endpoint: Bytes40


class RailAnswer(NamedTuple):
    """Answers RailOffer: the Endpoint of its partner, which is connected."""

    request_id: U32
    rail: U32
    endpoint: Bytes40


class RailReady(NamedTuple):
    """A write by this rail has been acknowledged here: the peer can use it too."""

    request_id: U32
    rail: U32


class RailDown(NamedTuple):
    """The sender has stopped this rail; answered once by the same.

    ``request_id`` is the RailCause, or 0. Releases before it send 0 and ignore it.
    """

    request_id: U32
    rail: U32


class Resume(NamedTuple):
    """First frame on a rail that becomes the lead: so many frames have been handled here.

    It takes no credit, and does not count itself.  ``request_id`` is how many its sender has sent,
    with this one: an earlier one that comes later by another rail does not count.
    """

    request_id: U32
    rail: U32
    frames: U64


class RegionKey(NamedTuple):
    """Rail ``rail``, which came up after the region was granted, can use it with this ``rkey``.

    Ignored for a region that was not granted on this connection, and for a rail that is not up.
    """

    request_id: U32
    region_id: U64
    rail: U32
    rkey: U32


Message: TypeAlias = (
    RegionGrant
    | RegionReturn
    | RegionRequest
    | RegionRelease
    | Ping
    | Pong
    | Goodbye
    | Error
    | AuthHello
    | AuthAnswer
    | AuthProof
    | ReceiveSize
    | ConnectRequest
    | ConnectReply
    | ReadyToUse
    | RegionEnd
    | RegionRenew
    | RegionLease
    | ConnectData
    | ConnectAccepted
    | RailOffer
    | RailAnswer
    | RailReady
    | RailDown
    | Resume
    | RegionKey
)
"""Any control message; its request id stands first. New ones go to the end: see NUMBERS."""

BEFORE_PROOF: frozenset[type[Message]] = frozenset({AuthHello, AuthAnswer, AuthProof, Goodbye})
"""Messages that a peer may send before it has proved the key: all others end the connection."""

NUMBERS: Mapping[type[Message], int] = MappingProxyType(
    {cls: number for number, cls in enumerate(get_args(Message), 3)}
)
"""The type of each message as a number, which stands third in its array."""


def _codecs(cls: type[Message]) -> tuple[tuple[str, Codec], ...]:
    hints = get_type_hints(cls, include_extras=True)
    return tuple((name, get_args(hints[name])[-1]) for name in cls._fields)


# By type: the class and, for the request id and each field of the body, name and codec.
_FORMATS: dict[int, tuple[type[Message], tuple[tuple[str, Codec], ...]]] = {
    number: (cls, _codecs(cls)) for cls, number in NUMBERS.items()
}


def _check(message: Message) -> None:
    """Checks the relations between fields; ValueError."""
    if isinstance(message, ReceiveSize) and message.size < MIN_RECEIVE:
        raise ValueError(f"a receive has at least {MIN_RECEIVE} bytes, not {message.size}")


def _pack(value: list[object]) -> bytes:
    packed: bytes = msgpack.packb(value)
    return packed


def _unpack(data: bytes | bytearray | memoryview) -> object:
    # No map and no extension type is part of the protocol. Arrays and strings that claim to be
    # longer than the message are refused by msgpack before it allocates anything for them.
    try:
        value: object = msgpack.unpackb(data, max_map_len=0, max_ext_len=0)
    except (ValueError, msgpack.UnpackException) as error:
        text = str(error) or type(error).__name__
        raise ProtocolError(f"the peer sent a control message that is no msgpack: {text}") from None
    return value


def _is(value: object, number: int) -> bool:
    # 1.0 and True are equal to 1, but they are not what the peer has to send.
    return type(value) is int and value == number


def encode(message: Message) -> bytes:
    """A message as bytes, at most MAX_LENGTH of them. ValueError when a field does not fit."""
    if message is GOODBYE:
        return _GOODBYE
    return _encode(message)


def _encode(message: Message) -> bytes:
    number = NUMBERS[type(message)]
    _, codecs = _FORMATS[number]
    _check(message)
    values = []
    name = ""
    try:
        for name, codec in codecs:
            values.append(codec.encode(getattr(message, name)))
    except ValueError as error:
        raise ValueError(f"{type(message).__name__}.{name}: {error}") from None
    request_id, *body = values
    return _pack([MAGIC, VERSION, number, request_id, body])


def decode(data: bytes | bytearray | memoryview) -> Message:
    """The message in ``data``, all of it. Raises ProtocolError, and nothing else, if it is none."""
    if data == _GOODBYE:
        return GOODBYE
    if len(data) > MAX_LENGTH:
        raise ProtocolError(f"the peer sent a control message of {len(data)} bytes")
    envelope = _unpack(data)
    if type(envelope) is not list or not envelope or not _is(envelope[0], MAGIC):
        raise ProtocolError("the peer sent something that is no control message of aiordma")
    if len(envelope) < 2 or not _is(envelope[1], VERSION):
        raise ProtocolError(
            f"the peer speaks version {envelope[1:2]!r:.40} of the control protocol, this side "
            f"[{VERSION}]; run the same release of aiordma on both"
        )
    if len(envelope) != 5:
        raise ProtocolError(f"the peer sent a control message of {len(envelope)} parts, not 5")
    _, _, number, request_id, body = envelope
    known = _FORMATS.get(number) if type(number) is int else None
    if known is None:
        raise ProtocolError(f"the peer sent a control message of unknown type {number!r:.40}")
    cls, codecs = known
    if type(body) is not list or len(body) != len(codecs) - 1:
        raise ProtocolError(f"the peer sent a {cls.__name__} without its {len(codecs) - 1} fields")
    values: list[Any] = []
    field = codecs[0]
    try:
        for field, value in zip(codecs, [request_id, *body], strict=True):
            values.append(field[1].decode(value))
    except ValueError as error:
        raise ProtocolError(
            f"the peer sent a {cls.__name__} with a bad {field[0]}: {error}"
        ) from None
    message = cls(*values)
    try:
        _check(message)
    except ValueError as error:
        raise ProtocolError(f"the peer sent a {cls.__name__}: {error}") from None
    return message


GOODBYE = Goodbye(0, GoodbyeCode.NORMAL, "")
"""The last message of every connection that ends in order; so it is made and read once."""
_GOODBYE = _encode(GOODBYE)

GOING_AWAY = Goodbye(0, GoodbyeCode.NORMAL, "the server is shutting down")
"""Ends a connection in order, as GOODBYE, for a release that does not know the text as well."""
CUT_OFF = Goodbye(0, GoodbyeCode.SHUTDOWN, "the server was shut down before its handler had ended")

_FAILURE = re.compile("([A-Za-z_][A-Za-z0-9_]{0,63})(?: ([0-9]{1,20}) of ([0-9]{1,20}))?")


def failed(error: BaseException) -> Goodbye:
    """Return the goodbye of a side that an exception ends, with its type and never its text.

    The text may hold what the peer must not see. Of a group it is the first exception's type. A
    message that is too long has its size and the limit behind that, for the side whose limit it is.
    """
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = type(error).__name__
    if type(error) is MessageTooLongError:
        text += f" {error.amount} of {error.limit}"
    return Goodbye(0, GoodbyeCode.FAILED, text)


def failure(goodbye: Goodbye, max_message: int) -> str:
    """Return the failure of the peer, for an error of this side, which takes `max_message` bytes.

    Only a name of a type and numbers are repeated.
    """
    found = _FAILURE.fullmatch(goodbye.text)
    name, amount, limit = found.groups("0") if found else ("an exception", "0", "0")
    text = f"{name} ended the connection in the peer's program: "
    if name == MessageTooLongError.__name__ and int(amount) > int(limit) == max_message:
        return (
            f"{text}its message has {amount} bytes, and this side takes at most {limit} "
            f"(Config.max_message here)"
        )
    return f"{text}what it sent may be incomplete"
