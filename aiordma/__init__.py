"""RDMA for asyncio: send, recv, read, write and atomics as awaits, with or without a card."""

from .async_queue_pair import AsyncQueuePair
from .config import Config
from .dmabuf import DmabufRegion
from .errors import (
    AuthenticationError,
    BufferStateError,
    ConnectionBrokenError,
    ConnectionClosedError,
    ConnectionManagerError,
    DeviceEventError,
    MessageTooLongError,
    ProtocolError,
    RDMAError,
    RemoteRangeError,
    RequestRefusedError,
    VerbsError,
    WorkCompletionError,
)
from .events import DeviceEvents, device_events
from .mr_pool import Buffer, MemoryPool, Region
from .reconnect import reconnect
from .streams import (
    create_connection,
    create_server,
    open_connection,
    start_stream_server,
)
from .transport import (
    Batch,
    Connection,
    Listener,
    Message,
    PendingConnection,
    RegionToken,
    RemoteRegion,
    Rights,
    Server,
    Share,
    connect,
    listen,
    prepare_connection,
    start_server,
)

__version__ = "0.1.0"

__all__ = [
    "AsyncQueuePair",
    "AuthenticationError",
    "Batch",
    "Buffer",
    "BufferStateError",
    "Config",
    "Connection",
    "ConnectionBrokenError",
    "ConnectionClosedError",
    "ConnectionManagerError",
    "DeviceEventError",
    "DeviceEvents",
    "DmabufRegion",
    "Listener",
    "MemoryPool",
    "Message",
    "MessageTooLongError",
    "PendingConnection",
    "ProtocolError",
    "RDMAError",
    "Region",
    "RegionToken",
    "RemoteRangeError",
    "RemoteRegion",
    "RequestRefusedError",
    "Rights",
    "Server",
    "Share",
    "VerbsError",
    "WorkCompletionError",
    "connect",
    "create_connection",
    "create_server",
    "device_events",
    "listen",
    "open_connection",
    "prepare_connection",
    "reconnect",
    "start_server",
    "start_stream_server",
]
