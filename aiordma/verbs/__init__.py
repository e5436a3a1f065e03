"""The verbs: devices, memory, queues, work requests; synchronous, without an event loop.

::

    with verbs.open_device() as context, context.alloc_pd() as pd, context.create_cq(64) as cq:
        mr = pd.reg_mr(4096)
        qp = pd.create_qp(cq)
        local = qp.endpoint()                 # to the peer, by whatever channel; its answer:
        qp.connect(local, remote)
        qp.post_send_one(1, verbs.WROpcode.SEND, verbs.SendFlags.SIGNALED, mr.addr, 5, mr.lkey)
        while not (completions := cq.poll()): ...

The owner makes the child, closing the owner closes the child. Fields keep their names in C; times
are seconds. Failures are exceptions of :mod:`aiordma.errors`.
"""

from typing import TYPE_CHECKING

from aiordma._core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from aiordma._core.handshake import Endpoint as Endpoint
    from aiordma._core.timers import decode_ack_timeout as decode_ack_timeout
    from aiordma._core.timers import decode_rnr_timer as decode_rnr_timer
    from aiordma._native import Library as Library

    from ._cq.completion import CompletionChannel as CompletionChannel
    from ._cq.completion import CompletionQueue as CompletionQueue
    from ._cq.completion_cursor import CompletionCursor as CompletionCursor
    from ._cq.work_completion import WorkCompletion as WorkCompletion
    from ._device.address import GID as GID
    from ._device.address import AddressVector as AddressVector
    from ._device.address import GIDEntry as GIDEntry
    from ._device.address_handle import AddressHandle as AddressHandle
    from ._device.address_handle import Destination as Destination
    from ._device.attributes import DeviceAttributes as DeviceAttributes
    from ._device.attributes import PortAttributes as PortAttributes
    from ._device.capabilities import CQModerationCapabilities as CQModerationCapabilities
    from ._device.capabilities import ExtendedDeviceAttributes as ExtendedDeviceAttributes
    from ._device.capabilities import OdpCapabilities as OdpCapabilities
    from ._device.capabilities import OdpCapability as OdpCapability
    from ._device.capabilities import OdpOperations as OdpOperations
    from ._device.capabilities import PacketPacingCapabilities as PacketPacingCapabilities
    from ._device.capabilities import PciAtomicCapabilities as PciAtomicCapabilities
    from ._device.capabilities import PciAtomicSizes as PciAtomicSizes
    from ._device.capabilities import RawPacketCapability as RawPacketCapability
    from ._device.capabilities import RssCapabilities as RssCapabilities
    from ._device.capabilities import TagMatchingCapabilities as TagMatchingCapabilities
    from ._device.capabilities import TsoCapabilities as TsoCapabilities
    from ._device.context import AsyncEvent as AsyncEvent
    from ._device.context import Context as Context
    from ._device.device import Choice as Choice
    from ._device.device import Device as Device
    from ._device.device import choose_device as choose_device
    from ._device.device import devices as devices
    from ._device.device import find_device as find_device
    from ._device.device import fork_status as fork_status
    from ._device.device import libraries as libraries
    from ._device.device import missing_library as missing_library
    from ._device.device import open_device as open_device
    from ._device.domains import ParentDomain as ParentDomain
    from ._device.domains import ThreadDomain as ThreadDomain
    from ._device.enums import MTU as MTU
    from ._device.enums import AccessFlags as AccessFlags
    from ._device.enums import Advice as Advice
    from ._device.enums import AtomicCapability as AtomicCapability
    from ._device.enums import CQFlags as CQFlags
    from ._device.enums import DeviceCapability as DeviceCapability
    from ._device.enums import EventType as EventType
    from ._device.enums import ForkStatus as ForkStatus
    from ._device.enums import GIDType as GIDType
    from ._device.enums import LinkLayer as LinkLayer
    from ._device.enums import MigrationState as MigrationState
    from ._device.enums import MWType as MWType
    from ._device.enums import NodeType as NodeType
    from ._device.enums import PlacementType as PlacementType
    from ._device.enums import PortCapability as PortCapability
    from ._device.enums import PortState as PortState
    from ._device.enums import QPAttrMask as QPAttrMask
    from ._device.enums import QPCreateFlags as QPCreateFlags
    from ._device.enums import QPState as QPState
    from ._device.enums import QPType as QPType
    from ._device.enums import SelectivityLevel as SelectivityLevel
    from ._device.enums import SendFlags as SendFlags
    from ._device.enums import TransportType as TransportType
    from ._device.enums import WCFields as WCFields
    from ._device.enums import WCFlags as WCFlags
    from ._device.enums import WCOpcode as WCOpcode
    from ._device.enums import WCStatus as WCStatus
    from ._device.enums import WROpcode as WROpcode
    from ._device.fault_injection import FaultCounts as FaultCounts
    from ._device.grh import GRH as GRH
    from ._device.grh import GRH_SIZE as GRH_SIZE
    from ._device.protection_domain import ProtectionDomain as ProtectionDomain
    from ._device.resource import live as live
    from ._device.resource import remember_places as remember_places
    from ._device.statistics import ChannelStatistics as ChannelStatistics
    from ._device.statistics import CQStatistics as CQStatistics
    from ._device.statistics import DeviceStatistics as DeviceStatistics
    from ._memory.buffers import bytes_of as bytes_of
    from ._memory.memory_region import MemoryRegion as MemoryRegion
    from ._memory.memory_region import address_of as address_of
    from ._memory.memory_window import MemoryWindow as MemoryWindow
    from ._memory.memory_window import inc_rkey as inc_rkey
    from ._memory.special_regions import DeviceMemory as DeviceMemory
    from ._qp.batch import ReceiveBatch as ReceiveBatch
    from ._qp.batch import SendBatch as SendBatch
    from ._qp.multicast import MULTICAST_QPN as MULTICAST_QPN
    from ._qp.multicast import MulticastAttachment as MulticastAttachment
    from ._qp.qp_attributes import QPAttributes as QPAttributes
    from ._qp.qp_attributes import QPCapabilities as QPCapabilities
    from ._qp.qp_creation import QPKeywords as QPKeywords
    from ._qp.qp_options import ECE as ECE
    from ._qp.qp_options import RateLimit as RateLimit
    from ._qp.queue_pair import QueuePair as QueuePair
    from ._qp.shared_receive_queue import SharedReceiveQueue as SharedReceiveQueue
    from ._qp.shared_receive_queue import SRQAttributes as SRQAttributes
    from ._qp.transport_rules import SendOps as SendOps
    from ._qp.transport_rules import send_ops_of as send_ops_of
    from ._qp.work_request import BindInfo as BindInfo
    from ._qp.work_request import FlushInfo as FlushInfo
    from ._qp.work_request import ReceiveWorkRequest as ReceiveWorkRequest
    from ._qp.work_request import ScatterGatherElement as ScatterGatherElement
    from ._qp.work_request import Segmentation as Segmentation
    from ._qp.work_request import SendWorkRequest as SendWorkRequest
    from ._qp.xrc import XRCDomain as XRCDomain
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "aiordma._core.handshake": "Endpoint",
            "aiordma._core.timers": "decode_ack_timeout decode_rnr_timer",
            "aiordma._native": "Library",
            "._cq.completion": "CompletionChannel CompletionQueue",
            "._cq.completion_cursor": "CompletionCursor",
            "._cq.work_completion": "WorkCompletion",
            "._device.address": "GID AddressVector GIDEntry",
            "._device.address_handle": "AddressHandle Destination",
            "._device.attributes": "DeviceAttributes PortAttributes",
            "._device.capabilities": "CQModerationCapabilities ExtendedDeviceAttributes "
            "OdpCapabilities OdpCapability OdpOperations PacketPacingCapabilities "
            "PciAtomicCapabilities PciAtomicSizes RawPacketCapability RssCapabilities "
            "TagMatchingCapabilities TsoCapabilities",
            "._device.context": "AsyncEvent Context",
            "._device.device": "Choice Device choose_device devices find_device fork_status "
            "libraries missing_library "
            "open_device",
            "._device.domains": "ParentDomain ThreadDomain",
            "._device.enums": "MTU AccessFlags Advice AtomicCapability CQFlags DeviceCapability "
            "EventType ForkStatus GIDType LinkLayer MigrationState MWType NodeType PlacementType "
            "PortCapability PortState QPAttrMask QPCreateFlags QPState QPType SelectivityLevel "
            "SendFlags TransportType WCFields WCFlags WCOpcode WCStatus WROpcode",
            "._device.fault_injection": "FaultCounts",
            "._device.grh": "GRH GRH_SIZE",
            "._device.protection_domain": "ProtectionDomain",
            "._device.resource": "live remember_places",
            "._device.statistics": "CQStatistics ChannelStatistics DeviceStatistics",
            "._memory.buffers": "bytes_of",
            "._memory.memory_region": "MemoryRegion address_of",
            "._memory.memory_window": "MemoryWindow inc_rkey",
            "._memory.special_regions": "DeviceMemory",
            "._qp.batch": "ReceiveBatch SendBatch",
            "._qp.multicast": "MULTICAST_QPN MulticastAttachment",
            "._qp.qp_attributes": "QPAttributes QPCapabilities",
            "._qp.qp_creation": "QPKeywords",
            "._qp.qp_options": "ECE RateLimit",
            "._qp.queue_pair": "QueuePair",
            "._qp.shared_receive_queue": "SharedReceiveQueue SRQAttributes",
            "._qp.transport_rules": "SendOps send_ops_of",
            "._qp.work_request": "BindInfo FlushInfo ReceiveWorkRequest ScatterGatherElement "
            "Segmentation SendWorkRequest",
            "._qp.xrc": "XRCDomain",
            ".experimental": "",
        },
    )
