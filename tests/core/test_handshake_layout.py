"""Tests of Hello and Endpoint: their fixed layouts and their strict validation."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiordma._core.handshake_layout import ENDPOINT_SIZE, HELLO_SIZE, Endpoint, Hello
from aiordma._core.protocol import MIN_RECEIVE
from aiordma._core.qp_states import QPType
from aiordma.errors import ProtocolError

u8, u16, u24, u32, u64 = (st.integers(0, (1 << bits) - 1) for bits in (8, 16, 24, 32, 64))

hellos = st.builds(
    Hello,
    eager_size=st.integers(MIN_RECEIVE, (1 << 32) - 1),
    data_receives=st.integers(1, 65535),
    control_receives=st.integers(4, 255),
    max_message=u64,
    lend_quota=u64,
    max_rd_atomic=u8,
    max_dest_rd_atomic=u8,
    authenticates=st.booleans(),
    in_band=st.booleans(),
    encrypts=st.booleans(),
    memory_in_clear=st.booleans(),
    rails=st.booleans(),
)
endpoints = st.builds(
    Endpoint,
    gid=st.binary(min_size=16, max_size=16),
    qp_num=u24,
    psn=u24,
    lid=u16,
    mtu=st.integers(1, 5),
    qp_type=st.sampled_from(QPType),
    is_global=st.booleans(),
    qkey=u32,
    max_rd_atomic=u8,
    max_dest_rd_atomic=u8,
)
HELLO = Hello(
    eager_size=8192,
    data_receives=64,
    control_receives=8,
    max_message=1 << 30,
    lend_quota=1 << 20,
    max_rd_atomic=16,
    max_dest_rd_atomic=17,
)
ENDPOINT = Endpoint(
    gid=bytes(range(16)),
    qp_num=0x010203,
    psn=0x040506,
    lid=0x0708,
    mtu=5,
    qkey=0x11111111,
    max_rd_atomic=16,
    max_dest_rd_atomic=17,
)


def test_hello_layout_is_stable() -> None:
    assert HELLO_SIZE == 32
    assert HELLO.pack().hex(" ") == (
        "41 49 4f 52 02 00 10 11 00 20 00 00 40 00 08 00 "
        "00 00 00 40 00 00 00 00 00 00 10 00 00 00 00 00"
    )


def test_endpoint_layout_is_stable() -> None:
    assert ENDPOINT_SIZE == 40
    assert ENDPOINT.pack().hex(" ") == (
        "41 49 4f 45 02 01 02 05 00 01 02 03 04 05 06 07 08 09 0a 0b 0c 0d 0e 0f "
        "03 02 01 00 06 05 04 00 11 11 11 11 08 07 10 11"
    )


@given(hellos, st.integers(0, 164))
def test_hello_round_trips_with_padding(hello: Hello, padding: int) -> None:
    assert Hello.unpack(hello.pack() + bytes(padding)) == hello


@given(endpoints)
def test_endpoint_round_trips(endpoint: Endpoint) -> None:
    again = Endpoint.unpack(memoryview(bytearray(endpoint.pack())))
    assert again == endpoint
    assert isinstance(again.gid, bytes)
    assert isinstance(again.qp_type, QPType)


def edited(packed: bytes, position: int, *values: int) -> bytes:
    return packed[:position] + bytes(values) + packed[position + len(values) :]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (bytes(56), "not an aiordma hello: received 56 bytes"),
        (ENDPOINT.pack(), "not an aiordma hello: received 40 bytes starting with b'AIOE'"),
        (
            edited(HELLO.pack(), 4, 9),
            "hello: the peer uses version 9, but this side uses version 2",
        ),
        (edited(HELLO.pack(), 5, 1), "features that the peer requires (flags 0x01)"),
        (HELLO.pack()[:31], "truncated hello from the peer: 31 of 32 bytes"),
        (HELLO.pack() + b"\0\0x", "bytes instead of"),
        (edited(HELLO.pack(), 8, 0, 0), "eager_size must be between 536 and"),
        (edited(HELLO.pack(), 12, 0, 0), "data_receives must be between 1 and 65535, not 0"),
        (edited(HELLO.pack(), 14, 3), "control_receives must be between 4 and 255, not 3"),
        (edited(HELLO.pack(), 14, 0, 1), "control_receives must be between 4 and 255, not 256"),
    ],
)
def test_hello_unpack_rejects_malformed_data(data: bytes, text: str) -> None:
    with pytest.raises(ProtocolError, match=re.escape(text)):
        Hello.unpack(data)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "not an aiordma endpoint: received 0 bytes"),
        (edited(ENDPOINT.pack(), 4, 0), "endpoint: the peer uses version 0"),
        (edited(ENDPOINT.pack(), 5, 7), "flags 0x07"),
        (edited(ENDPOINT.pack(), 6, 7), "invalid endpoint from the peer: 7 is not a valid QPType"),
        (edited(ENDPOINT.pack(), 7, 0), "mtu must be between 1 and 5, not 0"),
        (edited(ENDPOINT.pack(), 27, 1), "qp_num must be between 0 and 16777215"),
        (edited(ENDPOINT.pack(), 31, 1), "psn must be between"),
        (ENDPOINT.pack() + b"\0", "bytes instead of"),
        (ENDPOINT.pack()[:-1], "truncated endpoint"),
    ],
)
def test_endpoint_unpack_rejects_malformed_data(data: bytes, text: str) -> None:
    with pytest.raises(ProtocolError, match=re.escape(text)):
        Endpoint.unpack(data)


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        (HELLO, {"eager_size": MIN_RECEIVE - 1}),
        (HELLO, {"control_receives": 256}),
        (HELLO, {"max_message": -1}),
        (HELLO, {"lend_quota": 1 << 64}),
        (HELLO, {"max_dest_rd_atomic": 256}),
        (ENDPOINT, {"max_dest_rd_atomic": -1}),
        (ENDPOINT, {"gid": b"short"}),
        (ENDPOINT, {"qp_num": 1 << 24}),
        (ENDPOINT, {"lid": 1 << 16}),
        (ENDPOINT, {"mtu": 6}),
        (ENDPOINT, {"qkey": 1 << 32}),
    ],
)
def test_hello_and_endpoint_reject_values_out_of_range(
    message: Any, changes: dict[str, object]
) -> None:
    replace: Callable[..., object] = dataclasses.replace
    (name,) = changes
    with pytest.raises(ValueError, match=name):
        replace(message, **changes)
