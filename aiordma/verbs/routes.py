"""Ways to a peer that do not work: which GID was used, and which would be better."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from aiordma._core.handshake import Endpoint
from aiordma._native import failure
from aiordma.errors import VerbsError

from .address import GID, AddressVector, GIDEntry
from .enums import GIDType, PortState

if TYPE_CHECKING:
    from .context import Context

# What a device says when the addresses of the way cannot be resolved: ibv_create_ah(3),
# ibv_modify_qp(3) and what the kernel's address resolution answers.
NO_ROUTE = frozenset(
    {errno.ETIMEDOUT, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENODEV, errno.EADDRNOTAVAIL}
)


def require_active(context: Context, port_num: int) -> None:
    """VerbsError (ENETDOWN) naming port and state when a port is not ACTIVE."""
    port = context.query_port(port_num)
    if port.state is not PortState.ACTIVE:
        raise VerbsError(
            errno.ENETDOWN,
            "ibv_query_port",
            f"port {port_num} of {context.name} is {port.state.name}, not ACTIVE",
        )


def source_entry(context: Context, local: Endpoint) -> GIDEntry:
    """The GID table entry of a local endpoint, looked up now: an index may change."""
    gid = GID(local.gid)
    found = [
        entry
        for entry in context.query_gid_table()
        if entry.gid == gid and (entry.gid_type is GIDType.ROCE_V1) == local.is_roce_v1
    ]
    if not found:
        raise ValueError(f"{context.name} has no GID {gid} any more")
    return min(found, key=GIDEntry.preference)


def better_entry(table: list[GIDEntry], vector: AddressVector) -> GIDEntry | None:
    """The entry of the same port that fits the peer's GID better than the one that was used.

    An IPv4 peer is reached from an IPv4 address, a link-local one from a link-local one; other
    than that the order is that of the automatic choice.
    """
    if vector.dgid is None:
        return None
    there = vector.dgid.ip

    def rank(entry: GIDEntry) -> tuple[bool, bool, tuple[int, int, int]]:
        here = entry.gid.ip
        return (
            here.version != there.version,
            here.is_link_local != there.is_link_local,
            entry.preference(),
        )

    here = [entry for entry in table if entry.port_num == vector.port_num]
    used = next((entry for entry in here if entry.gid_index == vector.sgid_index), None)
    best = min(here, key=rank, default=None)
    if best is None or (used is not None and rank(best) >= rank(used)):
        return None
    return best


def describe(context: Context, vector: AddressVector) -> str:
    """``"to GID by GID index I (GID) of port P of DEVICE"``, with the better index if any."""
    if vector.dgid is None:
        return f"to LID {vector.dlid} by port {vector.port_num} of {context.name}"
    table = context.query_gid_table()
    index = f"GID index {vector.sgid_index}"
    for entry in table:
        if (entry.port_num, entry.gid_index) == (vector.port_num, vector.sgid_index):
            index += f" ({entry.gid})"
    text = f"to {vector.dgid} by {index} of port {vector.port_num} of {context.name}"
    if (better := better_entry(table, vector)) is not None:
        text += f"; GID index {better.gid_index} ({better.gid}) fits better"
    return text


def explain(error: VerbsError, context: Context, vector: AddressVector, what: str) -> VerbsError:
    """The same failure, with the way that was tried."""
    detail = f"{what} {describe(context, vector)}"
    if error.errno in NO_ROUTE:
        detail += "; there is no way to the peer from there: check its address and the routes"
    return failure(error.verb, error.errno or 0, detail)
