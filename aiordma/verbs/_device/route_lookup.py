"""Choice of the local GID and port for a peer, and explanations for routes that do not work."""

from __future__ import annotations

import errno

from aiordma import verbs
from aiordma._core.handshake_layout import Endpoint
from aiordma._native import handles as h
from aiordma.errors import VerbsError

from .address import GID, AddressVector, GIDEntry, best
from .enums import GIDType, PortState

# The errors that ibv_create_ah(3), ibv_modify_qp(3) and the kernel's address resolution report for
# an unreachable address.
NO_ROUTE = frozenset(
    {errno.ETIMEDOUT, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENODEV, errno.EADDRNOTAVAIL}
)


def better_gid_hint(context: verbs.Context, port_num: int, to: GID | None) -> str:
    better = context.choose_gid(port_num, to)
    return "no better GID is available" if better.problem(to) else f"use {better} instead"


def active_port(context: verbs.Context, port_num: int) -> h.ibv_port_attr:
    """Return an active port's attributes.

    Raises:
        VerbsError: With ENETDOWN, if the port is not ACTIVE. The message contains the port and its
            state.
    """
    port = context.ask_port(port_num)
    if port.state != PortState.ACTIVE:
        raise VerbsError(
            errno.ENETDOWN,
            "ibv_query_port",
            f"port {port_num} of {context.name} is {PortState(port.state).name}, not ACTIVE",
        )
    return port


def source_entry(context: verbs.Context, local: Endpoint) -> GIDEntry:
    """Find a local endpoint's GID in the current GID table, where its index may have changed."""
    found = [
        entry
        for entry in context.query_gid_table()
        if entry.gid.raw == local.gid and (entry.gid_type is GIDType.ROCE_V1) == local.is_roce_v1
    ]
    if not found:
        raise ValueError(f"{context.name} no longer has the GID {GID(local.gid)}")
    return best(found)


def describe_route(context: verbs.Context, vector: AddressVector, error: VerbsError) -> str:
    """Return a description of the route in ``vector``, including known causes of ``error``."""
    port = f"port {vector.port_num} of {context.name}"
    if vector.dgid is None:
        text = f"to LID {vector.dlid} from {port}, without the dgid that RoCE requires"
    else:
        source, problem = f"GID index {vector.sgid_index}", "is empty"
        for entry in context.query_gid_table():
            if (entry.port_num, entry.gid_index) == (vector.port_num, vector.sgid_index):
                source, problem = str(entry), entry.problem(vector.dgid)
        text = f"to {vector.dgid} from {source} of {port}"
        if problem:
            hint = better_gid_hint(context, vector.port_num, vector.dgid)
            text += f"; this GID {problem}; {hint}"
    if error.errno in NO_ROUTE:
        text += "; the peer cannot be reached, so check its address and the routes"
    return text
