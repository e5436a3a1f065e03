"""Control messages between the two sides of a connection, in msgpack.

Each message is an array ``[magic, version, type, request id, body]``. The body is an array of the
fields of the message's class below, in order. A message travels in a CONTROL frame
(:mod:`aiordma._core.frames`). It is never longer than MAX_LENGTH, so it fits every receive that a
peer may post.

The sender of a request chooses a request id other than 0, and the response carries the same id.
Every request gets a response: either what was requested, or an Error. Id 0 is for messages that are
neither requests nor responses. One side may have at most MAX_UNANSWERED requests, as many offers
and as many connect requests without a response. Responses wait for credits, so a peer that
withholds credits could otherwise make this side queue an unlimited number of them.

Decoding is strict. Wrong types, numbers out of range, unknown versions and types, and missing,
additional or trailing bytes all raise ProtocolError.
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
"""The length of the longest control message in bytes."""
MAX_UNANSWERED = 256
"""The maximum number of requests, of offers and of connect requests awaiting a response."""
MIN_RECEIVE = HEADER_SIZE + MAX_LENGTH + TAG_SIZE
"""The minimum size of a receive in bytes, so that any control message fits."""


class ErrorCode(IntEnum):
    """The reason for refusing a request. A peer that runs a later release may send other codes."""

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
    """The reason for ending a connection. A peer that runs a later release may send other codes."""

    NORMAL = 0
    SHUTDOWN = 1
    PROTOCOL_ERROR = 2
    TIMEOUT = 3
    INTERNAL = 4
    NOT_AUTHENTICATED = 5
    REJECTED = 6
    FAILED = 7


class RailCause(IntEnum):
    """The reason for stopping a rail. A peer that runs a later release may send other codes."""

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
        RailCause.SILENCE: "it received nothing from this side in time, or its link was closed",
        RailCause.OTHER: "its device could not carry the connection",
    }
)
"""The description of each cause that the peer reports. The peer sends only the number."""


def rail_cause_text(number: int) -> str:
    """Return a description of the peer's cause, or an empty string if the peer gave none."""
    if number == RailCause.UNKNOWN:
        return ""
    return RAIL_CAUSES.get(number, f"unknown cause {number}")


class RegionGrant(NamedTuple):
    """Grant the receiver access to a region, with the rights and lease in ``token``.

    If the grant responds to a RegionRequest, it has the same request id. An unsolicited grant has
    request id 0. ``keys`` contains the number and rkey of each further rail that can use the
    region. The token contains the rkey for rail 0.
    """

    request_id: U32
    token: Token
    keys: Keys = ()


class RegionReturn(NamedTuple):
    """Return a borrowed region and its contents to the owner.

    The sender must not use the token any more.
    """

    request_id: U32
    region_id: U64


class RegionRequest(NamedTuple):
    """Request a loan of ``length`` bytes for ``lease_ms`` milliseconds (0 means until released).

    The response is a RegionGrant or an Error, for example if the quota is exceeded.
    """

    request_id: U32
    length: U64
    access: Access
    lease_ms: U32


class RegionRelease(NamedTuple):
    """Tell the owner that the sender no longer needs a region. The contents are discarded."""

    request_id: U32
    region_id: U64


class RegionEnd(NamedTuple):
    """Forbid further use of a region that was revoked or whose lease has expired.

    The receiver ignores the message if it has released the region.
    """

    request_id: U32
    region_id: U64


class RegionRenew(NamedTuple):
    """Ask the owner of a borrowed region for a new lease of ``lease_ms`` (0 means until released).

    The response is a RegionLease or an Error.
    """

    request_id: U32
    region_id: U64
    lease_ms: U32


class RegionLease(NamedTuple):
    """Set the remaining lease of one of the sender's regions to ``lease_ms`` (0 means no limit).

    If the message responds to a RegionRenew, it has the same request id. An unsolicited message has
    request id 0.
    """

    request_id: U32
    region_id: U64
    lease_ms: U32


class Ping(NamedTuple):
    """Ask the peer for a Pong, to check that it is alive."""

    request_id: U32


class Pong(NamedTuple):
    """Respond to a Ping."""

    request_id: U32


class Goodbye(NamedTuple):
    """Announce that the sender will send nothing more. ``code`` is a GoodbyeCode."""

    request_id: U32
    code: U16
    text: Text


class Error(NamedTuple):
    """Refuse the request that has the same id. ``code`` is an ErrorCode."""

    request_id: U32
    code: U16
    text: Text


class AuthHello(NamedTuple):
    """Start the authentication with the connecting side's nonce.

    If both sides encrypt, the nonces in AuthHello and AuthAnswer are X25519 public keys.
    """

    request_id: U32
    nonce: Bytes32


class AuthAnswer(NamedTuple):
    """Respond to AuthHello with the listening side's nonce and proof."""

    request_id: U32
    nonce: Bytes32
    proof: Bytes32


class AuthProof(NamedTuple):
    """Respond to AuthAnswer with the connecting side's proof."""

    request_id: U32
    proof: Bytes32


class ReceiveSize(NamedTuple):
    """Announce the size of the sender's receives, from receive number ``first`` on.

    Receives are numbered from 0 in the order in which they are posted.
    """

    request_id: U32
    first: U64
    size: U32


class ConnectRequest(NamedTuple):
    """Request a further connection over this one, with the sender's Endpoint and Hello.

    ``number`` must be unique among the connections that share the socket. The response is a
    ConnectReply or an Error. The code QUOTA means that the listener has too many connections. Any
    other code means that the sender must connect through a socket instead.
    """

    request_id: U32
    number: U32
    endpoint: Bytes40
    hello: Bytes32


class ConnectReply(NamedTuple):
    """Respond to ConnectRequest with the listener's Endpoint and Hello.

    The listener's queue pair is already connected.
    """

    request_id: U32
    endpoint: Bytes40
    hello: Bytes32


class ReadyToUse(NamedTuple):
    """Report that the queue pair is connected. It is the first message on an in-band connection."""

    request_id: U32


class ConnectData(NamedTuple):
    """Send the connecting application's ``data`` to a listener that inspects requests.

    It is the first message to a listener whose hello has ``inspects`` set. The response is a
    ConnectAccepted, or a Goodbye with code REJECTED and the reason.
    """

    request_id: U32
    data: Data


class ConnectAccepted(NamedTuple):
    """Respond to ConnectData after the listener's application has accepted the connection."""

    request_id: U32


class RailOffer(NamedTuple):
    """Offer a queue pair on another device of the connecting side as rail ``rail``.

    Rails are numbered from 1 in the order of the offers. The queue pair of the handshake is rail 0.
    The response is a RailAnswer or an Error.
    """

    request_id: U32
    rail: U32
    endpoint: Bytes40


class RailAnswer(NamedTuple):
    """Respond to RailOffer with the Endpoint of a queue pair that is already connected."""

    request_id: U32
    rail: U32
    endpoint: Bytes40


class RailReady(NamedTuple):
    """Report that a write over this rail was acknowledged. The peer may now use the rail."""

    request_id: U32
    rail: U32


class RailDown(NamedTuple):
    """Report that the sender has stopped this rail. The peer responds with a single RailDown.

    ``request_id`` contains the RailCause. Older releases send 0 and ignore the received value.
    """

    request_id: U32
    rail: U32


class Resume(NamedTuple):
    """Report the number of frames that the sender has handled.

    It is the first frame that each side sends on a rail that becomes the new lead. A Resume needs
    no credit and is not counted as a frame. ``request_id`` is the number of Resumes sent so far,
    including this one. It lets the receiver ignore an older Resume that arrives later over another
    rail.
    """

    request_id: U32
    rail: U32
    frames: U64


class RegionKey(NamedTuple):
    """Send the ``rkey`` of a region for a rail that came up after the region was granted.

    The receiver ignores the message if the region was not granted on this connection or if the
    rail is not up.
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
"""Any control message. Its first field is the request id. Add new ones at the end (see NUMBERS)."""

BEFORE_PROOF: frozenset[type[Message]] = frozenset({AuthHello, AuthAnswer, AuthProof, Goodbye})
"""The messages accepted from an unauthenticated peer. Any other message ends the connection."""

NUMBERS: Mapping[type[Message], int] = MappingProxyType(
    {cls: number for number, cls in enumerate(get_args(Message), 3)}
)
"""The type number of each message, the third element of its array."""


class _Field(NamedTuple):
    """A field of a message."""

    name: str
    codec: Codec


def _fields(cls: type[Message]) -> tuple[_Field, ...]:
    hints = get_type_hints(cls, include_extras=True)
    return tuple(_Field(name, get_args(hints[name])[-1]) for name in cls._fields)


# The message class for each type number, and its fields. The request id is always the first field.
_FORMATS: dict[int, tuple[type[Message], tuple[_Field, ...]]] = {
    number: (cls, _fields(cls)) for cls, number in NUMBERS.items()
}


def _check_constraints(message: Message) -> None:
    """Check the constraints that codecs cannot express. Raises ValueError."""
    if isinstance(message, ReceiveSize) and message.size < MIN_RECEIVE:
        raise ValueError(
            f"a receive buffer must be at least {MIN_RECEIVE} bytes long, not {message.size}"
        )


def _pack(value: list[object]) -> bytes:
    packed: bytes = msgpack.packb(value)
    return packed


def _unpack(data: bytes | bytearray | memoryview) -> object:
    # The protocol does not use maps or extension types. If the declared length of an array or
    # string exceeds the message, msgpack raises an error before it allocates memory.
    try:
        value: object = msgpack.unpackb(data, max_map_len=0, max_ext_len=0)
    except (ValueError, msgpack.UnpackException) as error:
        text = str(error) or type(error).__name__
        raise ProtocolError(
            f"the peer sent a control message that is not valid msgpack: {text}"
        ) from None
    return value


def _is_int_equal_to(value: object, number: int) -> bool:
    # 1.0 and True compare equal to 1, but are not valid here.
    return type(value) is int and value == number


def encode(message: Message) -> bytes:
    """Encode a message in at most MAX_LENGTH bytes. Raises ValueError if a field does not fit."""
    if message is GOODBYE:
        return _GOODBYE
    return _encode(message)


def _encode(message: Message) -> bytes:
    number = NUMBERS[type(message)]
    _, fields = _FORMATS[number]
    _check_constraints(message)
    values = []
    name = ""
    try:
        for name, codec in fields:
            values.append(codec.encode(getattr(message, name)))
    except ValueError as error:
        raise ValueError(f"{type(message).__name__}.{name}: {error}") from None
    request_id, *body = values
    return _pack([MAGIC, VERSION, number, request_id, body])


def decode(data: bytes | bytearray | memoryview) -> Message:
    """Decode a message. Raises ProtocolError, and no other exception, if it is invalid."""
    if data == _GOODBYE:
        return GOODBYE
    if len(data) > MAX_LENGTH:
        raise ProtocolError(f"the peer sent a control message that is too long: {len(data)} bytes")
    envelope = _unpack(data)
    if type(envelope) is not list or not envelope or not _is_int_equal_to(envelope[0], MAGIC):
        raise ProtocolError("the peer sent a message that is not an aiordma control message")
    if len(envelope) < 2 or not _is_int_equal_to(envelope[1], VERSION):
        raise ProtocolError(
            f"the peer uses version {envelope[1:2]!r:.40} of the control protocol, but this "
            f"side uses [{VERSION}]; run the same release of aiordma on both sides"
        )
    if len(envelope) != 5:
        raise ProtocolError(
            f"the peer sent a control message with {len(envelope)} parts instead of 5"
        )
    _, _, number, request_id, body = envelope
    message_format = _FORMATS.get(number) if type(number) is int else None
    if message_format is None:
        raise ProtocolError(f"the peer sent a control message of unknown type {number!r:.40}")
    cls, fields = message_format
    if type(body) is not list or len(body) != len(fields) - 1:
        raise ProtocolError(
            f"the peer sent an invalid {cls.__name__}: expected a list of {len(fields) - 1} fields"
        )
    values: list[Any] = []
    field = fields[0]
    try:
        for field, value in zip(fields, [request_id, *body], strict=True):
            values.append(field.codec.decode(value))
    except ValueError as error:
        raise ProtocolError(
            f"the peer sent a {cls.__name__} with an invalid {field.name}: {error}"
        ) from None
    message = cls(*values)
    try:
        _check_constraints(message)
    except ValueError as error:
        raise ProtocolError(f"the peer sent an invalid {cls.__name__}: {error}") from None
    return message


GOODBYE = Goodbye(0, GoodbyeCode.NORMAL, "")
"""The last message of every connection that ends normally, encoded only once."""
_GOODBYE = _encode(GOODBYE)

GOING_AWAY = Goodbye(0, GoodbyeCode.NORMAL, "the server is shutting down")
"""The goodbye of a server that is shutting down. Older releases treat it like GOODBYE."""
CUT_OFF = Goodbye(
    0, GoodbyeCode.SHUTDOWN, "the server was shut down before its handler had finished"
)

_FAILURE = re.compile("([A-Za-z_][A-Za-z0-9_]{0,63})(?: ([0-9]{1,20}) of ([0-9]{1,20}))?")


def failure_goodbye(error: BaseException) -> Goodbye:
    """Return the goodbye to send when an exception ends the connection.

    It contains the name of the exception's type, but not its text, which may contain private data.
    For an exception group, it names the type of the first exception. For a MessageTooLongError, it
    also contains the size of the message and the limit.
    """
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = type(error).__name__
    if type(error) is MessageTooLongError:
        text += f" {error.amount} of {error.limit}"
    return Goodbye(0, GoodbyeCode.FAILED, text)


def describe_failure(goodbye: Goodbye, max_message: int) -> str:
    """Describe the failure that the peer's goodbye reports.

    `max_message` is the longest message that this side accepts, in bytes. Only an exception name
    and numbers are copied from the peer's text.
    """
    found = _FAILURE.fullmatch(goodbye.text)
    # Trust the numbers only if the peer's limit is the one that this side announced.
    name, amount, limit = found.groups("0") if found else ("an exception", "0", "0")
    text = f"the peer's program ended the connection with {name}: "
    if name == MessageTooLongError.__name__ and int(amount) > int(limit) == max_message:
        return (
            f"{text}it sent a message of {amount} bytes, and this side accepts at most {limit} "
            f"(Config.max_message here)"
        )
    return f"{text}the data that it sent may be incomplete"
