"""The stub of the compiled module against the module itself."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest

from aiordma._native import ffi, lib

STUB = Path(__file__).parents[2] / "aiordma" / "_native" / "_lib.pyi"
CLASSES = {node.name: node for node in ast.parse(STUB.read_text()).body
           if isinstance(node, ast.ClassDef)}  # fmt: skip

# Which C structure a class of the stub stands for; the others have no members.
STRUCTURES = {
    "Gid": "union ibv_gid",
    "GidEntry": "struct ibv_gid_entry",
    "Device": "struct ibv_device",
    "Context": "struct ibv_context",
    "DeviceAttr": "struct ibv_device_attr",
    "PortAttr": "struct ibv_port_attr",
    "AsyncEvent": "struct ibv_async_event",
    "MemoryRegion": "struct ibv_mr",
    "CompletionChannel": "struct ibv_comp_channel",
    "CompletionQueue": "struct ibv_cq",
    "QPCap": "struct ibv_qp_cap",
    "QPInitAttr": "struct ibv_qp_init_attr",
    "GlobalRoute": "struct ibv_global_route",
    "AHAttr": "struct ibv_ah_attr",
    "QPAttr": "struct ibv_qp_attr",
    "WC": "struct ibv_wc",
    "QueuePair": "struct ibv_qp",
    "EventChannel": "struct rdma_event_channel",
    "Route": "struct rdma_route",
    "ConnectionId": "struct rdma_cm_id",
    "ConnParam": "struct rdma_conn_param",
    "UDParam": "struct rdma_ud_param",
    "JoinAttr": "struct rdma_cm_join_mc_attr_ex",
    "AddrInfo": "struct rdma_addrinfo",
    "Ece": "struct ibv_ece",
    "ConnectionEvent": "struct rdma_cm_event",
    "Drain": "struct aiordma_drain",
    "FaultCounts": "struct aiordma_fault_counts",
    "CompletionQueueEx": "struct ibv_cq_ex",
    "DeviceAttrEx": "struct ibv_device_attr_ex",
    "ValuesEx": "struct ibv_values_ex",
    "CQInitAttrEx": "struct ibv_cq_init_attr_ex",
    "ModifyCQAttr": "struct ibv_modify_cq_attr",
    "AllocDMAttr": "struct ibv_alloc_dm_attr",
    "TDInitAttr": "struct ibv_td_init_attr",
    "ParentDomainInitAttr": "struct ibv_parent_domain_init_attr",
    "XRCDInitAttr": "struct ibv_xrcd_init_attr",
    "SRQInitAttrEx": "struct ibv_srq_init_attr_ex",
    "QPInitAttrEx": "struct ibv_qp_init_attr_ex",
    "QPOpenAttr": "struct ibv_qp_open_attr",
    "QPRateLimitAttr": "struct ibv_qp_rate_limit_attr",
    "MWBind": "struct ibv_mw_bind",
    "OdpCaps": "struct ibv_odp_caps",
    "TsoCaps": "struct ibv_tso_caps",
    "RssCaps": "struct ibv_rss_caps",
    "PacketPacingCaps": "struct ibv_packet_pacing_caps",
    "TmCaps": "struct ibv_tm_caps",
    "CQModerationCaps": "struct ibv_cq_moderation_caps",
    "PciAtomicCaps": "struct ibv_pci_atomic_caps",
    "TimeSpec": "struct timespec",
    "Calls": "struct aiordma_calls",
    "DeviceCalls": "struct aiordma_device_calls",
    "DeviceMemory": "struct ibv_dm",
    "MemoryWindow": "struct ibv_mw",
    "MWBindInfo": "struct ibv_mw_bind_info",
    "ModerateCQ": "struct ibv_moderate_cq",
    "EFADeviceAttr": "struct efadv_device_attr",
    "EFAQPInitAttr": "struct efadv_qp_init_attr",
    "Mlx5DCInitAttr": "struct mlx5dv_dc_init_attr",
    "Mlx5QPInitAttr": "struct mlx5dv_qp_init_attr",
    "SharedReceiveQueue": "struct ibv_srq",
    "SRQAttr": "struct ibv_srq_attr",
    "SRQInitAttr": "struct ibv_srq_init_attr",
}
# Classes for what cffi itself makes, and members of anonymous unions.
OTHERS = {
    "Null", "VoidPointer", "Integer", "Pointer", "IntegerPointer", "Characters", "Text", "Bytes",
    "GidEntries", "DeviceList", "AsyncEventElement", "EventParam", "OdpTransportCaps",
    "CField", "CType", "FFI", "Lib",
}  # fmt: skip


def members(node: ast.ClassDef) -> set[str]:
    names = set()
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            names.add(statement.target.id)
        elif isinstance(statement, ast.FunctionDef):
            names.add(statement.name)
    return names


@pytest.mark.parametrize("name", sorted(STRUCTURES))
def test_members(name: str) -> None:
    fields = {field for field, _ in ffi.typeof(STRUCTURES[name]).fields}
    assert members(CLASSES[name]) <= fields
    assert members(CLASSES[name])


def test_no_class_is_unaccounted_for() -> None:
    empty = {name for name, node in CLASSES.items() if not members(node)}
    assert set(CLASSES) == {*STRUCTURES, *OTHERS, *empty}


def test_functions() -> None:
    compiled = {name for name in dir(lib) if name.startswith("aiordma_")}
    stub = {node.name: node for node in CLASSES["Lib"].body if isinstance(node, ast.FunctionDef)}
    assert set(stub) <= compiled
    for name, node in stub.items():
        ctype: Any = ffi.typeof(getattr(lib, name))
        assert len(ctype.args) == len(node.args.args) - 1, name
        assert inspect.isbuiltin(getattr(lib, name))
