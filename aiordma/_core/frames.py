"""The header of every two-sided message of the transport: 8 bytes, little endian.

::

    offset 0  u8   kind (bits 0..6), bit 7: immediate data present
    offset 1  u8   control credits returned
    offset 2  u16  data credits returned
    offset 4  u32  immediate data, 0 if absent

What follows the header: DATA, a message of the user; CONTROL, a message of
:mod:`aiordma._core.protocol`; CREDIT, nothing (the credits in the header are all it says);
OFFER, a Rendezvous, in the place of a message that is too long for a frame; BUNDLE, several
messages of the user in their order, each behind a header of its own and padded with zeros to a
multiple of 8 bytes, so that each begins where anything may begin::

    offset 0  u32  length of the message (bits 0..30), bit 31: immediate data present
    offset 4  u32  immediate data, 0 if absent
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum

from aiordma.errors import ProtocolError

_HEADER = struct.Struct("<BBHI")
HEADER_SIZE = _HEADER.size
"""Bytes of a header."""

_IMMEDIATE = 0x80

_ENTRY = struct.Struct("<II")
_ENTRY_IMMEDIATE = 1 << 31
MAX_BUNDLE = 128
"""Messages in one BUNDLE at most: each costs its receiver more memory than its own bytes."""


class FrameKind(IntEnum):
    """What follows the header."""

    DATA = 1
    CONTROL = 2
    CREDIT = 3
    OFFER = 4
    BUNDLE = 5


MESSAGES = frozenset({FrameKind.DATA, FrameKind.OFFER, FrameKind.BUNDLE})
"""The kinds that stand for messages of the user, and need a data credit."""


# The first byte decides both kind and flag; what is not here is not the protocol. Immediate data
# belongs to a user's message, so nothing else may have it.
_FIRST_BYTES = {int(kind): (kind, False) for kind in FrameKind}
_FIRST_BYTES[FrameKind.DATA | _IMMEDIATE] = (FrameKind.DATA, True)


def pack_header(
    buffer: bytearray | memoryview,
    offset: int,
    kind: FrameKind,
    control: int,
    data: int,
    *,
    imm: int | None = None,
) -> None:
    """Write a header at ``buffer[offset:offset + HEADER_SIZE]``.

    ``control`` (0..255) and ``data`` (0..65535) are the credits that go back with it; ``imm``
    (0..2**32-1, DATA only) is the user's immediate data. Raises ValueError when a number does
    not fit.
    """
    first = int(kind)
    if imm is None:
        imm = 0
    elif kind is FrameKind.DATA:
        first |= _IMMEDIATE
    else:
        raise ValueError(f"a {kind.name} frame has no immediate data")
    try:
        _HEADER.pack_into(buffer, offset, first, control, data, imm)
    except struct.error as error:
        raise ValueError(
            f"no frame header: {error} (control={control}, data={data}, imm={imm})"
        ) from None


def unpack_header(
    buffer: bytes | bytearray | memoryview, offset: int = 0
) -> tuple[FrameKind, int, int, int | None]:
    """Read a header: ``(kind, control credits, data credits, immediate data or None)``.

    Raises ProtocolError for anything that :func:`pack_header` does not write.
    """
    try:
        first, control, data, imm = _HEADER.unpack_from(buffer, offset)
    except struct.error:
        raise ProtocolError(
            f"the peer sent a message shorter than its header of {HEADER_SIZE} bytes"
        ) from None
    known = _FIRST_BYTES.get(first)
    if known is None:
        raise ProtocolError(f"the peer sent a frame of unknown kind {first:#04x}")
    kind, has_immediate = known
    if has_immediate:
        return kind, control, data, imm
    if imm:
        raise ProtocolError(f"the peer sent a {kind.name} frame with stray immediate data")
    return kind, control, data, None


def bundled_size(length: int) -> int:
    """The bytes that a message of ``length`` takes in a BUNDLE."""
    return _ENTRY.size + (length + 7 & ~7)


def pack_bundled(buffer: memoryview, offset: int, data: memoryview, imm: int | None) -> int:
    """Write one message of a BUNDLE at ``offset``; the answer is where the next one goes."""
    length = data.nbytes
    flag = 0 if imm is None else _ENTRY_IMMEDIATE
    _ENTRY.pack_into(buffer, offset, length | flag, imm or 0)
    start = offset + _ENTRY.size
    stop = start + length
    buffer[start:stop] = data
    end = offset + bundled_size(length)
    buffer[stop:end] = bytes(end - stop)
    return end


def unpack_bundle(buffer: memoryview) -> Iterator[tuple[int, int, int | None]]:
    """The messages of a BUNDLE, all of ``buffer`` with its header: (start, length, imm or None).

    Raises ProtocolError for anything that :func:`pack_bundled` does not write, once it gets there.
    """
    offset, end = HEADER_SIZE, len(buffer)
    for _ in range(MAX_BUNDLE):
        if end - offset < _ENTRY.size:
            raise ProtocolError("the peer sent a bundle that ends before its last message")
        word, imm = _ENTRY.unpack_from(buffer, offset)
        length = word & ~_ENTRY_IMMEDIATE
        start = offset + _ENTRY.size
        offset += bundled_size(length)
        if offset > end:
            raise ProtocolError(
                f"the peer sent a bundle with a message of {length} bytes, longer than the bundle"
            )
        if any(buffer[start + length : offset]):
            raise ProtocolError("the peer sent a bundle with stray bytes between its messages")
        if word & _ENTRY_IMMEDIATE:
            yield start, length, imm
        elif imm:
            raise ProtocolError("the peer sent a bundle with stray immediate data")
        else:
            yield start, length, None
        if offset == end:
            return
    raise ProtocolError(f"the peer sent a bundle of more than {MAX_BUNDLE} messages")
