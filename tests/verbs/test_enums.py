"""Every enumeration against the constants that the compiler saw."""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import Any

import pytest

from aiordma import cm, verbs
from aiordma._native import ffi, lib
from aiordma.verbs._device.enums import OpenEnum

# Our class, the C enumeration (none for an anonymous one), and what our names leave out.
ENUMS: list[tuple[type[IntEnum | IntFlag], str | None, str]] = [
    (verbs.NodeType, "ibv_node_type", "IBV_NODE_"),
    (verbs.TransportType, "ibv_transport_type", "IBV_TRANSPORT_"),
    (verbs.PortState, "ibv_port_state", "IBV_PORT_"),
    (verbs.MTU, "ibv_mtu", "IBV_"),
    (verbs.LinkLayer, None, "IBV_LINK_LAYER_"),
    (verbs.GIDType, "ibv_gid_type", "IBV_GID_TYPE_"),
    (verbs.ForkStatus, "ibv_fork_status", "IBV_FORK_"),
    (verbs.AtomicCapability, "ibv_atomic_cap", "IBV_ATOMIC_"),
    (verbs.DeviceCapability, "ibv_device_cap_flags", "IBV_DEVICE_"),
    (verbs.PortCapability, "ibv_port_cap_flags", "IBV_PORT_"),
    (verbs.EventType, "ibv_event_type", "IBV_EVENT_"),
    (verbs.WCStatus, "ibv_wc_status", "IBV_WC_"),
    (verbs.WCOpcode, "ibv_wc_opcode", "IBV_WC_"),
    (verbs.WCFlags, "ibv_wc_flags", "IBV_WC_"),
    (verbs.AccessFlags, "ibv_access_flags", "IBV_ACCESS_"),
    (verbs.WROpcode, "ibv_wr_opcode", "IBV_WR_"),
    (verbs.MWType, "ibv_mw_type", "IBV_MW_"),
    (verbs.PlacementType, "ibv_placement_type", "IBV_FLUSH_"),
    (verbs.SelectivityLevel, "ibv_selectivity_level", "IBV_FLUSH_"),
    (verbs.SendFlags, "ibv_send_flags", "IBV_SEND_"),
    (verbs.QPType, "ibv_qp_type", "IBV_QPT_"),
    (verbs.QPState, "ibv_qp_state", "IBV_QPS_"),
    (verbs.QPAttrMask, "ibv_qp_attr_mask", "IBV_QP_"),
    (verbs.QPCreateFlags, "ibv_qp_create_flags", "IBV_QP_CREATE_"),
    (verbs.SendOps, "ibv_qp_create_send_ops_flags", "IBV_QP_EX_WITH_"),
    (verbs.MigrationState, "ibv_mig_state", "IBV_MIG_"),
    (verbs.OdpCapability, "ibv_odp_general_caps", "IBV_ODP_"),
    (verbs.OdpOperations, "ibv_odp_transport_cap_bits", "IBV_ODP_"),
    (verbs.RawPacketCapability, "ibv_raw_packet_caps", "IBV_RAW_PACKET_CAP_"),
    (verbs.PciAtomicSizes, "ibv_pci_atomic_op_size", "IBV_PCI_ATOMIC_"),
    (verbs.WCFields, "ibv_create_cq_wc_flags", "IBV_WC_EX_"),
    (verbs.CQFlags, "ibv_create_cq_attr_flags", "IBV_CREATE_CQ_ATTR_"),
    (verbs.Advice, "ib_uverbs_advise_mr_advice", "IB_UVERBS_ADVISE_MR_ADVICE_"),
    (cm.EventType, "rdma_cm_event_type", "RDMA_CM_EVENT_"),
    (cm.PortSpace, "rdma_port_space", "RDMA_PS_"),
    (cm.Option, None, "RDMA_OPTION_ID_"),
]
# In C, not here: what no caller can have or ask for.
LEFT_OUT = {"IBV_QPT_DRIVER", "IBV_QPS_UNKNOWN"}


@pytest.mark.parametrize(("ours", "theirs", "prefix"), ENUMS, ids=str)
def test_values(ours: type[IntEnum | IntFlag], theirs: str | None, prefix: str) -> None:
    for name, member in ours.__members__.items():
        if name != "NONE" or issubclass(ours, IntEnum):  # a flag without bits has no C name
            assert getattr(lib, prefix + name) == member.value, name
    if theirs is not None:
        names = set(ffi.typeof(f"enum {theirs}").relements)
        assert names - LEFT_OUT == {prefix + name for name in ours.__members__} & names
        assert names <= {prefix + name for name in ours.__members__} | LEFT_OUT


def test_mtu_in_bytes() -> None:
    assert [mtu.bytes for mtu in verbs.MTU] == [256, 512, 1024, 2048, 4096]


def test_an_unknown_value_of_a_report_is_kept() -> None:
    assert issubclass(verbs.WCStatus, OpenEnum)
    status = verbs.WCStatus(77)
    assert status == 77
    assert status.name == "UNKNOWN_77"
    assert "77" in repr(status)
    unknown: Any = "x"
    with pytest.raises(ValueError, match="'x'"):
        verbs.WCStatus(unknown)
