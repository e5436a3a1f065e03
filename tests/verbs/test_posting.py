"""Work requests of every kind, and how they fail."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest

from aiordma import verbs
from aiordma.errors import PostError, UnsupportedError
from aiordma.verbs import (
    AccessFlags,
    QPCapabilities,
    QPState,
    QPType,
    ReceiveWorkRequest,
    ScatterGatherElement,
    SendFlags,
    SendWorkRequest,
    WCFlags,
    WCOpcode,
    WCStatus,
    WROpcode,
)

if TYPE_CHECKING:
    from tests.conftest import ConnectedPair, End

SIGNALED = int(SendFlags.SIGNALED)


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
    one.completion()


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
        one.qp.post_send_atomic(
            1, opcode, SIGNALED, one.mr.addr, one.mr.lkey,
            two.mr.addr + 64, two.mr.rkey, compare_add, swap,
        )  # fmt: skip
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


# --- what fails --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("opcode", "right"),
    [
        (WROpcode.RDMA_WRITE, AccessFlags.REMOTE_WRITE),
        (WROpcode.RDMA_READ, AccessFlags.REMOTE_READ),
        (WROpcode.ATOMIC_FETCH_AND_ADD, AccessFlags.REMOTE_ATOMIC),
    ],
)
def test_the_region_must_give_the_right(
    pair: tuple[End, End], pd: verbs.ProtectionDomain, opcode: WROpcode, right: AccessFlags
) -> None:
    one, two = pair
    rights = two.mr.access & ~right
    with pd.reg_mr(4096, rights) as mr:
        one.qp.post_send_atomic(1, opcode, SIGNALED, one.mr.addr, one.mr.lkey, mr.addr, mr.rkey, 1)
        wc = one.completion()
        assert wc.status is WCStatus.REM_ACCESS_ERR
        assert not any(mr.buf)


@pytest.mark.parametrize("opcode", [WROpcode.RDMA_WRITE, WROpcode.RDMA_READ])
@pytest.mark.parametrize(("offset", "length"), [(65536 - 4, 8), (65536, 8), (-1, 8), (0, 65537)])
def test_outside_of_the_region(
    connected_pair: ConnectedPair,
    pd: verbs.ProtectionDomain,
    opcode: WROpcode,
    offset: int,
    length: int,
) -> None:
    one, two = connected_pair()
    with pd.reg_mr(1 << 17) as mr:
        one.qp.post_send_one(
            1, opcode, SIGNALED, mr.addr, length, mr.lkey, two.mr.addr + offset, two.mr.rkey
        )
        assert one.completion().status is WCStatus.REM_ACCESS_ERR
        assert one.qp.query().qp_state is QPState.ERR
        assert not any(two.mr.buf)


def test_a_key_that_nobody_has(pair: tuple[End, End]) -> None:
    one, two = pair
    one.qp.post_send_one(
        1, WROpcode.RDMA_WRITE, SIGNALED, one.mr.addr, 8, one.mr.lkey,
        two.mr.addr, two.mr.rkey ^ 0x5A5A5A00,
    )  # fmt: skip
    assert one.completion().status is WCStatus.REM_ACCESS_ERR


def test_a_closed_region(pair: tuple[End, End], pd: verbs.ProtectionDomain) -> None:
    one, two = pair
    mr = pd.reg_mr(4096, two.mr.access)
    addr, rkey, memory = mr.addr, mr.rkey, mr.buf
    mr.close()
    one.mr.buf[:8] = b"too late"
    one.qp.post_send_one(1, WROpcode.RDMA_WRITE, SIGNALED, one.mr.addr, 8, one.mr.lkey, addr, rkey)
    assert one.completion().status is WCStatus.REM_ACCESS_ERR
    assert not any(memory)


def test_the_queue_pair_must_give_the_right(connected_pair: ConnectedPair) -> None:
    one, two = connected_pair(access=AccessFlags.REMOTE_READ)
    one.qp.post_send_one(
        1, WROpcode.RDMA_WRITE, SIGNALED, one.mr.addr, 8, one.mr.lkey, two.mr.addr, two.mr.rkey
    )
    assert one.completion().status in (WCStatus.REM_ACCESS_ERR, WCStatus.REM_INV_REQ_ERR)


def test_a_message_longer_than_the_receive(
    pair: tuple[End, End], deviations: frozenset[str]
) -> None:
    """IBTA volume 1, clause 9.9.3, table 61: invalid request there, length error here."""
    one, two = pair
    two.qp.post_recv_one(7, two.mr.addr, 8, two.mr.lkey)
    one.qp.post_send_one(1, WROpcode.SEND, SIGNALED, one.mr.addr, 9, one.mr.lkey)
    sent, received = one.completion(), two.completion()
    assert received.wr_id == 7
    if "a message too long for the receive is an operational error" in deviations:
        assert sent.status is WCStatus.REM_OP_ERR
        assert received.status is WCStatus.LOC_QP_OP_ERR
    else:
        assert sent.status is WCStatus.REM_INV_REQ_ERR
        assert received.status is WCStatus.LOC_LEN_ERR


def test_a_wrong_lkey(pair: tuple[End, End], deviations: frozenset[str]) -> None:
    one, two = pair
    two.qp.post_recv_one(1, two.mr.addr, 8, two.mr.lkey)
    one.qp.post_send_one(5, WROpcode.SEND, SIGNALED, one.mr.addr, 8, one.mr.lkey ^ 0x5A5A5A00)
    wc = one.completion()
    assert wc.wr_id == 5
    if "an unknown lkey is a queue pair error" in deviations:
        assert wc.status is WCStatus.LOC_QP_OP_ERR
    else:
        assert wc.status is WCStatus.LOC_PROT_ERR


def test_not_ready_receiver_ends_after_the_retries(connected_pair: ConnectedPair) -> None:
    one, _ = connected_pair(rnr_retry=1, min_rnr_timer=0.00001)
    one.qp.post_send_one(1, WROpcode.SEND, SIGNALED, one.mr.addr, 8, one.mr.lkey)
    assert one.completion().status is WCStatus.RNR_RETRY_EXC_ERR


def test_not_ready_receiver_is_waited_for(connected_pair: ConnectedPair) -> None:
    one, two = connected_pair(rnr_retry=7, min_rnr_timer=0.00001)
    one.qp.post_send_one(1, WROpcode.SEND, SIGNALED, one.mr.addr, 8, one.mr.lkey)
    two.qp.post_recv_one(1, two.mr.addr, 8, two.mr.lkey)
    assert two.completion().ok
    assert one.completion().ok


def test_nobody_there(connected_pair: ConnectedPair) -> None:
    one, two = connected_pair(retry_cnt=1, timeout=0.001)
    two.qp.to_reset()
    one.qp.post_send_one(1, WROpcode.SEND, SIGNALED, one.mr.addr, 8, one.mr.lkey)
    assert one.completion().status is WCStatus.RETRY_EXC_ERR


def test_a_full_queue_tells_the_first_that_was_not_posted(connected_pair: ConnectedPair) -> None:
    one, _ = connected_pair(rnr_retry=7, min_rnr_timer=0.4)  # no receives: nothing completes
    granted = one.qp.query().cap.max_send_wr
    requests = [
        SendWorkRequest(i, WROpcode.SEND, [sge(one, 0, 8)], SendFlags.NONE)
        for i in range(granted + 10)
    ]
    with pytest.raises(PostError) as caught:
        one.qp.post_send(requests)
    assert caught.value.errno == errno.ENOMEM
    assert caught.value.verb == "ibv_post_send"
    assert one.qp.capabilities.max_send_wr <= caught.value.bad_index <= granted
    assert f"work request {caught.value.bad_index}" in str(caught.value)
    assert "full" in str(caught.value)
    with pytest.raises(PostError) as caught:
        one.qp.post_send_one(1, WROpcode.SEND, 0, one.mr.addr, 8, one.mr.lkey)
    assert caught.value.bad_index == 0


def test_a_full_receive_queue(pair: tuple[End, End]) -> None:
    one, _ = pair
    granted = one.qp.query().cap.max_recv_wr
    with pytest.raises(PostError) as caught:
        one.qp.post_recv([ReceiveWorkRequest(i, [sge(one)]) for i in range(granted + 10)])
    assert caught.value.errno == errno.ENOMEM
    assert one.qp.capabilities.max_recv_wr <= caught.value.bad_index <= granted
    with pytest.raises(PostError):
        one.qp.post_recv_one(1, one.mr.addr, 8, one.mr.lkey)


def test_too_many_pieces(pair: tuple[End, End]) -> None:
    one, _ = pair
    pieces = [sge(one, 0, 8)] * 40
    with pytest.raises(PostError) as caught:
        one.qp.post_send(
            [
                SendWorkRequest(1, WROpcode.SEND, pieces[:1]),
                SendWorkRequest(2, WROpcode.SEND, pieces),
            ]
        )
    assert caught.value.bad_index == 1
    assert caught.value.errno in (errno.EINVAL, errno.ENOMEM)
    with pytest.raises(PostError):
        one.qp.post_recv([ReceiveWorkRequest(1, pieces)])


@pytest.mark.parametrize(
    ("qp_type", "opcode"),
    [
        pytest.param(QPType.UC, WROpcode.RDMA_READ, marks=pytest.mark.needs("UC")),
        pytest.param(QPType.UC, WROpcode.ATOMIC_FETCH_AND_ADD, marks=pytest.mark.needs("UC")),
        pytest.param(QPType.UD, WROpcode.RDMA_WRITE, marks=pytest.mark.needs("UD")),
        pytest.param(QPType.UD, WROpcode.RDMA_READ, marks=pytest.mark.needs("UD")),
        (QPType.RC, WROpcode.TSO),
    ],
)
def test_what_a_transport_cannot_do_is_not_posted(
    pd: verbs.ProtectionDomain,
    cq: verbs.CompletionQueue,
    qp_type: QPType,
    opcode: WROpcode,
) -> None:
    with pd.create_qp(cq, qp_type=qp_type) as qp:
        message = f"{opcode.name} on a {qp_type.name} queue pair"
        with pytest.raises(UnsupportedError, match=message) as caught:
            qp.post_send_one(1, opcode, SIGNALED, 0, 0, 0)
        assert caught.value.device == pd.context.name
        with pytest.raises(UnsupportedError, match=message):
            qp.post_send([SendWorkRequest(1, opcode)])


def test_a_number_that_does_not_fit(pair: tuple[End, End]) -> None:
    one, _ = pair
    with pytest.raises(ValueError, match="does not fit"):
        one.qp.post_send_one(1 << 64, WROpcode.SEND, 0, 0, 0, 0)
    with pytest.raises(ValueError, match="does not fit"):
        one.qp.post_recv_one(-1, 0, 0, 0)
    with pytest.raises(ValueError, match="does not fit"):
        one.qp.post_send([SendWorkRequest(1 << 64, WROpcode.SEND)])
    with pytest.raises(ValueError, match="does not fit"):
        one.qp.post_recv([ReceiveWorkRequest(1, [ScatterGatherElement(0, 1 << 32, 0)])])


def test_posting_in_the_wrong_state(pd: verbs.ProtectionDomain, cq: verbs.CompletionQueue) -> None:
    """ibv_post_recv(3): receives from INIT on; sends in RTS."""
    with pd.create_qp(cq) as qp, pd.reg_mr(64) as mr:
        with pytest.raises(PostError):
            qp.post_send_one(1, WROpcode.SEND, SIGNALED, mr.addr, 8, mr.lkey)
        with pytest.raises(PostError):
            qp.post_recv_one(1, mr.addr, 8, mr.lkey)
        qp.to_init()
        qp.post_recv_one(1, mr.addr, 8, mr.lkey)
        with pytest.raises(PostError):
            qp.post_send_one(1, WROpcode.SEND, SIGNALED, mr.addr, 8, mr.lkey)


def test_flush_is_in_order(pair: tuple[End, End]) -> None:
    one, _ = pair
    one.qp.post_recv([ReceiveWorkRequest(i, [sge(one)]) for i in range(10)])
    one.qp.to_error()
    flushed = one.completions(10)
    assert [wc.wr_id for wc in flushed] == list(range(10))
    assert {wc.status for wc in flushed} == {WCStatus.WR_FLUSH_ERR}


def test_work_posted_in_error_is_flushed(pair: tuple[End, End], deviations: frozenset[str]) -> None:
    """IBTA volume 1, clause 10.3.1.7; the signaled flag does not matter."""
    one, _ = pair
    one.qp.to_error()
    one.qp.post_recv_one(1, one.mr.addr, 8, one.mr.lkey)
    one.qp.post_send_one(2, WROpcode.SEND, 0, one.mr.addr, 8, one.mr.lkey)
    expected = {2} if "a receive posted in ERR is not flushed" in deviations else {1, 2}
    flushed = one.completions(len(expected))
    assert {wc.wr_id for wc in flushed} == expected
    assert {wc.status for wc in flushed} == {WCStatus.WR_FLUSH_ERR}
    assert one.cq.poll() == []


def test_to_itself(pd: verbs.ProtectionDomain, cq: verbs.CompletionQueue) -> None:
    with pd.create_qp(cq) as qp, pd.reg_mr(128) as mr:
        mine = qp.endpoint()
        qp.connect(mine, mine)
        mr.buf[:4] = b"self"
        qp.post_recv_one(1, mr.addr + 64, 64, mr.lkey)
        qp.post_send_one(2, WROpcode.SEND, SIGNALED, mr.addr, 4, mr.lkey)
        found: list[verbs.WorkCompletion] = []
        while len(found) < 2:
            found += cq.poll()
        assert all(wc.ok for wc in found)
        assert bytes(mr.buf[64:68]) == b"self"
