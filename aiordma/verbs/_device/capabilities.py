"""Capabilities of a device beyond the basics, as ``ibv_query_device_ex`` tells them, typed.

A device, provider or library that does not know a capability leaves it zero, which here as there
means that it is not offered.
"""

from __future__ import annotations

from enum import IntFlag
from typing import TYPE_CHECKING, NamedTuple, Self

from .attributes import DeviceAttributes
from .enums import QPType

if TYPE_CHECKING:
    from aiordma._native import handles as h


class OdpCapability(IntFlag):
    """Registering memory that is not pinned: ``enum ibv_odp_general_caps``."""

    SUPPORT = 1 << 0
    SUPPORT_IMPLICIT = 1 << 1


class OdpOperations(IntFlag):
    """Operations on memory with on-demand paging: ``enum ibv_odp_transport_cap_bits``."""

    SUPPORT_SEND = 1 << 0
    SUPPORT_RECV = 1 << 1
    SUPPORT_WRITE = 1 << 2
    SUPPORT_READ = 1 << 3
    SUPPORT_ATOMIC = 1 << 4
    SUPPORT_SRQ_RECV = 1 << 5
    SUPPORT_FLUSH = 1 << 6


class RawPacketCapability(IntFlag):
    """Of raw packet queue pairs: ``enum ibv_raw_packet_caps``."""

    CVLAN_STRIPPING = 1 << 0
    SCATTER_FCS = 1 << 1
    IP_CSUM = 1 << 2
    DELAY_DROP = 1 << 3


class PciAtomicSizes(IntFlag):
    """Sizes of atomics over the PCI bus: ``enum ibv_pci_atomic_op_size``."""

    OPERATION_4_BYTE_SIZE_SUP = 1 << 0
    OPERATION_8_BYTE_SIZE_SUP = 1 << 1
    OPERATION_16_BYTE_SIZE_SUP = 1 << 2


def _qp_types(bits: int) -> frozenset[QPType]:
    return frozenset(kind for kind in QPType if bits >> kind & 1)


class OdpCapabilities(NamedTuple):
    """On-demand paging: whether, and which operations of which transport (``ibv_odp_caps``)."""

    general: OdpCapability
    rc: OdpOperations
    uc: OdpOperations
    ud: OdpOperations
    xrc: OdpOperations


class TsoCapabilities(NamedTuple):
    """Segmentation of TCP by the device: bytes of one send, 0 without (``ibv_tso_caps``)."""

    max_tso: int
    supported_qpts: frozenset[QPType]


class RssCapabilities(NamedTuple):
    """Spreading received packets over queues (``ibv_rss_caps``)."""

    supported_qpts: frozenset[QPType]
    max_rwq_indirection_tables: int
    max_rwq_indirection_table_size: int
    rx_hash_fields_mask: int
    rx_hash_function: int


class PacketPacingCapabilities(NamedTuple):
    """Rate limits of a queue pair in kbit/s; 0 to 0 without (``ibv_packet_pacing_caps``)."""

    qp_rate_limit_min: int
    qp_rate_limit_max: int
    supported_qpts: frozenset[QPType]


class TagMatchingCapabilities(NamedTuple):
    """Matching of tags by a shared receive queue (``ibv_tm_caps``)."""

    max_rndv_hdr_size: int
    max_num_tags: int
    flags: int
    max_ops: int
    max_sge: int


class CQModerationCapabilities(NamedTuple):
    """Most that can be set, in completions and microseconds (``ibv_cq_moderation_caps``)."""

    max_cq_count: int
    max_cq_period: int


class PciAtomicCapabilities(NamedTuple):
    """The atomics that the device does over its bus (``ibv_pci_atomic_caps``)."""

    fetch_add: PciAtomicSizes
    swap: PciAtomicSizes
    compare_swap: PciAtomicSizes


class ExtendedDeviceAttributes(NamedTuple):
    """``struct ibv_device_attr_ex``; see ibv_query_device_ex(3).

    ``orig_attr`` is what ibv_query_device tells. ``completion_timestamp_mask`` has the bits that
    a timestamp has, 0 without timestamps; ``hca_core_clock`` is their clock in kHz.
    ``max_dm_size`` is the device's own memory in bytes.
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
        """A difference of two timestamps, or of two readings of the clock, in seconds.

        ValueError when the device does not tell the frequency of its clock.
        """
        if not self.hca_core_clock:
            raise ValueError("the device does not tell the frequency of its clock")
        return ticks / (self.hca_core_clock * 1000)

    @classmethod
    def read(cls, attr: h.ibv_device_attr_ex) -> Self:
        """From ``struct ibv_device_attr_ex``."""
        odp, transports = attr.odp_caps, attr.odp_caps.per_transport_caps
        tso, rss, pacing = attr.tso_caps, attr.rss_caps, attr.packet_pacing_caps
        tm, moderation, pci = attr.tm_caps, attr.cq_mod_caps, attr.pci_atomic_caps
        return cls(
            orig_attr=DeviceAttributes.read(attr.orig_attr),
            odp_caps=OdpCapabilities(
                OdpCapability(odp.general_caps),
                OdpOperations(transports.rc_odp_caps),
                OdpOperations(transports.uc_odp_caps),
                OdpOperations(transports.ud_odp_caps),
                OdpOperations(attr.xrc_odp_caps),
            ),
            completion_timestamp_mask=attr.completion_timestamp_mask,
            hca_core_clock=attr.hca_core_clock,
            device_cap_flags_ex=attr.device_cap_flags_ex,
            tso_caps=TsoCapabilities(tso.max_tso, _qp_types(tso.supported_qpts)),
            rss_caps=RssCapabilities(
                _qp_types(rss.supported_qpts),
                rss.max_rwq_indirection_tables,
                rss.max_rwq_indirection_table_size,
                rss.rx_hash_fields_mask,
                rss.rx_hash_function,
            ),
            max_wq_type_rq=attr.max_wq_type_rq,
            packet_pacing_caps=PacketPacingCapabilities(
                pacing.qp_rate_limit_min,
                pacing.qp_rate_limit_max,
                _qp_types(pacing.supported_qpts),
            ),
            raw_packet_caps=RawPacketCapability(attr.raw_packet_caps),
            tm_caps=TagMatchingCapabilities(
                tm.max_rndv_hdr_size, tm.max_num_tags, tm.flags, tm.max_ops, tm.max_sge
            ),
            cq_mod_caps=CQModerationCapabilities(moderation.max_cq_count, moderation.max_cq_period),
            max_dm_size=attr.max_dm_size,
            pci_atomic_caps=PciAtomicCapabilities(
                PciAtomicSizes(pci.fetch_add),
                PciAtomicSizes(pci.swap),
                PciAtomicSizes(pci.compare_swap),
            ),
            phys_port_cnt_ex=attr.phys_port_cnt_ex,
        )
