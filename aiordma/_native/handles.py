"""Names for what crosses the boundary, for annotations only.

The pointers' classes live in the stub of the compiled module. Import them under ``TYPE_CHECKING``:
at run time there is one type for all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from ._lib import (
        WC,
        AddrInfo,
        AHAttr,
        AllocDMAttr,
        AsyncEvent,
        Characters,
        CompatPortAttr,
        Completion,
        CompletionMore,
        ConnParam,
        CQInitAttrEx,
        DeviceAttr,
        DeviceAttrEx,
        DeviceList,
        Ece,
        EFADeviceAttr,
        EFAQPInitAttr,
        Gid,
        GidEntries,
        GidEntry,
        Grh,
        IntegerPointer,
        JoinAttr,
        Mlx5QPInitAttr,
        ModifyCQAttr,
        MWBind,
        Null,
        ParentDomainInitAttr,
        Pointer,
        PortAttr,
        QPAttr,
        QPInitAttr,
        QPInitAttrEx,
        QPOpenAttr,
        QPRateLimitAttr,
        Recv,
        Send,
        Sge,
        SocketAddress,
        SocketStorage,
        SRQAttr,
        SRQInitAttr,
        SRQInitAttrEx,
        TDInitAttr,
        Text,
        UDParam,
        ValuesEx,
        VoidPointer,
        XRCDInitAttr,
    )
    from ._lib import AddressHandle as AHPointer
    from ._lib import Calls as CallsPointer
    from ._lib import CompletionChannel as ChannelPointer
    from ._lib import CompletionQueue as CQPointer
    from ._lib import CompletionQueueEx as CQExPointer
    from ._lib import ConnectionEvent as EventPointer
    from ._lib import ConnectionId as IdPointer
    from ._lib import Context as ContextPointer
    from ._lib import Device as DevicePointer
    from ._lib import DeviceMemory as DMPointer
    from ._lib import Drain as DrainPointer
    from ._lib import EventChannel as EventChannelPointer
    from ._lib import MemoryRegion as MRPointer
    from ._lib import MemoryWindow as MWPointer
    from ._lib import Mlx5QPEx as Mlx5QPExPointer
    from ._lib import ProtectionDomain as PDPointer
    from ._lib import ProviderCalls as ProviderCallsPointer
    from ._lib import QueuePair as QPPointer
    from ._lib import QueuePairEx as QPExPointer
    from ._lib import SharedReceiveQueue as SRQPointer
    from ._lib import ThreadDomain as TDPointer
    from ._lib import XRCDomain as XRCDPointer


class SupportsDLPack(Protocol):
    """A tensor: torch, JAX, TensorFlow, CuPy ... (the Python Array API's `__dlpack__`)."""

    def __dlpack__(self) -> Any: ...

    def __dlpack_device__(self) -> tuple[Any, int]: ...


AnyMemory: TypeAlias = "Buffer | SupportsDLPack"


__all__ = [
    "WC",
    "AHAttr",
    "AHPointer",
    "AddrInfo",
    "AllocDMAttr",
    "AnyMemory",
    "AsyncEvent",
    "CQExPointer",
    "CQInitAttrEx",
    "CQPointer",
    "CallsPointer",
    "ChannelPointer",
    "Characters",
    "CompatPortAttr",
    "Completion",
    "CompletionMore",
    "ConnParam",
    "ContextPointer",
    "DMPointer",
    "DeviceAttr",
    "DeviceAttrEx",
    "DeviceList",
    "DevicePointer",
    "DrainPointer",
    "EFADeviceAttr",
    "EFAQPInitAttr",
    "Ece",
    "EventChannelPointer",
    "EventPointer",
    "Gid",
    "GidEntries",
    "GidEntry",
    "Grh",
    "IdPointer",
    "IntegerPointer",
    "JoinAttr",
    "MRPointer",
    "MWBind",
    "MWPointer",
    "Mlx5QPExPointer",
    "Mlx5QPInitAttr",
    "ModifyCQAttr",
    "Null",
    "PDPointer",
    "ParentDomainInitAttr",
    "Pointer",
    "PortAttr",
    "ProviderCallsPointer",
    "QPAttr",
    "QPExPointer",
    "QPInitAttr",
    "QPInitAttrEx",
    "QPOpenAttr",
    "QPPointer",
    "QPRateLimitAttr",
    "Recv",
    "SRQAttr",
    "SRQInitAttr",
    "SRQInitAttrEx",
    "SRQPointer",
    "Send",
    "Sge",
    "SocketAddress",
    "SocketStorage",
    "SupportsDLPack",
    "TDInitAttr",
    "TDPointer",
    "Text",
    "UDParam",
    "ValuesEx",
    "VoidPointer",
    "XRCDInitAttr",
    "XRCDPointer",
]
