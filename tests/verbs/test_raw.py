"""Test `aiordma.verbs.raw`, the C structures and calls through cffi."""

from __future__ import annotations

import errno
import time
from typing import TYPE_CHECKING

import pytest

from aiordma import verbs
from aiordma.errors import BufferStateError, VerbsError
from aiordma.verbs import EventType, QPState, SendFlags, WROpcode, raw
from aiordma.verbs.raw import ffi
from conftest import ConnectedPair, End

if TYPE_CHECKING:
    from aiordma._native import handles as h


def piece(end: End, length: int) -> h.ibv_sge:
    fields = {"addr": end.mr.addr, "length": length, "lkey": end.mr.lkey}
    return ffi.new("struct ibv_sge *", fields)


def test_raw_calls_transfer_a_message(pair: tuple[End, End]) -> None:
    a, b = pair
    for end in pair:
        end.qp.untrack()
    a.mr.buf[:5] = b"hello"
    kept = piece(b, 64), piece(a, 5)
    fields = {"wr_id": 1, "sg_list": kept[0], "num_sge": 1}
    raw.ibv_req_notify_cq(b.cq.pointer, 0)
    raw.ibv_post_recv(b.qp.pointer, ffi.new("struct ibv_recv_wr *", fields))
    fields = {"wr_id": 2, "sg_list": kept[1], "num_sge": 1, "opcode": raw.IBV_WR_SEND}
    request = ffi.new("struct ibv_send_wr *", fields)
    request.send_flags = raw.IBV_SEND_SIGNALED
    raw.ibv_post_send(a.qp.pointer, request)
    for end, wr_id in ((a, 2), (b, 1)):
        wc = ffi.new("struct ibv_wc[]", 1)
        deadline = time.monotonic() + 100
        while not raw.ibv_poll_cq(end.cq.pointer, 1, wc):
            assert time.monotonic() < deadline
        assert (wc[0].wr_id, wc[0].status) == (wr_id, raw.IBV_WC_SUCCESS)
    assert bytes(b.mr.buf[:5]) == b"hello"


def test_raw_queue_pair_methods_post_a_send(connected_pair: ConnectedPair) -> None:
    a, b = connected_pair(send_ops=verbs.SendOps.SEND)
    a.qp.untrack()
    b.post_recv()
    qp = a.qp.context.library.calls.ibv_qp_to_qp_ex(a.qp.pointer)
    qp.wr_start(qp)
    qp.wr_id, qp.wr_flags = 3, raw.IBV_SEND_SIGNALED
    qp.wr_send(qp)
    qp.wr_set_sge(qp, a.mr.lkey, a.mr.addr, 5)
    assert qp.wr_complete(qp) == 0
    assert (a.completion().wr_id, b.completion().byte_len) == (3, 5)


def test_raw_srq_post_reports_the_bad_request(pd: verbs.ProtectionDomain) -> None:
    with pd.create_srq(1) as srq:
        first = ffi.new("struct ibv_recv_wr *")
        bad = ffi.new("struct ibv_recv_wr **")
        for _ in range(srq.max_wr):
            raw.ibv_post_srq_recv(srq.pointer, first)
        with pytest.raises(VerbsError, match="ibv_post_srq_recv") as caught:
            raw.ibv_post_srq_recv(srq.pointer, first, bad)
        assert caught.value.errno == errno.ENOMEM
        assert bad[0] == first


def test_raw_calls_raise_errno_and_report_the_bad_request(qp: verbs.QueuePair) -> None:
    with pytest.raises(VerbsError, match="ibv_post_send") as caught:
        raw.ibv_post_send(qp.pointer, ffi.new("struct ibv_send_wr *"))  # in RESET
    assert caught.value.errno == errno.EINVAL
    bad = ffi.new("struct ibv_recv_wr **")
    request = ffi.new("struct ibv_recv_wr *", {"num_sge": qp.capabilities.max_recv_sge + 1})
    qp.to_init()
    with pytest.raises(VerbsError, match="ibv_post_recv"):
        raw.ibv_post_recv(qp.pointer, request, bad)
    assert bad[0] == request
    qp.close()
    with pytest.raises(BufferStateError, match="closed"):
        _ = qp.pointer


def test_library_calls_accept_raw_structures(qp: verbs.QueuePair) -> None:
    attr, init = ffi.new("struct ibv_qp_attr *"), ffi.new("struct ibv_qp_init_attr *")
    calls = qp.context.library.calls
    calls.ibv_query_qp(qp.pointer, attr, raw.IBV_QP_STATE, init)
    assert attr.qp_state == QPState.RESET
    attr.qp_state = raw.IBV_QPS_RTS
    with pytest.raises(VerbsError, match="ibv_modify_qp") as caught:
        calls.ibv_modify_qp(qp.pointer, attr, raw.IBV_QP_STATE)
    assert caught.value.errno == errno.EINVAL


def test_raw_module_has_constants_and_rejects_unknown_names() -> None:
    assert raw.IBV_WR_RDMA_READ == WROpcode.RDMA_READ
    assert raw.IBV_SEND_FENCE == SendFlags.FENCE
    assert raw.IBV_EVENT_SRQ_LIMIT_REACHED == EventType.SRQ_LIMIT_REACHED
    assert raw.RDMA_PS_TCP == 0x106
    assert verbs.raw is raw
    for name in ("IBV_WR_NOTHING", "aiordma_poll", "ibv_poll"):
        with pytest.raises(AttributeError, match=name):
            getattr(raw, name)
