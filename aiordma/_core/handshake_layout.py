"""The handshake messages, which have fixed little-endian layouts.

:class:`Hello` describes the transport: sizes, credits and limits. It fits into the private data of
a connection request (56 bytes for RDMA_PS_TCP; rdma_connect(3)), which arrives padded with zeros::

    offset  0  4s   b"AIOR"                      offset  8  u32  eager_size
    offset  4  u8   version, 2                   offset 12  u16  data_receives
    offset  5  u8   flags, see below             offset 14  u16  control_receives
    offset  6  u8   max_rd_atomic                offset 16  u64  max_message
    offset  7  u8   max_dest_rd_atomic           offset 24  u64  lend_quota

Bit 1 of its flags is ``in_band``, bit 2 ``encrypts``, bit 3 ``memory_in_clear``, bit 4 ``stream``,
bit 5 ``inspects``, bit 6 ``authenticates``, bit 7 ``rails``. Bit 0 was ``authenticates`` in
releases that created queue pairs for peers without a ticket (admission.py). Those releases and this
one reject each other's hello with a text that asks for the same release.

In a connection request, a ticket may follow the hello, but it is not part of the hello.

:class:`Endpoint` describes a queue pair, so that a peer can connect to it without the connection
manager. It can be sent over any channel::

    offset  0  4s   b"AIOE"                      offset 24  u32  qp_num
    offset  4  u8   version, 2                   offset 28  u32  psn
    offset  5  u8   flags, see below             offset 32  u32  qkey
    offset  6  u8   qp_type (enum ibv_qp_type)   offset 36  u16  lid
    offset  7  u8   mtu (enum ibv_mtu)           offset 38  u8   max_rd_atomic
    offset  8  16s  gid                          offset 39  u8   max_dest_rd_atomic

Bit 0 of its flags is ``is_global``, bit 1 ``is_roce_v1``.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache

from aiordma._core.arguments import U32_MAX, U64_MAX, integer
from aiordma._core.frames import (
    MAX_CONTROL_RECEIVES,
    MAX_DATA_RECEIVES,
    MIN_CONTROL_RECEIVES,
    MIN_DATA_RECEIVES,
)
from aiordma._core.layout import check_layout
from aiordma._core.protocol import MIN_RECEIVE
from aiordma._core.qp_states import QPType
from aiordma.errors import ProtocolError

_VERSION = 2

_HELLO = struct.Struct("<4sBBBBIHHQQ")
_HELLO_MAGIC = b"AIOR"
_HELLO_FLAGS = {
    "in_band": 2,
    "encrypts": 4,
    "memory_in_clear": 8,
    "stream": 16,
    "inspects": 32,
    "authenticates": 64,
    "rails": 128,
}
HELLO_SIZE = _HELLO.size
"""The size of a packed :class:`Hello` in bytes."""
CHALLENGE_MAGIC = b"AIOC"
CHALLENGE_SIZE = 40
"""The size of a challenge (admission.py) in bytes. An :class:`Endpoint` has the same size."""
TICKET_SIZE = 24
"""The size of a ticket in bytes. Hello and ticket fill the private data of a request."""

_ENDPOINT = struct.Struct("<4sBBBB16sIIIHBB")
_ENDPOINT_MAGIC = b"AIOE"
_IS_GLOBAL = 1
_IS_ROCE_V1 = 2
ENDPOINT_SIZE = _ENDPOINT.size
"""The size of a packed :class:`Endpoint` in bytes."""

_U24_MAX = (1 << 24) - 1
_MTU_256, _MTU_4096 = 1, 5

_HELLO_BOUNDS = {
    "eager_size": (MIN_RECEIVE, U32_MAX),
    "data_receives": (MIN_DATA_RECEIVES, MAX_DATA_RECEIVES),
    "control_receives": (MIN_CONTROL_RECEIVES, MAX_CONTROL_RECEIVES),
    "max_message": (0, U64_MAX),
    "lend_quota": (0, U64_MAX),
    "max_rd_atomic": (0, 0xFF),
    "max_dest_rd_atomic": (0, 0xFF),
}
_ENDPOINT_BOUNDS = {
    "qp_num": (0, _U24_MAX),
    "psn": (0, _U24_MAX),
    "lid": (0, 0xFFFF),
    "mtu": (_MTU_256, _MTU_4096),
    "max_rd_atomic": (0, 0xFF),
    "max_dest_rd_atomic": (0, 0xFF),
    "qkey": (0, U32_MAX),
}


def _check_bounds(message: object, bounds: dict[str, tuple[int, int]]) -> None:
    for name, (low, high) in bounds.items():
        value = integer(name, getattr(message, name), None, None)
        object.__setattr__(message, name, value)  # store numpy integers as int
        if not low <= value <= high:
            raise ValueError(f"{name} must be between {low} and {high}, not {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The limits and features that one side announces to the other.

    Raises:
        ValueError: If a number is out of range.
    """

    eager_size: int
    """The size of each receive in bytes, including the frame header."""
    data_receives: int
    """The number of DATA, BUNDLE and RNDV_RTS frames it accepts before it returns credits."""
    control_receives: int
    """The number of CONTROL, CREDIT and RNDV_ACK frames it accepts before it returns credits."""
    max_message: int
    """The length of the longest message it accepts, in bytes."""
    lend_quota: int
    """The maximum number of bytes it lends to the peer."""
    max_rd_atomic: int = 0
    """The number of reads and atomics that it wants to have outstanding."""
    max_dest_rd_atomic: int = 0
    """The number of concurrent reads and atomics of the peer that it can serve."""
    authenticates: bool = False
    """Whether it continues only with a peer that proves that it has the key."""
    in_band: bool = False
    """Whether further connections may be opened over this one (protocol.ConnectRequest)."""
    encrypts: bool = False
    """Whether it encrypts what it sends, and requires the same of the peer."""
    memory_in_clear: bool = False
    """Whether it allows unencrypted memory operations although it encrypts messages."""
    stream: bool = False
    """Whether its messages are the pieces of a byte stream (aiordma.streams)."""
    inspects: bool = False
    """Whether its application inspects requests, so that it waits for a ConnectData."""
    rails: bool = False
    """Whether queue pairs may be added (protocol.RailOffer). A reply sets it only if requested."""

    def __post_init__(self) -> None:
        _check_bounds(self, _HELLO_BOUNDS)

    def pack(self) -> bytes:
        """Encode the hello as HELLO_SIZE bytes."""
        return _HELLO.pack(
            _HELLO_MAGIC,
            _VERSION,
            sum(bit for name, bit in _HELLO_FLAGS.items() if getattr(self, name)),
            self.max_rd_atomic,
            self.max_dest_rd_atomic,
            self.eager_size,
            self.data_receives,
            self.control_receives,
            self.max_message,
            self.lend_quota,
        )

    @staticmethod
    @lru_cache(maxsize=64)  # peers of one kind send the same hello
    def unpack(data: bytes) -> Hello:
        """Decode a hello, which may be padded with zeros.

        Raises:
            ProtocolError: If the data is invalid.
        """
        check_layout(
            data,
            what="hello",
            magic=_HELLO_MAGIC,
            version=_VERSION,
            flags=sum(_HELLO_FLAGS.values()),
            size=HELLO_SIZE,
            padded=True,
        )
        (_, _, flags, max_rd_atomic, max_dest_rd_atomic, eager_size, data_receives,
         control_receives, max_message, lend_quota) = _HELLO.unpack_from(data)  # fmt: skip
        try:
            return Hello(
                eager_size=eager_size,
                data_receives=data_receives,
                control_receives=control_receives,
                max_message=max_message,
                lend_quota=lend_quota,
                max_rd_atomic=max_rd_atomic,
                max_dest_rd_atomic=max_dest_rd_atomic,
                **{name: bool(flags & bit) for name, bit in _HELLO_FLAGS.items()},
            )
        except ValueError as error:
            raise ProtocolError(f"invalid hello from the peer: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """The parameters that a peer needs to connect to a queue pair.

    ``gid`` is 16 bytes in network order.

    Raises:
        ValueError: If a number is out of range.
    """

    gid: bytes
    qp_num: int
    psn: int
    lid: int
    mtu: int
    """The active path MTU of its port, as ``enum ibv_mtu`` (1: 256 bytes ... 5: 4096)."""
    qp_type: QPType = QPType.RC
    is_global: bool = True
    """Whether it must be addressed by its GID (with a GRH), as on RoCE."""
    is_roce_v1: bool = False
    """Whether its GID is for RoCE v1. Both sides must use the same version."""
    qkey: int = 0
    max_rd_atomic: int = 0
    max_dest_rd_atomic: int = 0

    def __post_init__(self) -> None:
        if len(self.gid) != 16:
            raise ValueError(f"gid must be 16 bytes long, not {len(self.gid)}")
        _check_bounds(self, _ENDPOINT_BOUNDS)

    def pack(self) -> bytes:
        """Encode the endpoint as ENDPOINT_SIZE bytes."""
        return _ENDPOINT.pack(
            _ENDPOINT_MAGIC,
            _VERSION,
            (_IS_GLOBAL if self.is_global else 0) | (_IS_ROCE_V1 if self.is_roce_v1 else 0),
            self.qp_type,
            self.mtu,
            self.gid,
            self.qp_num,
            self.psn,
            self.qkey,
            self.lid,
            self.max_rd_atomic,
            self.max_dest_rd_atomic,
        )

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview) -> Endpoint:
        """Decode an endpoint.

        Raises:
            ProtocolError: If the data is invalid.
        """
        check_layout(
            data,
            what="endpoint",
            magic=_ENDPOINT_MAGIC,
            version=_VERSION,
            flags=_IS_GLOBAL | _IS_ROCE_V1,
            size=ENDPOINT_SIZE,
        )
        (_, _, flags, qp_type, mtu, gid, qp_num, psn, qkey, lid, max_rd_atomic,
         max_dest_rd_atomic) = _ENDPOINT.unpack_from(data)  # fmt: skip
        try:
            return cls(
                gid=gid,
                qp_num=qp_num,
                psn=psn,
                lid=lid,
                mtu=mtu,
                qp_type=QPType(qp_type),
                is_global=bool(flags & _IS_GLOBAL),
                is_roce_v1=bool(flags & _IS_ROCE_V1),
                qkey=qkey,
                max_rd_atomic=max_rd_atomic,
                max_dest_rd_atomic=max_dest_rd_atomic,
            )
        except ValueError as error:
            raise ProtocolError(f"invalid endpoint from the peer: {error}") from None
