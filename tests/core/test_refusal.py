"""Refusals: a text that travels in a fixed number of bytes, and what may be printed of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiordma._core.refusal import REFUSAL_SIZE, pack_refusal, unpack_refusal


@pytest.mark.parametrize("text", ["", "no room", "größer", "x" * 144])
def test_what_fits_arrives(text: str) -> None:
    packed = pack_refusal(text)
    assert len(packed) == REFUSAL_SIZE
    assert unpack_refusal(packed) == text


@given(st.text())
def test_any_text_has_its_size(text: str) -> None:
    packed = pack_refusal(text)
    assert len(packed) == REFUSAL_SIZE
    assert unpack_refusal(packed) is not None


@given(st.binary(max_size=200))
def test_what_a_peer_says_is_printable(data: bytes) -> None:
    text = unpack_refusal(b"AIOX" + data)
    assert text is not None
    assert text.isprintable()
    assert len(text) <= REFUSAL_SIZE


@given(st.binary(max_size=200).filter(lambda data: not data.startswith(b"AIOX")))
def test_what_is_no_refusal(data: bytes) -> None:
    assert unpack_refusal(data) is None


def test_no_commands_for_a_terminal() -> None:
    assert unpack_refusal(b"AIOX\x1b[2Jgone\nnext") == "?[2Jgone?next"
