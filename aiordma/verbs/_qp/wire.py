"""The medium of the bytes of a queue pair."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiordma._native import lib

from .._device.enums import LinkLayer, TransportType

if TYPE_CHECKING:
    from .queue_pair import QueuePair

_OF_SOFTWARE = {
    lib.AIORDMA_WIRE_SHARED_MEMORY: "shared memory",
    lib.AIORDMA_WIRE_TCP: "tcp",
}
_OF_LINK_LAYERS = {
    LinkLayer.ETHERNET: "roce",
    LinkLayer.INFINIBAND: "infiniband",
}


def wire(qp: QueuePair) -> str | None:
    """As :attr:`QueuePair.wire`."""
    context = qp.context
    if context.library.offers("wire"):
        return _OF_SOFTWARE.get(context.library.table.device.wire(qp.pointer))
    port = context.query_port(qp.query().port_num or 1)
    return of_port(port.link_layer, TransportType(context.pointer.device.transport_type))


def of_port(layer: LinkLayer, transport: TransportType) -> str | None:
    """The wire of a card's port."""
    return "iwarp" if transport is TransportType.IWARP else _OF_LINK_LAYERS.get(layer)
