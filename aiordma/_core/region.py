"""The token, access rights and ranges of a memory region, without the memory itself.

A token is all that a peer needs to read, write or atomically change a region. Anyone who holds it
can use the region, so it is sent only to the peer it is meant for. Its layout is fixed, in control
messages and in a user's own messages, and little endian::

    offset  0  4s   b"AIOT"           offset 16  u64  address
    offset  4  u8   version, 1        offset 24  u64  length in bytes
    offset  5  u8   flags, 0          offset 32  u32  rkey
    offset  6  u16  reserved, 0       offset 36  u32  access (Rights)
    offset  8  u64  region id         offset 40  u32  lease in milliseconds, 0: no end

The upper 24 bits of a region id identify the side of the connection that granted the region
(:func:`granter`), so that a token of another connection is rejected when it is opened.

Ranges are checked here before anything is posted. A range that the device rejects breaks the queue
pair, while one that is rejected here has no consequences.
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
"""The size of a packed :class:`RegionToken` in bytes."""

ATOMIC_SIZE = 8
"""The size and alignment of an atomic operand (IBTA volume 1, clause 9.4.5)."""


NUMBER_BITS = 40
"""The number of low bits of a region id, which are unique among the regions of one granter."""


def granter(owner_qp: int, user_qp: int, *, client: bool) -> int:
    """Return the upper 24 bits of the region ids that one side of a connection assigns.

    ``owner_qp`` is the queue pair number of that side, and ``user_qp`` is its peer's number. Both
    are taken from the handshake. ``client`` distinguishes the sides if the numbers are equal.
    """
    return crc32(struct.pack("<II?", owner_qp, user_qp, client)) >> 8


class Rights(IntFlag):
    """A peer's rights to a region. The values equal the ``IBV_ACCESS_REMOTE_...`` flags."""

    WRITE = 2
    READ = 4
    ATOMIC = 8


ALL_RIGHTS = int(Rights.WRITE | Rights.READ | Rights.ATOMIC)


@dataclass(frozen=True, slots=True)
class RegionToken:
    """A token that lets the peer access a region of its owner's memory.

    Both sides identify the region by ``region_id``. The token's key is valid for ``lease_ms`` after
    the grant or, if ``lease_ms`` is 0, until the owner revokes it.

    Raises:
        ValueError: If a number does not fit its field, if the region wraps around the end of the
            address space, or if a right is unknown.
    """

    region_id: int
    address: int
    length: int
    rkey: int
    access: Rights
    lease_ms: int = 0

    _no_memory_hint: ClassVar[str] = "pack it: token.pack()"

    def __post_init__(self) -> None:
        # The length is limited to 63 bits, because Python stores lengths as signed integers.
        fields = {"region_id": 64, "address": 64, "length": 63, "rkey": 32, "lease_ms": 32}
        for name, bits in fields.items():
            value = integer(name, getattr(self, name), None, None)
            if value < 0 or value >> bits:
                raise ValueError(f"{name} {value} does not fit in {bits} bits")
            object.__setattr__(self, name, value)
        object.__setattr__(self, "access", choice("access", self.access, Rights))
        if self.address + self.length > U64_MAX + 1:
            raise ValueError("the region extends beyond the end of the address space")
        if self.access & ~ALL_RIGHTS:
            raise ValueError(f"unknown rights {int(self.access):#x}")

    def __repr__(self) -> str:
        rights = self.access.name or "none"
        return (
            f"<RegionToken {self.region_id:#x}: {self.length} bytes at {self.address:#x}, "
            f"rkey {self.rkey:#x}, {rights}, lease {self.lease_ms} ms>"
        )

    def pack(self) -> bytes:
        """Encode the token as TOKEN_SIZE bytes."""
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
        """Decode a token.

        Raises:
            ProtocolError: If the data is invalid.
        """
        check_layout(
            data, what="region token", magic=_MAGIC, version=_VERSION, flags=0, size=TOKEN_SIZE
        )
        _, _, _, reserved, region_id, address, length, rkey, access, lease_ms = _LAYOUT.unpack_from(
            data
        )
        if reserved:
            raise ProtocolError("invalid region token from the peer: a reserved field is not zero")
        try:
            return cls(region_id, address, length, rkey, Rights(access), lease_ms)
        except ValueError as error:
            raise ProtocolError(f"invalid region token from the peer: {error}") from None


def slice_range(
    key: slice,
    available: int,
    error: type[RangeError] = RemoteRangeError,
    *,
    region_id: int | None = None,
) -> tuple[int, int]:
    """Return the (offset, length) that the slice ``key`` selects from ``available`` bytes.

    Negative and missing bounds work as in Python slices, but bounds are never clipped. A bound that
    is out of range raises ``error``, and so does a step other than 1. The length is 0 if the end
    precedes the start.
    """
    if not isinstance(key, slice):
        raise TypeError(f"a region must be sliced with [start:stop], not indexed with [{key!r}]")
    try:
        start = 0 if key.start is None else as_index(key.start)
        stop = available if key.stop is None else as_index(key.stop)
    except TypeError:
        raise TypeError(
            f"slice indices of a region must be integers, not [{key.start}:{key.stop}]"
        ) from None
    low = start + available if start < 0 else start
    high = stop + available if stop < 0 else stop
    if key.step is not None and as_index(key.step) != 1:
        detail = f"the step must be 1, not {key.step}"
        raise error(low, high - low, available, detail=detail, region_id=region_id)
    if not 0 <= low <= available or not 0 <= high <= available:
        detail = f"[{start}:{stop}] is out of range"
        raise error(start, stop - start, available, detail=detail, region_id=region_id)
    return low, max(0, high - low)


@dataclass(frozen=True, slots=True)
class RemoteRange:
    """All or part of a peer's region, as the target of one-sided operations.

    Create a range with :meth:`of`, and slice it to get a smaller one. A range never extends beyond
    the region that its token describes.
    """

    token: RegionToken
    offset: int
    length: int

    def __post_init__(self) -> None:
        if min(self.offset, self.length, self.token.length - self.offset - self.length) < 0:
            raise RemoteRangeError(self.offset, self.length, self.token.length)

    @classmethod
    def of(cls, token: RegionToken) -> RemoteRange:
        """Return the range that covers the whole region."""
        return cls(token, 0, token.length)

    @property
    def address(self) -> int:
        """The remote address of the range. It is an iova if the region was registered with one."""
        return self.token.address + self.offset

    @property
    def rkey(self) -> int:
        """The rkey of the region."""
        return self.token.rkey

    def __getitem__(self, key: slice) -> RemoteRange:
        """Return a part of this range. Bounds are checked as in :func:`slice_range`."""
        offset, length = slice_range(key, self.length, region_id=self.token.region_id)
        return RemoteRange(self.token, self.offset + offset, length)

    def require(self, right: Rights) -> None:
        """Raise RemoteRangeError unless the token grants every right in ``right``."""
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
        """Raise RemoteRangeError unless this range is a valid atomic operand."""
        self.require(Rights.ATOMIC)
        if self.length != ATOMIC_SIZE or self.address % ATOMIC_SIZE:
            raise RemoteRangeError(
                self.offset,
                self.length,
                self.token.length,
                detail=f"an atomic operation needs {ATOMIC_SIZE} bytes at an address that is a "
                f"multiple of {ATOMIC_SIZE}, not {self.length} at {self.address:#x}",
                region_id=self.token.region_id,
            )
