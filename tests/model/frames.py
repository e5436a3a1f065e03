"""Pack and unpack frames in Python, as laid out in aiordma/_core/frames.py."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from aiordma._core.frames import HEADER_SIZE, MAX_BUNDLE, FrameKind
from aiordma.errors import ProtocolError

_HEADER = struct.Struct("<BBHI")
_IMMEDIATE = 0x80

_ENTRY = struct.Struct("<II")
_ENTRY_IMMEDIATE = 1 << 31

MESSAGES = frozenset({FrameKind.DATA, FrameKind.RNDV_RTS, FrameKind.BUNDLE, FrameKind.WRITTEN})
"""The kinds that stand for messages of the user, and need a data credit."""

_WITH_IMMEDIATE = (FrameKind.DATA, FrameKind.RNDV_RTS, FrameKind.WRITTEN)
"""The kinds that stand for one message of the user, which may have immediate data."""

# Maps each valid first byte to the frame's kind and whether it has immediate data.
_FIRST_BYTES = {int(kind): (kind, False) for kind in FrameKind}
_FIRST_BYTES |= {kind | _IMMEDIATE: (kind, True) for kind in _WITH_IMMEDIATE}


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

    ``control`` (0..255) and ``data`` (0..65535) are the credits to return. ``imm`` (0..2**32-1) is
    the user's immediate data, for DATA, RNDV_RTS and WRITTEN only. Raises ValueError for a number
    out of range.
    """
    first = int(kind)
    if imm is None:
        imm = 0
    elif kind in _WITH_IMMEDIATE:
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
    """Return ``(kind, control credits, data credits, immediate data or None)`` from a header.

    Raises ProtocolError for anything that :func:`pack_header` does not write.
    """
    try:
        first, control, data, imm = _HEADER.unpack_from(buffer, offset)
    except struct.error:
        raise ProtocolError(
            f"the peer sent a frame shorter than its header of {HEADER_SIZE} bytes"
        ) from None
    known = _FIRST_BYTES.get(first)
    if known is None:
        raise ProtocolError(f"the peer sent a frame of unknown kind {first:#04x}")
    kind, has_immediate = known
    if has_immediate:
        return kind, control, data, imm
    if imm:
        raise ProtocolError(f"the peer sent a {kind.name} frame with unexpected immediate data")
    return kind, control, data, None


def bundled_size(length: int) -> int:
    """Return the size of a message of ``length`` bytes in a BUNDLE."""
    return _ENTRY.size + (length + 7 & ~7)


def pack_bundled(buffer: memoryview, offset: int, data: memoryview, imm: int | None) -> int:
    """Write one message of a BUNDLE at ``offset`` and return the offset of the next."""
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
    """Yield (start, length, imm or None) for each message of ``buffer``, a whole BUNDLE frame.

    Raises ProtocolError on reaching an entry that :func:`pack_bundled` does not write.
    """
    offset, end, count = HEADER_SIZE, len(buffer), 0
    while offset < end or not count:
        if end - offset < _ENTRY.size:
            raise ProtocolError("the peer sent a bundle that ends before its last message")
        if count == MAX_BUNDLE:
            raise ProtocolError(f"the peer sent a bundle of more than {MAX_BUNDLE} messages")
        word, imm = _ENTRY.unpack_from(buffer, offset)
        length = word & ~_ENTRY_IMMEDIATE
        start = offset + _ENTRY.size
        offset += bundled_size(length)
        if offset > end:
            raise ProtocolError(
                f"the peer sent a bundle with a message of {length} bytes, longer than the bundle"
            )
        if imm and not word & _ENTRY_IMMEDIATE:
            raise ProtocolError("the peer sent a bundle with unexpected immediate data")
        if any(buffer[start + length : offset]):
            raise ProtocolError("the peer sent a bundle with nonzero bytes between its messages")
        yield start, length, imm if word & _ENTRY_IMMEDIATE else None
        count += 1


_PIECE = struct.Struct("<QQII")
_KEYS = struct.Struct("<IIII")
_KEY = struct.Struct("<II")
MAX_PIECES = 128
"""Pieces of one rendezvous message at most."""


def unpack_rendezvous(content: bytes, longest: int) -> tuple[int, list[tuple[int, int, int]]]:
    """Return (request id, [(address, length, rkey)]) from the content of an RNDV_RTS frame.

    Raises ProtocolError if it is malformed or the total length exceeds `longest`.
    """
    size = HEADER_SIZE + len(content)
    if len(content) < _ENTRY.size:
        raise ProtocolError(f"the peer sent a rendezvous request of invalid size: {size} bytes")
    request_id, count = _ENTRY.unpack_from(content)
    if not 0 < count <= MAX_PIECES or len(content) != _ENTRY.size + count * _PIECE.size:
        raise ProtocolError(
            f"the peer sent a rendezvous request of invalid size: {size} bytes for {count} pieces"
        )
    pieces = []
    total = 0
    for address, length, rkey, flags in _PIECE.iter_unpack(content[_ENTRY.size :]):
        total += length
        if not length:
            raise ProtocolError("the peer offered an empty message by rendezvous")
        if total > longest:
            whole = sum(each[1] for each in _PIECE.iter_unpack(content[_ENTRY.size :]))
            raise ProtocolError(
                f"the peer sent a message of {whole} bytes, but this side accepts at most "
                f"{longest} (Config.max_message here)"
            )
        if address + length > 1 << 64:
            raise ProtocolError(
                "the peer offered a message that extends beyond the end of the address space"
            )
        if flags & ~1:
            raise ProtocolError("the peer sent a rendezvous request with extra bytes")
        pieces.append((address, length, rkey))
    return request_id, pieces


def pack_keys(request_id: int, rail: int, first: int, keys: list[tuple[int, int]]) -> bytes:
    """Build an RNDV_KEYS frame's content. `keys` holds (rkey, flags) per piece, from `first` on."""
    head = _KEYS.pack(request_id, rail, first, len(keys))
    return head + b"".join(_KEY.pack(*key) for key in keys)


def unpack_keys(content: bytes) -> tuple[int, int, int, list[tuple[int, int]]]:
    """Parse the content of an RNDV_KEYS frame. Raise ProtocolError if it is malformed."""
    size = len(content)
    request_id, rail, first, count = _KEYS.unpack_from(content) if size >= _KEYS.size else [0] * 4
    if not 0 < count <= MAX_PIECES or size != _KEYS.size + count * _KEY.size:
        raise ProtocolError(f"the peer sent keys of invalid size: {size} bytes for {count} pieces")
    keys = list(_KEY.iter_unpack(content[_KEYS.size :]))
    if any(flags & ~1 for _, flags in keys):
        raise ProtocolError("the peer sent keys with extra bytes")
    return request_id, rail, first, keys
