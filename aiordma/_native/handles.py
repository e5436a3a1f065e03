"""Names for what crosses the boundary, for annotations only; import them under ``TYPE_CHECKING``.

They are those of the stub of the compiled module: a C structure has a class of its name, which
stands for pointers to it as well. At run time all of them are `ffi.CData`.
"""

# ruff: noqa: F403, F405

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from ._lib import *

    WC = ibv_wc
    AddrInfo = rdma_addrinfo
    AHAttr = ibv_ah_attr
    AllocDMAttr = ibv_alloc_dm_attr
    AsyncEvent = ibv_async_event
    CompatPortAttr = compat_ibv_port_attr
    Completion = aiordma_completion
    CompletionMore = aiordma_completion_more
    ConnParam = rdma_conn_param
    CQInitAttrEx = ibv_cq_init_attr_ex
    DeviceAttr = ibv_device_attr
    DeviceAttrEx = ibv_device_attr_ex
    DeviceList: TypeAlias = Pointer[ibv_device]
    Ece = ibv_ece
    EFADeviceAttr = efadv_device_attr
    EFAQPInitAttr = efadv_qp_init_attr
    Gid = ibv_gid
    GidEntries = ibv_gid_entry
    GidEntry = ibv_gid_entry
    Grh = ibv_grh
    JoinAttr = rdma_cm_join_mc_attr_ex
    Mlx5QPInitAttr = mlx5dv_qp_init_attr
    ModifyCQAttr = ibv_modify_cq_attr
    MWBind = ibv_mw_bind
    ParentDomainInitAttr = ibv_parent_domain_init_attr
    PortAttr = ibv_port_attr
    QPAttr = ibv_qp_attr
    QPInitAttr = ibv_qp_init_attr
    QPInitAttrEx = ibv_qp_init_attr_ex
    QPOpenAttr = ibv_qp_open_attr
    QPRateLimitAttr = ibv_qp_rate_limit_attr
    Recv = aiordma_recv
    Send = aiordma_send
    Sge = ibv_sge
    SocketAddress = sockaddr
    SocketStorage = sockaddr_storage
    SRQAttr = ibv_srq_attr
    SRQInitAttr = ibv_srq_init_attr
    SRQInitAttrEx = ibv_srq_init_attr_ex
    TDInitAttr = ibv_td_init_attr
    UDParam = rdma_ud_param
    ValuesEx = ibv_values_ex
    XRCDInitAttr = ibv_xrcd_init_attr
    AHPointer = ibv_ah
    CallsPointer = aiordma_calls
    ChannelPointer = ibv_comp_channel
    CQPointer = ibv_cq
    CQExPointer = ibv_cq_ex
    EventPointer = rdma_cm_event
    IdPointer = rdma_cm_id
    ContextPointer = ibv_context
    DevicePointer = ibv_device
    DMPointer = ibv_dm
    DrainPointer = aiordma_drain
    EventChannelPointer = rdma_event_channel
    MRPointer = ibv_mr
    MWPointer = ibv_mw
    Mlx5QPExPointer = mlx5dv_qp_ex
    PDPointer = ibv_pd
    ProviderCallsPointer = aiordma_provider_calls
    QPPointer = ibv_qp
    QPExPointer = ibv_qp_ex
    SRQPointer = ibv_srq
    TDPointer = ibv_td
    XRCDPointer = ibv_xrcd


class SupportsDLPack(Protocol):
    """A tensor: torch, JAX, TensorFlow, CuPy ... (the Python Array API's `__dlpack__`)."""

    def __dlpack__(self) -> Any: ...

    def __dlpack_device__(self) -> tuple[Any, int]: ...


AnyMemory: TypeAlias = "Buffer | SupportsDLPack"
