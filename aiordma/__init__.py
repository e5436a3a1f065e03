"""RDMA for asyncio: send, recv, read, write and atomics as awaits, with or without a card."""

from .async_queue_pair import AsyncQueuePair
from .config import Config
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
    RemoteRegion,
    Rights,
    Server,
    Share,
    connect,
    listen,
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
    "Listener",
    "MemoryPool",
    "Message",
    "MessageTooLongError",
    "ProtocolError",
    "RDMAError",
    "Region",
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
    "start_server",
    "start_stream_server",
]
