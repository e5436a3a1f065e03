"""Tests of control messages: round trips and strict validation.

Invalid input must raise only ProtocolError.
"""

from __future__ import annotations

import re
from typing import get_type_hints

import msgpack  # type: ignore[import-untyped]
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiordma._core import fields, protocol
from aiordma._core.fields import MAX_DATA, MAX_RAILS, MAX_TEXT
from aiordma._core.protocol import (
    CUT_OFF,
    GOING_AWAY,
    MAGIC,
    MAX_LENGTH,
    MIN_RECEIVE,
    VERSION,
    Error,
    ErrorCode,
    Goodbye,
    GoodbyeCode,
    Message,
    Ping,
    ReceiveSize,
    RegionGrant,
    RegionRequest,
    RegionReturn,
    decode,
    describe_failure,
    encode,
    failure_goodbye,
)
from aiordma._core.refusal import printable
from aiordma._core.region import RegionToken, Rights
from aiordma.errors import ProtocolError

u16, u32, u64 = (st.integers(0, (1 << bits) - 1) for bits in (16, 32, 64))
rights = st.sampled_from([Rights(bits) for bits in range(0, 16, 2)])
texts = st.text(st.characters(exclude_categories=["Cs"])).filter(
    lambda text: len(text.encode()) <= MAX_TEXT and text.isprintable()
)
low_addresses = st.integers(0, 1 << 63)
VALUES: dict[object, st.SearchStrategy[object]] = {
    fields.U16: u16,
    fields.U32: u32,
    fields.U64: u64,
    fields.Text: texts,
    fields.Bytes32: st.binary(min_size=32, max_size=32),
    fields.Bytes40: st.binary(min_size=40, max_size=40),
    fields.Data: st.binary(max_size=MAX_DATA),
    fields.Access: rights,
    fields.Token: st.builds(
        RegionToken, u64, low_addresses, st.integers(0, (1 << 63) - 1), u32, rights, u32
    ),
    fields.Keys: st.lists(st.tuples(u32, u32), max_size=MAX_RAILS).map(tuple),
}


def of_kind(kind: type[Message]) -> st.SearchStrategy[Message]:
    values = [VALUES[it] for it in get_type_hints(kind, include_extras=True).values()]
    if kind is ReceiveSize:
        values[2] = st.integers(MIN_RECEIVE, (1 << 32) - 1)
    return st.builds(kind, *values)


messages = st.one_of(*map(of_kind, protocol.NUMBERS))


def pack(value: object) -> bytes:
    packed: bytes = msgpack.packb(value)
    return packed


def envelope(number: object, body: object, request_id: object = 1) -> bytes:
    return pack([MAGIC, VERSION, number, request_id, body])


@given(messages)
def test_messages_round_trip(message: Message) -> None:
    data = encode(message)
    assert len(data) <= MAX_LENGTH
    assert decode(data) == message
    assert decode(memoryview(bytearray(data))) == message
    assert type(decode(data)) is type(message)


def test_message_layout_is_stable() -> None:
    assert encode(Ping(5)) == pack([0xA17D, 1, 7, 5, []])
    assert encode(RegionRequest(9, 1 << 20, Rights.READ, 60_000)) == pack(
        [0xA17D, 1, 5, 9, [1 << 20, 4, 60_000]]
    )


def test_message_types_and_error_codes_are_stable() -> None:
    assert " ".join(f"{kind.__name__}={number}" for kind, number in protocol.NUMBERS.items()) == (
        "RegionGrant=3 RegionReturn=4 RegionRequest=5 RegionRelease=6 Ping=7 Pong=8 Goodbye=9 "
        "Error=10 AuthHello=11 AuthAnswer=12 AuthProof=13 ReceiveSize=14 ConnectRequest=15 "
        "ConnectReply=16 ReadyToUse=17 RegionEnd=18 RegionRenew=19 RegionLease=20 ConnectData=21 "
        "ConnectAccepted=22 RailOffer=23 RailAnswer=24 RailReady=25 RailDown=26 "
        "Resume=27 RegionKey=28"
    )
    assert " ".join(f"{member.name}={member}" for member in ErrorCode) == (
        "OK=0 INTERNAL=1 UNSUPPORTED=2 QUOTA=3 UNKNOWN_REGION=4 ACCESS=5 TOO_LONG=6 BUSY=7 "
        "CANCELLED=8"
    )
    assert " ".join(f"{member.name}={member}" for member in GoodbyeCode) == (
        "NORMAL=0 SHUTDOWN=1 PROTOCOL_ERROR=2 TIMEOUT=3 INTERNAL=4 NOT_AUTHENTICATED=5 REJECTED=6 "
        "FAILED=7"
    )
    assert " ".join(f"{member.name}={member}" for member in protocol.RailCause) == (
        "UNKNOWN=0 UNANSWERED=1 NOT_READY=2 QUEUE_PAIR=3 PORT=4 DEVICE=5 SILENCE=6 OTHER=7"
    )


def test_rail_down_encoding_is_compatible_with_earlier_releases() -> None:
    """Earlier releases read a request id in the place of the cause, and ignore it."""
    assert encode(protocol.RailDown(protocol.RailCause.PORT, 2)) == pack([0xA17D, 1, 26, 4, [2]])
    assert set(protocol.RAIL_CAUSES) == set(protocol.RailCause) - {protocol.RailCause.UNKNOWN}


def test_goodbyes_use_codes_known_to_earlier_releases() -> None:
    """Earlier releases know the codes up to REJECTED, and take others for a broken connection.

    They do not read the text of NORMAL.
    """
    assert GOING_AWAY.code == GoodbyeCode.NORMAL
    assert CUT_OFF.code == GoodbyeCode.SHUTDOWN
    assert all(decode(encode(goodbye)) == goodbye for goodbye in (GOING_AWAY, CUT_OFF))


@pytest.mark.parametrize("name", ["Überlauf", "x" * 65, "a\x1b[2J", ""])
def test_goodbye_failure_includes_only_valid_type_names(name: str) -> None:
    goodbye = failure_goodbye(type("Known", (Exception,), {})("secret"))
    assert goodbye == Goodbye(0, GoodbyeCode.FAILED, "Known")
    begin = "the peer's program ended the connection with "
    assert describe_failure(goodbye, 100).startswith(f"{begin}Known: ")
    assert describe_failure(goodbye._replace(text=name), 100).startswith(f"{begin}an exception: ")


def test_longest_messages_do_not_exceed_max_length() -> None:
    token = RegionToken((1 << 64) - 1, 1 << 63, (1 << 63) - 1, (1 << 32) - 1, Rights.READ)
    for message in (
        Goodbye((1 << 32) - 1, 65535, "x" * 10_000),
        Error((1 << 32) - 1, 65535, "\N{SNOWMAN}" * 10_000),
        RegionGrant((1 << 32) - 1, token, (((1 << 32) - 1,) * 2,) * MAX_RAILS),
    ):
        assert len(encode(message)) <= MAX_LENGTH


@given(st.text(st.characters()))
def test_long_error_text_is_truncated_and_made_printable(text: str) -> None:
    for long in (text, text * 100):
        message = decode(encode(Error(1, 2, long)))
        assert isinstance(message, Error)
        sent = long.encode("utf-8", "ignore")[:MAX_TEXT].decode("utf-8", "ignore")
        assert message.text == printable(sent, MAX_TEXT)


def test_decoded_access_field_has_type_rights() -> None:
    message = decode(encode(RegionRequest(1, 2, Rights.READ | Rights.ATOMIC, 0)))
    assert isinstance(message, RegionRequest)
    assert isinstance(message.access, Rights)


# --- what is refused -----------------------------------------------------------------------------

GOOD = [MAGIC, VERSION, 7, 1, []]
TOKEN = RegionToken(1, 2, 3, 4, Rights.READ).pack()
REFUSED = [
    (b"", "not valid msgpack"),
    (b"\xc1", "not valid msgpack"),
    (pack(GOOD) + b"\0", "not valid msgpack"),
    (pack(GOOD)[:-1], "not valid msgpack"),
    (b"\x91" * 500, "not valid msgpack"),
    (b"\xdd\xff\xff\xff\xff", "not valid msgpack"),
    (b"\xdb\xff\xff\xff\xff", "not valid msgpack"),
    (pack({"a": 1}), "not valid msgpack"),
    (pack([*GOOD[:4], [msgpack.ExtType(5, b"x")]]), "not valid msgpack"),
    (pack([*GOOD[:4], [msgpack.Timestamp(1)]]), "not valid msgpack"),
    (b"\xa4\xff\xff\xff\xff", "not valid msgpack"),
    (bytes(MAX_LENGTH), "not valid msgpack"),
    (bytes(MAX_LENGTH + 1), "too long: 513 bytes"),
    (pack({}), "a message that is not an aiordma control message"),
    (pack([MAGIC + 1, *GOOD[1:]]), "a message that is not an aiordma control message"),
    (pack([float(MAGIC), *GOOD[1:]]), "a message that is not an aiordma control message"),
    (pack([MAGIC]), "uses version [] of the control protocol, but this side uses [1]"),
    (pack([MAGIC, True, *GOOD[2:]]), "uses version [True] of"),
    (pack([MAGIC, "x" * 400]), "uses version"),
    (pack(GOOD[:4]), "4 parts instead of 5"),
    (pack([*GOOD, 0]), "6 parts instead of 5"),
    (envelope(0, []), "unknown type 0"),
    (envelope(11, [bytes(31)]), "AuthHello with an invalid nonce: expected 32 bytes, not 31"),
    (envelope(11, ["x" * 32]), "AuthHello with an invalid nonce: expected bytes, not str"),
    (envelope(7.0, []), "unknown type 7.0"),
    (envelope([7], []), "unknown type [7]"),
    (envelope(True, [2, 3, 4, None]), "unknown type True"),
    (envelope(7, None), "an invalid Ping: expected a list of 0 fields"),
    (envelope(4, []), "an invalid RegionReturn: expected a list of 1 fields"),
    (envelope(7, [], None), "a Ping with an invalid request_id: expected an int, not NoneType"),
    (envelope(7, [], -1), "a Ping with an invalid request_id: -1 does not fit in 32 bits"),
    (envelope(4, [True]), "invalid region_id: expected an int, not bool"),
    (envelope(4, [1.0]), "invalid region_id: expected an int, not float"),
    (envelope(9, [65536, ""]), "invalid code: 65536 does not fit in 16 bits"),
    (envelope(5, [1, 1, 0]), "a RegionRequest with an invalid access: unknown rights 0x1"),
    (envelope(5, [1, 16 | 2, 0]), "invalid access: unknown rights 0x10"),
    (envelope(9, [0, b"bytes"]), "a Goodbye with an invalid text: expected a str, not bytes"),
    (envelope(9, [0, "x" * (MAX_TEXT + 1)]), "invalid text: longer than 256 bytes"),
    (envelope(3, ["x", []]), "a RegionGrant with an invalid token: expected bytes, not str"),
    (envelope(3, [b"x", []]), "not an aiordma region token"),
    (envelope(3, [TOKEN + b"\0", []]), "bytes instead of"),
    (envelope(3, [TOKEN, 1]), "a RegionGrant with an invalid keys: expected at most 8 pairs"),
    (envelope(3, [TOKEN, [[1, 2]] * 9]), "invalid keys: expected at most 8 pairs"),
    (envelope(3, [TOKEN, [[1]]]), "invalid keys: expected (rail, key) pairs"),
    (envelope(3, [TOKEN, [[1, 1 << 32]]]), "invalid keys: 4294967296 does not fit in 32 bits"),
]


@pytest.mark.parametrize(("data", "text"), REFUSED)
def test_decode_rejects_malformed_messages(data: bytes, text: str) -> None:
    with pytest.raises(ProtocolError, match=re.escape(text)) as caught:
        decode(data)
    assert "peer" in str(caught.value) or "the sender" in str(caught.value)
    assert len(str(caught.value)) < 300


# --- what cannot be said -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (Ping(-1), "Ping.request_id: -1 does not fit in 32 bits"),
        (Ping(True), "Ping.request_id: expected an int"),
        (Goodbye(0, 1 << 16, ""), "Goodbye.code"),
        (
            RegionReturn(1, 1 << 64),
            "RegionReturn.region_id: 18446744073709551616 does not fit in 64",
        ),
        (RegionRequest(1, 2, Rights(0), 1 << 32), "RegionRequest.lease_ms"),
        (RegionRequest(1, 2, Rights(32), 0), "RegionRequest.access: unknown rights 0x20"),
        (RegionGrant(1, "token"), "RegionGrant.token: expected a region token"),  # type: ignore[arg-type]
        (Error(1, 2, b"text"), "Error.text: expected a str"),  # type: ignore[arg-type]
    ],
)
def test_encode_rejects_fields_out_of_range(message: Message, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        encode(message)
