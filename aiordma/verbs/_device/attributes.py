"""Device and port attributes, with the same field names as the C structures."""

from __future__ import annotations

import sys
from typing import NamedTuple, Self

from aiordma._native import copy_of, ffi
from aiordma._native import handles as h

from .enums import MTU, AtomicCapability, DeviceCapability, LinkLayer, PortCapability, PortState


def guid_from_network(value: int) -> int:
    """Convert a GUID from network byte order to host byte order."""
    return int.from_bytes(value.to_bytes(8, sys.byteorder), "big")


class DeviceAttributes(NamedTuple):
    """A device's limits (``struct ibv_device_attr``). See ibv_query_device(3)."""

    fw_ver: str
    node_guid: int
    sys_image_guid: int
    max_mr_size: int
    page_size_cap: int
    vendor_id: int
    vendor_part_id: int
    hw_ver: int
    max_qp: int
    max_qp_wr: int
    device_cap_flags: DeviceCapability
    max_sge: int
    max_sge_rd: int
    max_cq: int
    max_cqe: int
    max_mr: int
    max_pd: int
    max_qp_rd_atom: int
    max_res_rd_atom: int
    max_qp_init_rd_atom: int
    atomic_cap: AtomicCapability
    max_mw: int
    max_mcast_grp: int
    max_mcast_qp_attach: int
    max_total_mcast_qp_attach: int
    max_ah: int
    max_srq: int
    max_srq_wr: int
    max_srq_sge: int
    max_pkeys: int
    local_ca_ack_delay: int
    phys_port_cnt: int

    @classmethod
    def read(cls, attr: h.ibv_device_attr) -> Self:
        """Create the attributes from a ``struct ibv_device_attr``."""
        return copy_of(
            attr,
            cls,
            fw_ver=ffi.string(attr.fw_ver).decode(errors="replace"),
            node_guid=guid_from_network(attr.node_guid),
            sys_image_guid=guid_from_network(attr.sys_image_guid),
        )


def is_rxe(device: DeviceAttributes) -> bool:
    """Return whether a device belongs to rdma_rxe.

    The embedded device has the same ``vendor_id``, but another ``vendor_part_id``.
    """
    return (device.vendor_id, device.vendor_part_id) == (0xFFFFFF, 0)


# _WIDTHS maps active_width to the number of lanes. _SPEEDS maps active_speed to a lane's nominal
# speed in Gbit/s. The speeds are SDR, DDR, QDR, FDR10, FDR, EDR, HDR and NDR (ibv_query_port(3)).
_WIDTHS = {1: 1, 2: 4, 4: 8, 8: 12, 16: 2}
_SPEEDS = {1: 2.5, 2: 5.0, 4: 10.0, 8: 10.0, 16: 14.0, 32: 25.0, 64: 50.0, 128: 100.0}


class PortAttributes(NamedTuple):
    """A port's state and limits (``struct ibv_port_attr``). See ibv_query_port(3)."""

    port_num: int
    state: PortState
    max_mtu: MTU
    active_mtu: MTU
    gid_tbl_len: int
    port_cap_flags: PortCapability
    max_msg_sz: int
    bad_pkey_cntr: int
    qkey_viol_cntr: int
    pkey_tbl_len: int
    lid: int
    sm_lid: int
    lmc: int
    max_vl_num: int
    sm_sl: int
    subnet_timeout: int
    active_width: int
    active_speed: int
    phys_state: int
    link_layer: LinkLayer
    flags: int
    port_cap_flags2: int

    @property
    def gigabits(self) -> float | None:
        """The port's speed in Gbit/s, or None if the device reports an unknown value."""
        lanes, each = self.lanes, self.lane_gigabits
        return lanes * each if lanes and each else None

    @property
    def lanes(self) -> int | None:
        """The number of lanes, derived from ``active_width``, or None if the value is unknown."""
        return _WIDTHS.get(self.active_width)

    @property
    def lane_gigabits(self) -> float | None:
        """A lane's speed in Gbit/s from ``active_speed``, or None if the value is unknown."""
        return _SPEEDS.get(self.active_speed)

    @classmethod
    def read(cls, port_num: int, attr: h.ibv_port_attr) -> Self:
        """Create the attributes from a ``struct ibv_port_attr``."""
        return copy_of(attr, cls, port_num=port_num)
