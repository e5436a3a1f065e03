"""Test every enumeration against the constants that the compiler found."""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import Any

import pytest

from aiordma import cm, verbs
from aiordma._core.region import Rights
from aiordma._native import ffi, lib
from aiordma.errors import WORK_COMPLETION_ERRORS
from aiordma.verbs._device.enums import OpenEnum

# Each entry lists our class, the C enumeration (None if anonymous) and the prefix our names omit.
# The list covers all handwritten classes and one generated class of each kind.
ENUMS: list[tuple[type[IntEnum | IntFlag], str | None, str]] = [
    (verbs.MTU, "ibv_mtu", "IBV_"),
    (verbs.LinkLayer, None, "IBV_LINK_LAYER_"),
    (verbs.WCOpcode, "ibv_wc_opcode", "IBV_WC_"),
    (verbs.AccessFlags, "ibv_access_flags", "IBV_ACCESS_"),
    (verbs.QPType, "ibv_qp_type", "IBV_QPT_"),
    (verbs.QPState, "ibv_qp_state", "IBV_QPS_"),
    (verbs.QPAttrMask, "ibv_qp_attr_mask", "IBV_QP_"),
    (verbs.SendOps, "ibv_qp_create_send_ops_flags", "IBV_QP_EX_WITH_"),
    (cm.EventType, "rdma_cm_event_type", "RDMA_CM_EVENT_"),
    (cm.PortSpace, "rdma_port_space", "RDMA_PS_"),
    (cm.Option, None, "RDMA_OPTION_ID_"),
    (Rights, None, "IBV_ACCESS_REMOTE_"),
]
# C constants left out because no caller can receive or request them.
LEFT_OUT = {"IBV_QPT_DRIVER", "IBV_QPS_UNKNOWN"}


@pytest.mark.parametrize(("ours", "theirs", "prefix"), ENUMS, ids=str)
def test_python_enums_match_the_c_constants(
    ours: type[IntEnum | IntFlag], theirs: str | None, prefix: str
) -> None:
    for name, member in ours.__members__.items():
        if name != "NONE" or issubclass(ours, IntEnum):  # a flag without bits has no C name
            assert getattr(lib, prefix + name) == member.value, name
    if theirs is not None:
        names = set(ffi.typeof(f"enum {theirs}").relements)
        assert names - LEFT_OUT == {prefix + name for name in ours.__members__} & names
        assert names <= {prefix + name for name in ours.__members__} | LEFT_OUT


def test_every_error_status_has_an_exception_class() -> None:
    named = {cls.status_name: status for status, cls in WORK_COMPLETION_ERRORS.items()}
    assert {"SUCCESS": 0, **named} == {it.name: it.value for it in verbs.WCStatus}


def test_mtu_bytes_converts_every_value() -> None:
    assert [mtu.bytes for mtu in verbs.MTU] == [256, 512, 1024, 2048, 4096]


def test_open_enum_accepts_unknown_values() -> None:
    assert issubclass(verbs.WCStatus, OpenEnum)
    status = verbs.WCStatus(77)
    assert status == 77
    assert status.name == "UNKNOWN_77"
    assert "77" in repr(status)
    unknown: Any = "x"
    with pytest.raises(ValueError, match="'x'"):
        verbs.WCStatus(unknown)
