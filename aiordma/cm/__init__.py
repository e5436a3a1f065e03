"""A synchronous interface to the RDMA connection manager, which connects by IP address and port.

::

    with cm.EventChannel(device.library) as channel, channel.create_id() as id:
        id.resolve_addr(("10.9.9.1", 7471))          # then wait for each event on channel.fd:
        id.resolve_route()                           # after ADDR_RESOLVED
        qp = id.create_qp(pd, cq); id.connect()      # after ROUTE_RESOLVED; pd of id.context
        ...                                          # after ESTABLISHED

Most calls start an operation and return immediately. If the call itself fails, it raises an
exception from :mod:`aiordma.errors`. If the operation fails later, the channel delivers an event
whose ``error()`` method returns the exception.
"""

from typing import TYPE_CHECKING

from aiordma._core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from aiordma._exports.cm import *  # noqa: F403
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "aiordma.verbs": "ECE",
            ".address": "Address",
            ".connection_id": "ConnectionId",
            ".event_channel": "EventChannel",
            ".events": "ConnectionEvent EventType",
            ".lookup": "AddressFlags AddressInfo get_devices getaddrinfo",
            ".options": "Option",
            ".parameters": "ACCEPT_DATA_MAX CONNECT_DATA_MAX DATAGRAM_ANSWER_DATA_MAX "
            "DATAGRAM_REQUEST_DATA_MAX REJECT_DATA_MAX UDP_QKEY ConnectionParameters "
            "DatagramParameters PortSpace",
        },
    )
