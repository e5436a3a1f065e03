"""Work requests of every kind, by ibv_post_send and by the builders of ibv_wr_post(3)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest

from aiordma import verbs
from aiordma.verbs import (
    QPCapabilities,
    ReceiveWorkRequest,
    SendFlags,
    SendOps,
    SendWorkRequest,
    WCFlags,
    WCOpcode,
    WROpcode,
)

if TYPE_CHECKING:
    from conftest import ConnectedPair, Pair

SIGNALED = int(SendFlags.SIGNALED)


CLASSIC = SendOps.NONE
BUILDERS = verbs.send_ops_of(verbs.QPType.RC)


@pytest.fixture(params=[CLASSIC, BUILDERS], ids=["classic", "builders"])
def connected_pair(request: pytest.FixtureRequest, connected_pair: ConnectedPair) -> ConnectedPair:
    """The same face and the same results, whichever way the work is posted."""
    return partial(connected_pair, send_ops=request.param)


# --- send and receive --------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 4095, 4096, 4097, 65536])
def test_send(pair: Pair, length: int) -> None:
    one, two = pair
    one.mr.buf[:] = bytes(range(256)) * 256
    two.post_recv(7, 65536)
    one.post(WROpcode.SEND, length=length, wr_id=8)
    sent, received = one.completion(), two.completion()
    assert (sent.wr_id, sent.opcode) == (8, WCOpcode.SEND)
    assert (received.wr_id, received.opcode, received.byte_len) == (7, WCOpcode.RECV, length)
    assert received.imm_data is None
    assert two.mr.buf[:length] == one.mr.buf[:length]
    assert not any(two.mr.buf[length:])


@pytest.mark.parametrize("imm", [0, 1, 0x12345678, 0xFFFFFFFF])
def test_immediate_is_in_host_order(pair: Pair, imm: int) -> None:
    one, two = pair
    two.post_recv(1, 64)
    one.post(WROpcode.SEND_WITH_IMM, length=4, imm_data=imm)
    received = two.completion()
    assert received.imm_data == imm
    assert received.wc_flags & WCFlags.WITH_IMM
    assert one.completion().imm_data is None  # a sender gets none


def test_lists_with_several_pieces(connected_pair: ConnectedPair) -> None:
    one, two = connected_pair(QPCapabilities(max_send_sge=3, max_recv_sge=3))
    one.mr.buf[:48] = b"a" * 16 + b"b" * 16 + b"c" * 16
    two.qp.post_recv(
        [
            ReceiveWorkRequest(1, [two.sge(0, 10), two.sge(1000, 10), two.sge(2000, 100)]),
            ReceiveWorkRequest(2, [two.sge(3000, 100)]),
            ReceiveWorkRequest(3),
        ]
    )
    one.qp.post_send(
        [
            SendWorkRequest(4, WROpcode.SEND, [one.sge(32, 16), one.sge(16, 16), one.sge(0, 16)]),
            SendWorkRequest(5, WROpcode.SEND, [one.sge(0, 3)], SendFlags.NONE),
            SendWorkRequest(6, WROpcode.SEND_WITH_IMM, imm_data=9),
        ]
    )
    assert [wc.wr_id for wc in one.completions(2)] == [4, 6]
    received = two.completions(3)
    assert [wc.wr_id for wc in received] == [1, 2, 3]
    assert [wc.byte_len for wc in received] == [48, 3, 0]
    assert received[2].imm_data == 9
    assert bytes(two.mr.buf[:10]) == b"c" * 10
    assert bytes(two.mr.buf[1000:1010]) == b"c" * 6 + b"b" * 4
    assert bytes(two.mr.buf[2000:2028]) == b"b" * 12 + b"a" * 16
    assert bytes(two.mr.buf[3000:3003]) == b"aaa"


def test_a_hundred_in_one_crossing(connected_pair: ConnectedPair) -> None:
    one, two = connected_pair(QPCapabilities(max_send_wr=128, max_recv_wr=128))
    for index in range(100):
        one.mr.buf[8 * index : 8 * index + 8] = index.to_bytes(8, "little")
    two.qp.post_recv([ReceiveWorkRequest(i, [two.sge(8 * i)]) for i in range(100)])
    one.qp.post_send([SendWorkRequest(i, WROpcode.SEND, [one.sge(8 * i)]) for i in range(100)])
    assert [wc.wr_id for wc in two.completions(100)] == list(range(100))
    assert [wc.wr_id for wc in one.completions(100)] == list(range(100))
    assert two.mr.buf[:800] == one.mr.buf[:800]


def test_inline_data_may_be_changed_at_once(connected_pair: ConnectedPair) -> None:
    one, two = connected_pair(QPCapabilities(max_inline_data=64))
    flags = SIGNALED | SendFlags.INLINE
    two.qp.post_recv([ReceiveWorkRequest(i, [two.sge(64 * i, 64)]) for i in range(8)])
    for index in range(8):
        one.mr.buf[:64] = bytes([index]) * 64
        one.qp.post_send_one(index, WROpcode.SEND, flags, one.mr.addr, 64, 0)  # no key needed
    one.mr.buf[:64] = b"x" * 64
    two.completions(8)
    one.completions(8)
    for index in range(8):
        assert bytes(two.mr.buf[64 * index : 64 * index + 64]) == bytes([index]) * 64


# --- one-sided ---------------------------------------------------------------------------------
