"""Test the addresses of the C structures as the user's own code would use them, through ctypes
alone.
"""

from __future__ import annotations

import ctypes
from ctypes import c_size_t, c_uint32, c_void_p

import pytest

from aiordma import BufferStateError, cm, testing, verbs
from conftest import End


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


class CMId(ctypes.Structure):
    _fields_ = (
        ("verbs", c_void_p), ("channel", c_void_p), ("context", c_void_p), ("qp", c_void_p),
    )  # fmt: skip


def test_raw_handles_point_to_the_libibverbs_structures(pair: tuple[End, End]) -> None:
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


async def test_connection_and_cm_id_have_raw_handles(device_name: str, host: str) -> None:
    library = verbs.find_device(device_name).library
    with cm.EventChannel(library) as channel, channel.create_id() as id:
        assert CMId.from_address(id.raw_handle).channel == channel.raw_handle
    async with testing.connected_pair(device=device_name) as (conn, _):
        there = QP.from_address(conn.queue_pair.raw_handle)
        assert there.qp_num == conn.queue_pair.qp_num
        pd = conn.queue_pair.pd
        with pd.reg_mr(64) as mr:
            assert MR.from_address(mr.raw_handle).pd == pd.raw_handle == there.pd
