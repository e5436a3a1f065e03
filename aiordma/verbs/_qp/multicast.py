"""Multicast groups: a message to a group reaches every queue pair attached to it."""

from __future__ import annotations

from typing import Final

from aiordma import verbs
from aiordma._native import handles as h

from .._device.address import GID
from .._device.resource import Node, Resource

MULTICAST_QPN: Final = 0xFFFFFF
"""The queue pair number of a group in a :class:`Destination`: IBTA volume 1, clause 10.5.1."""


class MulticastAttachment(Resource[h.ibv_gid]):
    """A queue pair's membership in a multicast group: :meth:`QueuePair.attach_mcast`.

    ``gid`` and ``lid`` belong to the group, and ``qp`` is the queue pair. Closing the attachment or
    the queue pair ends the membership (ibv_detach_mcast(3)).
    """

    def __init__(self, node: Node[h.ibv_gid], qp: verbs.QueuePair, gid: GID, lid: int) -> None:
        super().__init__(node)
        self.qp = qp
        self.gid = gid
        self.lid = lid

    def _label(self) -> str:
        return f"MulticastAttachment of QueuePair {self.qp.qp_num:#x} to {self.gid}"
