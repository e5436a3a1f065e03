"""The compiled module as the type checker sees it: the contract between C and Python.

One class per C structure that is reached through a pointer; only the members that Python touches
are listed. None of these classes exists at run time (everything there is `ffi.CData`), so import
them through `aiordma._native.handles` under `TYPE_CHECKING` only. `tests/native` compares the
names here with those of the compiled module.
"""

from collections.abc import Callable
from typing import Any, Final, Generic, Literal, TypeVar, overload

from typing_extensions import Buffer

_T = TypeVar("_T")

class Null: ...
class VoidPointer: ...

class Integer:
    def __int__(self) -> int: ...

class Pointer(Generic[_T]):
    """`_T *` with one element behind it, or an array of them."""

    def __getitem__(self, index: int) -> _T: ...

class IntegerPointer:
    """`int *`, `uint8_t *` ..., and arrays of them."""

    def __getitem__(self, index: int) -> int: ...

class Characters:
    """`char[]`; from `ffi.from_buffer` it holds the exporter's buffer until it is released."""

    def __len__(self) -> int: ...

class Text:
    """`const char *`, for `ffi.string`."""

class Bytes(Buffer):
    """`ffi.buffer`: the memory itself, not a copy; its slices are copies."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: slice) -> bytes: ...
    def __setitem__(self, index: slice, value: bytes) -> None: ...
    def __eq__(self, other: object) -> bool: ...

# --- structures of the verbs -----------------------------------------------------------------

class Gid:
    @property
    def raw(self) -> IntegerPointer: ...

class GidEntry:
    gid: Gid
    gid_index: int
    port_num: int
    gid_type: int
    ndev_ifindex: int

class GidEntries:
    def __getitem__(self, index: int) -> GidEntry: ...

class Device:
    node_type: int
    transport_type: int
    @property
    def ibdev_path(self) -> Text: ...

class DeviceList:
    def __getitem__(self, index: int) -> Device: ...

class Context:
    device: Device
    async_fd: int
    num_comp_vectors: int

class DeviceAttr:
    @property
    def fw_ver(self) -> Text: ...
    node_guid: int
    sys_image_guid: int
    max_mr_size: int
    page_size_cap: int
    vendor_id: int
    vendor_part_id: int
    hw_ver: int
    max_qp: int
    max_qp_wr: int
    device_cap_flags: int
    max_sge: int
    max_sge_rd: int
    max_cq: int
    max_cqe: int
    max_mr: int
    max_pd: int
    max_qp_rd_atom: int
    max_res_rd_atom: int
    max_qp_init_rd_atom: int
    atomic_cap: int
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

class OdpTransportCaps:
    rc_odp_caps: int
    uc_odp_caps: int
    ud_odp_caps: int

class OdpCaps:
    general_caps: int
    @property
    def per_transport_caps(self) -> OdpTransportCaps: ...

class TsoCaps:
    max_tso: int
    supported_qpts: int

class RssCaps:
    supported_qpts: int
    max_rwq_indirection_tables: int
    max_rwq_indirection_table_size: int
    rx_hash_fields_mask: int
    rx_hash_function: int

class PacketPacingCaps:
    qp_rate_limit_min: int
    qp_rate_limit_max: int
    supported_qpts: int

class TmCaps:
    max_rndv_hdr_size: int
    max_num_tags: int
    flags: int
    max_ops: int
    max_sge: int

class CQModerationCaps:
    max_cq_count: int
    max_cq_period: int

class PciAtomicCaps:
    fetch_add: int
    swap: int
    compare_swap: int

class DeviceAttrEx:
    @property
    def orig_attr(self) -> DeviceAttr: ...
    @property
    def odp_caps(self) -> OdpCaps: ...
    completion_timestamp_mask: int
    hca_core_clock: int
    device_cap_flags_ex: int
    @property
    def tso_caps(self) -> TsoCaps: ...
    @property
    def rss_caps(self) -> RssCaps: ...
    max_wq_type_rq: int
    @property
    def packet_pacing_caps(self) -> PacketPacingCaps: ...
    raw_packet_caps: int
    @property
    def tm_caps(self) -> TmCaps: ...
    @property
    def cq_mod_caps(self) -> CQModerationCaps: ...
    max_dm_size: int
    @property
    def pci_atomic_caps(self) -> PciAtomicCaps: ...
    xrc_odp_caps: int
    phys_port_cnt_ex: int

class TimeSpec:
    tv_sec: int
    tv_nsec: int

class ValuesEx:
    comp_mask: int
    @property
    def raw_clock(self) -> TimeSpec: ...

class CompatPortAttr:
    """`struct _compat_ibv_port_attr *`: incomplete, ibv_query_port's argument."""

class PortAttr:
    state: int
    max_mtu: int
    active_mtu: int
    gid_tbl_len: int
    port_cap_flags: int
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
    link_layer: int
    flags: int
    port_cap_flags2: int

class AsyncEventElement:
    cq: CompletionQueue
    qp: QueuePair
    srq: SharedReceiveQueue
    port_num: int

class AsyncEvent:
    @property
    def element(self) -> AsyncEventElement: ...
    event_type: int

class ProtectionDomain: ...
class ThreadDomain: ...

class TDInitAttr:
    comp_mask: int

class ParentDomainInitAttr:
    pd: ProtectionDomain
    td: ThreadDomain | Null
    comp_mask: int

class DeviceMemory:
    handle: int

class AllocDMAttr:
    length: int
    log_align_req: int
    comp_mask: int

class MemoryWindow:
    rkey: int
    type: int

class MWBindInfo:
    mr: MemoryRegion | Null
    addr: int
    length: int
    mw_access_flags: int

class MWBind:
    wr_id: int
    send_flags: int
    @property
    def bind_info(self) -> MWBindInfo: ...

class MemoryRegion:
    lkey: int
    rkey: int

class CompletionChannel:
    fd: int

class CompletionQueue:
    cqe: int
    handle: int

class PollCQAttr: ...

class CompletionQueueEx:
    wr_id: int
    status: int
    read_qp_num: object
    def start_poll(self, cq: CompletionQueueEx, attr: PollCQAttr) -> int: ...
    def end_poll(self, cq: CompletionQueueEx) -> None: ...

class CQInitAttrEx:
    cqe: int
    cq_context: VoidPointer | Null
    channel: CompletionChannel | Null
    comp_vector: int
    wc_flags: int
    comp_mask: int
    flags: int
    parent_domain: ProtectionDomain | Null

class ModerateCQ:
    cq_count: int
    cq_period: int

class ModifyCQAttr:
    attr_mask: int
    @property
    def moderate(self) -> ModerateCQ: ...

class XRCDomain: ...

class XRCDInitAttr:
    comp_mask: int
    fd: int
    oflags: int

class SharedReceiveQueue:
    handle: int

class SRQAttr:
    max_wr: int
    max_sge: int
    srq_limit: int

class SRQInitAttr:
    @property
    def attr(self) -> SRQAttr: ...

class SRQInitAttrEx:
    @property
    def attr(self) -> SRQAttr: ...
    comp_mask: int
    srq_type: int
    pd: ProtectionDomain | Null
    xrcd: XRCDomain | Null
    cq: CompletionQueue | Null

class QPCap:
    max_send_wr: int
    max_recv_wr: int
    max_send_sge: int
    max_recv_sge: int
    max_inline_data: int

class QPInitAttr:
    send_cq: CompletionQueue
    recv_cq: CompletionQueue
    srq: SharedReceiveQueue
    @property
    def cap(self) -> QPCap: ...
    qp_type: int
    sq_sig_all: int

class QPInitAttrEx:
    send_cq: CompletionQueue | Null
    recv_cq: CompletionQueue | Null
    srq: SharedReceiveQueue | Null
    @property
    def cap(self) -> QPCap: ...
    qp_type: int
    sq_sig_all: int
    comp_mask: int
    pd: ProtectionDomain | Null
    xrcd: XRCDomain | Null
    create_flags: int
    max_tso_header: int
    source_qpn: int
    send_ops_flags: int

class QPOpenAttr:
    comp_mask: int
    qp_num: int
    xrcd: XRCDomain
    qp_type: int

class QPRateLimitAttr:
    rate_limit: int
    max_burst_sz: int
    typical_pkt_sz: int
    comp_mask: int

class GlobalRoute:
    @property
    def dgid(self) -> Gid: ...
    flow_label: int
    sgid_index: int
    hop_limit: int
    traffic_class: int

class AHAttr:
    @property
    def grh(self) -> GlobalRoute: ...
    dlid: int
    sl: int
    src_path_bits: int
    static_rate: int
    is_global: int
    port_num: int

class Grh: ...

class WC:
    wc_flags: int
    src_qp: int
    slid: int
    sl: int
    dlid_path_bits: int

class QPAttr:
    qp_state: int
    cur_qp_state: int
    path_mtu: int
    path_mig_state: int
    qkey: int
    rq_psn: int
    sq_psn: int
    dest_qp_num: int
    qp_access_flags: int
    @property
    def cap(self) -> QPCap: ...
    @property
    def ah_attr(self) -> AHAttr: ...
    @property
    def alt_ah_attr(self) -> AHAttr: ...
    pkey_index: int
    alt_pkey_index: int
    en_sqd_async_notify: int
    sq_draining: int
    max_rd_atomic: int
    max_dest_rd_atomic: int
    min_rnr_timer: int
    port_num: int
    timeout: int
    retry_cnt: int
    rnr_retry: int
    alt_port_num: int
    alt_timeout: int
    rate_limit: int

class QueuePair:
    qp_num: int
    state: int
    qp_type: int

class QueuePairEx: ...
class AddressHandle: ...
class Sge: ...
class Send: ...
class Recv: ...
class Completion: ...
class CompletionMore: ...

# --- structures of the connection manager ----------------------------------------------------

class EventChannel:
    fd: int

class SocketAddress: ...
class SocketStorage: ...
class Address: ...

class Route:
    @property
    def addr(self) -> Address: ...

class ConnectionId:
    verbs: Context
    qp: QueuePair
    @property
    def route(self) -> Route: ...
    ps: int
    port_num: int

class ConnParam:
    private_data: Characters | VoidPointer
    private_data_len: int
    responder_resources: int
    initiator_depth: int
    flow_control: int
    retry_count: int
    rnr_retry_count: int
    srq: int
    qp_num: int

class UDParam:
    private_data: Characters | VoidPointer
    private_data_len: int
    @property
    def ah_attr(self) -> AHAttr: ...
    qp_num: int
    qkey: int

class JoinAttr:
    comp_mask: int
    join_flags: int
    addr: SocketAddress

class AddrInfo:
    ai_flags: int
    ai_qp_type: int
    ai_port_space: int
    ai_src_len: int
    ai_dst_len: int
    ai_src_addr: SocketAddress
    ai_dst_addr: SocketAddress
    ai_next: AddrInfo

class Ece:
    vendor_id: int
    options: int

class EventParam:
    @property
    def conn(self) -> ConnParam: ...
    @property
    def ud(self) -> UDParam: ...

class ConnectionEvent:
    id: ConnectionId
    listen_id: ConnectionId
    event: int
    status: int
    @property
    def param(self) -> EventParam: ...

# --- the C part's own ------------------------------------------------------------------------

class DeviceCalls:
    reg_own_mr: Callable[[ProtectionDomain, VoidPointer | Characters, int, int], MemoryRegion]
    reg_local_dma: Callable[[ProtectionDomain], MemoryRegion]
    wire: Callable[[QueuePair], int]
    end_with_peer: Callable[[QueuePair], None]
    same_host: Callable[[bytes, bytes], int]
    withdrawn: Callable[[ConnectionId], int]
    set_faults: Callable[[bytes | Null, Characters, int], int]
    fault_counts: Callable[[FaultCounts], None]

class Calls:
    ibv_dereg_mr: object
    device: DeviceCalls

class ProviderCalls: ...
class Mlx5QPEx: ...

class EFADeviceAttr:
    max_sq_wr: int
    max_rq_wr: int
    max_sq_sge: int
    max_rq_sge: int
    inline_buf_size: int
    device_caps: int
    max_rdma_size: int

class EFAQPInitAttr:
    driver_qp_type: int

class Mlx5DCInitAttr:
    dc_type: int
    dct_access_key: int

class Mlx5QPInitAttr:
    comp_mask: int
    @property
    def dc_init_attr(self) -> Mlx5DCInitAttr: ...

class Drain:
    calls: Calls
    channel: CompletionChannel
    events: int
    drains: int
    completions: int
    spin_us: int

class FaultCounts:
    lost: int
    duplicated: int
    delayed: int
    cut: int
    not_ready: int
    overruns: int
    registrations: int
    handshakes: int
    retried: int

class CField:
    name: str

class CType:
    kind: str
    cname: str
    fields: list[tuple[str, CField]]
    elements: dict[int, str]
    relements: dict[str, int]

class FFI:
    NULL: Final[Null]
    errno: int
    class CData: ...

    @overload
    def new(
        self, cdecl: Literal["int *", "int[2]", "int[8]"], init: int = ...
    ) -> IntegerPointer: ...
    @overload
    def new(self, cdecl: Literal["uint8_t *"], init: int = ...) -> IntegerPointer: ...
    @overload
    def new(self, cdecl: Literal["uint16_t *"], init: int = ...) -> IntegerPointer: ...
    @overload
    def new(self, cdecl: Literal["uint32_t *"], init: int = ...) -> IntegerPointer: ...
    @overload
    def new(self, cdecl: Literal["uint64_t *"], init: int = ...) -> IntegerPointer: ...
    @overload
    def new(self, cdecl: Literal["char[]"], init: int | bytes) -> Characters: ...
    @overload
    def new(self, cdecl: Literal["void **"]) -> Pointer[VoidPointer]: ...
    @overload
    def new(self, cdecl: Literal["union ibv_gid *"]) -> Gid: ...
    @overload
    def new(self, cdecl: Literal["struct ibv_gid_entry *"]) -> GidEntry: ...
    @overload
    def new(self, cdecl: Literal["struct ibv_gid_entry[]"], init: int) -> GidEntries: ...
    @overload
    def new(self, cdecl: Literal["struct ibv_device_attr *"]) -> DeviceAttr: ...
    @overload
    def new(self, cdecl: Literal["struct ibv_port_attr *"]) -> PortAttr: ...
    @overload
    def new(self, cdecl: Literal["struct ibv_async_event *"]) -> AsyncEvent: ...
    @overload
    def new(self, cdecl: Literal["struct ibv_cq **"]) -> Pointer[CompletionQueue]: ...
    @overload
    def new(
        self, cdecl: Literal["struct ibv_qp_init_attr *"], init: dict[str, object] = ...
    ) -> QPInitAttr: ...
    @overload
    def new(
        self, cdecl: Literal["struct ibv_qp_attr *"], init: dict[str, object] = ...
    ) -> QPAttr: ...
    @overload
    def new(self, cdecl: Literal["struct ibv_device_attr_ex *"]) -> DeviceAttrEx: ...
    @overload
    def new(self, cdecl: Literal["struct ibv_values_ex *"]) -> ValuesEx: ...
    @overload
    def new(self, cdecl: Literal["struct ibv_cq_init_attr_ex *"]) -> CQInitAttrEx: ...
    @overload
    def new(self, cdecl: Literal["struct ibv_modify_cq_attr *"]) -> ModifyCQAttr: ...
    @overload
    def new(self, cdecl: Literal["struct ibv_alloc_dm_attr *"]) -> AllocDMAttr: ...
    @overload
    def new(self, cdecl: Literal["struct ibv_td_init_attr *"]) -> TDInitAttr: ...
    @overload
    def new(
        self, cdecl: Literal["struct ibv_parent_domain_init_attr *"]
    ) -> ParentDomainInitAttr: ...
    @overload
    def new(self, cdecl: Literal["struct ibv_xrcd_init_attr *"]) -> XRCDInitAttr: ...
    @overload
    def new(self, cdecl: Literal["struct ibv_srq_attr *"]) -> SRQAttr: ...
    @overload
    def new(self, cdecl: Literal["struct ibv_srq_init_attr *"]) -> SRQInitAttr: ...
    @overload
    def new(self, cdecl: Literal["struct ibv_srq_init_attr_ex *"]) -> SRQInitAttrEx: ...
    @overload
    def new(self, cdecl: Literal["struct ibv_qp_init_attr_ex *"]) -> QPInitAttrEx: ...
    @overload
    def new(self, cdecl: Literal["struct ibv_qp_open_attr *"]) -> QPOpenAttr: ...
    @overload
    def new(self, cdecl: Literal["struct efadv_device_attr *"]) -> EFADeviceAttr: ...
    @overload
    def new(self, cdecl: Literal["struct efadv_qp_init_attr *"]) -> EFAQPInitAttr: ...
    @overload
    def new(self, cdecl: Literal["struct mlx5dv_qp_init_attr *"]) -> Mlx5QPInitAttr: ...
    @overload
    def new(self, cdecl: Literal["struct ibv_qp_rate_limit_attr *"]) -> QPRateLimitAttr: ...
    @overload
    def new(self, cdecl: Literal["struct ibv_mw_bind *"]) -> MWBind: ...
    @overload
    def new(
        self, cdecl: Literal["struct ibv_ah_attr *"], init: dict[str, object] = ...
    ) -> AHAttr: ...
    @overload
    def new(self, cdecl: Literal["struct ibv_grh *"]) -> Grh: ...
    @overload
    def new(self, cdecl: Literal["struct ibv_wc *"]) -> WC: ...
    @overload
    def new(self, cdecl: Literal["struct aiordma_fault_counts *"]) -> FaultCounts: ...
    @overload
    def new(self, cdecl: Literal["struct ibv_sge[]"], init: int) -> Sge: ...
    @overload
    def new(self, cdecl: Literal["struct aiordma_send[]"], init: int) -> Send: ...
    @overload
    def new(self, cdecl: Literal["struct aiordma_recv[]"], init: int) -> Recv: ...
    @overload
    def new(self, cdecl: Literal["struct aiordma_completion[]"], init: int) -> Completion: ...
    @overload
    def new(
        self, cdecl: Literal["struct aiordma_completion_more[]"], init: int
    ) -> CompletionMore: ...
    @overload
    def new(self, cdecl: Literal["struct aiordma_drain *"]) -> Drain: ...
    @overload
    def new(self, cdecl: Literal["struct ibv_poll_cq_attr *"]) -> PollCQAttr: ...
    @overload
    def new(self, cdecl: Literal["struct aiordma_calls **"]) -> Pointer[Calls]: ...
    @overload
    def new(self, cdecl: Literal["struct rdma_cm_id **"]) -> Pointer[ConnectionId]: ...
    @overload
    def new(self, cdecl: Literal["struct rdma_cm_event **"]) -> Pointer[ConnectionEvent]: ...
    @overload
    def new(self, cdecl: Literal["struct rdma_conn_param *"]) -> ConnParam: ...
    @overload
    def new(self, cdecl: Literal["struct rdma_cm_join_mc_attr_ex *"]) -> JoinAttr: ...
    @overload
    def new(self, cdecl: Literal["struct rdma_addrinfo *"]) -> AddrInfo: ...
    @overload
    def new(self, cdecl: Literal["struct rdma_addrinfo **"]) -> Pointer[AddrInfo]: ...
    @overload
    def new(self, cdecl: Literal["struct ibv_ece *"]) -> Ece: ...
    @overload
    def new(self, cdecl: Literal["struct sockaddr_storage *"]) -> SocketStorage: ...
    def new_allocator(self, *, should_clear_after_alloc: bool) -> Callable[[str, int], Any]: ...
    @overload
    def cast(self, cdecl: Literal["uintptr_t"], source: object) -> Integer: ...
    @overload
    def cast(self, cdecl: Literal["void *"], source: object) -> VoidPointer: ...
    @overload
    def cast(
        self, cdecl: Literal["struct _compat_ibv_port_attr *"], source: PortAttr
    ) -> CompatPortAttr: ...
    @overload
    def cast(
        self, cdecl: Literal["struct ibv_cq *"], source: CompletionQueueEx
    ) -> CompletionQueue: ...
    @overload
    def cast(
        self, cdecl: Literal["struct ibv_cq_ex *"], source: CompletionQueue
    ) -> CompletionQueueEx: ...
    @overload
    def cast(self, cdecl: Literal["struct sockaddr *"], source: SocketStorage) -> SocketAddress: ...
    @overload
    def addressof(self, cdata: DeviceAttrEx, field: Literal["orig_attr"]) -> DeviceAttr: ...
    @overload
    def addressof(
        self, cdata: Address, field: Literal["src_storage", "dst_storage"]
    ) -> SocketStorage: ...
    @overload
    def addressof(self, cdata: Lib, field: Literal["aiordma_drain"]) -> object: ...
    def buffer(self, cdata: object, size: int = ...) -> Bytes: ...
    def from_buffer(self, python_buffer: Buffer) -> Characters: ...
    def release(self, cdata: object) -> None: ...
    def string(self, cdata: Text | Characters) -> bytes: ...
    def sizeof(self, cdecl: str | object) -> int: ...
    def typeof(self, cdecl: str | object) -> CType: ...

class Lib:
    AIORDMA_WIRE_SHARED_MEMORY: Final[int]
    AIORDMA_WIRE_TCP: Final[int]
    IBV_VALUES_MASK_RAW_CLOCK: Final[int]
    IBV_CQ_ATTR_MODERATE: Final[int]
    IB_UVERBS_ADVISE_MR_FLAG_FLUSH: Final[int]
    IBV_WC_STANDARD_FLAGS: Final[int]
    IBV_CQ_INIT_ATTR_MASK_FLAGS: Final[int]
    def aiordma_system_calls(
        self, calls: Pointer[Calls], error: Characters, error_size: int
    ) -> int: ...
    def aiordma_embedded_calls(self) -> Calls: ...
    def aiordma_post_send(
        self,
        qp: QueuePair,
        extended: QueuePairEx | Null,
        sends: Send,
        count: int,
        sges: Sge,
        posted: IntegerPointer,
    ) -> int: ...
    def aiordma_post_recv(
        self,
        qp: QueuePair | Null,
        srq: SharedReceiveQueue | Null,
        recvs: Recv,
        count: int,
        sges: Sge,
        posted: IntegerPointer,
    ) -> int: ...
    def aiordma_extended_cq_context(self) -> VoidPointer: ...
    def aiordma_poll(
        self,
        cq: CompletionQueue,
        out: Completion,
        more: CompletionMore,
        capacity: int,
        spin_us: int,
    ) -> int: ...
    def aiordma_req_notify(self, cq: CompletionQueue, solicited_only: int) -> int: ...
    def aiordma_drain(
        self, drain: Drain, out: Completion, capacity: int, more: IntegerPointer
    ) -> int: ...
    def aiordma_drain_end(self, drain: Drain) -> None: ...
    def aiordma_peer_wakeups(self, calls: Calls) -> int: ...
    def aiordma_drain_forget(self, drain: Drain, cq: CompletionQueue) -> None: ...
    def aiordma_embedded_raise(self, event: int) -> int: ...
    def aiordma_trace_start(self, path: bytes, used: Characters, size: int) -> int: ...
    def aiordma_trace_stop(self) -> None: ...
    def aiordma_provider_calls(self, calls: Calls) -> ProviderCalls: ...
    def aiordma_post_addressed(
        self,
        qp: QueuePairEx,
        dc: Mlx5QPEx | Null,
        wr_id: int,
        opcode: int,
        send_flags: int,
        imm_data: int,
        remote_addr: int,
        rkey: int,
        sges: Sge,
        num_sge: int,
        ah: AddressHandle,
        remote_number: int,
        remote_key: int,
    ) -> int: ...
    def aiordma_set_nonblocking(self, calls: Calls, fd: int) -> int: ...
    def aiordma_timer_open(self) -> int: ...
    def aiordma_timer_set(self, fd: int, at_ns: int) -> int: ...
    def aiordma_bring_up(
        self, calls: Calls, qp: QueuePair, attr: QPAttr, to_init: int, to_rtr: int, to_rts: int
    ) -> int: ...
    def aiordma_query_port(self, context: Context, port_num: int, attr: PortAttr) -> int: ...

ffi: Final[FFI]
lib: Final[Lib]
