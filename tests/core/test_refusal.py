"""Tests of refusals, which carry a printable text in a fixed number of bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiordma._core.refusal import (
    REFUSAL_SIZE,
    is_missing_key_refusal,
    pack_refusal,
    printable,
    unpack_refusal,
)


@pytest.mark.parametrize("text", ["", "no room", "größer", "x" * 144])
@pytest.mark.parametrize("key_missing", [False, True])
def test_refusal_round_trips_texts_that_fit(text: str, *, key_missing: bool) -> None:
    packed = pack_refusal(text, key_missing=key_missing)
    assert len(packed) == REFUSAL_SIZE
    assert unpack_refusal(packed) == text
    assert is_missing_key_refusal(packed) == key_missing


@given(st.text())
def test_packed_refusal_has_a_fixed_size(text: str) -> None:
    packed = pack_refusal(text)
    assert len(packed) == REFUSAL_SIZE
    assert unpack_refusal(packed) is not None


@given(st.binary(max_size=200))
def test_unpacked_refusal_is_printable(data: bytes) -> None:
    text = unpack_refusal(b"AIOX" + data)
    assert text is not None
    assert text.isprintable()
    assert len(text) <= REFUSAL_SIZE


@given(st.binary(max_size=200).filter(lambda data: data[:4] not in (b"AIOX", b"AIOK")))
def test_unpack_refusal_returns_none_for_unrelated_data(data: bytes) -> None:
    assert unpack_refusal(data) is None


@given(st.text(st.characters()), st.integers(3, 300))
def test_printable_returns_one_line_of_bounded_length(text: str, longest: int) -> None:
    shown = printable(text, longest)
    assert shown.isprintable()
    assert len(shown) <= longest
    if text.isprintable() and len(text) <= longest:
        assert shown == text


def test_printable_truncates_long_text() -> None:
    assert printable("x" * (64 << 10)) == "x" * 253 + "..."
    assert printable("\0" * (64 << 10), 11) == r"\x00\x00..."
