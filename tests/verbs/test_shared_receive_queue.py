"""Test shared receive queues, from which many queue pairs take their receives."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from aiordma import verbs
from aiordma.errors import BufferStateError, BusyError, PostError, QueueFullError, VerbsError
from aiordma.verbs import (
    AsyncEvent,
    Context,
    EventType,
    ProtectionDomain,
    QPState,
    QPType,
    ReceiveWorkRequest,
    ScatterGatherElement,
    SendFlags,
    WCOpcode,
    WROpcode,
)
from conftest import End

from .test_async_events import next_event

if TYPE_CHECKING:
    from collections.abc import Callable

    Star = Callable[[int], tuple["Hub", list[End]]]

SIGNALED = SendFlags.SIGNALED
SLOT = 64
RIGHTS = verbs.AccessFlags.LOCAL_WRITE | verbs.AccessFlags.REMOTE_WRITE


class Hub(End):
    """Queue pairs that share one receive queue and one completion queue."""

    def __init__(self, context: Context, pd: ProtectionDomain, receives: int, sges: int) -> None:
        self.cq = context.create_cq(256)
        self.srq = pd.create_srq(receives, sges)
        self.mr = pd.reg_mr(1 << 14, RIGHTS)
        self.qps: list[verbs.QueuePair] = []

    def fill(self, *wr_ids: int, length: int = SLOT) -> None:
        for wr_id in wr_ids:
            self.srq.post_recv_one(wr_id, self.mr.addr + wr_id * SLOT, length, self.mr.lkey)

    def close(self) -> None:
        self.cq.close()  # also closes the queue pairs
        self.srq.close()
        self.mr.close()


@pytest.fixture
def star(context: Context, pd: ProtectionDomain) -> Iterator[Star]:
    """Provide a factory for a hub with 8 shared receives and the peers connected to it."""
    made: list[Hub | End] = []

    def make(peers: int) -> tuple[Hub, list[End]]:
        hub = Hub(context, pd, 8, 2)
        made.append(hub)
        ends = []
        for _ in range(peers):
            cq = context.create_cq(64)
            end = End(pd.create_qp(cq), cq, pd.reg_mr(1 << 14))
            qp = pd.create_qp(hub.cq, srq=hub.srq)
            mine, theirs = qp.endpoint(), end.qp.endpoint()
            qp.connect(mine, theirs, access=RIGHTS)
            end.qp.connect(theirs, mine, rnr_retry=7, min_rnr_timer=0.00001)
            hub.qps.append(qp)
            ends.append(end)
            made.append(end)
        return hub, ends

    yield make
    for each in reversed(made):
        if isinstance(each, Hub):
            each.close()
        else:
            each.cq.close()
            each.mr.close()


def send(end: End, data: bytes, wr_id: int = 1) -> None:
    end.mr.buf[: len(data)] = data
    end.post(WROpcode.SEND, length=len(data), wr_id=wr_id)


# --- the object --------------------------------------------------------------------------------


def test_srq_query_returns_the_granted_attributes(context: Context, pd: ProtectionDomain) -> None:
    with pd.create_srq(100, 3) as srq:
        assert (srq.pd, srq.context) == (pd, context)
        granted = srq.query()
        assert granted == verbs.SRQAttributes(srq.max_wr, srq.max_sge, 0)
        assert granted.max_wr >= 100
        assert granted.max_sge >= 3
        assert verbs.live()["SharedReceiveQueue"] == 1
        assert "SharedReceiveQueue" in repr(srq)
    assert srq.closed
    with pytest.raises(BufferStateError, match="SharedReceiveQueue"):
        srq.query()
    with pytest.raises(BufferStateError, match="SharedReceiveQueue"):
        srq.post_recv_one(1, 0, 0, 0)


def test_create_srq_rejects_sizes_out_of_range(context: Context, pd: ProtectionDomain) -> None:
    device = context.query_device()
    for max_wr in (0, -1, device.max_srq_wr + 1):
        with pytest.raises(ValueError, match=f"between 1 and {device.max_srq_wr}"):
            pd.create_srq(max_wr)
    for max_sge in (-1, device.max_srq_sge + 1):
        with pytest.raises(ValueError, match=f"between 0 and {device.max_srq_sge}"):
            pd.create_srq(1, max_sge)
    with pytest.raises(ValueError, match="both"), context.create_cq(1) as cq:
        pd.create_srq(1, cq=cq)


@pytest.mark.needs("SRQ numbers")
def test_srq_numbers_are_distinct(pd: ProtectionDomain) -> None:
    with pd.create_srq(1) as one, pd.create_srq(1) as two:
        assert one.srq_num != two.srq_num


def test_srq_resize_grows_the_queue_and_rejects_invalid_sizes(pd: ProtectionDomain) -> None:
    with pd.create_srq(4) as srq:
        srq.modify(max_wr=1000)
        assert srq.max_wr == srq.query().max_wr >= 1000
        for wr_id in range(1000):
            srq.post_recv_one(wr_id, 0, 0, 0)
        with pytest.raises(VerbsError, match="max_wr=1") as caught:  # 1000 are posted
            srq.modify(max_wr=1)
        assert caught.value.verb == "ibv_modify_srq"
        with pytest.raises(ValueError, match="-1"):
            srq.modify(max_wr=-1)


def test_srq_limit_above_the_size_is_rejected(pd: ProtectionDomain) -> None:
    with pd.create_srq(4) as srq:
        with pytest.raises(VerbsError, match="srq_limit") as caught:
            srq.modify(srq_limit=srq.max_wr + 1)
        assert caught.value.errno == errno.EINVAL
        assert srq.query().srq_limit == 0


# --- posting -----------------------------------------------------------------------------------


def test_srq_post_recv_raises_queue_full_beyond_max_wr(pd: ProtectionDomain) -> None:
    with pd.create_srq(4) as srq:
        requests = [ReceiveWorkRequest(wr_id) for wr_id in range(srq.max_wr + 2)]
        with pytest.raises(QueueFullError) as caught:
            srq.post_recv(requests)
        assert caught.value.bad_index >= srq.max_wr
        assert caught.value.verb == "ibv_post_srq_recv"


def test_srq_post_recv_rejects_more_elements_than_max_sge(pd: ProtectionDomain) -> None:
    with pd.create_srq(4) as srq:
        pieces = [ScatterGatherElement(0, 0, 0)] * (srq.max_sge + 1)
        with pytest.raises(PostError) as caught:
            srq.post_recv([ReceiveWorkRequest(1), ReceiveWorkRequest(2, pieces)])
        assert caught.value.bad_index == 1
        with pytest.raises(ValueError, match="wr_id must be an int from 0 to"):
            srq.post_recv_one(1 << 64, 0, 0, 0)


def test_post_recv_is_rejected_for_queue_pair_with_srq(star: Star) -> None:
    hub, _ = star(1)
    with pytest.raises(ValueError, match="post receives to <SharedReceiveQueue"):
        hub.qps[0].post_recv([ReceiveWorkRequest(1)])


def test_srq_receives_can_be_posted_as_a_list_or_batch(star: Star) -> None:
    hub, (end,) = star(1)
    half = [ScatterGatherElement(hub.mr.addr + offset, 8, hub.mr.lkey) for offset in (0, SLOT)]
    hub.srq.post_recv([ReceiveWorkRequest(1, half)])
    with hub.srq.recv_batch() as batch:
        batch.recv(half[1:], wr_id=2)
        batch.recv(wr_id=3)
    send(end, b"0123456789abcdef")
    assert (hub.completion().wr_id, end.completion().ok) == (1, True)
    assert bytes(hub.mr.buf[:8]) == b"01234567"
    assert bytes(hub.mr.buf[SLOT : SLOT + 8]) == b"89abcdef"
    send(end, b"ABCD")
    assert (hub.completion().wr_id, end.completion().ok) == (2, True)
    assert bytes(hub.mr.buf[SLOT : SLOT + 8]) == b"ABCDcdef"
    send(end, b"")
    assert (hub.completion().wr_id, end.completion().ok) == (3, True)


# --- receiving ---------------------------------------------------------------------------------


def test_queue_pairs_consume_srq_receives_in_order(star: Star) -> None:
    hub, ends = star(3)
    hub.fill(*range(8))
    for turn in range(40):
        peer = turn * turn % 3
        send(ends[peer], turn.to_bytes(4, "little") * 4, turn)
        received = hub.completion()
        assert (received.wr_id, received.opcode) == (turn % 8, WCOpcode.RECV)
        assert received.qp_num == hub.qps[peer].qp_num
        assert received.byte_len == 16
        start = turn % 8 * SLOT
        assert bytes(hub.mr.buf[start : start + 16]) == turn.to_bytes(4, "little") * 4
        assert ends[peer].completion().wr_id == turn
        hub.fill(turn % 8)


def test_write_with_immediate_consumes_one_srq_receive(star: Star) -> None:
    hub, (end,) = star(1)
    hub.srq.post_recv_one(5, 0, 0, 0)
    end.mr.buf[:4] = b"abcd"
    end.post(WROpcode.RDMA_WRITE_WITH_IMM, hub, 4, imm_data=9)
    received = hub.completion()
    assert (received.wr_id, received.opcode) == (5, WCOpcode.RECV_RDMA_WITH_IMM)
    assert received.imm_data == 9
    assert bytes(hub.mr.buf[:4]) == b"abcd"
    assert end.completion().ok


def test_srq_limit_reports_one_event_until_rearmed(context: Context, star: Star) -> None:
    hub, (end,) = star(1)
    hub.fill(*range(6))
    hub.srq.modify(srq_limit=5)
    assert hub.srq.query().srq_limit == 5
    send(end, b"")  # five remain, so the limit is not reached
    hub.completion()
    assert end.completion().ok
    assert context.async_events() == []
    send(end, b"")
    event = next_event(context)
    assert event == AsyncEvent(EventType.SRQ_LIMIT_REACHED, hub.srq)
    assert event.element is hub.srq
    assert hub.srq.query().srq_limit == 0
    hub.completion()
    assert end.completion().ok
    hub.srq.modify(srq_limit=4)
    send(end, b"")
    assert next_event(context) == event
    hub.srq.modify(srq_limit=2)
    hub.srq.modify(srq_limit=0)
    for _ in range(3):
        send(end, b"")
    assert end.completions(4)[3].ok
    assert context.async_events() == []


@pytest.mark.needs("UC")
def test_uc_queue_pair_receives_from_srq(context: Context, pd: ProtectionDomain) -> None:
    """The queue pair sends to itself. softdev/tests/soft/test_ud.c tests datagrams."""
    with (
        context.create_cq(16) as cq,
        pd.create_srq(1) as srq,
        pd.create_qp(cq, qp_type=QPType.UC, srq=srq) as qp,
        pd.reg_mr(1024) as mr,
    ):
        end, mine = End(qp, cq, mr), qp.endpoint()
        qp.connect(mine, mine)
        for wr_id in (2, 3):
            srq.post_recv_one(wr_id, mr.addr + 512, 128, mr.lkey)
            send(end, bytes([wr_id] * 8))
            sent, received = sorted(end.completions(2), key=lambda wc: wc.wr_id)
            assert sent.ok
            assert (received.wr_id, received.byte_len) == (wr_id, 8)
            assert bytes(mr.buf[512:520]) == bytes([wr_id] * 8)


# --- failures ----------------------------------------------------------------------------------


def test_srq_receives_survive_a_failed_queue_pair(
    context: Context, star: Star, deviations: frozenset[str]
) -> None:
    """IBTA volume 1, clause 10.2.9: receives that no message has used are not flushed."""
    hub, ends = star(2)
    hub.fill(7)
    send(ends[0], b"connected")
    assert (hub.completion().wr_id, ends[0].completion().ok) == (7, True)
    hub.fill(0, 1)
    hub.qps[0].modify(qp_state=QPState.ERR)
    if "QP_LAST_WQE_REACHED never comes" in deviations:
        assert context.async_events() == []
    else:
        assert next_event(context) == AsyncEvent(EventType.QP_LAST_WQE_REACHED, hub.qps[0])
    assert hub.cq.poll() == []
    for wr_id in (0, 1):
        send(ends[1], b"still there")
        received = hub.completion()
        assert (received.wr_id, received.ok) == (wr_id, True)
        assert received.qp_num == hub.qps[1].qp_num
        assert ends[1].completion().ok


# --- room for completions ----------------------------------------------------------------------


def test_shared_receives_are_reserved_only_once_in_the_cq(
    context: Context, pd: ProtectionDomain
) -> None:
    """Queue pairs that share the receives must not reserve entries for them again."""
    sends = verbs.QPCapabilities(max_send_wr=4, max_recv_wr=0, max_recv_sge=0)
    with context.create_cq(8) as cq:
        with pd.create_srq(200) as srq:
            qps = [pd.create_qp(cq, capabilities=sends, srq=srq) for _ in range(2)]
            of_sends = sum(qp.capabilities.max_send_wr for qp in qps)
            assert cq.reserved == of_sends + srq.max_wr
            assert cq.cqe >= cq.reserved
            before = cq.reserved - srq.max_wr
            srq.modify(max_wr=600)
            assert cq.reserved >= before + 600
            with pytest.raises(VerbsError, match="srq_limit"):
                srq.modify(max_wr=900, srq_limit=1 << 31)
            assert cq.reserved < before + 900
        assert cq.in_use == 0


def test_srq_resize_raises_busy_error_when_the_cq_cannot_grow(
    context: Context, pd: ProtectionDomain
) -> None:
    with context.create_cq(8) as cq, pd.create_srq(8) as srq, pd.create_qp(cq, srq=srq):
        cq.make_room(context.query_device().max_cqe - cq.reserved)
        before = srq.query()
        with pytest.raises(BusyError, match="cannot be resized"):
            srq.modify(max_wr=srq.max_wr + 1)
        assert srq.query() == before
        with pd.create_srq(8) as other, pytest.raises(BusyError, match="cannot be resized"):
            pd.create_qp(cq, srq=other)
