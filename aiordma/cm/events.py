"""Events of the connection manager, and the exceptions that they amount to."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from aiordma.errors import (
    AddressError,
    ConnectionManagerError,
    RejectedError,
    RouteError,
    ServiceRejectedError,
    UnreachableError,
)
from aiordma.verbs._device.enums import OpenEnum

from .parameters import ConnectionParameters, DatagramParameters

if TYPE_CHECKING:
    from .address import Address
    from .connection_id import ConnectionId


class EventType(OpenEnum):
    """``enum rdma_cm_event_type``, see rdma_get_cm_event(3)."""

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


_WHAT = {
    EventType.ADDR_ERROR: "the address cannot be resolved to an RDMA device",
    EventType.ROUTE_ERROR: "no route to the address",
    EventType.CONNECT_ERROR: "the connection could not be made",
    EventType.UNREACHABLE: "no answer, or the address cannot be reached",
    EventType.REJECTED: "the connection was rejected",
    EventType.DEVICE_REMOVAL: "the device is being removed; close what is on it",
    EventType.MULTICAST_ERROR: "the multicast group could not be joined, or was lost",
}
_CLASSES = {
    EventType.ADDR_ERROR: AddressError,
    EventType.ROUTE_ERROR: RouteError,
    EventType.UNREACHABLE: UnreachableError,
}


class ConnectionEvent(NamedTuple):
    """Something happened to a connection; already acknowledged, everything in it is a copy.

    For CONNECT_REQUEST ``id`` is the new connection, which must be accepted or rejected and
    closed, and ``listen_id`` the listening one (None if its object is gone). ``status`` is a
    negative errno, or for REJECTED the reason. ``private_data`` is padded with zeros by the
    connection manager; ``parameters`` has what else the peer asked for or granted.

    In the port spaces of datagrams, and for MULTICAST_JOIN, ``datagrams`` says where to send;
    ``group`` is the multicast address that was joined or, for MULTICAST_ERROR, was not.

    DEVICE_REMOVAL: every object on the device must be closed before the removal can go on.
    ADDR_CHANGE: the way to the peer leads through another port now; the connection may be made
    anew. Source: rdma_get_cm_event(3).
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
        """What the peer sent along."""
        return (self.datagrams or self.parameters).private_data

    def error(self) -> ConnectionManagerError | None:
        """The exception that the event amounts to; None when it is not a failure."""
        if self.type not in _WHAT:
            return None
        peer = self.group or self.id.peer_address
        text = _WHAT[self.type] + (f": {peer[0]} port {peer[1]}" if peer else "")
        event = f"RDMA_CM_EVENT_{self.type.name}"
        if self.type is EventType.REJECTED:
            return RejectedError(
                text, reason=self.status, private_data=self.private_data, event=event
            )
        # rdma_get_cm_event(3): of a datagram service, a status that is no errno is the answer's.
        if self.type is EventType.UNREACHABLE and self.status > 0:
            return ServiceRejectedError(
                text, reason=self.status, private_data=self.private_data, event=event
            )
        cls = _CLASSES.get(self.type, ConnectionManagerError)
        return cls(text, event=event, status=self.status)
