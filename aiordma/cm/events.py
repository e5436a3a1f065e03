"""Connection manager events, and the exceptions for failed operations."""

from __future__ import annotations

from typing import NamedTuple

from aiordma.errors import (
    AddressError,
    ConnectionManagerError,
    RejectedError,
    RouteError,
    ServiceRejectedError,
    UnreachableError,
    host_port,
)
from aiordma.verbs._device.enums import OpenEnum

from .address import Address
from .connection_id import ConnectionId
from .parameters import ConnectionParameters, DatagramParameters


class EventType(OpenEnum):
    """The type of an event (``enum rdma_cm_event_type``). See rdma_get_cm_event(3)."""

    ADDR_RESOLVED = 0
    ADDR_ERROR = 1
    ROUTE_RESOLVED = 2
    ROUTE_ERROR = 3
    CONNECT_REQUEST = 4
    CONNECT_RESPONSE = 5
    CONNECT_ERROR = 6
    UNREACHABLE = 7
    REJECTED = 8
    ESTABLISHED = 9
    DISCONNECTED = 10
    DEVICE_REMOVAL = 11
    MULTICAST_JOIN = 12
    MULTICAST_ERROR = 13
    ADDR_CHANGE = 14
    TIMEWAIT_EXIT = 15


_FAILURE_TEXTS = {
    EventType.ADDR_ERROR: "no RDMA device has a route to {}",
    EventType.ROUTE_ERROR: "no route to {}",
    EventType.CONNECT_ERROR: "the connection to {} could not be established",
    EventType.UNREACHABLE: "{} does not respond or cannot be reached",
    EventType.REJECTED: "{} rejected the connection",
    EventType.DEVICE_REMOVAL: "the device is being removed; close all objects on it",
    EventType.MULTICAST_ERROR: "could not join the multicast group {}, or lost the membership",
}
_ERROR_CLASSES = {
    EventType.ADDR_ERROR: AddressError,
    EventType.ROUTE_ERROR: RouteError,
    EventType.UNREACHABLE: UnreachableError,
}


class ConnectionEvent(NamedTuple):
    """A connection manager event. See rdma_get_cm_event(3).

    The object is a copy of an event that has already been acknowledged.

    - ``id``: The ID the event belongs to. A CONNECT_REQUEST event has a new ID, which you must
      accept or reject, and eventually close.
    - ``listen_id``: For CONNECT_REQUEST, the listening ID, or None if its ConnectionId object has
      been deleted.
    - ``status``: A negative errno value, or the reason code for a rejection.
    - ``private_data``: The peer's private data, padded with zeros by the connection manager.
    - ``parameters``: The connection parameters requested or granted by the peer.
    - ``datagrams``: In a datagram port space, the destination or the peer's private data.
    - ``group``: For MULTICAST_JOIN and MULTICAST_ERROR, the address of the multicast group.

    After DEVICE_REMOVAL, close every object on the device. The device cannot be removed while
    objects on it are open. ADDR_CHANGE means that the route to the peer now uses a different port.
    To use the new port, open a new connection.
    """

    type: EventType
    id: ConnectionId
    listen_id: ConnectionId | None
    status: int
    parameters: ConnectionParameters
    datagrams: DatagramParameters | None = None
    group: Address | None = None

    @property
    def private_data(self) -> bytes:
        """The private data sent by the peer."""
        return (self.datagrams or self.parameters).private_data

    def error(self) -> ConnectionManagerError | None:
        """Return an exception if the event reports a failure, or None otherwise."""
        if self.type not in _FAILURE_TEXTS:
            return None
        address = self.group or self.id.peer_address
        text = _FAILURE_TEXTS[self.type].format(
            host_port(address) if address else "an unknown address"
        )
        event = f"RDMA_CM_EVENT_{self.type.name}"
        if self.type is EventType.REJECTED:
            return RejectedError(
                text, reason=self.status, private_data=self.private_data, event=event
            )
        # For a datagram service, a positive status comes from the peer's reply
        # (rdma_get_cm_event(3)).
        if self.type is EventType.UNREACHABLE and self.status > 0:
            return ServiceRejectedError(
                text, reason=self.status, private_data=self.private_data, event=event
            )
        error_class = _ERROR_CLASSES.get(self.type, ConnectionManagerError)
        return error_class(text, event=event, status=self.status)
