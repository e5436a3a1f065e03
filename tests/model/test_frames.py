"""Tests of the model's frame headers and bundles."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st

from aiordma._core.frames import HEADER_SIZE, MAX_BUNDLE, FrameKind
from aiordma.errors import ProtocolError

from .frames import (
    bundled_size,
    pack_bundled,
    pack_header,
    pack_keys,
    unpack_bundle,
    unpack_header,
    unpack_keys,
)

u8, u16, u32 = (st.integers(0, (1 << bits) - 1) for bits in (8, 16, 32))


def packed(kind: FrameKind, control: int, data: int, imm: int | None = None) -> bytes:
    buffer = bytearray(HEADER_SIZE)
    pack_header(buffer, 0, kind, control, data, imm=imm)
    return bytes(buffer)


def test_frame_header_layout_is_stable() -> None:
    assert HEADER_SIZE == 8
    assert packed(FrameKind.DATA, 2, 0x0304, 0x05060708).hex() == "8102040308070605"
    assert packed(FrameKind.DATA, 0, 0).hex() == "0100000000000000"
    assert packed(FrameKind.CONTROL, 255, 65535).hex() == "02ffffff00000000"
    assert packed(FrameKind.CREDIT, 1, 0).hex() == "0301000000000000"
    assert packed(FrameKind.RNDV_RTS, 0, 1).hex() == "0400010000000000"
    assert packed(FrameKind.RNDV_RTS, 0, 1, 7).hex() == "8400010007000000"
    assert packed(FrameKind.RNDV_ACK, 1, 0).hex() == "0601000000000000"
    assert packed(FrameKind.RNDV_KEYS, 1, 0).hex() == "0701000000000000"
    assert packed(FrameKind.WRITTEN, 1, 0, 5).hex() == "8801000005000000"


def test_keys_frame_layout_is_stable() -> None:
    content = pack_keys(1, 2, 3, [(0x11223344, 1), (5, 0)])
    assert content.hex(" ", 8) == (
        "0100000002000000 0300000002000000 4433221101000000 0500000000000000"
    )
    assert unpack_keys(content) == (1, 2, 3, [(0x11223344, 1), (5, 0)])


@pytest.mark.parametrize(
    ("header", "text"),
    [
        ("", "shorter than its header"),
        ("01000000000000", "shorter than its header"),
        ("0000000000000000", "unknown kind 0x00"),
        ("0900000000000000", "unknown kind 0x09"),
        ("8200000000000000", "unknown kind 0x82"),
        ("8600000000000000", "unknown kind 0x86"),
        ("4100000000000000", "unknown kind 0x41"),
        ("0100000001000000", "DATA frame with unexpected immediate"),
        ("0300000000000001", "CREDIT frame with unexpected immediate"),
    ],
)
def test_unpack_header_rejects_malformed_headers(header: str, text: str) -> None:
    with pytest.raises(ProtocolError, match=f"the peer sent .*{text}"):
        unpack_header(bytes.fromhex(header))


# ---- bundles -------------------------------------------------------------------------------------

Entry = tuple[bytes, int | None]


def packed_bundle(*entries: Entry) -> bytes:
    """Pack messages and their immediate data into the content of a BUNDLE, without its header."""
    packed = bytearray(sum(bundled_size(len(data)) for data, _ in entries))
    offset = 0
    for data, imm in entries:
        offset = pack_bundled(memoryview(packed), offset, memoryview(data), imm)
    assert offset == len(packed)
    return bytes(packed)


def unpacked_bundle(content: bytes) -> list[Entry]:
    whole = memoryview(bytes(HEADER_SIZE) + content)
    return [(bytes(whole[start : start + size]), imm) for start, size, imm in unpack_bundle(whole)]


entries = st.lists(
    st.tuples(st.binary(max_size=40), st.none() | st.integers(0, 0xFFFFFFFF)),
    min_size=1,
    max_size=MAX_BUNDLE,
)


def test_bundle_layout_is_stable() -> None:
    content = packed_bundle((b"abc", 7), (b"", None), (b"12345678", None))
    assert content.hex(" ", 8) == (
        "0300008007000000 6162630000000000 0000000000000000 0800000000000000 3132333435363738"
    )


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", "ends before"),
        ("00000000", "ends before"),
        ("0000000000000000 00000000", "ends before"),
        ("0100000000000000", "longer than the bundle"),
        ("ffffff7f00000000 0000000000000000", "longer than the bundle"),
        ("0100000000000000 6100000000000001", "nonzero bytes"),
        ("0100000001000000 6100000000000000", "unexpected immediate"),
        ("0000000000000000" * (MAX_BUNDLE + 1), f"more than {MAX_BUNDLE} messages"),
    ],
)
def test_unpacking_a_malformed_bundle_raises_protocol_error(content: str, text: str) -> None:
    with pytest.raises(ProtocolError, match=f"the peer sent a bundle .*{text}"):
        unpacked_bundle(bytes.fromhex(content))
