"""The RDMA connection manager (librdmacm): connecting by IP address and port; synchronous.

::

    with cm.EventChannel(device.library) as channel, channel.create_id() as id:
        id.resolve_addr(("10.9.9.1", 7471))          # then, one event after another on channel.fd:
        id.resolve_route()                           # ADDR_RESOLVED
        qp = id.create_qp(pd, cq); id.connect()      # ROUTE_RESOLVED; pd of id.context
        ...                                          # ESTABLISHED

A call that fails raises an exception of :mod:`aiordma.errors`. An operation that fails later
delivers an event, whose ``error()`` is the exception.
"""

from typing import TYPE_CHECKING

from aiordma._core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from aiordma.verbs import ECE as ECE

    from .address import Address as Address
    from .connection_id import ConnectionId as ConnectionId
    from .event_channel import EventChannel as EventChannel
    from .events import ConnectionEvent as ConnectionEvent
    from .events import EventType as EventType
    from .lookup import AddressFlags as AddressFlags
    from .lookup import AddressInfo as AddressInfo
    from .lookup import get_devices as get_devices
    from .lookup import getaddrinfo as getaddrinfo
    from .options import Option as Option
    from .parameters import ACCEPT_DATA_MAX as ACCEPT_DATA_MAX
    from .parameters import CONNECT_DATA_MAX as CONNECT_DATA_MAX
    from .parameters import DATAGRAM_ANSWER_DATA_MAX as DATAGRAM_ANSWER_DATA_MAX
    from .parameters import DATAGRAM_REQUEST_DATA_MAX as DATAGRAM_REQUEST_DATA_MAX
    from .parameters import REJECT_DATA_MAX as REJECT_DATA_MAX
    from .parameters import UDP_QKEY as UDP_QKEY
    from .parameters import ConnectionParameters as ConnectionParameters
    from .parameters import DatagramParameters as DatagramParameters
    from .parameters import PortSpace as PortSpace
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
