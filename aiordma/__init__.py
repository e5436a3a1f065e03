"""RDMA for asyncio: send, recv, read, write and atomics as awaits, with or without a card.

Importing it loads next to nothing: each name comes, with what it needs, when it is first used.
`from aiordma import connect` at the top of a program is a first use, so that nothing is left for
the time when the event loop runs.
"""

import os
from typing import TYPE_CHECKING

from ._core.lazy_exports import lazy_exports

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .async_connection_id import AsyncConnectionId as AsyncConnectionId
    from .async_queue_pair import AsyncQueuePair as AsyncQueuePair
    from .async_queue_pair import ReceiveRing as ReceiveRing
    from .config import Config as Config
    from .dmabuf import DmabufRegion as DmabufRegion
    from .errors import AuthenticationError as AuthenticationError
    from .errors import BufferStateError as BufferStateError
    from .errors import ConnectionBrokenError as ConnectionBrokenError
    from .errors import ConnectionClosedError as ConnectionClosedError
    from .errors import ConnectionManagerError as ConnectionManagerError
    from .errors import DeviceEventError as DeviceEventError
    from .errors import LeaseEndedError as LeaseEndedError
    from .errors import MessageTooLongError as MessageTooLongError
    from .errors import ProtocolError as ProtocolError
    from .errors import RDMAError as RDMAError
    from .errors import RemoteRangeError as RemoteRangeError
    from .errors import RequestRefusedError as RequestRefusedError
    from .errors import VerbsError as VerbsError
    from .errors import WorkCompletionError as WorkCompletionError
    from .errors import WrongLoopError as WrongLoopError
    from .events import DeviceEvents as DeviceEvents
    from .events import device_events as device_events
    from .monitoring import ConnectionChange as ConnectionChange
    from .monitoring import add_connection_hook as add_connection_hook
    from .monitoring import remove_connection_hook as remove_connection_hook
    from .monitoring import snapshot as snapshot
    from .mr_pool import Buffer as Buffer
    from .mr_pool import MemoryPool as MemoryPool
    from .mr_pool import Region as Region
    from .reconnecting import reconnect as reconnect
    from .streams import create_connection as create_connection
    from .streams import create_server as create_server
    from .streams import open_connection as open_connection
    from .streams import start_stream_server as start_stream_server
    from .transport import Batch as Batch
    from .transport import Connection as Connection
    from .transport import ConnectionRequest as ConnectionRequest
    from .transport import Listener as Listener
    from .transport import Message as Message
    from .transport import PendingConnection as PendingConnection
    from .transport import RegionToken as RegionToken
    from .transport import RemoteRegion as RemoteRegion
    from .transport import Rights as Rights
    from .transport import Server as Server
    from .transport import Share as Share
    from .transport import connect as connect
    from .transport import listen as listen
    from .transport import prepare_connection as prepare_connection
    from .transport import start_server as start_server
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            ".async_connection_id": "AsyncConnectionId",
            ".async_queue_pair": "AsyncQueuePair ReceiveRing",
            ".config": "Config",
            ".dmabuf": "DmabufRegion",
            ".errors": "AuthenticationError BufferStateError ConnectionBrokenError "
            "ConnectionClosedError ConnectionManagerError DeviceEventError "
            "LeaseEndedError MessageTooLongError ProtocolError RDMAError RemoteRangeError "
            "RequestRefusedError VerbsError WorkCompletionError WrongLoopError",
            ".events": "DeviceEvents device_events",
            ".monitoring": "ConnectionChange add_connection_hook remove_connection_hook snapshot",
            ".mr_pool": "Buffer MemoryPool Region",
            ".reconnecting": "reconnect",
            ".streams": "create_connection create_server open_connection start_stream_server",
            ".transport": "Batch Connection ConnectionRequest Listener Message PendingConnection "
            "RegionToken RemoteRegion Rights Server Share connect listen prepare_connection "
            "start_server",
        },
    )

if os.environ.get("AIORDMA_MONITOR"):  # for `aiordma top`
    from .monitoring_socket import start as _start_monitoring

    _start_monitoring()
