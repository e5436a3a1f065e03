"""Extended reliable connections (XRC), which share one connection among many receive queues.

With XRC, two processes need only one connection, no matter how many queues they use. The receiving
side of the connection is a queue pair in an XRC domain (:meth:`XRCDomain.create_qp`), which has no
queues of its own. Each request contains the number of the shared receive queue to deliver the
message to. The sending side is an XRC_SEND queue pair in a protection domain.

On a card, processes share a domain by opening the same file. The embedded device only shares
domains within a process. See IBTA volume 1, annex A14, and ibv_open_xrcd(3).

rdma_rxe does not support XRC, and this module has not been tested on a card.
"""

from __future__ import annotations

import os

from aiordma import verbs
from aiordma._core.arguments import I32_MAX, integer
from aiordma._native import ffi
from aiordma._native import handles as h
from aiordma.errors import VerbsError

from .._device.enums import QPType
from .._device.resource import Node, Resource
from .qp_attributes import QPCapabilities, reset_function
from .qp_creation import XRC, QPOptions, creation_error, require_xrc
from .queue_pair import QueuePair

_XRCD = 1 << 1  # a bit of enum ibv_qp_init_attr_mask
# Bits of enum ibv_xrcd_init_attr_mask.
_FD, _OFLAGS = 1 << 0, 1 << 1


class XRCDomain(Resource[h.ibv_xrcd]):
    """A domain for XRC queue pairs and receive queues, opened by :meth:`Context.open_xrcd`."""

    def __init__(self, context: verbs.Context, node: Node[h.ibv_xrcd], *, is_private: bool) -> None:
        """Initialize the object. `is_private` means that no other process can open the domain."""
        super().__init__(node)
        self.context = context
        self._is_private = is_private

    def create_qp(self) -> QueuePair:
        """Create the receiving side of a connection.

        This is an XRC_RECV queue pair in the RESET state.
        """
        context, calls = self.context, self.context.library.calls
        attr = ffi.new("struct ibv_qp_init_attr_ex *")
        attr.qp_type, attr.comp_mask, attr.xrcd = QPType.XRC_RECV, _XRCD, self.pointer
        try:
            pointer = calls.ibv_create_qp_ex(context.pointer, attr)
        except VerbsError as error:
            no_queues = QPCapabilities(0, 0, 0, 0, 0)
            raise creation_error(error, context, QPType.XRC_RECV, no_queues, QPOptions()) from None
        node = Node("QueuePair", pointer, calls.ibv_destroy_qp, [self.node])
        if self._is_private:  # other processes can use the queue pairs of a shared domain
            node.halt = reset_function(context.library)
        return QueuePair(node, None, None, None, attr, context=context)


def open_xrcd(
    context: verbs.Context, fd: int | None = None, *, exclusive: bool = False
) -> XRCDomain:
    """Open an XRC domain, creating it if it does not exist. See ibv_open_xrcd(3).

    Args:
        context: The device.
        fd: A file descriptor. Processes that pass descriptors of the same file share the domain.
            Without a file, the domain is private.
        exclusive: Whether to fail if the domain already exists.

    Raises:
        UnsupportedError: If the device does not support XRC.
    """
    require_xrc(context, "ibv_open_xrcd")
    attr = ffi.new("struct ibv_xrcd_init_attr *")
    attr.comp_mask = _FD | _OFLAGS
    attr.fd = -1 if fd is None else integer("fd", fd, 0, I32_MAX)
    attr.oflags = os.O_CREAT | (os.O_EXCL if exclusive else 0)
    calls = context.library.calls
    with context._requires_capability(XRC):
        pointer = calls.ibv_open_xrcd(context.pointer, attr)
    node = Node("XRCDomain", pointer, calls.ibv_close_xrcd, [context.node])
    return XRCDomain(context, node, is_private=fd is None or context.library.name == "embedded")
