"""Address handles, which store the resolved route to a datagram peer."""

from __future__ import annotations

import errno
from typing import NamedTuple, TypedDict, Unpack

from aiordma import verbs
from aiordma._core.arguments import integer
from aiordma._core.handshake_layout import Endpoint
from aiordma._native import ffi
from aiordma._native import handles as h
from aiordma.errors import VerbsError

from .._cq.work_completion import WorkCompletion
from .address import GID, AddressVector
from .enums import WCFlags
from .grh import GRH_SIZE
from .resource import Node, Resource
from .route_lookup import source_entry


class AddressHandle(Resource[h.ibv_ah]):
    """A route to a datagram peer, created by :meth:`ProtectionDomain.create_ah`.

    ``vector`` describes the route. Keep the handle open until the last request using it has
    completed (ibv_post_send(3)).
    """

    def __init__(
        self, pd: verbs.ProtectionDomain, pointer: h.ibv_ah, vector: AddressVector
    ) -> None:
        destroy = pd.context.library.calls.ibv_destroy_ah
        super().__init__(Node("AddressHandle", pointer, destroy, [pd.node]))
        self.pd = pd
        self.vector = vector

    def _details(self) -> str:
        return f"to {self.vector.dgid or self.vector.dlid}"


class Destination(NamedTuple):
    """A datagram's destination: the route to the peer, its queue pair number and its Q_Key."""

    ah: AddressHandle
    remote_qpn: int
    remote_qkey: int


class PathKeywords(TypedDict, total=False):
    """The optional fields of an :class:`AddressVector`. ``hop_limit`` defaults to 64."""

    hop_limit: int
    traffic_class: int
    flow_label: int
    sl: int
    static_rate: int


def vector_to(
    context: verbs.Context, local: Endpoint, remote: Endpoint, **path: Unpack[PathKeywords]
) -> AddressVector:
    """Return the route from a local endpoint to a peer's endpoint.

    Raises:
        ValueError: If ``local`` is not an endpoint on this device.
        VerbsError: With ENETUNREACH, if the local GID cannot reach the peer's GID. This is checked
            before calling the device.
    """
    source = source_entry(context, local)
    dgid = GID(remote.gid) if remote.is_global else None
    if dgid is not None and not source.can_reach(dgid):
        problem = context.explain_gid(source, dgid)
        raise VerbsError(errno.ENETUNREACH, "ibv_modify_qp", problem)
    return AddressVector(
        dgid=dgid, sgid_index=source.gid_index, dlid=remote.lid, port_num=source.port_num, **path
    )


def vector_from_wc(
    context: verbs.Context, wc: WorkCompletion, grh: bytes | bytearray | memoryview, port_num: int
) -> AddressVector:
    """Return the route to the sender of a received datagram. See ibv_init_ah_from_wc(3).

    Args:
        context: The device.
        wc: The receive's completion.
        grh: The first 40 bytes of the receive's memory. They are only used if the completion has
            the WCFlags.GRH flag.
        port_num: The port the datagram arrived on.
    """
    port_num = integer("port_num", port_num, 0, 0xFF)
    raw = ffi.new("struct ibv_wc *")
    raw.wc_flags = int(wc.wc_flags)
    raw.src_qp = wc.src_qp
    raw.slid, raw.sl, raw.dlid_path_bits = wc.slid or 0, wc.sl or 0, wc.dlid_path_bits or 0
    header = ffi.new("struct ibv_grh *")
    if wc.wc_flags & WCFlags.GRH:
        data = bytes(memoryview(grh)[:GRH_SIZE])
        if len(data) < GRH_SIZE:
            raise ValueError(f"a GRH must be {GRH_SIZE} bytes long, not {len(data)}")
        ffi.buffer(header)[:] = data
    attr = ffi.new("struct ibv_ah_attr *")
    with context._requires_capability("address handles from completions"):
        context.library.calls.ibv_init_ah_from_wc(context.pointer, port_num, raw, header, attr)
    return AddressVector.read(attr)
