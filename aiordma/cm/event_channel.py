"""The channel on which the connection manager's events arrive."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiordma._native import Library, failure, ffi, lib
from aiordma.errors import VerbsError
from aiordma.verbs.resource import Node, Resource

from .connection_id import ConnectionId
from .events import ConnectionEvent, EventType
from .parameters import ConnectionParameters, PortSpace

if TYPE_CHECKING:
    from aiordma._native import handles as h


class EventChannel(Resource["h.EventChannelPointer"]):
    """Events of many connections, for an event loop: ``fd`` is readable when there is one.

    It may be readable earlier, when looking for an event does the work that leads to it.
    Synchronous, and never blocks. Closing it closes every connection id on it.
    """

    def __init__(self, library: Library) -> None:
        self.library = library
        try:
            pointer = library.calls.rdma_create_event_channel()
        except VerbsError as error:
            detail = "the kernel's connection manager cannot be opened; is rdma_ucm loaded?"
            raise failure(error.verb, error.errno or 0, detail) from None
        self.fd = pointer.fd
        destroy = library.calls.rdma_destroy_event_channel
        super().__init__(Node("EventChannel", pointer, destroy))
        code = lib.aiordma_set_nonblocking(self.fd)  # librdmacm makes it blocking
        if code:
            self.close()
            raise failure("fcntl", code, "the event channel's fd")

    def create_id(self, port_space: PortSpace = PortSpace.TCP) -> ConnectionId:
        """Make an id: the beginning of a connection, or of a listener."""
        result = ffi.new("struct rdma_cm_id **")
        self.library.calls.rdma_create_id(self.pointer, result, ffi.NULL, port_space)
        return ConnectionId(self, result[0])

    def get_event(self) -> ConnectionEvent | None:
        """Take, copy and acknowledge the next event; None when there is none now.

        Events of ids whose object is gone are acknowledged and passed over.
        """
        calls = self.library.calls
        result = ffi.new("struct rdma_cm_event **")
        while calls.rdma_get_cm_event(self.pointer, result):
            raw = result[0]
            try:
                event = self._read(raw)
            finally:
                calls.rdma_ack_cm_event(raw)
            if event is not None:
                return event
        return None

    def _read(self, raw: h.EventPointer) -> ConnectionEvent | None:
        kind = EventType(raw.event)
        if kind is EventType.CONNECT_REQUEST:
            id: ConnectionId | None = ConnectionId(self, raw.id)
            listen_id = ConnectionId.of(self.library, raw.listen_id)
        else:
            id = ConnectionId.of(self.library, raw.id)
            listen_id = None
        if id is None:
            return None
        id.peer_address  # noqa: B018 - remembers it, for messages about a closed id
        parameters = ConnectionParameters.read(raw.param.conn)
        return ConnectionEvent(kind, id, listen_id, raw.status, parameters)

    def _details(self) -> str:
        return f"fd {self.fd}"
