"""The connection manager: connections by address, as sockets make them; synchronous.

::

    with cm.EventChannel(device.library) as channel, channel.create_id() as id:
        id.resolve_addr(("10.9.9.1", 7471))          # then, event by event, as channel.fd tells:
        id.resolve_route()                           # ADDR_RESOLVED
        qp = id.create_qp(pd, cq); id.connect()      # ROUTE_RESOLVED; pd of id.context
        ...                                          # ESTABLISHED

Failures are exceptions of :mod:`aiordma.errors`; what fails later is an event, whose ``error()``
is the exception.
"""

from aiordma.verbs import ECE

from .address import Address
from .connection_id import ConnectionId
from .event_channel import EventChannel
from .events import ConnectionEvent, EventType
from .lookup import AddressFlags, AddressInfo, get_devices, getaddrinfo
from .options import Option
from .parameters import (
    ACCEPT_DATA_MAX,
    CONNECT_DATA_MAX,
    DATAGRAM_ANSWER_DATA_MAX,
    DATAGRAM_REQUEST_DATA_MAX,
    REJECT_DATA_MAX,
    UDP_QKEY,
    ConnectionParameters,
    DatagramParameters,
    PortSpace,
)

__all__ = [
    "ACCEPT_DATA_MAX",
    "CONNECT_DATA_MAX",
    "DATAGRAM_ANSWER_DATA_MAX",
    "DATAGRAM_REQUEST_DATA_MAX",
    "ECE",
    "REJECT_DATA_MAX",
    "UDP_QKEY",
    "Address",
    "AddressFlags",
    "AddressInfo",
    "ConnectionEvent",
    "ConnectionId",
    "ConnectionParameters",
    "DatagramParameters",
    "EventChannel",
    "EventType",
    "Option",
    "PortSpace",
    "get_devices",
    "getaddrinfo",
]
