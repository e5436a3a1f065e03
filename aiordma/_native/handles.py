"""Names for the pointers that cross the boundary, for annotations only.

The classes live in the stub of the compiled module. Import them under ``TYPE_CHECKING``: at run
time there is one type for all of them.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._lib import (
        AHAttr,
        AsyncEvent,
        Characters,
        CompatPortAttr,
        Completion,
        ConnParam,
        DeviceAttr,
        DeviceList,
        Gid,
        GidEntries,
        GidEntry,
        IntegerPointer,
        Null,
        Pointer,
        PortAttr,
        QPAttr,
        QPInitAttr,
        Recv,
        Send,
        Sge,
        SocketAddress,
        SocketStorage,
        Text,
        VoidPointer,
    )
    from ._lib import Calls as CallsPointer
    from ._lib import CompletionChannel as ChannelPointer
    from ._lib import CompletionQueue as CQPointer
    from ._lib import ConnectionEvent as EventPointer
    from ._lib import ConnectionId as IdPointer
    from ._lib import Context as ContextPointer
    from ._lib import Device as DevicePointer
    from ._lib import Drain as DrainPointer
    from ._lib import EventChannel as EventChannelPointer
    from ._lib import MemoryRegion as MRPointer
    from ._lib import ProtectionDomain as PDPointer
    from ._lib import QueuePair as QPPointer

__all__ = [
    "AHAttr",
    "AsyncEvent",
    "CQPointer",
    "CallsPointer",
    "ChannelPointer",
    "Characters",
    "CompatPortAttr",
    "Completion",
    "ConnParam",
    "ContextPointer",
    "DeviceAttr",
    "DeviceList",
    "DevicePointer",
    "DrainPointer",
    "EventChannelPointer",
    "EventPointer",
    "Gid",
    "GidEntries",
    "GidEntry",
    "IdPointer",
    "IntegerPointer",
    "MRPointer",
    "Null",
    "PDPointer",
    "Pointer",
    "PortAttr",
    "QPAttr",
    "QPInitAttr",
    "QPPointer",
    "Recv",
    "Send",
    "Sge",
    "SocketAddress",
    "SocketStorage",
    "Text",
    "VoidPointer",
]
