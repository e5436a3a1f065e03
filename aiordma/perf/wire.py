"""The control protocol between the measurement client and server, encoded with msgpack.

The client sends Open and receives Opened. It then sends Attach on each measured connection. For
each part of the measurement, the client sends Begin and receives Begun, and both sides run the
operations. The client then sends Finish, and receives Reached and Finished. The server can send
Refused instead of any other response.

Received messages are validated like any data from the network. An invalid message raises a
ProtocolError that describes the mistake.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import get_args

import msgpack  # type: ignore[import-untyped]

from aiordma._core.refusal import printable
from aiordma._core.strict_json import unique
from aiordma.errors import ProtocolError

from .settings import MAX_INLINE, OPERATIONS, QP_TYPES

VERSION = 2

KEY_SIZE = 16
"""The size in bytes of the key that assigns a connection to its measurement."""
MAX_TEXT = 512
U64 = 0xFFFF_FFFF_FFFF_FFFF

WAYS = ("ping", "both", "flood")
"""How the server can respond during a part.

It responds to one operation at a time, to several operations in flight, or not at all.
"""


def number(low: int, high: int) -> Callable[[object], bool]:
    return lambda value: type(value) is int and low <= value <= high


def text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= MAX_TEXT


def flag(value: object) -> bool:
    return isinstance(value, bool)


def key(value: object) -> bool:
    return isinstance(value, bytes) and len(value) == KEY_SIZE


def one_of(*words: str) -> Callable[[object], bool]:
    return lambda value: value in words


def list_of(is_valid: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list) and all(map(is_valid, value))


def token(value: object) -> bool:
    return isinstance(value, bytes) and len(value) <= 256


# Validators for the type and range of each field. A field has the same meaning in all messages.
FIELDS: dict[str, Callable[[object], bool]] = {
    "version": number(VERSION, VERSION),
    "operation": one_of(*OPERATIONS),
    "connections": number(1, 0xFFFF),
    "imm": flag,
    "qp": one_of("", *QP_TYPES),
    "depth": number(1, 0xFFFF),
    "inline": number(0, MAX_INLINE),
    "moderation": number(1, 0xFFFF),
    "cpu_us": number(0, U64),
    "lost": number(0, U64),
    "key": key,
    "index": number(0, 0xFFFF),
    "port": number(0, 0xFFFF),
    "machine": text,
    "polling_us": number(0, 1_000_000),
    "way": one_of(*WAYS),
    "size": number(0, U64),
    "seed": number(0, U64),
    "verify_all": flag,
    "tokens": list_of(token),
    "counts": list_of(number(0, U64)),
    "mismatch": text,
    "text": text,
}


@dataclass(frozen=True, slots=True)
class Open:
    """A request to measure an operation on `connections` connections."""

    version: int
    operation: str
    connections: int
    imm: bool
    qp: str
    """The type of plain queue pairs to measure, or empty to measure connections."""
    depth: int
    inline: int
    moderation: int


@dataclass(frozen=True, slots=True)
class Opened:
    """The server's reply to `Open`, sent when the server is ready for connections.

    `port` is the port for streams. If the operation does not use streams, `port` is 0.
    """

    key: bytes
    port: int
    machine: str
    polling_us: int


@dataclass(frozen=True, slots=True)
class Attach:
    """The first message on each measured connection.

    `key` identifies the measurement, and `index` is the connection's index within the measurement.
    """

    key: bytes
    index: int


@dataclass(frozen=True, slots=True)
class Begin:
    """A request to start a part.

    The payload is computed from the seed. The tokens grant access to the client's memory.
    """

    way: str
    size: int
    seed: int
    verify_all: bool
    tokens: list[bytes]


@dataclass(frozen=True, slots=True)
class Begun:
    """The server's reply to `Begin`, sent when the server is ready to run the part.

    The reply contains one token per connection. The tokens grant access to the server's memory.
    """

    tokens: list[bytes]


@dataclass(frozen=True, slots=True)
class Finish:
    """The client's notification that it has finished one part of the measurement.

    `counts` contains the number of operations that the client performed on each connection.
    """

    counts: list[int]


@dataclass(frozen=True, slots=True)
class Reached:
    """The server's reply to `Finish`, sent when all operations have arrived or count as lost."""

    cpu_us: int
    """The CPU time used by the server process during the part, in microseconds."""
    lost: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The server's last reply in a part. `mismatch` describes the first error, or is empty."""

    mismatch: str


@dataclass(frozen=True, slots=True)
class Refused:
    """The server's refusal to run the measurement. `text` contains the reason."""

    text: str


Wire = Open | Opened | Attach | Begin | Begun | Finish | Reached | Finished | Refused

KINDS: dict[str, type[Wire]] = {kind.__name__: kind for kind in get_args(Wire)}


def pack(message: Wire) -> bytes:
    packed: bytes = msgpack.packb([type(message).__name__, asdict(message)])
    return packed


def unpack(data: bytes) -> Wire:
    """Decode and validate a control message from the peer."""
    try:
        value = msgpack.unpackb(data, max_ext_len=0, object_pairs_hook=unique)
    except (ValueError, msgpack.UnpackException) as error:
        raise ProtocolError(f"the peer's control message is not valid msgpack: {error}") from error
    match value:
        case [str(name), dict(given)] if name in KINDS:
            kind = KINDS[name]
        case _:
            raise ProtocolError("the peer's control message has an unknown type")
    if name == "Open" and given.get("version") != VERSION:  # the fields depend on the version
        raise ProtocolError(
            f"the server uses protocol version {VERSION}, but the client uses "
            f"{given.get('version')!r:.20}; install the same version of aiordma on both sides"
        )
    wanted = {field.name for field in fields(kind)}
    if set(given) != wanted:
        raise ProtocolError(
            f"the peer's {name} message has invalid fields: expected {sorted(wanted)}"
        )
    for field, content in given.items():
        if not FIELDS[field](content):
            raise ProtocolError(f"the peer's {name} message has an invalid '{field}' field")
        if FIELDS[field] is text:
            given[field] = printable(content, MAX_TEXT)
    return kind(**given)
