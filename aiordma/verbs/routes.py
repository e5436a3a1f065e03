"""Ways to a peer that do not work: which GID was used, and which would be better."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from aiordma._core.handshake import Endpoint
from aiordma._native import failure
from aiordma.errors import VerbsError

from .address import GID, AddressVector, GIDEntry
from .enums import GIDType, PortState
from .ports import best

if TYPE_CHECKING:
    from aiordma._native import handles as h

    from .context import Context

# What a device says when the addresses of the way cannot be resolved: ibv_create_ah(3),
# ibv_modify_qp(3) and what the kernel's address resolution answers.
NO_ROUTE = frozenset(
    {errno.ETIMEDOUT, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENODEV, errno.EADDRNOTAVAIL}
)


def active_port(context: Context, port_num: int) -> h.PortAttr:
    """What an ACTIVE port says of itself; else VerbsError (ENETDOWN) naming port and state."""
    port = context.ask_port(port_num)
    if port.state != PortState.ACTIVE:
        raise VerbsError(
            errno.ENETDOWN,
            "ibv_query_port",
            f"port {port_num} of {context.name} is {PortState(port.state).name}, not ACTIVE",
        )
    return port


def source_entry(context: Context, local: Endpoint) -> GIDEntry:
    """The GID table entry of a local endpoint, looked up now: an index may change."""
    found = [
        entry
        for entry in context.query_gid_table()
        if entry.gid.raw == local.gid and (entry.gid_type is GIDType.ROCE_V1) == local.is_roce_v1
    ]
    if not found:
        raise ValueError(f"{context.name} has no GID {GID(local.gid)} any more")
    return best(found)


def describe(context: Context, vector: AddressVector) -> str:
    """The way: peer, GID index and GID, port, device; and what is wrong with it, if that shows."""
    where = f"port {vector.port_num} of {context.name}"
    if vector.dgid is None:
        return f"to LID {vector.dlid} by {where}"
    source, problem = f"GID index {vector.sgid_index}", "is empty"
    for entry in context.query_gid_table():
        if (entry.port_num, entry.gid_index) == (vector.port_num, vector.sgid_index):
            source, problem = str(entry), entry.problem(vector.dgid)
    text = f"to {vector.dgid} by {source} of {where}"
    if problem:
        better = context.choose_gid(vector.port_num, vector.dgid)
        advice = "there is no better one" if better.problem(vector.dgid) else f"{better} would do"
        text += f", which {problem}; {advice}"
    return text


def explain(error: VerbsError, context: Context, vector: AddressVector, what: str) -> VerbsError:
    """The same failure, with the way that was tried."""
    detail = f"{what} {describe(context, vector)}"
    if error.errno in NO_ROUTE:
        detail += "; there is no way to the peer from there: check its address and the routes"
    return failure(error.verb, error.errno or 0, detail)
