"""The facts about a region of memory that need no memory: its token, rights and ranges.

A token is all that a peer needs to read, write or atomically change a region: its holder
can use it, so it travels only to the peer it is meant for. On the wire and in a user's own channel
it has a fixed layout, little endian::

    offset  0  4s   b"AIOT"           offset 16  u64  address
    offset  4  u8   version, 1        offset 24  u64  length in bytes
    offset  5  u8   flags, 0          offset 32  u32  rkey
    offset  6  u16  reserved, 0       offset 36  u32  access (Rights)
    offset  8  u64  region id         offset 40  u32  lease in milliseconds, 0: no end

The upper 24 bits of a region id say which side of which connection has granted it
(:func:`granter`), so that the token of another one is refused where it is opened.

Ranges are checked here, before anything is posted: a range that the device refuses costs the
queue pair, one that is refused here costs nothing.
"""

from __future__ import annotations

import struct
from binascii import crc32
from dataclasses import dataclass
from enum import IntFlag
from operator import index as as_index
from typing import ClassVar

from aiordma._core.arguments import U64_MAX, choice, integer
from aiordma._core.layout import check_layout
from aiordma.errors import ProtocolError, RangeError, RemoteRangeError

_LAYOUT = struct.Struct("<4sBBHQQQIII")
_MAGIC = b"AIOT"
_VERSION = 1
TOKEN_SIZE = _LAYOUT.size
"""Bytes of a packed :class:`RegionToken`."""

ATOMIC_SIZE = 8
"""Bytes, and alignment, of what an atomic operation works on (IBTA volume 1, clause 9.4.5)."""


NUMBER_BITS = 40
"""Bits of a region id that number the regions of one granter."""


def granter(owner_qp: int, user_qp: int, *, client: bool) -> int:
    """The upper 24 bits of the ids of the regions that one side of a connection grants.

    ``owner_qp`` is the number of its own queue pair, ``user_qp`` of the peer's, both from the
    handshake; ``client`` says which side it is, since the two numbers may be the same.
    """
    return crc32(struct.pack("<II?", owner_qp, user_qp, client)) >> 8


class Rights(IntFlag):
    """Rights of a peer to a region; the values are those of ``IBV_ACCESS_REMOTE_...``."""

    WRITE = 2
    READ = 4
    ATOMIC = 8


ALL_RIGHTS = int(Rights.WRITE | Rights.READ | Rights.ATOMIC)


@dataclass(frozen=True, slots=True)
class RegionToken:
    """One region of one side's memory, as the other side may use it.

    ``region_id`` names it between the two sides, ``lease_ms`` is how long its key works from
    when the owner granted it (0: until it is taken back). Raises ValueError when a number does not
    fit its field, the region wraps around the end of the address space, or a right is unknown.
    """

    region_id: int
    address: int
    length: int
    rkey: int
    access: Rights
    lease_ms: int = 0

    _no_memory_hint: ClassVar[str] = "pack it: token.pack()"

    def __post_init__(self) -> None:
        # No memory is longer than a Python object can say that it is.
        fields = {"region_id": 64, "address": 64, "length": 63, "rkey": 32, "lease_ms": 32}
        for name, bits in fields.items():
            value = integer(name, getattr(self, name), None, None)
            if value < 0 or value >> bits:
                raise ValueError(f"{name} {value} does not fit {bits} bits")
            object.__setattr__(self, name, value)
        object.__setattr__(self, "access", choice("access", self.access, Rights))
        if self.address + self.length > U64_MAX + 1:
            raise ValueError("the region goes beyond the end of the address space")
        if self.access & ~ALL_RIGHTS:
            raise ValueError(f"unknown rights {int(self.access):#x}")

    def __repr__(self) -> str:
        rights = self.access.name or "none"
        return (
            f"<RegionToken {self.region_id:#x}: {self.length} bytes at {self.address:#x}, "
            f"rkey {self.rkey:#x}, {rights}, lease {self.lease_ms} ms>"
        )

    def pack(self) -> bytes:
        """The token as TOKEN_SIZE bytes."""
        return _LAYOUT.pack(
            _MAGIC,
            _VERSION,
            0,
            0,
            self.region_id,
            self.address,
            self.length,
            self.rkey,
            self.access,
            self.lease_ms,
        )

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview) -> RegionToken:
        """Read a token. Raises ProtocolError for anything that :meth:`pack` does not write."""
        check_layout(
            data, what="region token", magic=_MAGIC, version=_VERSION, flags=0, size=TOKEN_SIZE
        )
        _, _, _, reserved, region_id, address, length, rkey, access, lease_ms = _LAYOUT.unpack_from(
            data
        )
        if reserved:
            raise ProtocolError("region token: the peer used a reserved field")
        try:
            return cls(region_id, address, length, rkey, Rights(access), lease_ms)
        except ValueError as error:
            raise ProtocolError(f"region token: the peer sent nonsense: {error}") from None


def slice_range(
    key: slice,
    available: int,
    error: type[RangeError] = RemoteRangeError,
    *,
    region_id: int | None = None,
) -> tuple[int, int]:
    """The part that ``key`` selects out of ``available`` bytes, as (offset, length).

    As Python slices, negative and missing bounds included, but nothing is clipped: a bound outside
    the range raises ``error``, and so does a step other than 1. Where the end lies before the
    start the slice is empty.
    """
    if not isinstance(key, slice):
        raise TypeError(f"a region is sliced as [start:stop], not indexed with {key!r}")
    try:
        start = 0 if key.start is None else as_index(key.start)
        stop = available if key.stop is None else as_index(key.stop)
    except TypeError:
        raise TypeError(
            f"a region is sliced by whole numbers, not [{key.start}:{key.stop}]"
        ) from None
    low = start + available if start < 0 else start
    high = stop + available if stop < 0 else stop
    if key.step is not None and as_index(key.step) != 1:
        detail = f"a step of {key.step} is not contiguous"
        raise error(low, high - low, available, detail=detail, region_id=region_id)
    if not 0 <= low <= available or not 0 <= high <= available:
        detail = f"[{start}:{stop}] is out of range"
        raise error(start, stop - start, available, detail=detail, region_id=region_id)
    return low, max(0, high - low)


@dataclass(frozen=True, slots=True)
class RemoteRange:
    """A part of a peer's region, or all of it: what a one-sided operation is aimed at.

    Made with :meth:`of`, narrowed by slicing; never reaches beyond the region of its token.
    """

    token: RegionToken
    offset: int
    length: int

    def __post_init__(self) -> None:
        if min(self.offset, self.length, self.token.length - self.offset - self.length) < 0:
            raise RemoteRangeError(self.offset, self.length, self.token.length)

    @classmethod
    def of(cls, token: RegionToken) -> RemoteRange:
        """The whole region."""
        return cls(token, 0, token.length)

    @property
    def address(self) -> int:
        """Where the range begins in the peer's address space (or the region's iova)."""
        return self.token.address + self.offset

    @property
    def rkey(self) -> int:
        """The key of the region."""
        return self.token.rkey

    def __getitem__(self, key: slice) -> RemoteRange:
        """A part of this range; see :func:`slice_range`."""
        offset, length = slice_range(key, self.length, region_id=self.token.region_id)
        return RemoteRange(self.token, self.offset + offset, length)

    def require(self, right: Rights) -> None:
        """Raise RemoteRangeError unless all of ``right`` was given with the token."""
        missing = right & ~self.token.access
        if missing:
            name = (Rights(missing).name or "").lower().replace("|", " and ")
            raise RemoteRangeError(
                self.offset,
                self.length,
                self.token.length,
                right=name,
                region_id=self.token.region_id,
            )

    def require_atomic(self) -> None:
        """Raise RemoteRangeError unless an atomic operation can work on exactly this range."""
        self.require(Rights.ATOMIC)
        if self.length != ATOMIC_SIZE or self.address % ATOMIC_SIZE:
            raise RemoteRangeError(
                self.offset,
                self.length,
                self.token.length,
                detail=f"an atomic operation needs {ATOMIC_SIZE} bytes at a multiple of "
                f"{ATOMIC_SIZE}, not {self.length} at {self.address:#x}",
                region_id=self.token.region_id,
            )
