"""The channel that delivers the connection manager's events."""

from __future__ import annotations

import errno
from typing import TypeAlias

from aiordma._core.arguments import choice
from aiordma._native import Library, failure, ffi, lib
from aiordma._native import handles as h
from aiordma.errors import UnsupportedError, VerbsError
from aiordma.verbs._device.resource import Node, Resource

from .address import Address
from .connection_id import ConnectionId
from .events import ConnectionEvent, EventType
from .lookup import check_library
from .parameters import ConnectionParameters, DatagramParameters, PortSpace

_MULTICAST = frozenset({EventType.MULTICAST_JOIN, EventType.MULTICAST_ERROR})
_WITH_DESTINATION = frozenset({EventType.ESTABLISHED, EventType.MULTICAST_JOIN})
_Parameters: TypeAlias = tuple[ConnectionParameters, DatagramParameters | None, Address | None]


def _read_parameters(kind: EventType, id: ConnectionId, raw: h.rdma_cm_event) -> _Parameters:
    """Read an event's parameters, and find the multicast group to which it belongs, if any.

    The port space determines whether the event has connection parameters or datagram parameters
    (rdma_get_cm_event(3)). In a datagram port space, the connection parameters are the defaults.
    """
    multicast = kind in _MULTICAST
    if not (multicast or id.port_space.datagrams):
        return ConnectionParameters.read(raw.param.conn), None, None
    ud = raw.param.ud
    # In multicast events, the private data is the context passed to rdma_join_multicast.
    group = id.group_of(ud.private_data) if multicast else None
    datagrams = DatagramParameters.read(
        ud, private_data=not multicast, destination=kind in _WITH_DESTINATION
    )
    return ConnectionParameters(), datagrams, group


class EventChannel(Resource[h.rdma_event_channel]):
    """A channel that delivers the events of connection IDs.

    The channel is synchronous and never blocks. When an event arrives, the file descriptor ``fd``
    becomes readable. ``fd`` can also become readable without an event, so ``get_event`` may return
    None. Closing the channel closes all of its connection IDs.

    Creating a channel in a child process can raise UnsupportedError. The error means that the
    parent process opened devices through the connection manager before the fork.
    """

    def __init__(self, library: Library) -> None:
        self.library: Library = check_library(library)
        library.enter_cm()
        try:
            pointer = library.calls.rdma_create_event_channel()
        except VerbsError as error:
            likely = "cannot open the kernel's connection manager"
            if error.errno != errno.EMFILE:
                likely += "; check that the kernel module rdma_ucm is loaded"
            raise library.open_failure(error, likely) from None
        self.fd: int = pointer.fd
        destroy = library.calls.rdma_destroy_event_channel
        super().__init__(Node("EventChannel", pointer, destroy))
        code = lib.aiordma_set_nonblocking(library.table, self.fd)  # it is blocking by default
        if code:
            self.close()
            raise failure("fcntl", code, "cannot make the event channel non-blocking")

    def create_id(self, port_space: PortSpace = PortSpace.TCP) -> ConnectionId:
        """Create an ID for a connection or a listener.

        Raises:
            UnsupportedError: If the library does not support this port space.
        """
        port_space = choice("port_space", port_space, PortSpace)
        result = ffi.new("struct rdma_cm_id **")
        try:
            self.library.calls.rdma_create_id(self.pointer, result, ffi.NULL, port_space)
        except VerbsError as error:
            if error.errno != errno.EPROTONOSUPPORT:
                raise
            raise UnsupportedError(
                f"PortSpace.{port_space.name}",
                device=f"the {self.library.name} library",
                verb=error.verb,
                errno=errno.EPROTONOSUPPORT,
            ) from None
        return ConnectionId(self, result[0])

    def get_event(self) -> ConnectionEvent | None:
        """Return and acknowledge the next event, without waiting.

        If an ID's Python object has been closed or deleted, the ID's events are acknowledged and
        skipped.

        Returns:
            The event, or None if no event is pending.
        """
        calls = self.library.calls
        result = ffi.new("struct rdma_cm_event **")
        while calls.rdma_get_cm_event(self.pointer, result):
            raw = result[0]
            try:
                event = self._copy_event(raw)
            finally:
                calls.rdma_ack_cm_event(raw)
            if event is not None:
                return event
        return None

    def _copy_event(self, raw: h.rdma_cm_event) -> ConnectionEvent | None:
        """Copy an event, which acknowledging frees. Returns None if its ID has been closed."""
        kind = EventType(raw.event)
        if kind is EventType.CONNECT_REQUEST:
            id: ConnectionId | None = ConnectionId(self, raw.id)
            listen_id = ConnectionId.of(self.library, raw.listen_id)
        else:
            id = ConnectionId.of(self.library, raw.id)
            listen_id = None
        if id is None:
            return None
        id._note(kind.name)
        id.peer_address  # noqa: B018 - caches it, for the text of errors about a closed id
        parameters, datagrams, group = _read_parameters(kind, id, raw)
        return ConnectionEvent(kind, id, listen_id, raw.status, parameters, datagrams, group)

    def _details(self) -> str:
        return f"fd {self.fd}"
