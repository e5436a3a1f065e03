"""asyncio's streams, protocols and servers over RDMA.

::

    reader, writer = await aiordma.open_connection(host, port)
    transport, protocol = await aiordma.create_connection(Protocol, host, port)
    server = await aiordma.create_server(Protocol, host, port)
    server = await aiordma.start_stream_server(handler, host, port)

The first three functions correspond to asyncio's functions of the same names. `start_stream_server`
corresponds to `asyncio.start_server`. After the address, these functions accept the options of
`aiordma.connect` and `aiordma.listen`, except `ssl`. As in asyncio, `ssl` encrypts the stream with
TLS.

Both ends of a connection must be streams, because streams have their own message format (see
`StreamTransport`).

Use `EventLoop` for software that opens its connections through its event loop and cannot be
configured in another way. Source: the asyncio documentation, "Transports and Protocols" and
"Streams".
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
