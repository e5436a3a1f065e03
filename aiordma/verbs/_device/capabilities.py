"""A device's extended capabilities, as reported by ``ibv_query_device_ex``.

A capability is zero if the device does not support it, or if the device's library is too old to
report it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Self, TypeVar

from aiordma._native import copy_of
from aiordma._native import handles as h

from .attributes import DeviceAttributes
from .enums import OdpCapability, OdpOperations, PciAtomicSizes, QPType, RawPacketCapability

QPTypeCaps = h.ibv_tso_caps | h.ibv_rss_caps | h.ibv_packet_pacing_caps

T = TypeVar("T")


def _with_qp_types(caps: QPTypeCaps, record: Callable[..., T]) -> T:
    qp_types = frozenset(qp_type for qp_type in QPType if caps.supported_qpts >> qp_type & 1)
    return copy_of(caps, record, supported_qpts=qp_types)


class OdpCapabilities(NamedTuple):
    """Support for on-demand paging, by transport and operation (``ibv_odp_caps``)."""

    general: OdpCapability
    rc: OdpOperations
    uc: OdpOperations
    ud: OdpOperations
    xrc: OdpOperations


class TsoCapabilities(NamedTuple):
    """Support for segmented sends (``ibv_tso_caps``).

    ``max_tso`` is in bytes, or 0 if segmented sends are not supported.
    """

    max_tso: int
    supported_qpts: frozenset[QPType]


class RssCapabilities(NamedTuple):
    """Support for distributing received packets across several queues (``ibv_rss_caps``)."""

    supported_qpts: frozenset[QPType]
    max_rwq_indirection_tables: int
    max_rwq_indirection_table_size: int
    rx_hash_fields_mask: int
    rx_hash_function: int


class PacketPacingCapabilities(NamedTuple):
    """The range of rate limits in kbit/s (``ibv_packet_pacing_caps``), or zeros if unsupported."""

    qp_rate_limit_min: int
    qp_rate_limit_max: int
    supported_qpts: frozenset[QPType]


class TagMatchingCapabilities(NamedTuple):
    """Support for tag matching in shared receive queues (``ibv_tm_caps``)."""

    max_rndv_hdr_size: int
    max_num_tags: int
    flags: int
    max_ops: int
    max_sge: int


class CQModerationCapabilities(NamedTuple):
    """Limits on event moderation (``ibv_cq_moderation_caps``). The period is in microseconds."""

    max_cq_count: int
    max_cq_period: int


class PciAtomicCapabilities(NamedTuple):
    """The atomic operations the device can perform over PCI (``ibv_pci_atomic_caps``)."""

    fetch_add: PciAtomicSizes
    swap: PciAtomicSizes
    compare_swap: PciAtomicSizes


class ExtendedDeviceAttributes(NamedTuple):
    """A device's extended attributes (``struct ibv_device_attr_ex``).

    ``orig_attr`` contains the basic attributes. ``completion_timestamp_mask`` shows which bits of a
    timestamp are valid; it is 0 if the device does not support timestamps. ``hca_core_clock`` is
    the timestamp clock's frequency in kHz. ``max_dm_size`` is the size of the device's own memory,
    in bytes. See ibv_query_device_ex(3).
    """

    orig_attr: DeviceAttributes
    odp_caps: OdpCapabilities
    completion_timestamp_mask: int
    hca_core_clock: int
    device_cap_flags_ex: int
    tso_caps: TsoCapabilities
    rss_caps: RssCapabilities
    max_wq_type_rq: int
    packet_pacing_caps: PacketPacingCapabilities
    raw_packet_caps: RawPacketCapability
    tm_caps: TagMatchingCapabilities
    cq_mod_caps: CQModerationCapabilities
    max_dm_size: int
    pci_atomic_caps: PciAtomicCapabilities
    phys_port_cnt_ex: int

    def seconds(self, ticks: int) -> float:
        """Convert a time difference from clock ticks to seconds.

        The difference may be between two completion timestamps, or between two readings of the
        device's clock.

        Raises:
            ValueError: If the device does not report its clock frequency.
        """
        if not self.hca_core_clock:
            raise ValueError("the device does not report its clock frequency")
        return ticks / (self.hca_core_clock * 1000)

    @classmethod
    def read(cls, attr: h.ibv_device_attr_ex) -> Self:
        """Create the attributes from a ``struct ibv_device_attr_ex``."""
        odp, transports = attr.odp_caps, attr.odp_caps.per_transport_caps
        return copy_of(
            attr,
            cls,
            orig_attr=DeviceAttributes.read(attr.orig_attr),
            odp_caps=OdpCapabilities(
                OdpCapability(odp.general_caps),
                OdpOperations(transports.rc_odp_caps),
                OdpOperations(transports.uc_odp_caps),
                OdpOperations(transports.ud_odp_caps),
                OdpOperations(attr.xrc_odp_caps),
            ),
            tso_caps=_with_qp_types(attr.tso_caps, TsoCapabilities),
            rss_caps=_with_qp_types(attr.rss_caps, RssCapabilities),
            packet_pacing_caps=_with_qp_types(attr.packet_pacing_caps, PacketPacingCapabilities),
            tm_caps=copy_of(attr.tm_caps, TagMatchingCapabilities),
            cq_mod_caps=copy_of(attr.cq_mod_caps, CQModerationCapabilities),
            pci_atomic_caps=copy_of(attr.pci_atomic_caps, PciAtomicCapabilities),
        )
