"""Work requests of every kind, by ibv_post_send and by the builders of ibv_wr_post(3)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest

from aiordma import verbs
from aiordma.verbs import (
    QPCapabilities,
    ReceiveWorkRequest,
    ScatterGatherElement,
    SendFlags,
    SendOps,
    SendWorkRequest,
    WCFlags,
    WCOpcode,
    WROpcode,
)

if TYPE_CHECKING:
    from tests.conftest import ConnectedPair, End

SIGNALED = int(SendFlags.SIGNALED)


CLASSIC = SendOps.NONE
BUILDERS = verbs.send_ops_of(verbs.QPType.RC)


@pytest.fixture(params=[CLASSIC, BUILDERS], ids=["classic", "builders"])
def connected_pair(request: pytest.FixtureRequest, connected_pair: ConnectedPair) -> ConnectedPair:
    """The same face and the same results, whichever way the work is posted."""
    return partial(connected_pair, send_ops=request.param)


def sge(end: End, offset: int = 0, length: int = 64) -> ScatterGatherElement:
    return ScatterGatherElement(end.mr.addr + offset, length, end.mr.lkey)


# --- send and receive --------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 4095, 4096, 4097, 65536])
def test_send(pair: tuple[End, End], length: int) -> None:
    one, two = pair
    one.mr.buf[:] = bytes(range(256)) * 256
    two.qp.post_recv_one(7, two.mr.addr, 65536, two.mr.lkey)
    one.qp.post_send_one(8, WROpcode.SEND, SIGNALED, one.mr.addr, length, one.mr.lkey)
    sent, received = one.completion(), two.completion()
    assert (sent.wr_id, sent.opcode) == (8, WCOpcode.SEND)
    assert (received.wr_id, received.opcode, received.byte_len) == (7, WCOpcode.RECV, length)
    assert received.imm_data is None
    assert two.mr.buf[:length] == one.mr.buf[:length]
    assert not any(two.mr.buf[length:])


@pytest.mark.parametrize("imm", [0, 1, 0x12345678, 0xFFFFFFFF])
def test_immediate_is_in_host_order(pair: tuple[End, End], imm: int) -> None:
    one, two = pair
    two.qp.post_recv_one(1, two.mr.addr, 64, two.mr.lkey)
    one.qp.post_send_one(
        1, WROpcode.SEND_WITH_IMM, SIGNALED, one.mr.addr, 4, one.mr.lkey, imm_data=imm
    )
    received = two.completion()
    assert received.imm_data == imm
    assert received.wc_flags & WCFlags.WITH_IMM
    assert one.completion().imm_data is None  # a sender gets none


def test_lists_with_several_pieces(connected_pair: ConnectedPair) -> None:
    one, two = connected_pair(QPCapabilities(max_send_sge=3, max_recv_sge=3))
    one.mr.buf[:48] = b"a" * 16 + b"b" * 16 + b"c" * 16
    two.qp.post_recv(
        [
            ReceiveWorkRequest(1, [sge(two, 0, 10), sge(two, 1000, 10), sge(two, 2000, 100)]),
            ReceiveWorkRequest(2, [sge(two, 3000, 100)]),
            ReceiveWorkRequest(3),
        ]
    )
    one.qp.post_send(
        [
            SendWorkRequest(
                4, WROpcode.SEND, [sge(one, 32, 16), sge(one, 16, 16), sge(one, 0, 16)]
            ),
            SendWorkRequest(5, WROpcode.SEND, [sge(one, 0, 3)], SendFlags.NONE),
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
    two.qp.post_recv([ReceiveWorkRequest(i, [sge(two, 8 * i, 8)]) for i in range(100)])
    one.qp.post_send([SendWorkRequest(i, WROpcode.SEND, [sge(one, 8 * i, 8)]) for i in range(100)])
    assert [wc.wr_id for wc in two.completions(100)] == list(range(100))
    assert [wc.wr_id for wc in one.completions(100)] == list(range(100))
    assert two.mr.buf[:800] == one.mr.buf[:800]


def test_inline_data_may_be_changed_at_once(connected_pair: ConnectedPair) -> None:
    one, two = connected_pair(QPCapabilities(max_inline_data=64))
    flags = SIGNALED | SendFlags.INLINE
    two.qp.post_recv([ReceiveWorkRequest(i, [sge(two, 64 * i)]) for i in range(8)])
    for index in range(8):
        one.mr.buf[:64] = bytes([index]) * 64
        one.qp.post_send_one(index, WROpcode.SEND, flags, one.mr.addr, 64, 0)  # no key needed
    one.mr.buf[:64] = b"x" * 64
    two.completions(8)
    one.completions(8)
    for index in range(8):
        assert bytes(two.mr.buf[64 * index : 64 * index + 64]) == bytes([index]) * 64


def test_every_send_signaled(pd: verbs.ProtectionDomain, cq: verbs.CompletionQueue) -> None:
    with pd.create_qp(cq, sq_sig_all=True) as qp, pd.create_qp(cq) as peer, pd.reg_mr(64) as mr:
        assert qp.sq_sig_all
        assert not peer.sq_sig_all
        first, second = qp.endpoint(), peer.endpoint()
        qp.connect(first, second)
        peer.connect(second, first)
        peer.post_recv_one(1, mr.addr, 8, mr.lkey)
        qp.post_send_one(2, WROpcode.SEND, 0, mr.addr, 8, mr.lkey)
        found: list[verbs.WorkCompletion] = []
        while len(found) < 2:
            found += cq.poll()
        assert {wc.wr_id for wc in found} == {1, 2}


# --- one-sided ---------------------------------------------------------------------------------


def test_write(pair: tuple[End, End]) -> None:
    one, two = pair
    one.mr.buf[:5] = b"hello"
    one.qp.post_send_one(
        1, WROpcode.RDMA_WRITE, SIGNALED, one.mr.addr, 5, one.mr.lkey,
        two.mr.addr + 100, two.mr.rkey,
    )  # fmt: skip
    assert one.completion().opcode is WCOpcode.RDMA_WRITE
    assert bytes(two.mr.buf[100:105]) == b"hello"
    assert two.cq.poll() == []  # the peer notices nothing


def test_write_with_immediate_uses_up_a_receive(pair: tuple[End, End]) -> None:
    one, two = pair
    one.mr.buf[:5] = b"hello"
    two.qp.post_recv_one(9, 0, 0, 0)
    one.qp.post_send_one(
        1, WROpcode.RDMA_WRITE_WITH_IMM, SIGNALED, one.mr.addr, 5, one.mr.lkey,
        two.mr.addr, two.mr.rkey, 0xABCD,
    )  # fmt: skip
    received = two.completion()
    assert (received.wr_id, received.opcode) == (9, WCOpcode.RECV_RDMA_WITH_IMM)
    assert (received.imm_data, received.byte_len) == (0xABCD, 5)
    assert one.completion().opcode is WCOpcode.RDMA_WRITE
    assert bytes(two.mr.buf[:5]) == b"hello"


def test_read(pair: tuple[End, End]) -> None:
    one, two = pair
    two.mr.buf[1000:1005] = b"there"
    one.qp.post_send_one(
        1, WROpcode.RDMA_READ, SIGNALED, one.mr.addr + 7, 5, one.mr.lkey,
        two.mr.addr + 1000, two.mr.rkey,
    )  # fmt: skip
    completion = one.completion()
    assert (completion.opcode, completion.byte_len) == (WCOpcode.RDMA_READ, 5)
    assert bytes(one.mr.buf[7:12]) == b"there"


def test_atomics_return_the_old_value(pair: tuple[End, End]) -> None:
    one, two = pair
    counter, old = two.mr.buf[64:72].cast("Q"), one.mr.buf[:8].cast("Q")
    counter[0] = 40

    def atomic(opcode: WROpcode, compare_add: int, swap: int = 0) -> int:
        with one.qp.batch() as batch:
            if opcode is WROpcode.ATOMIC_FETCH_AND_ADD:
                batch.fetch_and_add(sge(one, 0, 8), two.mr.addr + 64, two.mr.rkey, compare_add)
            else:
                batch.compare_and_swap(
                    sge(one, 0, 8), two.mr.addr + 64, two.mr.rkey, compare_add, swap
                )
        completion = one.completion()
        assert completion.ok
        expected = {
            WROpcode.ATOMIC_FETCH_AND_ADD: WCOpcode.FETCH_ADD,
            WROpcode.ATOMIC_CMP_AND_SWP: WCOpcode.COMP_SWAP,
        }
        assert completion.opcode is expected[opcode]
        assert completion.byte_len == 8
        return old[0]

    assert atomic(WROpcode.ATOMIC_FETCH_AND_ADD, 2) == 40
    assert atomic(WROpcode.ATOMIC_FETCH_AND_ADD, -1) == 42
    assert counter[0] == 41
    assert atomic(WROpcode.ATOMIC_CMP_AND_SWP, 7, 1) == 41  # not equal: not swapped
    assert counter[0] == 41
    assert atomic(WROpcode.ATOMIC_CMP_AND_SWP, 41, (1 << 64) - 1) == 41
    assert counter[0] == (1 << 64) - 1
    assert atomic(WROpcode.ATOMIC_FETCH_AND_ADD, 1) == (1 << 64) - 1
    assert counter[0] == 0  # wraps


def test_a_fenced_send_comes_after_the_read(pair: tuple[End, End]) -> None:
    one, two = pair
    two.mr.buf[:4] = b"data"
    two.qp.post_recv_one(1, two.mr.addr + 4096, 64, two.mr.lkey)
    one.qp.post_send(
        [
            SendWorkRequest(
                1, WROpcode.RDMA_READ, [sge(one, 0, 4)], SIGNALED,
                remote_addr=two.mr.addr, rkey=two.mr.rkey,
            ),
            SendWorkRequest(
                2, WROpcode.SEND, [sge(one, 0, 4)], SendFlags.SIGNALED | SendFlags.FENCE
            ),
        ]
    )  # fmt: skip
    assert [wc.wr_id for wc in one.completions(2)] == [1, 2]
    two.completion()
    assert bytes(two.mr.buf[4096:4100]) == b"data"  # what the read brought
