"""Multicast groups, whose messages reach every queue pair attached to the group."""

from __future__ import annotations

from typing import Final

from aiordma import verbs
from aiordma._native import handles as h

from .._device.address import GID
from .._device.resource import Node, Resource

MULTICAST_QPN: Final = 0xFFFFFF
"""The queue pair number for a :class:`Destination` that is a multicast group.

See IBTA volume 1, clause 10.5.1.
"""


class MulticastAttachment(Resource[h.ibv_gid]):
    """A queue pair's membership in a multicast group, created by :meth:`QueuePair.attach_mcast`.

    ``gid`` and ``lid`` identify the group, and ``qp`` is the queue pair. Closing either the
    attachment or the queue pair ends the membership. See ibv_detach_mcast(3).
    """

    def __init__(self, node: Node[h.ibv_gid], qp: verbs.QueuePair, gid: GID, lid: int) -> None:
        super().__init__(node)
        self.qp = qp
        self.gid = gid
        self.lid = lid

    def _label(self) -> str:
        return f"MulticastAttachment of QueuePair {self.qp.qp_num:#x} to {self.gid}"
