"""A synchronous interface to RDMA verbs: devices, memory, queues and work requests.

::

    with verbs.open_device() as context, context.alloc_pd() as pd, context.create_cq(64) as cq:
        mr = pd.reg_mr(4096)
        qp = pd.create_qp(cq)
        local = qp.endpoint()                 # send it to the peer, and receive the peer's
        qp.connect(local, remote)
        qp.post_send_one(1, verbs.WROpcode.SEND, verbs.SendFlags.SIGNALED, mr.addr, 5, mr.lkey)
        while not (completions := cq.poll()): ...

Objects are created by methods of other objects, and closing an object also closes everything
created from it. Fields have the same names as in C. Times are in seconds. Failures raise exceptions
from :mod:`aiordma.errors`.
"""

from typing import TYPE_CHECKING

from aiordma._core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from aiordma._exports.verbs import *  # noqa: F403
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "aiordma._core.handshake_layout": "Endpoint",
            "aiordma._core.timers": "decode_ack_timeout decode_rnr_timer",
            "aiordma._native": "Library",
            "._cq.completion": "CompletionChannel CompletionQueue",
            "._cq.completion_cursor": "CompletionCursor",
            "._cq.work_completion": "WorkCompletion",
            "._device.address": "GID AddressVector GIDEntry",
            "._device.address_handle": "AddressHandle Destination PathKeywords",
            "._device.attributes": "DeviceAttributes PortAttributes",
            "._device.capabilities": "CQModerationCapabilities ExtendedDeviceAttributes "
            "OdpCapabilities PacketPacingCapabilities PciAtomicCapabilities RssCapabilities "
            "TagMatchingCapabilities TsoCapabilities",
            "._device.context": "AsyncEvent Context",
            "._device.device": "Choice Device choose_device devices find_device fork_status "
            "libraries missing_library open_device",
            "._device.domains": "ParentDomain ThreadDomain",
            "._device.enums": "MTU AccessFlags Advice AtomicCapability CQFlags DeviceCapability "
            "EventType ForkStatus GIDType LinkLayer MigrationState MWType NodeType OdpCapability "
            "OdpOperations PciAtomicSizes PlacementType PortCapability PortState QPAttrMask "
            "QPCreateFlags QPState QPType RawPacketCapability SelectivityLevel SendFlags "
            "TransportType WCFields WCFlags WCOpcode WCStatus WROpcode",
            "._device.fault_injection": "FaultCounts",
            "._device.grh": "GRH GRH_SIZE",
            "._device.protection_domain": "ProtectionDomain",
            "._device.resource": "live remember_places",
            "._device.statistics": "CQStatistics ChannelStatistics DeviceStatistics",
            "._memory.buffers": "bytes_of",
            "._memory.device_memory": "DeviceMemory",
            "._memory.memory_region": "MemoryRegion address_of",
            "._memory.memory_window": "MemoryWindow inc_rkey",
            "._qp.batch": "ReceiveBatch SendBatch",
            "._qp.multicast": "MULTICAST_QPN MulticastAttachment",
            "._qp.qp_attributes": "ECE QPAttributes QPCapabilities RateLimit",
            "._qp.qp_creation": "QPKeywords",
            "._qp.queue_pair": "QueuePair",
            "._qp.shared_receive_queue": "SharedReceiveQueue SRQAttributes",
            "._qp.transport_rules": "SendOps send_ops_of",
            "._qp.work_request": "BindInfo FlushInfo ReceiveWorkRequest ScatterGatherElement "
            "Segmentation SendWorkRequest",
            "._qp.xrc": "XRCDomain",
            ".experimental": "",
            ".raw": "",
        },
    )
