"""asyncio's streams, protocols and servers over RDMA.

::

    reader, writer = await aiordma.open_connection(host, port)
    transport, protocol = await aiordma.create_connection(Protocol, host, port)
    server = await aiordma.create_server(Protocol, host, port)
    server = await aiordma.start_stream_server(handler, host, port)

The first three functions correspond to the asyncio functions of the same name, and
`start_stream_server` corresponds to `asyncio.start_server`. Apart from the address, they accept the
options of `aiordma.connect` and `aiordma.listen`. The exception is `ssl`, which has the same
meaning as in asyncio: it encrypts the stream with TLS.

Both ends of a connection must use streams, because streams have their own message format (see
`StreamTransport`).

Some software opens its connections through the event loop and cannot be configured to use these
functions. Run it on an `EventLoop` instead. For the interfaces, see "Transports and Protocols" and
"Streams" in the asyncio documentation.
"""

from typing import TYPE_CHECKING

from aiordma._core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from aiordma._exports.streams import *  # noqa: F403
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            ".client": "create_connection open_connection sendfile",
            ".loop": "EventLoop OverRDMA",
            ".server": "StreamServer create_server start_stream_server",
            ".transport": "StreamTransport",
        },
    )
