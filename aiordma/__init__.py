"""RDMA for asyncio: send, recv, read, write and atomics as awaitable calls, with or without a card.

Importing this package loads almost nothing. Each name is loaded with its dependencies on first use.
`from aiordma import connect` at the top of a program counts as a use, so nothing remains to be
loaded while the event loop runs.
"""

import os
from typing import TYPE_CHECKING

from ._core.lazy_exports import lazy_exports

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ._exports.aiordma import *  # noqa: F403
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            ".async_connection_id": "AsyncConnectionId",
            ".async_queue_pair": "AsyncQueuePair ReceiveRing",
            ".config": "Config LoopConfig",
            ".dmabuf": "DmabufRegion",
            ".errors": "AuthenticationError BufferStateError ConnectionBrokenError "
            "ConnectionClosedError ConnectionManagerError DeviceEventError "
            "LeaseEndedError MessageTooLongError OutcomeUnknownError ProtocolError RDMAError "
            "RemoteRangeError RequestRefusedError VerbsError WorkCompletionError WrongLoopError",
            ".events": "DeviceEvents device_events",
            ".monitoring": "ConnectionChange add_connection_hook remove_connection_hook snapshot",
            ".mr_pool": "Buffer MemoryPool Region",
            ".reconnecting": "reconnect",
            ".streams": "create_connection create_server open_connection start_stream_server",
            ".testing": "",
            ".transport": "Batch Connection ConnectionRequest Listener Message PendingConnection "
            "RegionToken RemoteRegion Rights Server Share configure_loop connect listen "
            "prepare_connection start_server",
        },
    )

if os.environ.get("AIORDMA_MONITOR"):  # for `aiordma top`
    from .monitoring_socket import start as _start_monitoring

    _start_monitoring()
