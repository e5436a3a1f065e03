"""Multicast groups: what is sent to one reaches every queue pair that is attached to it."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Final

from aiordma._native import explained, ffi
from aiordma.errors import UnsupportedError, VerbsError

from .._device.address import GID
from .._device.enums import QPType
from .._device.resource import Node, Resource

if TYPE_CHECKING:
    from aiordma._native import handles as h

    from .queue_pair import QueuePair

MULTICAST_QPN: Final = 0xFFFFFF
"""The queue pair number of a :class:`Destination` that is a group: IBTA volume 1, clause 10.5.1."""


class MulticastAttachment(Resource["h.ibv_gid"]):
    """A queue pair in a multicast group, made by :meth:`QueuePair.attach_mcast`.

    ``gid`` and ``lid`` are those of the group, ``qp`` is the queue pair.
    Closing it detaches the queue pair (ibv_detach_mcast(3)); closing the queue pair does as well.
    """

    def __init__(self, node: Node[h.ibv_gid], qp: QueuePair, gid: GID, lid: int) -> None:
        super().__init__(node)
        self.qp = qp
        self.gid = gid
        self.lid = lid

    def _label(self) -> str:
        return f"MulticastAttachment of QueuePair {self.qp.qp_num:#x} to {self.gid}"


def attach(qp: QueuePair, gid: GID, lid: int) -> MulticastAttachment:
    """As :meth:`QueuePair.attach_mcast`."""
    context = qp.context
    if qp.qp_type is not QPType.UD:
        raise ValueError(f"{qp!r} cannot be in a multicast group: its type is not UD")
    if not gid.ip.is_multicast:  # of IPv6, or of IPv4 in its mapped form, as RoCE v2 has it
        raise ValueError(f"{gid} is not a multicast address")
    if not 0 <= lid < 1 << 16:
        raise ValueError(f"a LID has 16 bits, unlike {lid}")
    raw = ffi.new("union ibv_gid *")
    ffi.buffer(raw)[:] = gid.raw
    calls, pointer = context.library.calls, qp.pointer
    try:
        with context._offering("multicast groups"):
            calls.ibv_attach_mcast(pointer, raw, lid)
    except UnsupportedError:
        raise
    except VerbsError as error:
        detail = f"{qp!r} to {gid}"
        if error.errno == errno.ENOMEM:
            limits = context.query_device()
            detail += (
                f"; the device has {limits.max_mcast_grp} groups with "
                f"{limits.max_mcast_qp_attach} queue pairs each"
            )
        raise explained(error, detail) from None

    def detach(raw: h.ibv_gid) -> None:
        calls.ibv_detach_mcast(pointer, raw, lid)

    return MulticastAttachment(Node("MulticastAttachment", raw, detach, [qp.node]), qp, gid, lid)
