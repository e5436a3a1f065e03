"""asyncio's streams, protocols and servers over RDMA connections::

    reader, writer = await aiordma.open_connection(host, port)
    transport, protocol = await aiordma.create_connection(Protocol, host, port)
    server = await aiordma.create_server(Protocol, host, port)
    server = await aiordma.start_stream_server(handler, host, port)

They are what the functions of the same names (`asyncio.start_server` for the last) are over TCP,
with the arguments of `aiordma.connect` and `aiordma.listen` after the address; but `ssl` is TLS
over the stream, as it is there.  Both ends must be streams: on the connection they are messages
with a meaning of their own (`StreamTransport`).
`EventLoop` is for software that connects by its loop and cannot be told otherwise.
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
