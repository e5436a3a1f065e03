"""asyncio's streams, protocols and servers over RDMA connections.

The functions are::

    reader, writer = await aiordma.open_connection(host, port)
    transport, protocol = await aiordma.create_connection(Protocol, host, port)
    server = await aiordma.create_server(Protocol, host, port)
    server = await aiordma.start_stream_server(handler, host, port)

They correspond to asyncio's functions of the same names, and the last one to
`asyncio.start_server`. After the address they take the arguments of `aiordma.connect` and
`aiordma.listen`, except that `ssl` is TLS over the stream, as in asyncio. Both ends must be
streams, because they send messages with a meaning of their own over the connection (see
`StreamTransport`).

`EventLoop` is for software that connects through its event loop and cannot be configured otherwise.
Source: the asyncio documentation, "Transports and Protocols" and "Streams".
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
