"""Test how posted work fails, and which requests are not posted at all."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from aiordma import verbs
from aiordma.errors import PostError, QueueFullError, UnsupportedError
from aiordma.verbs import (
    AccessFlags,
    QPType,
    ReceiveWorkRequest,
    ScatterGatherElement,
    SendFlags,
    SendWorkRequest,
    WCStatus,
    WROpcode,
)

if TYPE_CHECKING:
    from conftest import ConnectedPair, Pair

SIGNALED = int(SendFlags.SIGNALED)


@pytest.mark.parametrize(
    ("opcode", "right"),
    [
        (WROpcode.RDMA_WRITE, AccessFlags.REMOTE_WRITE),
        (WROpcode.RDMA_READ, AccessFlags.REMOTE_READ),
        (WROpcode.ATOMIC_FETCH_AND_ADD, AccessFlags.REMOTE_ATOMIC),
    ],
)
def test_remote_access_not_granted_by_the_region_fails(
    pair: Pair, pd: verbs.ProtectionDomain, opcode: WROpcode, right: AccessFlags
) -> None:
    one, two = pair
    rights = two.mr.access & ~right
    with pd.reg_mr(4096, rights) as mr:
        one.qp.post_send_one(1, opcode, SIGNALED, one.mr.addr, 8, one.mr.lkey, mr.addr, mr.rkey)
        wc = one.completion()
        assert wc.status is WCStatus.REM_ACCESS_ERR
        assert not any(mr.buf)


def test_message_longer_than_receive_buffer_fails_on_both_sides(
    pair: Pair, deviations: frozenset[str]
) -> None:
    """IBTA volume 1, clause 9.9.3, table 61: the sender gets an invalid request error, and the
    receiver a length error.
    """
    one, two = pair
    two.post_recv(7, 8)
    one.post(WROpcode.SEND, length=9)
    sent, received = one.completion(), two.completion()
    assert received.wr_id == 7
    if "a message too long for the receive is an operational error" in deviations:
        assert sent.status is WCStatus.REM_OP_ERR
        assert received.status is WCStatus.LOC_QP_OP_ERR
    else:
        assert sent.status is WCStatus.REM_INV_REQ_ERR
        assert received.status is WCStatus.LOC_LEN_ERR


def test_oversized_receive_accepts_messages_that_fit_its_region(
    pair: Pair, pd: verbs.ProtectionDomain
) -> None:
    one, two = pair
    with two.qp.pd.reg_mr(64) as mr:
        for wr_id in (1, 2):
            two.qp.post_recv_one(wr_id, mr.addr, 4096, mr.lkey)
        one.mr.buf[:64] = bytes(range(64))
        one.post(WROpcode.SEND, length=64)
        assert one.completion().status is WCStatus.SUCCESS
        assert (two.completion().status, bytes(mr.buf)) == (WCStatus.SUCCESS, bytes(range(64)))
        one.post(WROpcode.SEND, length=65)
        assert one.completion().status is WCStatus.REM_OP_ERR
        assert not two.completion().ok


def test_post_send_raises_queue_full_and_posts_nothing(connected_pair: ConnectedPair) -> None:
    one, _ = connected_pair(rnr_retry=7, min_rnr_timer=0.4)  # no receives: nothing completes
    size = one.qp.capabilities.max_send_wr
    requests = [SendWorkRequest(i, WROpcode.SEND, [one.sge()], SendFlags.NONE) for i in range(size)]
    with pytest.raises(
        QueueFullError, match=f"{size + 1} slots needed, {size} of {size}"
    ) as caught:
        one.qp.post_send([*requests, requests[0]])
    assert (caught.value.bad_index, caught.value.errno) == (0, errno.ENOMEM)
    assert one.qp.free_send_slots == size
    requests[-1].send_flags = SendFlags.SIGNALED
    one.qp.post_send(requests)
    assert (one.qp.free_send_slots, one.qp.unsignaled_tail) == (0, 0)
    with pytest.raises(QueueFullError, match="; poll completions first; <QueuePair"):
        one.post(WROpcode.SEND, flags=0)


def test_queue_full_error_contains_the_first_unposted_index(connected_pair: ConnectedPair) -> None:
    one, _ = connected_pair(rnr_retry=7, min_rnr_timer=0.4)  # no receives: nothing completes
    one.qp.untrack()
    granted = one.qp.query().cap.max_send_wr
    requests = [
        SendWorkRequest(i, WROpcode.SEND, [one.sge()], SendFlags.NONE) for i in range(granted + 10)
    ]
    with pytest.raises(QueueFullError) as caught:
        one.qp.post_send(requests)
    assert caught.value.errno == errno.ENOMEM
    assert caught.value.verb == "ibv_post_send"
    assert one.qp.capabilities.max_send_wr <= caught.value.bad_index <= granted
    assert f"work request {caught.value.bad_index}" in str(caught.value)
    assert "full" in str(caught.value)
    with pytest.raises(QueueFullError) as caught:
        one.post(WROpcode.SEND, flags=0)
    assert caught.value.bad_index == 0
    with pytest.raises(ValueError, match="does not track posted work"):
        _ = one.qp.free_send_slots


def test_post_recv_raises_queue_full_beyond_max_wr(pair: Pair) -> None:
    one, _ = pair
    granted = one.qp.query().cap.max_recv_wr
    with pytest.raises(PostError) as caught:
        one.qp.post_recv([ReceiveWorkRequest(i, [one.sge(length=64)]) for i in range(granted + 10)])
    assert caught.value.errno == errno.ENOMEM
    most = one.qp.capabilities.max_recv_wr
    assert most <= caught.value.bad_index <= granted
    with pytest.raises(QueueFullError, match=f"max_recv_wr is {most}"):
        one.post_recv(1, 8)


def test_post_rejects_more_elements_than_max_sge(pair: Pair) -> None:
    one, _ = pair
    pieces = [one.sge()] * 40
    caps = one.qp.capabilities
    said = r"elements: 40 \(max_{}_sge is {}\)"
    with pytest.raises(PostError, match=said.format("send", caps.max_send_sge)) as caught:
        one.qp.post_send(
            [
                SendWorkRequest(1, WROpcode.SEND, pieces[:1]),
                SendWorkRequest(2, WROpcode.SEND, pieces),
            ]
        )
    assert caught.value.bad_index == 1
    assert one.qp.free_send_slots == caps.max_send_wr - 1  # the other one is posted
    assert caught.value.errno in (errno.EINVAL, errno.ENOMEM)
    with pytest.raises(PostError, match=said.format("recv", caps.max_recv_sge)):
        one.qp.post_recv([ReceiveWorkRequest(1, pieces)])


def test_post_send_rejects_more_than_max_inline_data(pair: Pair) -> None:
    one, _ = pair
    most = one.qp.capabilities.max_inline_data
    length, flags = most + 1, SIGNALED | SendFlags.INLINE
    request = SendWorkRequest(1, WROpcode.SEND, [one.sge(0, length)], flags)
    with pytest.raises(PostError, match=rf"{length} bytes \(max_inline_data is {most}\)"):
        one.qp.post_send([request])
    assert one.qp.free_send_slots == one.qp.capabilities.max_send_wr


def test_post_rejects_malformed_scatter_gather_elements(pair: Pair) -> None:
    """A tuple of three numbers is a valid element.

    Anything else is rejected before anything is posted.
    """
    one, two = pair
    two.post_recv(1, 8)
    plain: Any = (one.mr.addr, 8, one.mr.lkey)
    one.qp.post_send([SendWorkRequest(1, WROpcode.SEND, [plain])])
    assert one.completion().ok
    for pieces, said in (
        (one.sge(length=64), "not a single one; write [element]"),
        (plain, "not of int"),
        ([(one.mr.addr, 8)], "not of tuple"),
        (one.mr, "not MemoryRegion"),
        (b"bytes", "not bytes"),
        ([bytearray(8)], "not of bytearray"),
    ):
        wrong: Any = pieces
        with pytest.raises(TypeError, match=said.replace("[", r"\[")):
            one.qp.post_send([SendWorkRequest(1, WROpcode.SEND, wrong)])
        with pytest.raises(TypeError, match=said.replace("[", r"\[")):
            one.qp.post_recv([ReceiveWorkRequest(1, wrong)])
    alone: Any = SendWorkRequest(1, WROpcode.SEND)
    with pytest.raises(TypeError, match=r"a list; write \[request\]"):
        one.qp.post_send(alone)
    assert one.qp.free_send_slots == one.qp.capabilities.max_send_wr


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
def test_post_send_rejects_operations_unsupported_by_the_transport(
    pd: verbs.ProtectionDomain, cq: verbs.CompletionQueue, qp_type: QPType, opcode: WROpcode
) -> None:
    with pd.create_qp(cq, qp_type=qp_type) as qp:
        message = f"{opcode.name} on a {qp_type.name} queue pair"
        with pytest.raises(UnsupportedError, match=message) as caught:
            qp.post_send_one(1, opcode, SIGNALED, 0, 0, 0)
        assert caught.value.device == pd.context.name


def test_post_rejects_numbers_out_of_range(pair: Pair) -> None:
    one, _ = pair
    posts: list[Callable[[], None]] = [
        lambda: one.qp.post_send_one(1 << 64, WROpcode.SEND, 0, 0, 0, 0),
        lambda: one.qp.post_recv_one(-1, 0, 0, 0),
        lambda: one.qp.post_recv([ReceiveWorkRequest(1, [ScatterGatherElement(0, 1 << 32, 0)])]),
    ]
    for post in posts:
        with pytest.raises(ValueError, match="must be an int from 0 to"):
            post()


def test_post_raises_post_error_before_the_required_state(
    pd: verbs.ProtectionDomain, cq: verbs.CompletionQueue
) -> None:
    """According to ibv_post_recv(3), receives can be posted from INIT on, and sends in RTS."""
    with pd.create_qp(cq) as qp, pd.reg_mr(64) as mr:
        with pytest.raises(
            PostError, match="in state RESET, but sends can be posted only from RTS on"
        ):
            qp.post_send_one(1, WROpcode.SEND, SIGNALED, mr.addr, 8, mr.lkey)
        with pytest.raises(
            PostError, match="in state RESET, but receives can be posted only from INIT on"
        ):
            qp.post_recv_one(1, mr.addr, 8, mr.lkey)
        qp.to_init()
        qp.post_recv_one(1, mr.addr, 8, mr.lkey)
        with pytest.raises(
            PostError, match="in state INIT, but sends can be posted only from RTS on"
        ):
            qp.post_send_one(1, WROpcode.SEND, SIGNALED, mr.addr, 8, mr.lkey)
