"""The addresses of the C structures, as code of the user's own would use them: by ctypes alone."""

from __future__ import annotations

import ctypes
import time
from ctypes import c_int, c_size_t, c_uint32, c_uint64, c_void_p

import pytest

from aiordma import BufferStateError, cm, testing, verbs
from aiordma.verbs import SendFlags, WROpcode
from conftest import End

# Places in struct ibv_context_ops: infiniband/verbs.h.
POLL_CQ, POST_SEND = 11, 25


class Base(ctypes.Structure):
    """What all of them begin with."""

    _fields_ = (("context", c_void_p),)


class MR(ctypes.Structure):
    _fields_ = (
        ("context", c_void_p), ("pd", c_void_p), ("addr", c_void_p), ("length", c_size_t),
        ("handle", c_uint32), ("lkey", c_uint32), ("rkey", c_uint32),
    )  # fmt: skip


class QP(ctypes.Structure):
    _fields_ = (
        ("context", c_void_p), ("qp_context", c_void_p), ("pd", c_void_p), ("send_cq", c_void_p),
        ("recv_cq", c_void_p), ("srq", c_void_p), ("handle", c_uint32), ("qp_num", c_uint32),
    )  # fmt: skip


class Context(ctypes.Structure):
    _fields_ = (("device", c_void_p), ("ops", c_void_p * 32))


class CMId(ctypes.Structure):
    _fields_ = (
        ("verbs", c_void_p), ("channel", c_void_p), ("context", c_void_p), ("qp", c_void_p),
    )  # fmt: skip


class SGE(ctypes.Structure):
    _fields_ = (("addr", c_uint64), ("length", c_uint32), ("lkey", c_uint32))


class SendWR(ctypes.Structure):
    _fields_ = (
        ("wr_id", c_uint64), ("next", c_void_p), ("sg_list", ctypes.POINTER(SGE)),
        ("num_sge", c_int), ("opcode", c_int), ("send_flags", c_uint32), ("imm_data", c_uint32),
        ("rest", ctypes.c_char * 96),
    )  # fmt: skip


class WC(ctypes.Structure):
    _fields_ = (
        ("wr_id", c_uint64), ("status", c_int), ("opcode", c_int), ("vendor_err", c_uint32),
        ("byte_len", c_uint32), ("imm_data", c_uint32), ("qp_num", c_uint32), ("src_qp", c_uint32),
        ("wc_flags", c_uint32), ("rest", ctypes.c_char * 16),
    )  # fmt: skip


def call(context: verbs.Context, place: int, *arguments: type) -> ctypes._FuncPointer:
    there = Context.from_address(context.raw_handle).ops[place]
    return ctypes.CFUNCTYPE(c_int, *arguments)(there)


def test_structures(pair: tuple[End, End]) -> None:
    qp, mr = pair[0].qp, pair[0].mr
    there = QP.from_address(qp.raw_handle)
    assert there.context == qp.context.raw_handle
    assert there.pd == qp.pd.raw_handle
    assert there.send_cq == qp.send_cq.raw_handle
    assert there.qp_num == qp.qp_num
    region = MR.from_address(mr.raw_handle)
    assert (region.pd, region.addr, region.lkey) == (qp.pd.raw_handle, mr.addr, mr.lkey)
    own = qp.pd.reg_mr(8)
    own.close()
    with pytest.raises(BufferStateError, match="closed"):
        _ = own.raw_handle


def test_verbs_by_their_addresses(pair: tuple[End, End]) -> None:
    """A send that is posted and polled without aiordma arrives."""
    a, b = pair
    post_send = call(a.qp.context, POST_SEND, c_void_p, c_void_p, c_void_p)
    poll_cq = call(a.qp.context, POLL_CQ, c_void_p, c_int, c_void_p)
    a.qp.untrack()
    b.qp.post_recv_one(1, b.mr.addr, 64, b.mr.lkey)
    a.mr.buf[:5] = b"hello"
    piece = SGE(a.mr.addr, 5, a.mr.lkey)
    request = SendWR(7, None, ctypes.pointer(piece), 1, WROpcode.SEND, SendFlags.SIGNALED)
    bad = c_void_p()
    assert post_send(a.qp.raw_handle, ctypes.addressof(request), ctypes.addressof(bad)) == 0
    completion = WC()
    deadline = time.monotonic() + 100
    while not poll_cq(a.qp.send_cq.raw_handle, 1, ctypes.addressof(completion)):
        assert time.monotonic() < deadline
    assert (completion.wr_id, completion.status) == (7, 0)
    assert completion.qp_num == a.qp.qp_num
    received = b.completion()
    assert bytes(b.mr.buf[: received.byte_len]) == b"hello"


async def test_of_the_connection_manager_and_a_connection(device_name: str, host: str) -> None:
    library = verbs.find_device(device_name).library
    with cm.EventChannel(library) as channel, channel.create_id() as id:
        assert CMId.from_address(id.raw_handle).channel == channel.raw_handle
    async with testing.connected_pair(device=device_name) as (conn, _):
        there = QP.from_address(conn.queue_pair.raw_handle)
        assert there.qp_num == conn.queue_pair.qp_num
        pd = conn.queue_pair.pd
        with pd.reg_mr(64) as mr:
            assert MR.from_address(mr.raw_handle).pd == pd.raw_handle == there.pd
