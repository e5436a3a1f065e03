"""Tests of the messages between client and server, and of the rejection of invalid ones.

tests/test_decoders.py tests arbitrary and mutated bytes.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import msgpack  # type: ignore[import-untyped]
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiordma import ProtocolError
from aiordma.perf import wire
from aiordma.perf.settings import MAX_INLINE, OPERATIONS, QP_TYPES

KEYS = st.binary(min_size=wire.KEY_SIZE, max_size=wire.KEY_SIZE)
TEXTS = st.text(max_size=wire.MAX_TEXT).filter(str.isprintable)
NUMBERS = st.integers(0, wire.U64)
TOKENS = st.lists(st.binary(max_size=256))

MESSAGES: dict[type[wire.Wire], st.SearchStrategy[wire.Wire]] = {
    wire.Open: st.builds(
        wire.Open,
        st.just(wire.VERSION),
        st.sampled_from(OPERATIONS),
        st.integers(1, 0xFFFF),
        st.booleans(),
        st.sampled_from(("", *QP_TYPES)),
        st.integers(1, 0xFFFF),
        st.integers(0, MAX_INLINE),
        st.integers(1, 0xFFFF),
    ),
    wire.Opened: st.builds(
        wire.Opened, KEYS, st.integers(0, 0xFFFF), TEXTS, st.integers(0, 1_000_000)
    ),
    wire.Attach: st.builds(wire.Attach, KEYS, st.integers(0, 0xFFFF)),
    wire.Begin: st.builds(
        wire.Begin, st.sampled_from(wire.WAYS), NUMBERS, NUMBERS, st.booleans(), TOKENS
    ),
    wire.Begun: st.builds(wire.Begun, TOKENS),
    wire.Finish: st.builds(wire.Finish, st.lists(NUMBERS)),
    wire.Reached: st.builds(wire.Reached, NUMBERS, NUMBERS),
    wire.Finished: st.builds(wire.Finished, TEXTS),
    wire.Refused: st.builds(wire.Refused, TEXTS),
}

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), wire.U64) | st.binary() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=6,
)


def test_round_trip_test_covers_every_message_type() -> None:
    assert set(wire.KINDS.values()) == set(MESSAGES)


@given(st.one_of(*MESSAGES.values()))
def test_messages_round_trip(message: wire.Wire) -> None:
    assert wire.unpack(wire.pack(message)) == message


@given(st.data())
def test_message_with_an_invalid_field_is_rejected(data: st.DataObject) -> None:
    message = data.draw(st.one_of(*MESSAGES.values()).filter(asdict))
    field = data.draw(st.sampled_from(sorted(asdict(message))))
    wrong = data.draw(ANYTHING.filter(lambda value: not wire.FIELDS[field](value)))
    packed = msgpack.packb([type(message).__name__, {**asdict(message), field: wrong}])
    with pytest.raises(ProtocolError, match=f"has an invalid '{field}'|protocol version"):
        wire.unpack(packed)


@pytest.mark.parametrize(
    "value",
    [["Reached", {"more": 1}], ["Finish", {}], ["Nonsense", {}], ["Finish", {"counts": [True]}]],
)
def test_messages_with_invalid_fields_or_names_are_rejected(value: list[Any]) -> None:
    with pytest.raises(ProtocolError):
        wire.unpack(msgpack.packb(value))


def test_message_with_a_duplicate_field_is_rejected() -> None:
    name, packed = msgpack.packb("Refused"), msgpack.packb({"text": "no"})
    assert wire.unpack(b"\x92" + name + packed) == wire.Refused("no")
    with pytest.raises(ProtocolError, match="duplicate name 'text'"):
        wire.unpack(b"\x92" + name + b"\x82" + 2 * packed[1:])


def test_control_characters_from_the_peer_are_escaped() -> None:
    sent = wire.Refused("no\n\x1b[2J")
    assert wire.unpack(wire.pack(sent)) == wire.Refused(r"no\n\x1b[2J")
