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
    from ._exports.aiordma import *  # noqa: F403
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
            "LeaseEndedError MessageTooLongError OutcomeUnknownError ProtocolError RDMAError "
            "RemoteRangeError RequestRefusedError VerbsError WorkCompletionError WrongLoopError",
            ".events": "DeviceEvents device_events",
            ".monitoring": "ConnectionChange add_connection_hook remove_connection_hook snapshot",
            ".mr_pool": "Buffer MemoryPool Region",
            ".reconnecting": "reconnect",
            ".streams": "create_connection create_server open_connection start_stream_server",
            ".testing": "",
            ".transport": "Batch Connection ConnectionRequest Listener Message PendingConnection "
            "RegionToken RemoteRegion Rights Server Share connect listen prepare_connection "
            "start_server",
        },
    )

if os.environ.get("AIORDMA_MONITOR"):  # for `aiordma top`
    from .monitoring_socket import start as _start_monitoring

    _start_monitoring()
