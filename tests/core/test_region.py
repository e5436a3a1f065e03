"""Tests of region tokens and ranges: the layout, slices as in Python, and rights."""

from __future__ import annotations

import contextlib
import itertools
import re
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiordma._core.region import TOKEN_SIZE, RegionToken, RemoteRange, Rights, granter, slice_range
from aiordma.errors import LocalRangeError, ProtocolError, RemoteRangeError

u32, u64 = st.integers(0, (1 << 32) - 1), st.integers(0, (1 << 64) - 1)
rights = st.sampled_from([Rights(bits) for bits in range(0, 16, 2)])


@st.composite
def tokens(draw: st.DrawFn) -> RegionToken:
    address = draw(u64)
    length = draw(st.integers(0, min((1 << 64) - address, (1 << 63) - 1)))
    return RegionToken(draw(u64), address, length, draw(u32), draw(rights), draw(u32))


TOKEN = RegionToken(7, 0x10000, 100, 0xABCD, Rights.READ | Rights.WRITE, 5000)

# --- tokens --------------------------------------------------------------------------------------


def test_token_layout_is_stable() -> None:
    assert TOKEN_SIZE == 44
    assert TOKEN.pack().hex(" ") == (
        "41 49 4f 54 01 00 00 00 07 00 00 00 00 00 00 00 00 00 01 00 00 00 00 00 "
        "64 00 00 00 00 00 00 00 cd ab 00 00 06 00 00 00 88 13 00 00"
    )


@given(st.integers(0, TOKEN_SIZE - 1), st.integers(1, 255))
def test_corrupted_token_never_unpacks_to_the_original(position: int, change: int) -> None:
    data = bytearray(TOKEN.pack())
    data[position] ^= change
    with contextlib.suppress(ProtocolError):
        assert RegionToken.unpack(data) != TOKEN


def edited(position: int, value: int) -> bytes:
    data = bytearray(TOKEN.pack())
    data[position] = value
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "not an aiordma region token"),
        (
            b"HTTP/1.1 400 Bad Request",
            "not an aiordma region token: received 24 bytes starting with b'HTTP'",
        ),
        (edited(4, 2), "the peer uses version 2, but this side uses version 1"),
        (edited(5, 1), "features that the peer requires (flags 0x01)"),
        (edited(5, 0x80), "features that the peer requires (flags 0x80)"),
        (edited(6, 1), "a reserved field is not zero"),
        (edited(36, 1), "unknown rights 0x1"),
        (edited(39, 1), "unknown rights 0x1000006"),
        (TOKEN.pack()[:-1], "truncated region token from the peer: 43 of 44 bytes"),
        (TOKEN.pack() + b"\0", "bytes instead of"),
        (
            TOKEN.pack()[:16] + struct.pack("<QQ", (1 << 64) - 1, 2) + TOKEN.pack()[32:],
            "beyond the end of the address space",
        ),
    ],
)
def test_token_unpack_rejects_malformed_data(data: bytes, text: str) -> None:
    with pytest.raises(ProtocolError, match=re.escape(text)):
        RegionToken.unpack(data)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("region_id", -1),
        ("region_id", 1 << 64),
        ("address", 1 << 64),
        ("length", 1 << 63),
        ("length", (1 << 64) - 0x10000 + 1),
        ("rkey", 1 << 32),
        ("lease_ms", -1),
        ("access", Rights(1)),
    ],
)
def test_token_rejects_values_out_of_range(name: str, value: int) -> None:
    fields = {
        "region_id": 7,
        "address": 0x10000,
        "length": 100,
        "rkey": 1,
        "access": Rights.READ,
        "lease_ms": 0,
    }
    with pytest.raises(ValueError, match=r"fit|address space|rights"):
        RegionToken(**fields | {name: value})  # type: ignore[arg-type]


def test_granter_differs_for_each_side_of_a_connection() -> None:
    """The two queue pairs may have the same number."""
    sides = itertools.product((17, 18), (17, 18), (False, True))
    assert len({granter(here, there, client=client) for here, there, client in sides}) == 8


def test_token_repr_shows_the_key_in_hex() -> None:
    assert repr(TOKEN) == (
        "<RegionToken 0x7: 100 bytes at 0x10000, rkey 0xabcd, WRITE|READ, lease 5000 ms>"
    )
    assert ", none, " in repr(RegionToken(1, 0, 0, 0, Rights(0)))


# --- slices and ranges ---------------------------------------------------------------------------


@pytest.mark.parametrize("length", range(5))
def test_slices_match_python_slices(length: int) -> None:
    some = [None, *range(-6, 7)]
    for start, stop, step in itertools.product(some, some, (None, 1)):
        key = slice(start, stop, step)
        inside = all(bound is None or -length <= bound <= length for bound in (start, stop))
        if not inside:
            with pytest.raises(RemoteRangeError):
                slice_range(key, length)
            continue
        offset, count = slice_range(key, length)
        assert list(range(length)[key]) == list(range(offset, offset + count))
        assert 0 <= offset <= offset + count <= length


bounds = st.one_of(st.none(), st.integers(-20, 20))


def test_slice_range_rejects_invalid_slices() -> None:
    with pytest.raises(RemoteRangeError) as caught:
        slice_range(slice(10, 200), 100)
    error = caught.value
    assert (error.offset, error.length, error.region_length) == (10, 190, 100)
    assert str(error) == (
        "cannot access 190 bytes at offset 10 of a remote region (100 bytes): [10:200] is out of "
        "range"
    )
    with pytest.raises(RemoteRangeError, match="the step must be 1, not 2"):
        slice_range(slice(0, 10, 2), 100)
    with pytest.raises(RemoteRangeError, match="the step must be 1, not -1"):
        slice_range(slice(None, None, -1), 100)
    with pytest.raises(LocalRangeError, match=r"a local buffer \(100 bytes\)"):
        slice_range(slice(-101, None), 100, LocalRangeError)
    with pytest.raises(TypeError, match=r"not indexed with \[5\]"):
        slice_range(5, 100)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        slice_range(slice("a", "b"), 100)


@given(tokens(), st.lists(st.tuples(bounds, bounds), max_size=4))
def test_nested_slice_never_exceeds_its_parent(
    token: RegionToken, keys: list[tuple[int | None, int | None]]
) -> None:
    part = RemoteRange.of(token)
    for start, stop in keys:
        try:
            narrower = part[start:stop]
        except RemoteRangeError:
            continue
        assert narrower.address >= part.address
        assert narrower.address + narrower.length <= part.address + part.length
        assert narrower.address == token.address + narrower.offset
        part = narrower
    assert part.rkey == token.rkey


def test_slice_offsets_are_relative_to_the_parent_slice() -> None:
    part = RemoteRange.of(TOKEN)[10:60][20:-10]
    assert (part.offset, part.length, part.address) == (30, 20, 0x10000 + 30)
    with pytest.raises(RemoteRangeError, match=r"region 0x7 \(20 bytes\)"):
        part[:21]


@pytest.mark.parametrize(("offset", "length"), [(50, 51), (101, 0), (-1, 1), (1, -1)])
def test_range_beyond_the_region_is_rejected(offset: int, length: int) -> None:
    RemoteRange(TOKEN, 100, 0)
    with pytest.raises(RemoteRangeError):
        RemoteRange(TOKEN, offset, length)


def test_require_raises_when_a_right_is_missing() -> None:
    part = RemoteRange.of(TOKEN)
    part.require(Rights.READ)
    part.require(Rights.READ | Rights.WRITE)
    with pytest.raises(RemoteRangeError, match=r"missing the right to atomic$") as caught:
        part.require(Rights.ATOMIC | Rights.READ)
    assert caught.value.right == "atomic"
    none = RemoteRange.of(RegionToken(1, 0, 8, 0, Rights(0)))
    with pytest.raises(RemoteRangeError, match="the right to write and read"):
        none.require(Rights.WRITE | Rights.READ)


def test_require_atomic_needs_the_atomic_right_and_8_aligned_bytes() -> None:
    part = RemoteRange.of(RegionToken(1, 0x1004, 64, 0, Rights.ATOMIC))
    part[4:12].require_atomic()
    for key in (slice(0, 8), slice(4, 8), slice(4, 20), slice(5, 13)):
        with pytest.raises(
            RemoteRangeError, match="needs 8 bytes at an address that is a multiple of 8"
        ):
            part[key].require_atomic()
    with pytest.raises(RemoteRangeError, match="right to atomic"):
        RemoteRange.of(TOKEN)[0:8].require_atomic()
