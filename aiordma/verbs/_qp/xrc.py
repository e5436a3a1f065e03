"""Extended reliable connections: one connection between two processes for many of their queues.

The receiving side is a queue pair of an XRC domain, without queues of its own
(:meth:`XRCDomain.create_qp`); what arrives goes to the shared receive queue that the request names
by its number. The sending side is a queue pair of a protection domain, of type XRC_SEND. Processes
that open the same file share the domain on a card; the embedded device shares it within a process
only. Source: IBTA volume 1, annex A14; ibv_open_xrcd(3).

rdma_rxe has none, and no card has run this module.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from aiordma._core.arguments import I32_MAX, integer
from aiordma._native import ffi

from .._device.resource import Node, Resource
from .qp_creation import XRC, create_xrc_target, require_xrc

if TYPE_CHECKING:
    from aiordma._native import handles as h

    from .._device.context import Context
    from .queue_pair import QueuePair

# enum ibv_xrcd_init_attr_mask
_FD, _OFLAGS = 1 << 0, 1 << 1


class XRCDomain(Resource["h.ibv_xrcd"]):
    """A domain of XRC queue pairs and shared receive queues: :meth:`Context.open_xrcd`."""

    def __init__(self, context: Context, node: Node[h.ibv_xrcd], *, own: bool) -> None:
        """For this package. `own`: no other process can open it."""
        super().__init__(node)
        self.context = context
        self._own = own

    def create_qp(self) -> QueuePair:
        """Make the receiving side of a connection, type XRC_RECV, in state RESET."""
        return create_xrc_target(self, self.context, own=self._own)


def open_xrcd(context: Context, fd: int | None, exclusive: bool) -> XRCDomain:
    """As :meth:`Context.open_xrcd`."""
    require_xrc(context, "ibv_open_xrcd")
    attr = ffi.new("struct ibv_xrcd_init_attr *")
    attr.comp_mask = _FD | _OFLAGS
    attr.fd = -1 if fd is None else integer("fd", fd, 0, I32_MAX)
    attr.oflags = os.O_CREAT | (os.O_EXCL if exclusive else 0)
    calls = context.library.calls
    with context._offering(XRC):
        pointer = calls.ibv_open_xrcd(context.pointer, attr)
    node = Node("XRCDomain", pointer, calls.ibv_close_xrcd, [context.node])
    return XRCDomain(context, node, own=fd is None or context.library.name == "embedded")
