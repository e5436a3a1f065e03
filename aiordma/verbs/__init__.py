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
    from aiordma._native import Library as Library
    from aiordma._native import Record as Record

    from .address import GID as GID
    from .address import AddressVector as AddressVector
    from .address import GIDEntry as GIDEntry
    from .address_handle import AddressHandle as AddressHandle
    from .address_handle import Destination as Destination
    from .attributes import DeviceAttributes as DeviceAttributes
    from .attributes import PortAttributes as PortAttributes
    from .batch import ReceiveBatch as ReceiveBatch
    from .batch import SendBatch as SendBatch
    from .buffers import bytes_of as bytes_of
    from .capabilities import CQModerationCapabilities as CQModerationCapabilities
    from .capabilities import ExtendedDeviceAttributes as ExtendedDeviceAttributes
    from .capabilities import OdpCapabilities as OdpCapabilities
    from .capabilities import OdpCapability as OdpCapability
    from .capabilities import OdpOperations as OdpOperations
    from .capabilities import PacketPacingCapabilities as PacketPacingCapabilities
    from .capabilities import PciAtomicCapabilities as PciAtomicCapabilities
    from .capabilities import PciAtomicSizes as PciAtomicSizes
    from .capabilities import RawPacketCapability as RawPacketCapability
    from .capabilities import RssCapabilities as RssCapabilities
    from .capabilities import TagMatchingCapabilities as TagMatchingCapabilities
    from .capabilities import TsoCapabilities as TsoCapabilities
    from .completion import CompletionChannel as CompletionChannel
    from .completion import CompletionQueue as CompletionQueue
    from .completion_cursor import CompletionCursor as CompletionCursor
    from .context import AsyncEvent as AsyncEvent
    from .context import Context as Context
    from .device import Device as Device
    from .device import devices as devices
    from .device import find_device as find_device
    from .device import fork_status as fork_status
    from .device import libraries as libraries
    from .device import missing_library as missing_library
    from .device import open_device as open_device
    from .domains import ParentDomain as ParentDomain
    from .domains import ThreadDomain as ThreadDomain
    from .enums import MTU as MTU
    from .enums import AccessFlags as AccessFlags
    from .enums import Advice as Advice
    from .enums import AtomicCapability as AtomicCapability
    from .enums import CQFlags as CQFlags
    from .enums import DeviceCapability as DeviceCapability
    from .enums import EventType as EventType
    from .enums import ForkStatus as ForkStatus
    from .enums import GIDType as GIDType
    from .enums import LinkLayer as LinkLayer
    from .enums import MigrationState as MigrationState
    from .enums import MWType as MWType
    from .enums import NodeType as NodeType
    from .enums import PortCapability as PortCapability
    from .enums import PortState as PortState
    from .enums import QPAttrMask as QPAttrMask
    from .enums import QPCreateFlags as QPCreateFlags
    from .enums import QPState as QPState
    from .enums import QPType as QPType
    from .enums import SendFlags as SendFlags
    from .enums import TransportType as TransportType
    from .enums import WCFields as WCFields
    from .enums import WCFlags as WCFlags
    from .enums import WCOpcode as WCOpcode
    from .enums import WCStatus as WCStatus
    from .enums import WROpcode as WROpcode
    from .faults import FaultCounts as FaultCounts
    from .grh import GRH as GRH
    from .grh import GRH_SIZE as GRH_SIZE
    from .memory_region import MemoryRegion as MemoryRegion
    from .memory_region import address_of as address_of
    from .memory_window import MemoryWindow as MemoryWindow
    from .memory_window import inc_rkey as inc_rkey
    from .multicast import MULTICAST_QPN as MULTICAST_QPN
    from .multicast import MulticastAttachment as MulticastAttachment
    from .other_memory import DeviceMemory as DeviceMemory
    from .protection_domain import ProtectionDomain as ProtectionDomain
    from .qp_attributes import QPAttributes as QPAttributes
    from .qp_attributes import QPCapabilities as QPCapabilities
    from .qp_creation import QPKeywords as QPKeywords
    from .qp_options import ECE as ECE
    from .qp_options import RateLimit as RateLimit
    from .queue_pair import QueuePair as QueuePair
    from .resource import live as live
    from .resource import remember_places as remember_places
    from .shared_receive_queue import SharedReceiveQueue as SharedReceiveQueue
    from .shared_receive_queue import SRQAttributes as SRQAttributes
    from .transport_rules import SendOps as SendOps
    from .transport_rules import send_ops_of as send_ops_of
    from .work_completion import WorkCompletion as WorkCompletion
    from .work_request import BindInfo as BindInfo
    from .work_request import ReceiveWorkRequest as ReceiveWorkRequest
    from .work_request import ScatterGatherElement as ScatterGatherElement
    from .work_request import Segmentation as Segmentation
    from .work_request import SendWorkRequest as SendWorkRequest
    from .xrc import XRCDomain as XRCDomain
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "aiordma._core.handshake": "Endpoint",
            "aiordma._native": "Library Record",
            ".address": "GID AddressVector GIDEntry",
            ".address_handle": "AddressHandle Destination",
            ".attributes": "DeviceAttributes PortAttributes",
            ".batch": "ReceiveBatch SendBatch",
            ".buffers": "bytes_of",
            ".capabilities": "CQModerationCapabilities ExtendedDeviceAttributes OdpCapabilities "
            "OdpCapability OdpOperations PacketPacingCapabilities PciAtomicCapabilities "
            "PciAtomicSizes RawPacketCapability RssCapabilities TagMatchingCapabilities "
            "TsoCapabilities",
            ".completion": "CompletionChannel CompletionQueue",
            ".completion_cursor": "CompletionCursor",
            ".context": "AsyncEvent Context",
            ".device": "Device devices find_device fork_status libraries missing_library "
            "open_device",
            ".domains": "ParentDomain ThreadDomain",
            ".efa": "",
            ".enums": "MTU AccessFlags Advice AtomicCapability CQFlags DeviceCapability EventType "
            "ForkStatus GIDType LinkLayer MigrationState MWType NodeType PortCapability "
            "PortState QPAttrMask QPCreateFlags QPState QPType SendFlags TransportType "
            "WCFields WCFlags WCOpcode WCStatus WROpcode",
            ".faults": "FaultCounts",
            ".grh": "GRH GRH_SIZE",
            ".memory_region": "MemoryRegion address_of",
            ".memory_window": "MemoryWindow inc_rkey",
            ".mlx5": "",
            ".multicast": "MULTICAST_QPN MulticastAttachment",
            ".other_memory": "DeviceMemory",
            ".protection_domain": "ProtectionDomain",
            ".qp_attributes": "QPAttributes QPCapabilities",
            ".qp_creation": "QPKeywords",
            ".qp_options": "ECE RateLimit",
            ".queue_pair": "QueuePair",
            ".resource": "live remember_places",
            ".shared_receive_queue": "SharedReceiveQueue SRQAttributes",
            ".transport_rules": "SendOps send_ops_of",
            ".work_completion": "WorkCompletion",
            ".work_request": "BindInfo ReceiveWorkRequest ScatterGatherElement Segmentation "
            "SendWorkRequest",
            ".xrc": "XRCDomain",
        },
    )
