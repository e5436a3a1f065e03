"""The enumerations of the verbs, with the values of the C header.

A test compares every value with the constant that the compiler saw. Those that a device reports
may know more values than this header: an unknown one becomes a member called ``UNKNOWN_<n>``
rather than an exception in the middle of a completion.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import Self

from aiordma._core.qp_states import QPAttrMask, QPState, QPType

__all__ = [
    "MTU", "AccessFlags", "Advice", "AtomicCapability", "CQFlags", "DeviceCapability",
    "EventType", "GIDType", "LinkLayer", "MWType", "MigrationState", "NodeType", "PortCapability",
    "PortState", "QPAttrMask", "QPCreateFlags", "QPState", "QPType", "SendFlags", "TransportType",
    "WCFields", "WCFlags", "WCOpcode", "WCStatus", "WROpcode",
]  # fmt: skip


class OpenEnum(IntEnum):
    """An enumeration of which a newer library may report more values."""

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        if not isinstance(value, int):
            return None
        member = int.__new__(cls, value)
        member._name_ = f"UNKNOWN_{value}"
        member._value_ = value
        return member


class NodeType(OpenEnum):
    """The kind of node that a device is: ``enum ibv_node_type``."""

    UNKNOWN = -1
    CA = 1
    SWITCH = 2
    ROUTER = 3
    RNIC = 4
    USNIC = 5
    USNIC_UDP = 6
    UNSPECIFIED = 7


class TransportType(OpenEnum):
    """The transport of a device: ``enum ibv_transport_type``. RoCE is IB."""

    UNKNOWN = -1
    IB = 0
    IWARP = 1
    USNIC = 2
    USNIC_UDP = 3
    UNSPECIFIED = 4


class PortState(OpenEnum):
    """State of a port: ``enum ibv_port_state``. Only ACTIVE carries data."""

    NOP = 0
    DOWN = 1
    INIT = 2
    ARMED = 3
    ACTIVE = 4
    ACTIVE_DEFER = 5


class MTU(OpenEnum):
    """Path MTU, encoded: ``enum ibv_mtu``."""

    MTU_256 = 1
    MTU_512 = 2
    MTU_1024 = 3
    MTU_2048 = 4
    MTU_4096 = 5

    @property
    def bytes(self) -> int:
        """The MTU in bytes."""
        return 128 << self


class LinkLayer(OpenEnum):
    """Link layer of a port: the ``IBV_LINK_LAYER_`` constants."""

    UNSPECIFIED = 0
    INFINIBAND = 1
    ETHERNET = 2


class GIDType(OpenEnum):
    """Type of a GID table entry: ``enum ibv_gid_type``."""

    IB = 0
    ROCE_V1 = 1
    ROCE_V2 = 2


class ForkStatus(OpenEnum):
    """Whether a process that has registered memory may fork: ibv_is_fork_initialized(3).

    ``DISABLED``: not; ``ENABLED``: yes, at a cost; ``UNNEEDED``: yes, the kernel sees to it.
    """

    DISABLED = 0
    ENABLED = 1
    UNNEEDED = 2


class AtomicCapability(OpenEnum):
    """Against what a device's atomics are atomic: ``enum ibv_atomic_cap``.

    HCA: against other atomics of the same device. GLOB: against the processor as well.
    """

    NONE = 0
    HCA = 1
    GLOB = 2


class DeviceCapability(IntFlag):
    """Abilities of a device beyond the basics: ``enum ibv_device_cap_flags``."""

    RESIZE_MAX_WR = 1
    BAD_PKEY_CNTR = 1 << 1
    BAD_QKEY_CNTR = 1 << 2
    RAW_MULTI = 1 << 3
    AUTO_PATH_MIG = 1 << 4
    CHANGE_PHY_PORT = 1 << 5
    UD_AV_PORT_ENFORCE = 1 << 6
    CURR_QP_STATE_MOD = 1 << 7
    SHUTDOWN_PORT = 1 << 8
    INIT_TYPE = 1 << 9
    PORT_ACTIVE_EVENT = 1 << 10
    SYS_IMAGE_GUID = 1 << 11
    RC_RNR_NAK_GEN = 1 << 12
    SRQ_RESIZE = 1 << 13
    N_NOTIFY_CQ = 1 << 14
    MEM_WINDOW = 1 << 17
    UD_IP_CSUM = 1 << 18
    XRC = 1 << 20
    MEM_MGT_EXTENSIONS = 1 << 21
    MEM_WINDOW_TYPE_2A = 1 << 23
    MEM_WINDOW_TYPE_2B = 1 << 24
    RC_IP_CSUM = 1 << 25
    RAW_IP_CSUM = 1 << 26
    MANAGED_FLOW_STEERING = 1 << 29


class PortCapability(IntFlag):
    """``enum ibv_port_cap_flags``."""

    SM = 1 << 1
    NOTICE_SUP = 1 << 2
    TRAP_SUP = 1 << 3
    OPT_IPD_SUP = 1 << 4
    AUTO_MIGR_SUP = 1 << 5
    SL_MAP_SUP = 1 << 6
    MKEY_NVRAM = 1 << 7
    PKEY_NVRAM = 1 << 8
    LED_INFO_SUP = 1 << 9
    SYS_IMAGE_GUID_SUP = 1 << 11
    PKEY_SW_EXT_PORT_TRAP_SUP = 1 << 12
    EXTENDED_SPEEDS_SUP = 1 << 14
    CAP_MASK2_SUP = 1 << 15
    CM_SUP = 1 << 16
    SNMP_TUNNEL_SUP = 1 << 17
    REINIT_SUP = 1 << 18
    DEVICE_MGMT_SUP = 1 << 19
    VENDOR_CLASS_SUP = 1 << 20
    DR_NOTICE_SUP = 1 << 21
    CAP_MASK_NOTICE_SUP = 1 << 22
    BOOT_MGMT_SUP = 1 << 23
    LINK_LATENCY_SUP = 1 << 24
    CLIENT_REG_SUP = 1 << 25
    IP_BASED_GIDS = 1 << 26


class EventType(OpenEnum):
    """Asynchronous event of a device: ``enum ibv_event_type``, see ibv_get_async_event(3)."""

    CQ_ERR = 0
    QP_FATAL = 1
    QP_REQ_ERR = 2
    QP_ACCESS_ERR = 3
    COMM_EST = 4
    SQ_DRAINED = 5
    PATH_MIG = 6
    PATH_MIG_ERR = 7
    DEVICE_FATAL = 8
    PORT_ACTIVE = 9
    PORT_ERR = 10
    LID_CHANGE = 11
    PKEY_CHANGE = 12
    SM_CHANGE = 13
    SRQ_ERR = 14
    SRQ_LIMIT_REACHED = 15
    QP_LAST_WQE_REACHED = 16
    CLIENT_REREGISTER = 17
    GID_CHANGE = 18
    WQ_FATAL = 19


class WCStatus(OpenEnum):
    """How posted work ended: ``enum ibv_wc_status``; IBTA volume 1, clause 11.6.2."""

    SUCCESS = 0
    LOC_LEN_ERR = 1
    LOC_QP_OP_ERR = 2
    LOC_EEC_OP_ERR = 3
    LOC_PROT_ERR = 4
    WR_FLUSH_ERR = 5
    MW_BIND_ERR = 6
    BAD_RESP_ERR = 7
    LOC_ACCESS_ERR = 8
    REM_INV_REQ_ERR = 9
    REM_ACCESS_ERR = 10
    REM_OP_ERR = 11
    RETRY_EXC_ERR = 12
    RNR_RETRY_EXC_ERR = 13
    LOC_RDD_VIOL_ERR = 14
    REM_INV_RD_REQ_ERR = 15
    REM_ABORT_ERR = 16
    INV_EECN_ERR = 17
    INV_EEC_STATE_ERR = 18
    FATAL_ERR = 19
    RESP_TIMEOUT_ERR = 20
    GENERAL_ERR = 21
    TM_ERR = 22
    TM_RNDV_INCOMPLETE = 23


class WCOpcode(OpenEnum):
    """The completed operation: ``enum ibv_wc_opcode``. Undefined when the status is not SUCCESS."""

    SEND = 0
    RDMA_WRITE = 1
    RDMA_READ = 2
    COMP_SWAP = 3
    FETCH_ADD = 4
    BIND_MW = 5
    LOCAL_INV = 6
    TSO = 7
    FLUSH = 8
    ATOMIC_WRITE = 9
    RECV = 1 << 7
    RECV_RDMA_WITH_IMM = (1 << 7) + 1
    TM_ADD = (1 << 7) + 2
    TM_DEL = (1 << 7) + 3
    TM_SYNC = (1 << 7) + 4
    TM_RECV = (1 << 7) + 5
    TM_NO_TAG = (1 << 7) + 6
    DRIVER1 = (1 << 7) + 7
    DRIVER2 = (1 << 7) + 8
    DRIVER3 = (1 << 7) + 9


class WCFlags(IntFlag):
    """Flags of a completion: ``enum ibv_wc_flags``."""

    GRH = 1 << 0
    WITH_IMM = 1 << 1
    IP_CSUM_OK = 1 << 2
    WITH_INV = 1 << 3
    TM_SYNC_REQ = 1 << 4
    TM_MATCH = 1 << 5
    TM_DATA_VALID = 1 << 6


class WCFields(IntFlag):
    """Fields that an extended completion queue shall tell: ``enum ibv_create_cq_wc_flags``."""

    WITH_BYTE_LEN = 1 << 0
    WITH_IMM = 1 << 1
    WITH_QP_NUM = 1 << 2
    WITH_SRC_QP = 1 << 3
    WITH_SLID = 1 << 4
    WITH_SL = 1 << 5
    WITH_DLID_PATH_BITS = 1 << 6
    WITH_COMPLETION_TIMESTAMP = 1 << 7
    WITH_CVLAN = 1 << 8
    WITH_FLOW_TAG = 1 << 9
    WITH_TM_INFO = 1 << 10
    WITH_COMPLETION_TIMESTAMP_WALLCLOCK = 1 << 11


class CQFlags(IntFlag):
    """How an extended completion queue works: ``enum ibv_create_cq_attr_flags``.

    SINGLE_THREADED: one thread at a time polls, and posts on its queue pairs. IGNORE_OVERRUN: the
    device need not watch for overruns, since the posting side does.
    """

    NONE = 0
    SINGLE_THREADED = 1 << 0
    IGNORE_OVERRUN = 1 << 1


class AccessFlags(IntFlag):
    """Rights of a memory region or queue pair: ``enum ibv_access_flags``.

    Local reading is always allowed. REMOTE_WRITE and REMOTE_ATOMIC need LOCAL_WRITE as well
    (ibv_reg_mr(3)).
    """

    NONE = 0
    LOCAL_WRITE = 1
    REMOTE_WRITE = 1 << 1
    REMOTE_READ = 1 << 2
    REMOTE_ATOMIC = 1 << 3
    MW_BIND = 1 << 4
    ZERO_BASED = 1 << 5
    ON_DEMAND = 1 << 6
    HUGETLB = 1 << 7
    FLUSH_GLOBAL = 1 << 8
    FLUSH_PERSISTENT = 1 << 9
    RELAXED_ORDERING = 1 << 20


class PlacementType(IntFlag):
    """Where data is when a flush of it completes: ``enum ibv_placement_type``.

    GLOBAL: every processor and device finds it in memory. PERSISTENT: it survives a loss of power.
    """

    NONE = 0
    GLOBAL = 1
    PERSISTENT = 2


class SelectivityLevel(IntEnum):
    """Of which memory a flush is: ``enum ibv_selectivity_level``."""

    RANGE = 0
    MR = 1


class MWType(IntEnum):
    """Type of a memory window: ``enum ibv_mw_type``, see ibv_alloc_mw(3)."""

    TYPE_1 = 1
    TYPE_2 = 2


class Advice(IntEnum):
    """Advice for :meth:`ProtectionDomain.advise_mr`: ``enum ib_uverbs_advise_mr_advice``.

    PREFETCH: the device will read these pages; PREFETCH_WRITE: it will write them;
    PREFETCH_NO_FAULT: as PREFETCH, of the pages that are there already.
    """

    PREFETCH = 0
    PREFETCH_WRITE = 1
    PREFETCH_NO_FAULT = 2


class WROpcode(IntEnum):
    """The operation of a send work request: ``enum ibv_wr_opcode``."""

    RDMA_WRITE = 0
    RDMA_WRITE_WITH_IMM = 1
    SEND = 2
    SEND_WITH_IMM = 3
    RDMA_READ = 4
    ATOMIC_CMP_AND_SWP = 5
    ATOMIC_FETCH_AND_ADD = 6
    LOCAL_INV = 7
    BIND_MW = 8
    SEND_WITH_INV = 9
    TSO = 10
    DRIVER1 = 11
    FLUSH = 14
    ATOMIC_WRITE = 15


class SendFlags(IntFlag):
    """How a send work request is done: ``enum ibv_send_flags``."""

    NONE = 0
    FENCE = 1 << 0
    SIGNALED = 1 << 1
    SOLICITED = 1 << 2
    INLINE = 1 << 3
    IP_CSUM = 1 << 4


class QPCreateFlags(IntFlag):
    """How a queue pair is to be made: ``enum ibv_qp_create_flags``, see ibv_create_qp_ex(3)."""

    NONE = 0
    BLOCK_SELF_MCAST_LB = 1 << 1
    SCATTER_FCS = 1 << 8
    CVLAN_STRIPPING = 1 << 9
    SOURCE_QPN = 1 << 10
    PCI_WRITE_END_PADDING = 1 << 11


class MigrationState(OpenEnum):
    """State of automatic path migration: ``enum ibv_mig_state``."""

    MIGRATED = 0
    REARM = 1
    ARMED = 2
