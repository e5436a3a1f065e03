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

from aiordma._core.handshake import Endpoint
from aiordma._native import Library, Record

from .address import GID, AddressVector, GIDEntry
from .address_handle import AddressHandle, Destination
from .attributes import DeviceAttributes, PortAttributes
from .batch import ReceiveBatch, SendBatch
from .buffers import bytes_of
from .capabilities import (
    CQModerationCapabilities,
    ExtendedDeviceAttributes,
    OdpCapabilities,
    OdpCapability,
    OdpOperations,
    PacketPacingCapabilities,
    PciAtomicCapabilities,
    PciAtomicSizes,
    RawPacketCapability,
    RssCapabilities,
    TagMatchingCapabilities,
    TsoCapabilities,
)
from .completion import CompletionChannel, CompletionQueue
from .completion_cursor import CompletionCursor
from .context import AsyncEvent, Context
from .device import (
    Device,
    devices,
    find_device,
    fork_status,
    libraries,
    missing_library,
    open_device,
)
from .domains import ParentDomain, ThreadDomain
from .enums import (
    MTU,
    AccessFlags,
    Advice,
    AtomicCapability,
    CQFlags,
    DeviceCapability,
    EventType,
    ForkStatus,
    GIDType,
    LinkLayer,
    MigrationState,
    MWType,
    NodeType,
    PortCapability,
    PortState,
    QPAttrMask,
    QPCreateFlags,
    QPState,
    QPType,
    SendFlags,
    TransportType,
    WCFields,
    WCFlags,
    WCOpcode,
    WCStatus,
    WROpcode,
)
from .faults import FaultCounts
from .grh import GRH, GRH_SIZE
from .memory_region import MemoryRegion, address_of
from .memory_window import MemoryWindow, inc_rkey
from .multicast import MULTICAST_QPN, MulticastAttachment
from .other_memory import DeviceMemory
from .protection_domain import ProtectionDomain
from .qp_attributes import QPAttributes, QPCapabilities
from .qp_creation import QPKeywords
from .qp_options import ECE, RateLimit
from .queue_pair import QueuePair
from .resource import live, remember_places
from .shared_receive_queue import SharedReceiveQueue, SRQAttributes
from .transport_rules import SendOps, send_ops_of
from .work_completion import WorkCompletion
from .work_request import (
    BindInfo,
    ReceiveWorkRequest,
    ScatterGatherElement,
    Segmentation,
    SendWorkRequest,
)
from .xrc import XRCDomain

__all__ = [
    "ECE",
    "GID",
    "GRH",
    "GRH_SIZE",
    "MTU",
    "MULTICAST_QPN",
    "AccessFlags",
    "AddressHandle",
    "AddressVector",
    "Advice",
    "AsyncEvent",
    "AtomicCapability",
    "BindInfo",
    "CQFlags",
    "CQModerationCapabilities",
    "CompletionChannel",
    "CompletionCursor",
    "CompletionQueue",
    "Context",
    "Destination",
    "Device",
    "DeviceAttributes",
    "DeviceCapability",
    "DeviceMemory",
    "Endpoint",
    "EventType",
    "ExtendedDeviceAttributes",
    "FaultCounts",
    "ForkStatus",
    "GIDEntry",
    "GIDType",
    "Library",
    "LinkLayer",
    "MWType",
    "MemoryRegion",
    "MemoryWindow",
    "MigrationState",
    "MulticastAttachment",
    "NodeType",
    "OdpCapabilities",
    "OdpCapability",
    "OdpOperations",
    "PacketPacingCapabilities",
    "ParentDomain",
    "PciAtomicCapabilities",
    "PciAtomicSizes",
    "PortAttributes",
    "PortCapability",
    "PortState",
    "ProtectionDomain",
    "QPAttrMask",
    "QPAttributes",
    "QPCapabilities",
    "QPCreateFlags",
    "QPKeywords",
    "QPState",
    "QPType",
    "QueuePair",
    "RateLimit",
    "RawPacketCapability",
    "ReceiveBatch",
    "ReceiveWorkRequest",
    "Record",
    "RssCapabilities",
    "SRQAttributes",
    "ScatterGatherElement",
    "Segmentation",
    "SendBatch",
    "SendFlags",
    "SendOps",
    "SendWorkRequest",
    "SharedReceiveQueue",
    "TagMatchingCapabilities",
    "ThreadDomain",
    "TransportType",
    "TsoCapabilities",
    "WCFields",
    "WCFlags",
    "WCOpcode",
    "WCStatus",
    "WROpcode",
    "WorkCompletion",
    "XRCDomain",
    "address_of",
    "bytes_of",
    "devices",
    "find_device",
    "fork_status",
    "inc_rkey",
    "libraries",
    "live",
    "missing_library",
    "open_device",
    "remember_places",
    "send_ops_of",
]
